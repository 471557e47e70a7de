"""Turn a checkpoint of any kind that Chiliad reads into one of its own, or into another code's.

    python -m tools.convert_checkpoint checkpoints/pi05_base runs/base --tokenizer FILE.model
    python -m tools.convert_checkpoint runs/lift exported --to openpi
    python -m tools.convert_checkpoint runs/lift exported --to lerobot

The kind of SOURCE is told by looking: a run of ours, an Orbax directory of openpi's, safetensors of
LeRobot's pi0 and pi05 or of GR00T-N1.5. What a format cannot hold is refused, not dropped.
"""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from models import Policy, load_policy
from models.config.as_json import to_json
from models.groot import checkpoint as groot
from models.groot.model import GrootConfig
from models.inputs.processor import Embodiment
from models.pi import lerobot, lora, openpi
from models.pi.model import PiConfig
from models.terminal import Console, guard_tracebacks
from parallel.checkpoint import CheckpointWriter, steps
from tools.command_line.ending import in_a_line

Format = Literal["chiliad", "openpi", "lerobot", "groot"]


def convert(policy: Policy, target: Path, to: Format) -> None:
    """Writes the policy into the directory `target`.

    Adapters are folded into their kernels for LeRobot, which has no place for them.

    Raises:
      ValueError: the directory holds a checkpoint already, or the format cannot hold the model.
    """
    config = policy.model.config
    if to == "chiliad":
        _write_own(policy, target)
    elif config.compute.quantized:
        raise ValueError(
            f"The policy's kernels at {config.compute.quantized!r} are quantised to float8, which "
            f"the format '{to}' cannot hold; convert the checkpoint it was made from."
        )
    elif isinstance(config, GrootConfig) != (to == "groot"):
        raise ValueError(f"A {type(config).__name__[:-6]} model does not fit the format '{to}'.")
    elif isinstance(config, GrootConfig):
        groot.export(policy.params, config, target)
    elif to == "openpi":
        openpi.export(policy.params, target)
        robot = policy.processor.embodiments[policy.embodiment] if policy.processor else None
        if robot is not None:
            _write_statistics(target, robot, config)
    else:
        _write_lerobot(policy, config, target)


def main(
    source: Annotated[Path, tyro.conf.Positional],
    target: Annotated[Path, tyro.conf.Positional],
    to: Format = "chiliad",
    dtype: str | None = None,
    tokenizer: Path | None = None,
    horizon: int | None = None,
    robot: str | None = None,
) -> None:
    """Convert a checkpoint.

    Args:
      source: what to read.
      target: directory to write.
      to: kind to write.
      dtype: of the parameters, as saved if not given.
      tokenizer: SentencePiece file, which openpi's checkpoints lack.
      horizon: steps of a chunk, which openpi's checkpoints do not tell.
      robot: which of several statistics of an openpi checkpoint to take.
    """
    with in_a_line(writing=target):
        policy = load_policy(source, dtype=dtype, tokenizer=tokenizer, horizon=horizon, robot=robot)
        convert(policy, target, to)
    Console(stderr=True).print(f"Wrote {target} ({to}).", soft_wrap=True)


def _write_own(policy: Policy, target: Path) -> None:
    folder = target / "checkpoints"
    if held := steps(folder):
        raise ValueError(f"{folder / str(held[0])} exists; give a directory without a run in it.")
    processor = None if policy.processor is None else to_json(policy.processor)
    config: Any = {"model": to_json(policy.model.config)}
    with CheckpointWriter(folder, config, {"processor": processor}) as writer:
        writer.save(0, {"ema": policy.params}, {})


def _write_lerobot(policy: Policy, config: PiConfig, target: Path) -> None:
    if policy.processor is None:
        raise ValueError("The policy has no processor, whose cameras LeRobot's config.json names.")
    robot = policy.processor.embodiments[policy.embodiment]
    merged, params = lora.merge(config, policy.params)
    told = lerobot.LerobotConfig(
        horizon=merged.horizon,
        text=policy.processor.text_limit,
        state_dim=merged.state_dim,
        cameras=robot.cameras,
        robot_state=len(robot.state.offset),
        robot_action=len(robot.actions.offset),
    )
    lerobot.export(params, told, target)


def _write_statistics(target: Path, robot: Embodiment, config: PiConfig) -> None:
    """openpi's norm_stats.json: means and deviations for π0, quantiles for π0.5."""
    stats = {}
    for key, normalizer in (("state", robot.state), ("actions", robot.actions)):
        offset, scale = np.asarray(normalizer.offset), np.asarray(normalizer.scale)
        if config.time == "modulation":
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


if __name__ == "__main__":
    guard_tracebacks()
    tyro.cli(main, prog="python -m tools.convert_checkpoint", description=__doc__)
