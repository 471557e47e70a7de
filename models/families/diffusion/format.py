"""LeRobot's checkpoints of Diffusion Policy (lerobot.policies.diffusion), 0.3's to 0.6's."""

from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

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
from models.checkpoints.rename import Rule, Table
from models.checkpoints.torch_rules import SEQUENTIAL, linear, norm, resnet
from models.families.diffusion.model import DiffusionConfig, grid
from models.families.diffusion.noise import NoiseConfig
from models.families.diffusion.unet import UnetConfig
from models.formats import CheckpointFormat, CheckpointInfo
from models.inputs.embodiment import Embodiment, Normalizer
from models.inputs.pictures import shape_of
from models.inputs.processor import Processor
from models.inputs.raw import RawKeys
from models.layers.vision.resnet import ResnetConfig
from models.model import ModelConfig
from models.policy import Policy

_ENVIRONMENT = "observation.environment_state"
_COUNTS = "num_batches_tracked"
"""Numbers of steps of a BatchNorm, which some writers store as arrays of one."""
_UNET, _ENCODER = "diffusion.unet", "diffusion.rgb_encoder"
_UNREAD = (r"\.pool\.pos_grid$", r"^(un)?normalize_")
_ALONG, _GROWN = ("o i k -> k i o", "o -> o"), ("i o k -> k o i", "o -> o")
_POINT, _PLACES = ("o i 1 -> i o", "o -> o"), ("o i 1 1 -> i o", "o -> o")


_SAME = {
    "n_obs_steps": "observations",
    "horizon": "horizon",
    "n_action_steps": "action_steps",
    "vision_backbone": "resnet.name",
    "crop_ratio": "crop_ratio",
    "crop_is_random": "random_crop",
    "spatial_softmax_num_keypoints": "keypoints",
    "use_separate_rgb_encoder_per_camera": "separate",
    "down_dims": "unet.widths",
    "kernel_size": "unet.kernel",
    "n_groups": "unet.norm_groups",
    "diffusion_step_embed_dim": "unet.time_width",
    "use_film_scale_modulation": "unet.scales",
    "num_train_timesteps": "noise.times",
    "beta_schedule": "noise.betas",
    "beta_start": "noise.beta_start",
    "beta_end": "noise.beta_end",
    "prediction_type": "noise.predicts",
}
"""Fields that our config has under other names."""


@dataclass(frozen=True)
class DiffusionFields(PolicyFields):
    """Fields of config.json, with LeRobot 0.6's defaults."""

    type: str = "diffusion"
    n_obs_steps: int = 2
    normalization_mapping: dict[str, str] = field(
        default_factory=lambda: {"VISUAL": "MEAN_STD", "STATE": "MIN_MAX", "ACTION": "MIN_MAX"}
    )
    horizon: int = 64
    n_action_steps: int = 32
    drop_n_last_frames: int = 7
    vision_backbone: str = "resnet18"
    pretrained_backbone_weights: str | None = None
    resize_shape: tuple[int, ...] | None = None
    crop_ratio: float = 1.0
    crop_shape: tuple[int, ...] | None = None
    crop_is_random: bool = True
    use_group_norm: bool = False
    spatial_softmax_num_keypoints: int = 32
    use_separate_rgb_encoder_per_camera: bool = True
    down_dims: tuple[int, ...] = (512, 1024, 2048)
    kernel_size: int = 5
    n_groups: int = 8
    diffusion_step_embed_dim: int = 128
    use_film_scale_modulation: bool = True
    gradient_checkpointing: bool = False
    noise_scheduler_type: str = "DDPM"
    num_train_timesteps: int = 100
    beta_schedule: str = "squaredcos_cap_v2"
    beta_start: float = 1e-4
    beta_end: float = 0.02
    prediction_type: str = "epsilon"
    clip_sample: bool = True
    clip_sample_range: float = 1.0
    num_inference_steps: int | None = None
    compile_model: bool = False
    compile_mode: str = "reduce-overhead"
    do_mask_loss_for_padding: bool = False
    optimizer_lr: float = 1e-4
    optimizer_betas: tuple[float, float] = (0.95, 0.999)
    optimizer_eps: float = 1e-8
    optimizer_weight_decay: float = 1e-6
    scheduler_name: str = "cosine"
    scheduler_warmup_steps: int = 500

    def __post_init__(self) -> None:
        shapes = set(self.picture_shapes)
        if not self.named("STATE") or len(self.named("ENV")) > 1 or len(shapes) > 1:
            raise ValueError(
                f"input_features are {', '.join(self.input_features)} with pictures of {shapes}; a "
                f"diffusion policy reads {STATE}, at most one ENV, and pictures of one shape."
            )


def table(config: DiffusionConfig) -> Table:
    """The rules for models of these sizes."""
    levels = len(config.unet.widths)
    rules = [
        *linear("unet/time_in", f"{_UNET}.diffusion_step_encoder.1"),
        *linear("unet/time_out", f"{_UNET}.diffusion_step_encoder.3"),
        *_convolved("unet/last", f"{_UNET}.final_conv.0"),
        *linear("unet/out", f"{_UNET}.final_conv.1", _POINT),
    ]
    for ours, theirs in _encoders(config).items():
        tower = f"{theirs}.backbone."
        rules += resnet(config.resnet, f"{ours}/backbone", tower, SEQUENTIAL, counted=True)
        rules += linear(f"{ours}/keypoints", f"{theirs}.pool.nets", _PLACES)
        rules += linear(f"{ours}/out", f"{theirs}.out")
    for name, count in (("down", levels), ("mid", 1), ("up", levels - 1)):
        for level, place in product(range(count), range(2)):
            ours, at = f"unet/{name}/{level}/{place}", "" if name == "mid" else f"{level}."
            block = f"{_UNET}.{name}_modules.{at}{place}"
            rules += _convolved(f"{ours}/conv1", f"{block}.conv1")
            rules += _convolved(f"{ours}/conv2", f"{block}.conv2")
            rules += linear(f"{ours}/film", f"{block}.cond_encoder.1")
            rules += linear(f"{ours}/skip", f"{block}.residual_conv", _POINT)
    for i in range(levels - 1):
        rules += linear(f"unet/shrink/{i}", f"{_UNET}.down_modules.{i}.2", _ALONG)
        rules += linear(f"unet/grow/{i}", f"{_UNET}.up_modules.{i}.2", _GROWN)
    return Table(tuple(rules), _UNREAD)


def _inspect(path: Path) -> CheckpointInfo:
    try:
        config = _config(read_policy(path, DiffusionFields))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    source = open_policy(path)
    arrays = {n: x.reshape(()) if n.endswith(_COUNTS) else x for n, x in source.arrays.items()}
    return CheckpointInfo(config, None, replace(source, arrays=arrays), table(config), LEROBOT)


def _config(found: LerobotPolicy[DiffusionFields]) -> DiffusionConfig:
    told = found.fields
    shapes, resize = told.picture_shapes, told.resize_shape or ()
    parts: dict[str, dict[str, Any]] = {}
    for theirs, ours in _SAME.items():
        part, _, name = ours.rpartition(".")
        parts.setdefault(part, {})[name] = getattr(told, theirs)
    clip = told.clip_sample_range if told.clip_sample else 0.0
    sampler: Any = told.noise_scheduler_type.lower()
    return DiffusionConfig(
        resnet=ResnetConfig(norm="group" if told.use_group_norm else "running", **parts["resnet"]),
        unet=UnetConfig(**parts["unet"]),
        noise=NoiseConfig(sampler=sampler, clip=clip, **parts["noise"]),
        cameras=max(1, len(shapes)),
        image_size=shapes[0] if shapes else 0,
        picture_scales=found.picture_scales,
        resize=resize,
        crop=() if resize else told.crop_shape or (),
        state_dim=told.dims("STATE", "ENV"),
        environment=told.dims("ENV"),
        action_dim=told.dims("ACTION"),
        padding="masked" if told.do_mask_loss_for_padding else "learnt",
        euler_steps=told.num_inference_steps or told.num_train_timesteps,
        **parts[""],
    )


def _acts(path: Path, info: CheckpointInfo, _: Any) -> tuple[ModelConfig, Processor]:
    found, config = read_policy(path, DiffusionFields), info.config
    cameras = tuple(found.robot[name] for name in found.fields.named("VISUAL"))
    state = tuple(found.robot[name] for name in found.fields.named("STATE", "ENV"))
    keys = RawKeys(tuple((name, name) for name in cameras), state, "task")
    scales = found.scale("STATE", "ENV"), found.scale("ACTION")
    return config, config.processor([Embodiment("LeRobot", cameras, *scales, keys=keys)])


def _prepares(path: Path, info: CheckpointInfo, config: Any) -> Processor:
    cameras = tuple(f"camera {i}" for i in range(config.cameras))
    robot = Embodiment.in_model_units(cameras, config.state_dim, config.action_dim)
    return config.processor([robot])


def _write(policy: Policy, folder: Path) -> None:
    config, processor = policy.model.config, policy.processor
    tower = config.resnet.norm != "frozen" and config.resnet.width == ResnetConfig().width
    robots = () if processor is None else processor.embodiments
    dims = [(len(x.state.offset), len(x.actions.offset)) for x in robots if not x.relative]
    if dims != [(config.state_dim, config.action_dim)] or not tower:
        raise ValueError(
            "LeRobot's diffusion policies act for one robot, whose dims are all of the model's "
            f"(here {dims} of {config.state_dim} and {config.action_dim}) and whose actions are "
            f"not relative, with towers of width {ResnetConfig().width} that are not frozen; train "
            "with the robot's own --model.state-dim and --model.action-dim, or give --to chiliad."
        )
    (robot,) = robots
    own = config.state_dim - config.environment
    state, around = (
        Normalizer(robot.state.offset[dims], robot.state.scale[dims])
        for dims in (slice(own), slice(own, None))
    )
    scales = {STATE: state, ACTION: robot.actions}
    inputs = {STATE: Feature("STATE", (own,))}
    for i, camera in enumerate(robot.cameras if config.image_size else ()):
        name = picture_name(camera)
        inputs[name] = Feature("VISUAL", (3, *config.pictures[0].shape))
        if config.picture_scales:
            scales[name] = config.picture_scales[min(i, len(config.picture_scales) - 1)]
    if config.environment:
        inputs[_ENVIRONMENT] = Feature("ENV", (config.environment,))
        scales[_ENVIRONMENT] = around
    whole = shape_of(config.image_size)
    noise, same = config.noise, {x: attrgetter(ours)(config) for x, ours in _SAME.items()}
    told = DiffusionFields(
        input_features=inputs,
        output_features={ACTION: Feature("ACTION", (config.action_dim,))},
        resize_shape=config.resize or None,
        crop_shape=config.seen if config.seen != (config.resize or whole) else None,
        use_group_norm=config.resnet.norm == "group",
        noise_scheduler_type=noise.sampler.upper(),
        clip_sample=noise.clip > 0,
        clip_sample_range=noise.clip or 1.0,
        num_inference_steps=config.euler_steps if config.euler_steps < noise.times else None,
        do_mask_loss_for_padding=config.padding != "learnt",
        **same,
    )
    arrays = exported(policy.params, table(config), "LeRobot's diffusion")
    places = grid(*config.resnet.places(*config.seen)) if config.image_size else np.zeros((0, 2))
    for theirs in _encoders(config).values():
        arrays[f"{theirs}.pool.pos_grid"] = places.shape, partial(np.asarray, places)
    kinds = {x: np.dtype(np.int64 if x.endswith(_COUNTS) else np.float32) for x in sorted(arrays)}
    arrays = {x: arrays[x] for x in sorted(kinds, key=lambda x: -kinds[x].itemsize)}
    write_policy(folder, told, arrays, scales, dtype=kinds)


def _encoders(config: DiffusionConfig) -> dict[str, str]:
    """Our path of each picture encoder, with LeRobot's name."""
    ends = [f".{i}" for i in range(config.cameras)] if config.separate else [""]
    ends = ends if config.image_size else []
    return {f"encoders/{i}": f"{_ENCODER}{end}" for i, end in enumerate(ends)}


def _convolved(ours: str, theirs: str) -> list[Rule]:
    return [
        *linear(f"{ours}/conv", f"{theirs}.block.0", _ALONG),
        *norm(f"{ours}/norm", f"{theirs}.block.1", "o -> o"),
    ]


LEROBOT = CheckpointFormat(
    "lerobot",
    ("diffusion",),
    partial(is_policy, kind="diffusion"),
    _inspect,
    _acts,
    _prepares,
    write=_write,
    kinds=("diffusion",),
)
FORMATS = (LEROBOT,)
