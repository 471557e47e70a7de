"""Training steps of π0.5 and GR00T-N1.5 at their released widths on one GPU, in bf16 and float8:
samples a second, and the share of the GPU's peak (MFU).

Among choices that fit by the planner's count of bytes, the one with most layers is taken, then the
one that recomputes least in backward. If it does not fit after all, the next one is taken. FLOPs
are the model's own, as `parallel.monitor.speed` counts them.
"""

import gc
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from functools import cache, partial
from typing import Any

import jax
from jax.sharding import Mesh

from models.layers.layers import Remat
from models.model import ModelConfig, require
from models.terminal import Console
from parallel.mesh import MeshConfig, make_mesh
from parallel.monitor.speed import Speed, model_flops
from parallel.optimizer import OptimizerConfig
from parallel.planning.flops import gradient_work
from parallel.planning.random_batch import random_batch
from parallel.step import abstract_state, init_state, make_train_step
from tools.bench.attempt import FULL, attempt, tell
from tools.bench.models.pi05 import held_bytes
from tools.bench.timing import timed
from tools.recipes.presets import RunConfig, load_preset

Ways = Mapping[str, Mapping[str, Any]]
"""Fields of `compute` that each way to train changes."""
PRECISIONS: Ways = {"bf16": {}, "fp8": {"fp8": "delayed"}}
_SHARES = (1.0, 0.75, 0.5, 0.25)
_REMATS: tuple[Remat, ...] = ("none", "dots", "qkv", "attention", "full")
_FITS = 0.9


def run(console: Console, tiny: bool = False, rows: int = 8, samples: int = 4) -> dict[str, Any]:
    """Every model in every precision; `ratio` is float8 over bf16 of the first model.

    Raises:
      ValueError: the first device is no GPU, and the sizes are the released ones.
    """
    told = " in float8", "in bf16"
    return compared(console, PRECISIONS, told, tiny, rows, samples)


def compared(
    console: Console, ways: Ways, told: tuple[str, str], tiny: bool, rows: int, samples: int
) -> dict[str, Any]:
    """Every model in every way, one after another; `ratio` is the first model's second way over its
    first, which `told` names in that order. Raises as `run`."""
    if jax.default_backend() != "gpu" and not tiny:
        raise ValueError("The step benchmark needs a GPU; --tiny tries it on a CPU.")
    if tiny:
        rows, samples = 2, 2
    found = []
    for name in ("tiny", "groot-tiny") if tiny else ("pi05", "groot"):
        preset = benched(name)
        for way, changes in ways.items():
            console.print(f"{name}: a step in {way}")
            row = _largest(preset, changes, rows, samples, 2 if tiny else 10)
            found.append({"model": name, "precision": way, **row})
            tell(console, {"unit": "samples/s", "rows": found})
            jax.clear_caches()
    ours, other = (found[i].get("samples/s", math.nan) for i in (1, 0))
    return {
        "ratio": ours / other,
        "ours": f"{ours:.1f} samples/s of {found[0]['model']}{told[0]}",
        "other": f"{other:.1f} {told[1]}",
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


def fitting(preset: RunConfig, rows: int, samples: int) -> Iterator[tuple[float, Remat]]:
    """Shares of the layers, each with what is recomputed, that fit the first device in bf16."""
    stats = jax.devices()[0].memory_stats() or {}
    limit = _FITS * stats.get("bytes_limit", math.inf)
    for share in _SHARES:
        for remat in _REMATS:
            config = _config(preset, share, remat, {})
            if held(config, preset.optimizer, rows, samples) <= limit:
                yield share, remat


@cache
def held(config: ModelConfig, optimizer: OptimizerConfig, rows: int, samples: int) -> float:
    """Bytes of a training state and of what its step holds at once, as the planner counts them."""
    model = config.build()
    batch = jax.eval_shape(lambda: random_batch(config, rows, samples))
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    state = abstract_state(model, optimizer, model.sharding_rules, mesh)
    own = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    return own + gradient_work(model, optimizer, batch).peak


def stepper(
    config: ModelConfig, optimizer: OptimizerConfig, batch: Any, mesh: Mesh
) -> tuple[Callable[[], Any], int]:
    """A training step to call repeatedly, and the bytes that its program holds at once."""
    model = config.build()
    abstract = abstract_state(model, optimizer, model.sharding_rules, mesh)
    state = init_state(model, optimizer, abstract, 0)
    jitted: Any = make_train_step(model, optimizer, mesh, abstract)
    step = jitted.lower(state, batch, 0).compile()

    def call() -> Any:
        nonlocal state
        state, metrics = step(state, batch, 0)
        return metrics

    return call, held_bytes(step)


def _config(
    preset: RunConfig, share: float, remat: Remat, changes: Mapping[str, Any]
) -> ModelConfig:
    config = with_depth(preset.model, share).computing(dtype="bfloat16", **changes)
    return require(config, "recomputing", "the step benchmark")(remat)


def _largest(
    preset: RunConfig, changes: Mapping[str, Any], rows: int, samples: int, rounds: int
) -> dict[str, Any]:
    """The first choice that does fit, measured; `full` are those that did not."""
    full: list[str] = []
    for share, remat in fitting(preset, rows, samples):
        config = _config(preset, share, remat, changes)
        row = attempt(partial(_measured, config, preset.optimizer, rows, samples, rounds))
        if FULL not in row.get("error", ""):
            return {"layers": share, "remat": remat, "full": full, **row}
        gc.collect()  # an exception's frames may still hold arrays
        full.append(f"{share:.0%} of the layers, remat {remat}")
    return {"full": full, "error": "No number of layers fits this GPU's memory."}


def _measured(
    config: ModelConfig, optimizer: OptimizerConfig, rows: int, samples: int, rounds: int
) -> dict[str, Any]:
    """Speed; `bytes` that the step's program holds at once, and `start_seconds` until the first
    step is done, most of them for compiling, unless an earlier call left what it compiled."""
    device = jax.devices()[0]
    batch = jax.device_put(random_batch(config, rows, samples), device)
    mesh = make_mesh(MeshConfig(), [device])
    speed = Speed(1, device.device_kind)
    with timed() as starting:
        call, held = stepper(config, optimizer, batch, mesh)
        jax.block_until_ready(call())
    speed.flops = model_flops(config.build(), optimizer, batch)
    for _ in range(rounds):
        with timed() as took:
            metrics = jax.block_until_ready(call())
        speed.add(took.wall)
    report = speed.report()
    shapes = jax.eval_shape(config.build().init, jax.random.key(0))
    return {
        "samples/s": rows * samples / report["step_seconds_p50"],
        "parameters": sum(x.size for x in jax.tree.leaves(shapes)),
        "samples": rows * samples,
        "loss": float(metrics["loss"]),
        "bytes": held,
        "start_seconds": starting.wall,
        **report,
    }
