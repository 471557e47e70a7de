"""Write a policy as a program that runs without these packages: StableHLO or ONNX.

    python -m tools.export --checkpoint runs/lift --out exported
    python -m tools.export --checkpoint runs/lift --out exported --to onnx
    python exported/run.py

The program is the whole act: pictures, state, token ids and noise in, actions in the robot's units
out. `policy.json` tells every array; `run.py`, a copy of ours, runs it with numpy and jax or
onnxruntime, and reads prompts.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import tyro
from jax import export

from models import Policy
from models.files.own_file import run_file
from models.terminal import Console, guard_tracebacks
from tools.command_line.ending import in_a_line
from tools.exporting import run as example
from tools.exporting.act import Act, whole
from tools.exporting.facts import facts, write_tokenizer
from tools.recipes.policy import DEFAULTS, PolicyOptions, load

Format = Literal["stablehlo", "onnx"]
PLATFORMS = ("cpu", "cuda")


def write(
    policy: Policy,
    out: Path,
    to: Format = "stablehlo",
    *,
    cameras: Sequence[str] = (),
    batch: int = 1,
    names: dict[str, Any] | None = None,
) -> None:
    """Writes the folder `out` with a policy's program, weights, facts and example.

    Args:
      cameras: those whose pictures are sent, all if none are named.
      names: of the dims of "state" and "actions".

    Raises:
      ValueError: the folder is not empty, or the policy is not one program, or not one of ONNX.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not empty; give a new folder as --out.")
    act = whole(policy, cameras, batch)
    out.mkdir(parents=True, exist_ok=True)
    file, weights = _onnx(act, out) if to == "onnx" else _stablehlo(act, out)
    told = facts(act, to, file, names or {}, weights)
    (out / "policy.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    write_tokenizer(act.processor, out)
    shutil.copyfile(example.__file__, out / "run.py")


def main(
    checkpoint: Path,
    out: Path,
    to: Format = "stablehlo",
    batch: int = 1,
    cameras: tuple[str, ...] = (),
    dtype: str | None = None,
    family: Path | None = None,
    euler_steps: int | None = None,
    options: tyro.conf.OmitArgPrefixes[PolicyOptions] = DEFAULTS,
) -> None:
    """Export a policy.

    Args:
      checkpoint: run directory or one of its checkpoints; other codes' are read too.
      out: folder to write.
      to: stablehlo, for cpu and cuda alike, or onnx.
      batch: observations of one call.
      cameras: those of the policy's whose pictures are sent, all by default.
      dtype: of weights and activations; as saved by default. ONNX is written in float32.
      family: Python file that defines the model's family, if it is not one of ours; it runs.
      euler_steps: steps of the flow sampler; the policy's own by default.
      options: facts about the policy that its files do not tell.
    """
    with in_a_line(writing=out):
        if family is not None:
            run_file(family)
        if to == "onnx" and dtype not in (None, "float32"):
            raise ValueError(f"dtype is {dtype}, but ONNX is written in float32; leave it out.")
        policy = load(
            checkpoint, options, steps=euler_steps, dtype="float32" if to == "onnx" else dtype
        )
        write(policy, out, to, cameras=cameras, batch=batch)
    size = sum(file.stat().st_size for file in out.iterdir()) / 2**20
    Console(stderr=True).print(f"Wrote {out} ({to}, {size:,.0f} MiB).", soft_wrap=True)


def _stablehlo(act: Act, out: Path) -> tuple[str, dict[str, str]]:
    """The program's file and its weights' dtypes; the program is compiled where it runs."""
    shapes = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in act.weights.items()}
    program = export.export(jax.jit(act), platforms=PLATFORMS)(shapes, act.inputs)
    (out / "policy.stablehlo").write_bytes(program.serialize())
    kept = {name: _plain(np.asarray(x)) for name, x in act.weights.items()}
    np.savez(out / "weights.npz", **kept)
    return "policy.stablehlo", {name: str(x.dtype) for name, x in act.weights.items()}


def _plain(x: np.ndarray) -> np.ndarray:
    """The bits of numbers that numpy's files do not know, such as bfloat16."""
    return x if x.dtype.isbuiltin == 1 else x.view(f"u{x.dtype.itemsize}")


def _onnx(act: Act, out: Path) -> tuple[str, None]:
    try:
        from tools.exporting.onnx_rules import RULES
        from tools.exporting.onnx_writer import model_of
        from tools.exporting.onnx_writer import write as write_model
    except ModuleNotFoundError as error:
        raise ValueError(
            f"--to onnx needs the package {error.name}; pip install -e '.[export]'."
        ) from None
    (output,) = act.outputs
    model, arrays = model_of(act, act.weights, act.inputs, output, RULES)
    write_model(model, out / "policy.onnx", arrays, "policy.onnx.data")
    return "policy.onnx", None


if __name__ == "__main__":
    guard_tracebacks()
    tyro.cli(main, prog="python -m tools.export", description=__doc__)
