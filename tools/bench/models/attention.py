"""Attention, forward and backward: how its cost falls with the number of samples that share a row,
and what "auto" gains over dense in rows as the tiny preset packs them.

What is compared alternates, and ratios are taken within a round, so a drifting machine slows both
alike; figures are medians over the rounds.
"""

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from models.attention.attention import Implementation, attend, explain
from models.terminal import Console, track

_SEGMENTS = (1, 4, 16)


class Case(NamedTuple):
    """`rows` rows of `keys` places shared by `segments` samples, every sample asked about by
    `asked` queries of its own, or by all of its places (0)."""

    rows: int
    keys: int
    segments: int
    heads: int
    head_dim: int
    asked: int = 0

    def __str__(self) -> str:
        asked = f", {self.asked} queries a sample" if self.asked else ""
        return f"{self.rows} x {self.keys} places, {self.segments} samples a row{asked}"


def tiny(rows: int = 16, heads: int = 2, head_dim: int = 32) -> list[Case]:
    """Rows of the tiny preset: a prefix of some samples onto itself, and their chunks onto it."""
    sizes = [(100, 1), (200, 2), (304, 4), (512, 6)]
    return [
        Case(rows, keys, segments, heads, head_dim, asked)
        for asked in (0, 24)
        for keys, segments in sizes
    ]


def run(console: Console) -> dict[str, Any]:
    """Milliseconds of the gradient of one attention; `ratio` is dense over auto in full rows."""
    on_gpu = jax.default_backend() == "gpu"
    dtype, places, head_dim = (jnp.bfloat16, 16384, 256) if on_gpu else (jnp.float32, 4096, 64)
    scaling = [Case(1, places, segments, 8, head_dim) for segments in _SEGMENTS]
    console.print(f"{places} places shared by {_SEGMENTS} samples")
    took = alternate({str(case): gradient(case, "auto", dtype) for case in scaling}, 4)
    result: dict[str, Any] = {"unit": "ms", "scaling": rows(took, "share")}
    result["packed"] = []
    for case in track(tiny(128, 8, 256) if on_gpu else tiny(), "Packed rows", console=console):
        names: tuple[Implementation, ...] = ("auto", "dense")
        took = alternate({name: gradient(case, name, dtype) for name in names}, 12)
        auto, dense = rows(took, "ratio")
        result["packed"].append(
            {"case": str(case), "auto is": chosen(case, dtype), "auto": auto, "dense": dense}
        )
    full = result["packed"][3]
    result["ratio"] = full["dense"]["ratio"]
    result["ours"] = f"{full['auto']['ms']:.1f} ms auto"
    result["other"] = f"{full['dense']['ms']:.1f} ms dense, {full['case']}"
    return result


def alternate(steps: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every call, in turn; the first round only compiles."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            jax.block_until_ready(step())
            seconds[name].append(time.perf_counter() - start)
    return {name: times[1:] for name, times in seconds.items()}


def rows(took: dict[str, list[float]], ratio: str) -> list[dict[str, Any]]:
    """Median milliseconds, and the median over the rounds of each one's ratio to the first."""
    first = next(iter(took.values()))
    return [
        {
            "name": name,
            "ms": 1e3 * median(times),
            ratio: median(b / a for a, b in zip(first, times, strict=True)),
        }
        for name, times in took.items()
    ]


def gradient(case: Case, implementation: Implementation, dtype: Any) -> Callable[[], Any]:
    """A compiled call of the gradient by queries, keys and values."""
    rng = np.random.default_rng(0)
    segment = segments(case, rng)
    q_segment = segment
    if case.asked:
        asked = np.repeat(np.arange(1, case.segments + 1), case.asked)
        q_segment = np.tile(asked, (case.rows, 1))
    q = jnp.asarray(rng.normal(size=(*q_segment.shape, case.heads, case.head_dim)), dtype)
    k, v = jnp.asarray(rng.normal(size=(2, *segment.shape, 1, case.head_dim)), dtype)

    @partial(jax.grad, argnums=(0, 1, 2))
    def step(q, k, v, q_segment, segment):
        got = attend(q, k, v, q_segment, segment, implementation=implementation)
        return jnp.square(got.out.astype(jnp.float32)).sum()

    return partial(jax.jit(step), q, k, v, jnp.asarray(q_segment), jnp.asarray(segment))


def segments(case: Case, rng: np.random.Generator) -> Int[np.ndarray, "rows keys"]:
    """Samples end to end, of lengths that differ by up to a half of their mean where rows are many,
    and of equal lengths in a single row."""
    spread = rng.uniform(0.5, 1.5, (case.rows, case.segments)) if case.rows > 1 else 1.0
    shares = np.broadcast_to(spread, (case.rows, case.segments))
    ends = np.cumsum(shares, axis=1) / shares.sum(1, keepdims=True) * case.keys
    return 1 + (np.arange(case.keys)[:, None] >= ends.round()[:, None, :-1]).sum(-1)


def chosen(case: Case, dtype: Any) -> str:
    """The implementation that "auto" takes."""
    queries = case.asked * case.segments or case.keys
    q, k = (
        jax.ShapeDtypeStruct((case.rows, length, heads, case.head_dim), dtype)
        for length, heads in ((queries, case.heads), (case.keys, 1))
    )
    return next(name for name, objection in explain(q, k) if objection is None)
