"""Convert a checkpoint of any kind that Chiliad reads to Chiliad's own format or another code's.

    python -m tools.convert_checkpoint checkpoints/pi05_base runs/base --tokenizer FILE.model
    python -m tools.convert_checkpoint runs/mine exported --to openpi
    python -m tools.convert_checkpoint runs/mine exported --to lerobot

The kind of SOURCE is detected from its files: a run of ours, an Orbax directory of openpi's,
safetensors of LeRobot's pi0 and pi05 or of GR00T-N1.5. If a format cannot hold something, the
conversion is refused; nothing is dropped.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from models import Policy
from models.config import to_json
from models.files.terminal import Console, guard_tracebacks, say
from models.flow.flow import Solver
from models.formats import writers
from models.inputs.processor import Processor
from parallel.checkpoint import CheckpointWriter, steps
from tools.command_line.ending import in_a_line
from tools.command_line.options import cli
from tools.recipes.policy import DEFAULTS, PolicyOptions, load


def convert(policy: Policy, target: Path, to: str) -> None:
    """Writes the policy into the directory `target`.

    Raises:
      ValueError: the directory holds a checkpoint already, or the format cannot hold the model or
        say that a robot other than the first acts.
    """
    config = policy.model.config
    if to == "chiliad":
        _write_own(policy, target)
        return
    known = writers(config.family)
    if to not in known:
        raise ValueError(
            f"Format '{to}' cannot hold a model of family '{config.family}'; convert it to "
            f"{' or '.join(['chiliad', *known])}."
        )
    if config.compute.quantized and not config.adapted:
        raise ValueError(
            f"The policy's kernels at {config.compute.quantized!r} are quantised to "
            f"{config.compute.quantized_kind}, which format '{to}' cannot hold; convert the "
            "checkpoint that they were quantised from."
        )
    known[to](policy, target)


def main(
    source: Annotated[Path, tyro.conf.Positional],
    target: Annotated[Path, tyro.conf.Positional],
    to: str = "chiliad",
    dtype: str | None = None,
    euler_steps: int | None = None,
    solver: Solver | None = None,
    family: Path | None = None,
    options: Annotated[PolicyOptions, tyro.conf.arg(name="")] = DEFAULTS,
) -> None:
    """Convert a checkpoint.

    Args:
      source: checkpoint to read.
      target: directory to write.
      to: format to write: chiliad, or one that the model's family supports: openpi and lerobot
        (π), groot.
      dtype: dtype of the parameters; default: as saved by Chiliad, float32 for other codes. Files
        for openpi and GR00T are in float32.
      euler_steps: steps of the flow sampler to save; default: the policy's own.
      solver: method of the sampler's steps to save; default: the policy's own. LeRobot knows only
        euler.
      family: Python file that defines the model's family, if not one of ours; the file is run.
      options: facts about the policy that its files do not contain.
    """
    with in_a_line(writing=target):
        policy = load(
            source, options, euler_steps=euler_steps, solver=solver, dtype=dtype, family=family
        )
        convert(policy, target, to)
    console, compute = Console(stderr=True), policy.model.config.compute
    if compute.quantized and to != "chiliad":
        say(
            console,
            f"Kernels at {compute.quantized!r} were quantised to {compute.quantized_kind}; they "
            "were written as f32 with the same values, and their adapters were merged into "
            "them.",
        )
    say(console, f"Wrote {target} ({to}).")


def _write_own(policy: Policy, target: Path) -> None:
    folder = target / "checkpoints"
    if held := steps(folder):
        raise ValueError(
            f"{folder / str(held[0])} already exists; give a directory that holds no run."
        )
    processor = None if policy.processor is None else to_json(_led(policy, policy.processor))
    config: Any = {"model": to_json(policy.model.config)}
    with CheckpointWriter(folder, config, {"processor": processor}) as writer:
        writer.save(0, {"ema": policy.params}, {})


def _led(policy: Policy, processor: Processor) -> Processor:
    """The processor with the acting robot before the others, because reading takes the first."""
    chosen, robots = policy.embodiment, processor.embodiments
    if chosen and policy.model.config.embodiments is not None:
        raise ValueError(
            f"Models of family '{policy.model.config.family}' tell robots apart by their order, "
            f"so '{robots[chosen].name}' cannot be put first; leave out robot here, and give it "
            "when you load the converted policy."
        )
    return replace(processor, embodiments=(robots[chosen], *robots[:chosen], *robots[chosen + 1 :]))


if __name__ == "__main__":
    guard_tracebacks()
    cli(main, prog="python -m tools.convert_checkpoint", description=__doc__)
