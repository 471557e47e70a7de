"""Acting compiled for an H100: π0.5 and GR00T-N1.5 as released, with their layers stacked and apart
(`models.layers.stack`), and what the program's kernels would take (`parallel.planning.explain`).

Nothing runs: milliseconds are predicted, by the planner's constants. Needs the extra `plan`.
"""

import re
from functools import partial
from typing import Any

import jax
from rich.table import Table

from models.attention.target import compiling_for
from models.files.terminal import Console
from models.layers import stack
from models.load import like_model
from models.model import ModelConfig
from parallel.planning.deviceless import CUBLAS, compile_for, devices
from parallel.planning.explain import explain
from parallel.planning.hlo import Program
from parallel.planning.random_batch import random_batch
from parallel.planning.report import as_json
from tools.bench.attempt import tell
from tools.bench.timing import timed
from tools.plan import Machines
from tools.recipes.presets import load_preset

PRESETS = ("pi05", "groot")
BATCHES = (1, 8)
LAYERS = ("stacked", "apart")


def run(console: Console) -> dict[str, Any]:
    """A row for each model, batch and layout of the layers. `ratio` is π0.5's milliseconds for one
    observation with its layers stacked over those with its layers apart."""
    devices()
    rows: list[dict[str, Any]] = []
    table = Table("model", "observations", "layers", "ms", "kernels", "GB read and written", "GB")
    for name in PRESETS:
        config = load_preset(name).model.computing(dtype="bfloat16")
        for batch in BATCHES:
            for layers in LAYERS:
                console.print(f"{name}, {batch} observations, layers {layers}: compiling")
                row = {"model": name, "batch": batch, "layers": layers}
                rows.append(row | compiled_act(config, batch, apart=layers == "apart"))
                tell(console, {"unit": "ms", "rows": rows})
                shown = rows[-1]
                table.add_row(
                    name, str(batch), layers, f"{shown['ms']:.1f}", f"{shown['kernels']:,}",
                    f"{shown['gb']:.1f}", f"{shown['temporary_gb']:.2f}",
                )  # fmt: skip
    console.print(table)
    stacked, apart = (rows[i]["ms"] for i in range(2))
    return {
        "ratio": stacked / apart,
        "ours": f"{apart:.1f} ms predicted for π0.5's chunk, layers apart",
        "other": f"{stacked:.1f} ms, layers stacked",
        "unit": "ms",
        "rows": rows,
    }


def compiled_act(config: ModelConfig, batch: int, apart: bool) -> dict[str, float]:
    """Facts of the program that samples a chunk for each of `batch` observations of two cameras:
    milliseconds, those of vision and language, kernels, bytes that they move, those that only
    copies move, and bytes of temporaries (in GB)."""
    (device,) = devices("h100")
    model: Any = config.build()
    params = like_model(model, "bfloat16")
    if apart:
        params = jax.eval_shape(partial(stack.apart, stacked=model.stacked), params)
    rows = random_batch(config, batch, samples=1)
    noise = jax.ShapeDtypeStruct(rows.actions.shape, "float32")
    with timed() as took, compiling_for("gpu", float(device.compute_capability)):
        program: Any = compile_for(
            device, model.sample_actions, params, rows, noise, options=CUBLAS
        )
    found = as_json(explain(Program(program.as_text()), {"data": 1}, Machines(gpus=1).read()))
    return {
        "ms": found["seconds"] * 1e3,
        "observing_ms": sum(
            group["seconds"] * 1e3
            for scope, group in found["scopes"].items()
            if re.search(model.observing, scope)
        ),
        "kernels": found["kernels"],
        "gb": found["bytes"] / 1e9,
        "moved_gb": found["moved_bytes"] / 1e9,
        "temporary_gb": program.memory_analysis().temp_size_in_bytes / 1e9,
        "cpu_minutes": took.cpu / 60,
    }
