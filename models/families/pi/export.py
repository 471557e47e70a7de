"""Export of a policy of π's family as openpi's and LeRobot's checkpoints, with its robot's scales.

Anything that a format cannot hold is refused, not dropped.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from models.families.pi import lerobot, lerobot_processors, lora, openpi
from models.families.pi.model import PiConfig
from models.inputs.embodiment import Embodiment
from models.layers.adapters import merge
from models.policy import Policy

_LEROBOT = (("input", "suffix"), ("modulation", "text"))
_OPENPI = (*_LEROBOT, ("modulation", "none"))
"""Ways in which models of each code take flow time and read the state."""


def write_openpi(policy: Policy, target: Path) -> None:
    """Writes the parameters as openpi's Orbax directory, and norm_stats.json if the policy has a
    processor. Adapters are written as in `lora.for_openpi`.

    Raises:
      ValueError: the format has no place for some parameter, or for how the model reads the state.
    """
    _check_form(policy.model.config, "openpi", _OPENPI)
    openpi.export(lora.for_openpi(policy.model.config, policy.params), target)
    if policy.processor is not None:
        robot = policy.processor.embodiments[policy.embodiment]
        write_statistics(target, robot, quantiles=policy.model.config.time == "modulation")


def write_lerobot(policy: Policy, target: Path) -> None:
    """Writes safetensors, config.json and processor files of LeRobot's pi0 or pi05, with the scales
    of the robot, in bfloat16 if all parameters are bfloat16. Adapters are folded into their
    kernels, because these files have no place for them.

    LeRobot resizes pictures in its own way, and passes on only those under "observation.".

    Raises:
      ValueError: the policy has no processor, or the format has no place for some parameter, for
        the units of its robot, for its solver, or for how the model reads the state.
    """
    if policy.processor is None:
        raise ValueError(
            "The policy has no processor, but LeRobot's config.json needs the names of its cameras."
        )
    robot = policy.processor.embodiments[policy.embodiment]
    if robot.adapter or any(d >= 0 and d != at for at, d in enumerate(robot.relative)):
        raise ValueError(
            f"LeRobot's files have no place for the units of '{robot.name}' (adapter "
            f"'{robot.adapter}', relative {list(robot.relative)}); give --to chiliad."
        )
    merged, params = merge(policy.model.config, policy.params)
    _check_form(merged, "LeRobot", _LEROBOT)
    if merged.solver != "euler":
        raise ValueError(
            "LeRobot supports only Euler's steps, but this policy's model.solver is "
            f"'{merged.solver}'; give --solver euler (solver of load_policy), or --to "
            "chiliad."
        )
    prompts = policy.processor.prompts
    told = lerobot.LerobotConfig(
        horizon=merged.horizon,
        text=policy.processor.text_limit,
        state_dim=merged.state_dim,
        cameras=robot.cameras,
        robot_state=len(robot.state.offset),
        robot_action=len(robot.actions.offset),
        relative=tuple(d for d in robot.relative if d >= 0),
        earlier=prompts is not None and prompts.pads_state,
        euler_steps=merged.euler_steps,
        rtc_max_delay=merged.rtc_max_delay,
    )
    narrow = all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(params))
    lerobot.export(params, told, target, "bfloat16" if narrow else "float32")
    file = target / "config.json"
    config = json.loads(file.read_text()) | {"normalization_mapping": lerobot_processors.NORM_MAP}
    file.write_text(json.dumps(config, indent=2) + "\n")
    lerobot_processors.write_processors(target, config, robot.state, robot.actions)


def _check_form(config: PiConfig, code: str, known: tuple[tuple[str, str], ...]) -> None:
    """Raises ValueError unless the other code has models of this time and state input."""
    if (config.time, config.state_input) not in known:
        remedy = "chiliad or openpi" if (config.time, config.state_input) in _OPENPI else "chiliad"
        forms = " or ".join(f"'{time}' and '{state}'" for time, state in known)
        raise ValueError(
            f"{code} has models with model.time and model.state_input {forms}, but this policy "
            f"has '{config.time}' and '{config.state_input}', so it would act differently there; "
            f"give --to {remedy}."
        )


def write_statistics(target: Path, robot: Embodiment, *, quantiles: bool) -> None:
    """Writes norm_stats.json for openpi: means and deviations (π0) or quantiles (π0.5, π0-FAST)."""
    stats = {}
    for key, normalizer in (("state", robot.state), ("actions", robot.actions)):
        offset, scale = np.asarray(normalizer.offset), np.asarray(normalizer.scale)
        if quantiles:
            width = 2 * scale - 1e-6
            low = offset - scale
            stats[key] = {"mean": offset, "std": scale, "q01": low, "q99": low + width}
        else:
            stats[key] = {"mean": offset, "std": scale - 1e-6, "q01": None, "q99": None}
    listed = {
        key: {name: None if x is None else x.tolist() for name, x in values.items()}
        for key, values in stats.items()
    }
    folder = target / "assets" / robot.name.replace(" ", "_")
    folder.mkdir(parents=True)
    (folder / "norm_stats.json").write_text(json.dumps({"norm_stats": listed}, indent=2) + "\n")
