"""LeRobot's ACT policies, as its versions 0.3 to 0.6 leave them, read and written."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from models.checkpoints.layout import exported
from models.checkpoints.lerobot_policy import (
    ACTION,
    STATE,
    Feature,
    LerobotPolicy,
    PolicyFields,
    is_policy,
    open_policy,
    picture_name,
    read_policy,
    write_policy,
)
from models.checkpoints.lerobot_scales import SCALINGS, Kind
from models.checkpoints.rename import Rule, Table
from models.checkpoints.safetensors_format import Entry
from models.checkpoints.sources import CheckpointSource
from models.checkpoints.torch_rules import STACKED, attention, linear, norm, resnet
from models.families.act.model import ActConfig, line
from models.formats import CheckpointFormat, CheckpointInfo, ReadScales, require_scaling
from models.inputs.embodiment import Embodiment, Normalizer, Scaling
from models.inputs.processor import Processor
from models.inputs.raw import RawKeys
from models.layers.vision.resnet import ResnetConfig
from models.model import ModelConfig
from models.policy import Policy

_ENVIRONMENT = "observation.environment_state"
_FIXED = "model.vae_encoder_pos_enc"


@dataclass(frozen=True)
class ActFields(PolicyFields):
    """Fields of ACT's config.json, with the defaults of LeRobot 0.6."""

    chunk_size: int = 100
    n_action_steps: int = 100
    normalization_mapping: dict[str, str] = field(
        default_factory=lambda: dict.fromkeys(("VISUAL", "STATE", "ACTION"), "MEAN_STD")
    )
    vision_backbone: str = "resnet18"
    pretrained_backbone_weights: str | None = "ResNet18_Weights.IMAGENET1K_V1"
    replace_final_stride_with_dilation: Any = False
    pre_norm: bool = False
    dim_model: int = 512
    n_heads: int = 8
    dim_feedforward: int = 3200
    feedforward_activation: str = "relu"
    n_encoder_layers: int = 4
    n_decoder_layers: int = 1
    use_vae: bool = True
    latent_dim: int = 32
    n_vae_encoder_layers: int = 4
    temporal_ensemble_coeff: float | None = None
    dropout: float = 0.1
    kl_weight: float = 10.0
    optimizer_lr: float = 1e-5
    optimizer_weight_decay: float = 1e-4
    optimizer_lr_backbone: float = 1e-5

    def __post_init__(self) -> None:
        dilated, steps = self.replace_final_stride_with_dilation, self.n_action_steps
        ensembles = self.temporal_ensemble_coeff is not None and steps != 1
        fits = 1 <= steps <= self.chunk_size
        told = {
            "n_obs_steps": "ACT reads 1" * (self.n_obs_steps != 1),
            "replace_final_stride_with_dilation": "only false is supported" * bool(dilated),
            "n_action_steps": f"expected 1 to chunk_size, {self.chunk_size}" * (not fits),
            "temporal_ensemble_coeff": "ensembling needs n_action_steps 1" * ensembles,
            "input_features": "only one ENV feature is read" * (len(self.named("ENV")) > 1),
        }
        for name, remedy in told.items():
            if remedy:
                raise ValueError(f"{name} is {str(getattr(self, name))[:80]}; {remedy}.")


_SAME = {
    "chunk_size": "horizon",
    "n_action_steps": "n_action_steps",
    "pre_norm": "pre_norm",
    "dim_model": "width",
    "n_heads": "heads",
    "dim_feedforward": "hidden",
    "feedforward_activation": "activation",
    "n_encoder_layers": "encoder_depth",
    "n_decoder_layers": "decoder_depth",
    "use_vae": "vae",
    "latent_dim": "latent",
    "n_vae_encoder_layers": "vae_depth",
    "temporal_ensemble_coeff": "temporal_ensemble_coeff",
    "dropout": "dropout",
    "kl_weight": "kl_weight",
}
"""LeRobot's names of fields, and ours."""


def _config(told: ActFields, scales: tuple[Normalizer, ...]) -> ActConfig:
    shapes = told.picture_shapes
    same: dict[str, Any] = {ours: getattr(told, theirs) for theirs, ours in _SAME.items()}
    return ActConfig(
        tower=ResnetConfig(told.vision_backbone),
        image_size=shapes[0] if shapes else 0,
        cameras=len(shapes),
        camera_sizes=shapes if len(set(shapes)) > 1 else (),
        picture_scales=scales,
        state_dim=max(told.dims("STATE", "ENV"), 1),
        environment_dim=told.dims("ENV"),
        action_dim=told.dims("ACTION"),
        state_input="suffix" if told.dims("STATE", "ENV") else "none",
        **same,
    )


def table(config: ActConfig) -> Table:
    """Rules for the tensors of a policy; those of attention are apart, see `_open`."""
    rules = [
        Rule("position", "model.encoder_1d_feature_pos_embed.weight", "n w -> n w"),
        Rule("query", "model.decoder_pos_embed.weight", "n w -> n w"),
        Rule("vae/cls", "model.vae_encoder_cls_embed.weight", "n w -> n w"),
        *linear("latent_in", "model.encoder_latent_input_proj"),
        *linear("state_in", "model.encoder_robot_state_input_proj"),
        *linear("environment_in", "model.encoder_env_state_input_proj"),
        *linear("picture_in", "model.encoder_img_feat_input_proj", ("o i 1 1 -> i o", "o -> o")),
        *linear("action_out", "model.action_head"),
        *linear("vae/state_in", "model.vae_encoder_robot_state_input_proj"),
        *linear("vae/action_in", "model.vae_encoder_action_input_proj"),
        *linear("vae/latent_out", "model.vae_encoder_latent_output_proj"),
        *norm("encoder_norm", "model.encoder.norm", "w -> w"),
        *norm("decoder_norm", "model.decoder.norm", "w -> w"),
        *norm("vae/norm", "model.vae_encoder.norm", "w -> w"),
        *resnet(config.tower, "tower", "model.backbone."),
    ]
    for ours in ("encoder", "decoder", "vae/encoder"):
        layer = f"model.{ours.replace('/', '_')}.layers.{{l}}"
        parts = [("attention", "self_attn")] + [("cross", "multihead_attn")] * (ours == "decoder")
        for own, name in parts:
            names = (*(f"in_proj.{x}" for x in "qkv"), "out_proj")
            rules += attention(f"{ours}/{own}", f"{layer}.{name}", names)
        for i in range(1, 4 if ours == "decoder" else 3):
            rules += norm(f"{ours}/norm{i}", f"{layer}.norm{i}", "w -> l w")
        rules += linear(f"{ours}/up", f"{layer}.linear1", STACKED)
        rules += linear(f"{ours}/down", f"{layer}.linear2", STACKED)
    return Table(tuple(rules), (r"^(un)?normalize_", f"^{_FIXED}$"))


def _open(path: Path) -> CheckpointSource:
    """A policy's arrays, with the joint projections of attention as one array each."""
    source = open_policy(path)
    arrays: dict[str, Any] = {}
    for name, array in source.arrays.items():
        stem, joint, leaf = name.partition("in_proj_")
        size = len(array) // 3 if joint else 0
        parts = {f"{stem}in_proj.{x}.{leaf}": array[i * size :][:size] for i, x in enumerate("qkv")}
        arrays |= parts if joint else {name: array}
    return replace(source, arrays=arrays)


def _joined(arrays: Mapping[str, Entry]) -> dict[str, Entry]:
    """The inverse of what `_open` does, in the order in which LeRobot's files have them."""
    whole: dict[str, Entry] = {}
    for name, ((first, *rest), make) in arrays.items():
        stem, joint, leaf = name.partition("in_proj.q.")
        if joint:
            makes = [arrays[f"{stem}in_proj.{x}.{leaf}"][1] for x in "qkv"]
            parts = lambda makes=makes: np.concatenate([each() for each in makes])  # noqa: E731
            whole[f"{stem}in_proj_{leaf}"] = (3 * first, *rest), parts
        elif "in_proj." not in name:
            whole[name] = (first, *rest), make
    return dict(sorted(whole.items()))


def _told(path: Path) -> LerobotPolicy[ActFields]:
    return read_policy(Path(path), ActFields)


def _inspect(path: Path) -> CheckpointInfo:
    told, source = _told(path), _open(path)
    config = _config(told.fields, told.picture_scales)
    if stem := source.shapes.get("model.backbone.conv1.weight"):
        config = replace(config, tower=replace(config.tower, width=stem[0]))
    return CheckpointInfo(config, None, source, table(config), LEROBOT)


def _acts(path: Path, info: CheckpointInfo, _: Any) -> tuple[ModelConfig, Processor]:
    told = _told(path)
    cameras = tuple(told.robot[name] for name in told.fields.named("VISUAL"))
    states = tuple(told.robot[name] for name in told.fields.named("STATE", "ENV"))
    robot = Embodiment(
        "LeRobot",
        cameras,
        told.scale("STATE", "ENV"),
        told.scale("ACTION"),
        keys=RawKeys(tuple((name, name) for name in cameras), states, "task"),
    )
    return info.config, info.config.processor([robot])


def _prepares(path: Path, info: CheckpointInfo, config: Any) -> Processor:
    return config.processor([Embodiment.in_model_units((), config.state_dim, config.action_dim)])


def _statistics(folder: Path) -> Mapping[str, ReadScales]:
    def read(state: Scaling, actions: Scaling) -> tuple[Normalizer, Normalizer]:
        told = _told(folder)
        for what, name, wanted in (("state", STATE, state), ("action", ACTION, actions)):
            mode = told.modes.get(name, "IDENTITY")
            require_scaling(str(folder), what, SCALINGS.get(mode, mode), wanted, SCALINGS)
        return told.scale("STATE", "ENV"), told.scale("ACTION")

    return {"": read} if is_policy(folder, "act") else {}


def _write(policy: Policy, target: Path) -> None:
    """Writes the policy of one robot in f32. Statistics of a ResNet that learnt them are written as
    the frozen ones that LeRobot has.

    Raises:
      ValueError: the folder holds a model, the ResNet has group norms or another width than
        LeRobot's, or the robot's actions are relative or in units of an adapter.
    """
    config, processor = policy.model.config, policy.processor
    tower, width = config.tower, ResnetConfig().width
    if config.sizes and (tower.norm == "group" or tower.width != width):
        raise ValueError(
            f"LeRobot's ACT has a ResNet of width {width} with batch norms, but this policy's "
            f"tower.width is {tower.width}, and tower.norm '{tower.norm}'; give --to chiliad, or "
            f"train with --model.tower.width {width} --model.tower.norm running."
        )
    if (
        processor is None
        or (robot := processor.embodiments[policy.embodiment]).adapter
        or any(dim >= 0 for dim in robot.relative)
    ):
        raise ValueError(
            "LeRobot's ACT acts in the robot's units and absolutely, but this policy has no robot, "
            "or one with relative actions or an adapter; give --to chiliad."
        )
    dims = len(robot.state.offset), len(robot.actions.offset)
    config, params = _cut(config, policy.params, *dims)
    kept = {name: x for name, x in params.items() if not name.endswith("/batches")}
    arrays = _joined(exported(unflatten_dict(kept, sep="/"), table(config), "LeRobot's ACT"))
    if config.vae:
        fixed = line(1 + bool(config.robot_dim) + config.horizon, config.width)[None]
        arrays[_FIXED] = fixed.shape, lambda: fixed
    inputs, scales, at = dict[str, Feature](), {ACTION: robot.actions}, config.robot_dim
    offset, scale = robot.state.offset, robot.state.scale
    kinds: tuple[tuple[str, Kind, slice], ...] = (
        (STATE, "STATE", slice(at)),
        (_ENVIRONMENT, "ENV", slice(at, None)),
    )
    for name, kind, part in kinds:
        if offset[part]:
            inputs[name] = Feature(kind, (len(offset[part]),))
            scales[name] = Normalizer(offset[part], scale[part])
    for number, camera in enumerate(robot.cameras[: len(config.sizes)]):
        name = picture_name(camera)
        inputs[name] = Feature("VISUAL", (3, *config.sizes[number]))
        if seen := config.picture_scales:
            scales[name] = seen[min(number, len(seen) - 1)]
    same = {theirs: getattr(config, ours) for theirs, ours in _SAME.items()}
    told = ActFields(
        "act",
        input_features=inputs,
        output_features={ACTION: Feature("ACTION", (dims[1],))},
        vision_backbone=config.tower.name,
        pretrained_backbone_weights=None,
        **same | {"n_action_steps": min(config.n_action_steps, config.horizon)},
    )
    write_policy(Path(target), told, dict(sorted(arrays.items())), scales)


def _cut(
    config: ActConfig, params: Any, states: int, actions: int
) -> tuple[ActConfig, dict[str, Any]]:
    """The policy without the dims that only pad its robot's, flat."""
    flat = flatten_dict(params, sep="/")
    states = states if config.state_input != "none" else config.state_dim
    if states == config.state_dim and actions == config.action_dim:
        return config, flat
    for name in ("state_in/kernel", "vae/state_in/kernel"):
        if name in flat and not config.environment_dim:
            flat[name] = flat[name][:states]
    if "vae/action_in/kernel" in flat:
        flat["vae/action_in/kernel"] = flat["vae/action_in/kernel"][:actions]
    for name in ("action_out/kernel", "action_out/bias"):
        flat[name] = flat[name][..., :actions]
    return replace(config, state_dim=states, action_dim=actions), flat


LEROBOT = CheckpointFormat(
    "lerobot",
    ("act",),
    lambda path: is_policy(path, "act"),
    _inspect,
    _acts,
    _prepares,
    statistics=_statistics,
    write=_write,
    kinds=("act",),
)
FORMATS = (LEROBOT,)
