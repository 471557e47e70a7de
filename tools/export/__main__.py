"""Export a policy as a program that runs without these packages: StableHLO or ONNX.

    python -m tools.export --checkpoint runs/lift --out exported
    python -m tools.export --checkpoint runs/lift --out exported --to onnx
    python exported/run.py

The program contains everything from observation to actions: images, state, token ids and noise in,
actions in the robot's units out. `policy.json` describes every array. `run.py`, a copy of ours,
runs the program with numpy and jax or onnxruntime, and turns prompts into token ids.
"""

from pathlib import Path
from typing import Annotated

import tyro

from data import open_dataset
from data.mixture.mixture import DatasetConfig
from models.files.terminal import Console, guard_tracebacks, say
from models.flow.flow import Solver
from tools.command_line.ending import in_a_line
from tools.command_line.options import cli
from tools.export.write import Format, write
from tools.recipes.bound_recording import bound
from tools.recipes.policy import DEFAULTS, PolicyOptions, load


def main(
    checkpoint: Path,
    out: Path,
    to: Format = "stablehlo",
    batch: int = 1,
    sent: tuple[str, ...] = (),
    dtype: str | None = None,
    family: Path | None = None,
    euler_steps: int | None = None,
    solver: Solver | None = None,
    data: str | None = None,
    options: Annotated[PolicyOptions, tyro.conf.arg(name="")] = DEFAULTS,
) -> None:
    """Export a policy.

    Args:
      checkpoint: run directory or one of its checkpoints; other codes' checkpoints are read too.
      out: folder to write.
      to: stablehlo, for both cpu and cuda, or onnx.
      batch: observations per call.
      sent: policy's cameras whose images are sent; default: all.
      dtype: dtype of weights and activations; default: as saved by Chiliad, float32 for other
        codes. ONNX is written in float32.
      family: Python file that defines the model's family, if not one of ours; the file is run.
      euler_steps: steps of the flow sampler; default: the policy's own.
      solver: method of the sampler's steps: euler, or the second-order ab2, both with one
        evaluation per step; default: the policy's own.
      data: dataset of the policy's robot, for the names of state and action dims.
      options: facts about the policy that its files do not contain.
    """
    with in_a_line(writing=out):
        if to == "onnx" and dtype not in (None, "float32"):
            raise ValueError(f"dtype is {dtype}, but ONNX is written in float32; leave it out.")
        policy = load(
            checkpoint,
            options,
            euler_steps=euler_steps,
            solver=solver,
            dtype="float32" if to == "onnx" else dtype,
            family=family,
        )
        names = {}
        if data is not None:
            recording = bound(policy, DatasetConfig(data), open_dataset(data))
            names = {"state": recording.state_names, "actions": recording.action_names}
        write(policy, out, to, cameras=sent, batch=batch, names=names)
    size = sum(file.stat().st_size for file in out.iterdir()) / 2**20
    say(Console(stderr=True), f"Wrote {out} ({to}, {size:,.0f} MiB).")


if __name__ == "__main__":
    guard_tracebacks()
    cli(main, prog="python -m tools.export", description=__doc__)
