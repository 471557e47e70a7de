"""GR00T-N1.5 as LeRobot keeps it: config.json of type `groot`, weights under its prefix, and the
processor files, so that `GrootPolicy.from_pretrained` and `make_pre_post_processors` can load the
folder (LeRobot 0.4.4).

LeRobot prepares inputs in one way: Eagle's chat, whole pictures stretched to 224 pixels, least and
largest values mapped to −1 and 1, cameras in alphabetical order. A policy with other preparation
would act differently there, so it is refused.
"""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from models.checkpoints.layout import exported
from models.checkpoints.lerobot_pipeline import step, write_pipeline
from models.checkpoints.safetensors_format import Entry, new_model, write_file
from models.families.groot.checkpoint import eagle_robot, least_and_largest
from models.families.groot.model import TAGS, GrootConfig
from models.families.groot.names import LANGUAGE, TABLE, VISION
from models.inputs.embodiment import Embodiment
from models.inputs.pictures import Stretched
from models.layers.adapters import merge
from models.policy import Policy

_PREFIX = "_groot_model."
_BASE, _EAGLE = "nvidia/GR00T-N1.5-3B", "lerobot/eagle2hg-processor-groot-n1p5"
_SIZE = 224
_PICTURE = "observation.images."


def write(policy: Policy, target: Path) -> None:
    """Writes the policy of one robot in f32, with adapters folded in. LeRobot builds only the
    released sizes; models of other sizes are written in the same way.

    Raises:
      ValueError: `target` holds a model, or LeRobot would prepare the policy's inputs or scale its
        actions differently, or it has no place for some parameter.
    """
    target = Path(target)
    file = new_model(target)
    robot = _checked(policy)
    config, params = merge(policy.model.config, policy.params)
    arrays = exported(params, TABLE, "A GR00T-N1.5 checkpoint of LeRobot's")
    # There, tied tensors have one name and loading is strict; nothing reads the pooling head.
    arrays[f"{LANGUAGE}.lm_head.weight"] = arrays.pop(f"{LANGUAGE}.model.embed_tokens.weight")
    arrays |= {f"{VISION}.head.{name}": (shape, _zero) for name, shape in _pooling(config).items()}
    target.mkdir(parents=True, exist_ok=True)
    named = {_PREFIX + name: entry for name, entry in arrays.items()}
    write_file(file, named, jnp.dtype("float32"), {"format": "pt"})
    tag, row = config.robot(policy.embodiment)
    told = json.dumps(_values(config, robot, tag), indent=2)
    (target / "config.json").write_text(told + "\n")
    _write_processors(target, config, robot, {**TAGS, tag: row}, tag)


def _checked(policy: Policy) -> Embodiment:
    """The robot of a policy whose inputs LeRobot would prepare as we do."""
    (processor, robot), config = eagle_robot(policy, "LeRobot"), policy.model.config
    fit = processor.fit(0)
    if not isinstance(fit, Stretched) or config.image_size != _SIZE:
        raise ValueError(
            f"LeRobot's GR00T stretches whole images to {_SIZE} pixels, but this policy takes "
            f"images of {config.image_size} pixels, resized as '{fit.kind}'; give "
            "--to chiliad or groot."
        )
    if list(robot.cameras) != sorted(robot.cameras):
        raise ValueError(
            f"LeRobot shows GR00T its cameras in alphabetical order, but '{robot.name}' has them "
            f"in the order {', '.join(robot.cameras)}; give --to chiliad or groot."
        )
    return robot


def _zero() -> np.ndarray:
    return np.zeros(1, np.float32)


def _pooling(config: GrootConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the vision tower's pooling head."""
    width, hidden = config.vision.width, config.vision.hidden
    return {
        "attention.in_proj_bias": (3 * width,),
        "attention.in_proj_weight": (3 * width, width),
        "attention.out_proj.bias": (width,),
        "attention.out_proj.weight": (width, width),
        "layernorm.bias": (width,),
        "layernorm.weight": (width,),
        "mlp.fc1.bias": (hidden,),
        "mlp.fc1.weight": (hidden, width),
        "mlp.fc2.bias": (width,),
        "mlp.fc2.weight": (width, hidden),
        "probe": (1, 1, width),
    }


def _values(config: GrootConfig, robot: Embodiment, tag: str) -> dict[str, Any]:
    """The policy's config.json; fields that it leaves out have LeRobot's defaults."""
    picture = {"type": "VISUAL", "shape": [3, _SIZE, _SIZE]}
    names = [_PICTURE + camera.removeprefix(_PICTURE) for camera in robot.cameras]
    return {
        "type": "groot",
        "n_obs_steps": 1,
        "input_features": dict.fromkeys(names, picture)
        | {"observation.state": {"type": "STATE", "shape": [len(robot.state.offset)]}},
        "output_features": {"action": {"type": "ACTION", "shape": [len(robot.actions.offset)]}},
        "chunk_size": config.horizon,
        "n_action_steps": config.horizon,
        "max_state_dim": config.state_dim,
        "max_action_dim": config.action_dim,
        "image_size": [_SIZE, _SIZE],
        "base_model_path": _BASE,
        "tokenizer_assets_repo": _EAGLE,
        "embodiment_tag": tag,
    }


def _write_processors(
    target: Path, config: GrootConfig, robot: Embodiment, rows: Mapping[str, int], tag: str
) -> None:
    statistics: dict[str, Entry] = {}
    for feature, scaling in (("observation.state", robot.state), ("action", robot.actions)):
        for kind, values in least_and_largest(scaling).items():
            statistics[f"{feature}.{kind}"] = (len(values),), partial(np.asarray, values)
    packing, unpacking = "groot_pack_inputs_v3", "groot_action_unpack_unnormalize_v1"
    device = step("device_processor", device="cpu", float_dtype=None)
    before = [
        step("rename_observations_processor", rename_map={}),
        step("to_batch_processor"),
        step(
            packing,
            state_horizon=1,
            action_horizon=config.horizon,
            max_state_dim=config.state_dim,
            max_action_dim=config.action_dim,
            language_key="task",
            formalize_language=False,
            embodiment_tag=tag,
            embodiment_mapping=dict(rows),
            normalize_min_max=True,
        ),
        step("groot_eagle_encode_v3"),
        step("groot_eagle_collate_v3"),
        device,
    ]
    dims = len(robot.actions.offset)
    after = [step(unpacking, env_action_dim=dims, normalize_min_max=True), device]
    write_pipeline(target, "policy_preprocessor", before, statistics, (packing,))
    write_pipeline(target, "policy_postprocessor", after, statistics, (unpacking,))
