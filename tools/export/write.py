"""The folder of an exported policy: its program in one format, its weights, facts and example."""

import inspect
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax import export

from models import Policy
from models.inputs import pictures
from tools.export import run as example
from tools.export.act import Act, whole
from tools.export.facts import facts, write_tokenizer

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
      cameras: cameras whose pictures are sent; all if none are named.
      names: names of the dims of "state" and "actions".

    Raises:
      ValueError: the folder is not empty, or the policy cannot be written as one program, or not in
        ONNX.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not empty; give a new folder as --out.")
    act = whole(policy, cameras, batch)
    out.mkdir(parents=True, exist_ok=True)
    file, weights = _onnx(act, out) if to == "onnx" else _stablehlo(act, out)
    told = facts(act, to, file, names or {}, weights)
    (out / "policy.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    write_tokenizer(act.processor, out)
    _write_fits(act, out)
    shutil.copyfile(example.__file__, out / "run.py")


def _write_fits(act: Act, out: Path) -> None:
    """Writes `pictures.py`, our ways of fitting pictures with numpy and Pillow alone, if the policy
    has one of them and not its author's."""
    fits = [act.processor.fit(act.robot.cameras.index(camera)) for camera in act.cameras]
    if {type(fit).__module__ for fit in fits} == {pictures.__name__}:
        source = re.sub("^from (models|jaxtyping).*\n", "", inspect.getsource(pictures), flags=re.M)
        about, code = source.split('"""\n', 1)
        (out / "pictures.py").write_text(f'{about}"""\n\n{_ALONE}\n{code}', encoding="utf-8")


_ALONE = """from __future__ import annotations

LARGEST_IMAGE, KINDS = 2**14, {}


class InputPart:
    def __init_subclass__(cls, kind=None):
        KINDS[kind] = cls


def part_class(base, kind):
    return KINDS[kind]


def check_size(*given):
    pass
"""
"""Stand-ins for what `models.inputs.pictures` imports of ours."""


def _stablehlo(act: Act, out: Path) -> tuple[str, dict[str, str]]:
    """The program's file and its weights' dtypes; the program is compiled where it runs."""
    shapes = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in act.weights.items()}
    program = export.export(jax.jit(act), platforms=PLATFORMS)(shapes, act.inputs)
    (out / "policy.stablehlo").write_bytes(program.serialize())
    kept: dict[str, Any] = {name: _plain(np.asarray(x)) for name, x in act.weights.items()}
    np.savez(out / "weights.npz", **kept)
    return "policy.stablehlo", {name: str(x.dtype) for name, x in act.weights.items()}


def _plain(x: np.ndarray) -> np.ndarray:
    """An array that numpy's files can hold: of a dtype like bfloat16, the bits."""
    return x if x.dtype.isbuiltin == 1 else x.view(f"u{x.dtype.itemsize}")


def _onnx(act: Act, out: Path) -> tuple[str, None]:
    try:
        from tools.export.onnx_rules import RULES
        from tools.export.onnx_writer import model_of
        from tools.export.onnx_writer import write as write_model
    except ModuleNotFoundError as error:
        raise ValueError(
            f"--to onnx needs the package {error.name}; run `pip install -e '.[export]'` in "
            "Chiliad's repository."
        ) from None
    (output,) = act.outputs
    model, arrays = model_of(act, act.weights, act.inputs, output, RULES)
    write_model(model, out / "policy.onnx", arrays, "policy.onnx.data")
    return "policy.onnx", None
