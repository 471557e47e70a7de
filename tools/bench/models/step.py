"""Training steps of π0.5 and GR00T-N1.5 at their released widths on one GPU, with layers as a loop
and one after the other (`compute.unroll`), and in float8: samples a second beside the prediction
for the same program, and the share of the GPU's peak (MFU).

Backward recomputes all that it can (remat "full"), so that cards of 80 GB and of 141 GB run the
same programs; where all layers also fit with "dots", that is measured too. As many layers are taken
as fit. The prediction is the planner's roofline over the compiled program's kernels.
"""

import gc
import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from models.files.terminal import Console
from models.layers.layers import Remat
from models.model import ModelConfig, require, rules_of
from parallel.mesh import MeshConfig, make_mesh
from parallel.monitor.speed import Speed, model_flops
from parallel.optimizer import OptimizerConfig
from parallel.planning.cluster import CHIPS, Chip, Cluster, chip_of
from parallel.planning.explain import explain
from parallel.planning.flops import gradient_work
from parallel.planning.hlo import Program
from parallel.planning.random_batch import random_batch
from parallel.step import abstract_state
from tools.bench.attempt import FULL, attempt, tell
from tools.bench.models.stepper import held_bytes, stepper
from tools.bench.timing import timed
from tools.recipes.presets import RunConfig, load_preset

_SHARES = (1.0, 0.75, 0.5, 0.25)
_FITS = 0.9


class Way(NamedTuple):
    """A way to train: fields of `compute`, what backward recomputes, and the shares of the layers
    that are tried, the largest first."""

    name: str
    compute: Mapping[str, Any]
    remat: Remat = "full"
    shares: tuple[float, ...] = _SHARES


WAYS = (
    Way("bf16, layers as a loop", {}),
    Way("bf16, unrolled", {"unroll": True}),
    Way("bf16, unrolled", {"unroll": True}, "dots", (1.0,)),
    Way("float8, layers as a loop", {"fp8": "delayed"}),
)


def run(console: Console, tiny: bool = False, rows: int = 8, samples: int = 4) -> dict[str, Any]:
    """Every model in every way, one after another; `ratio` is the first model's unrolled over its
    layers as a loop.

    Raises:
      ValueError: the first device is no GPU, and the sizes are the released ones.
    """
    if jax.default_backend() != "gpu" and not tiny:
        raise ValueError("The step benchmark needs a GPU; --tiny tries it on a CPU.")
    if tiny:
        rows, samples = 2, 2
    found: list[dict[str, Any]] = []
    for name in ("tiny", "groot-tiny") if tiny else ("pi05", "groot"):
        preset = benched(name)
        for way in WAYS:
            console.print(f"{name}: a step in {way.name}, remat {way.remat}")
            row = {"model": name, "way": way.name, "remat": way.remat}
            found.append(row | _largest(preset, way, rows, samples, tiny))
            tell(console, {"unit": "samples/s", "rows": found})
            jax.clear_caches()
    loop, unrolled = (row.get("samples/s", math.nan) for row in found[:2])
    return {
        "ratio": unrolled / loop,
        "ours": f"{unrolled:.1f} samples/s of {found[0]['model']}, layers one after the other",
        "other": f"{loop:.1f} as a loop",
        "unit": "samples/s",
        "rows": found,
    }


def benched(name: str) -> RunConfig:
    """A preset that trains one chunk of each sample by AdamW, with a schedule that ends."""
    preset = load_preset(name)
    ends = preset.optimizer.warmup_steps + 1
    optimizer = replace(preset.optimizer, name="adamw", decay_steps=ends)
    return replace(preset, model=preset.model.changed(chunks=1), optimizer=optimizer)


def with_depth(config: ModelConfig, share: float) -> ModelConfig:
    """The same widths with the share `share` of each stack's layers, as an even number; unchanged
    for 1."""
    if share == 1:
        return config
    stacks = {f.name: getattr(config, f.name) for f in fields(config)}  # type: ignore[arg-type]
    shrunk = {
        name: replace(stack, depth=2 * max(1, round(share * stack.depth / 2)))
        for name, stack in stacks.items()
        if hasattr(stack, "depth")
    }
    return config.changed(**shrunk)


def fitting(preset: RunConfig, way: Way, rows: int, samples: int) -> Iterator[float]:
    """Shares of the layers that fit the first device in bf16."""
    stats = jax.devices()[0].memory_stats() or {}
    limit = _FITS * stats.get("bytes_limit", math.inf)
    for share in way.shares:
        config = _config(preset, way._replace(compute={}), share)
        if held(config, preset.optimizer, rows, samples) <= limit:
            yield share


@cache
def held(config: ModelConfig, optimizer: OptimizerConfig, rows: int, samples: int) -> float:
    """Bytes of a training state and of what its step holds at once, as the planner counts them."""
    model = config.build()
    batch = jax.eval_shape(lambda: random_batch(config, rows, samples))
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    state = abstract_state(model, optimizer, rules_of(model), mesh)
    own = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    return own + gradient_work(model, optimizer, batch).peak


def predicted_seconds(program: str, mesh: Mesh, chip: Chip) -> float:
    """Seconds of a compiled step on one chip, by the planner's roofline over its kernels."""
    kernels = explain(Program(program), dict(mesh.shape), Cluster(chip, devices=1))
    return kernels.seconds + chip.step_seconds


def _config(preset: RunConfig, way: Way, share: float) -> ModelConfig:
    config = with_depth(preset.model, share).computing(dtype="bfloat16", **way.compute)
    return require(config, "recomputing", "the step benchmark")(way.remat)


def _largest(preset: RunConfig, way: Way, rows: int, samples: int, tiny: bool) -> dict[str, Any]:
    """The most layers that do fit, measured; `full` are the shares that did not."""
    full: list[str] = []
    for share in fitting(preset, way, rows, samples):
        config = _config(preset, way, share)
        row = attempt(partial(_measured, config, preset.optimizer, rows, samples, tiny))
        if FULL not in row.get("error", ""):
            return {"layers": share, "full": full, **row}
        gc.collect()  # an exception's frames may still hold arrays
        full.append(f"{share:.0%} of the layers")
    return {"full": full, "cannot": "it needs more memory than this GPU has"}


def _measured(
    config: ModelConfig, optimizer: OptimizerConfig, rows: int, samples: int, tiny: bool
) -> dict[str, Any]:
    """Speed, and what the planner predicts of it where it knows the chip; `bytes` that the step's
    program holds at once, and `start_seconds` until the first step is done, most of them for
    compiling, unless an earlier call left what it compiled."""
    device = jax.devices()[0]
    batch = jax.device_put(random_batch(config, rows, samples), device)
    mesh = make_mesh(MeshConfig(), [device])
    speed = Speed(1, device.device_kind)
    with timed() as starting:
        call, program = stepper(config.build(), optimizer, batch, mesh)
        jax.block_until_ready(call())
    speed.flops = model_flops(config.build(), optimizer, batch)
    for _ in range(2 if tiny else 10):
        with timed() as took:
            metrics = jax.block_until_ready(call())
        speed.add(took.wall)
    report = speed.report()
    chip = CHIPS["h100"] if tiny else chip_of(device.device_kind)
    predicted = {}
    if chip is not None:
        seconds = predicted_seconds(program.as_text(), mesh, chip)
        predicted["predicted samples/s"] = rows * samples / seconds
    shapes = jax.eval_shape(config.build().init, jax.random.key(0))
    return {
        "samples/s": rows * samples / report["step_seconds_p50"],
        **predicted,
        "parameters": sum(x.size for x in jax.tree.leaves(shapes)),
        "samples": rows * samples,
        "loss": float(metrics["loss"]),
        "bytes": held_bytes(program),
        "start_seconds": starting.wall,
        **report,
    }
