"""Attention, forward and backward: on a GPU, every implementation on the heads and rows of the
released models first; then how its cost falls with the number of samples that share a row, and what
"auto" gains over dense in rows as the tiny preset packs them.

Compared calls alternate, and ratios are taken within a round, so a drifting machine slows both
alike; figures are medians over the rounds.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from models import PiConfig
from models.attention.attention import Implementation, attend, explain
from models.families.groot.model import GrootConfig
from models.files.terminal import Console, track
from parallel.planning.cluster import chip_of
from tools.bench.attempt import FULL, failed, tell
from tools.bench.timing import timed

_SEGMENTS = (1, 4, 16)
_BRIEF, _MOST = 0.01, 100
"""Seconds below which a call is made several times in a row, and the largest number of times."""
_BACKWARD = 2.5
"""Products of the backward pass over those of the forward: five and two (FlashAttention-2,
arXiv 2307.08691, section 4.1)."""


class Case(NamedTuple):
    """`rows` rows of `keys` places shared by `segments` samples. Each sample has `asked` queries of
    its own, or one for each of its places (0)."""

    rows: int
    keys: int
    segments: int
    heads: int
    head_dim: int
    asked: int = 0
    kv_heads: int = 1
    causal: bool = False

    def __str__(self) -> str:
        asked = f", {self.asked} queries a sample" if self.asked else ""
        return f"{self.rows} x {self.keys} places, {self.segments} samples a row{asked}"


def released(tiny: bool = False) -> dict[str, Case]:
    """Heads of the released models, in rows of four samples with two cameras and 60 tokens of text;
    shrunk if `tiny`."""
    pi, groot = PiConfig(), GrootConfig()
    language, vision, qwen, dit = pi.language, pi.vision, groot.language, groot.dit
    tokens, samples = pi.tokens_per_image, 4
    places = samples * (2 * tokens + 60)
    acting = 1 + groot.future_tokens + groot.horizon
    gemma = language.heads, language.head_dim
    siglip = vision.heads, vision.width // vision.heads
    cases = {
        "π0.5's prefix": Case(8, places, samples, *gemma),
        "π0.5's chunks onto it": Case(8, places, samples, *gemma, asked=pi.horizon),
        "SigLIP": Case(64, tokens, 1, *siglip, kv_heads=vision.heads),
        "GR00T's Qwen3": Case(
            8, places, samples, qwen.heads, qwen.head_dim, kv_heads=qwen.kv_heads, causal=True
        ),
        "GR00T's transformer": Case(32, acting, 1, dit.heads, dit.head_dim, kv_heads=dit.heads),
        "π0.5's heads, a long row": Case(1, 32768, 16, *gemma),
    }
    if not tiny:
        return cases
    return {
        name: case._replace(
            rows=min(case.rows, 2),
            keys=8 * case.segments,
            heads=2 * case.kv_heads if case.kv_heads < case.heads else case.heads,
            asked=min(case.asked, 4),
        )
        for name, case in cases.items()
    }


def preset_rows(rows: int = 16, heads: int = 2, head_dim: int = 32) -> list[Case]:
    """Rows of the tiny preset: a prefix of some samples onto itself, and their chunks onto it."""
    sizes = [(100, 1), (200, 2), (304, 4), (512, 6)]
    return [
        Case(rows, keys, segments, heads, head_dim, asked)
        for asked in (0, 24)
        for keys, segments in sizes
    ]


def run(console: Console, tiny: bool = False) -> dict[str, Any]:
    """Milliseconds of the gradient of one attention; `ratio` is dense over auto in full rows."""
    on_gpu = jax.default_backend() == "gpu"
    result: dict[str, Any] = {"unit": "ms"}
    if on_gpu or tiny:
        result["released"] = []
        for name, case in track(released(tiny).items(), "Released heads", console=console):
            found = implementations(case, jnp.bfloat16, 1 if tiny else 10)
            result["released"].append({"name": name, **found})
            tell(console, result)
    dtype, places, head_dim = (jnp.bfloat16, 16384, 256) if on_gpu else (jnp.float32, 4096, 64)
    places = 256 if tiny else places
    scaling = [Case(1, places, segments, 8, head_dim) for segments in _SEGMENTS]
    console.print(f"{places} places shared by {_SEGMENTS} samples")
    ready, lost = _able({str(case): gradient(case, "auto", dtype) for case in scaling})
    result["scaling"] = rows(alternate(ready, 4), "share") + lost
    tell(console, result)
    result["packed"] = []
    packed = preset_rows(128, 8, 256) if on_gpu else preset_rows()
    packed = packed[:1] if tiny else packed
    for case in track(packed, "Packed rows", console=console):
        names: tuple[Implementation, ...] = ("auto", "dense")
        ready, lost = _able({name: gradient(case, name, dtype) for name in names})
        by_name = {row["name"]: row for row in rows(alternate(ready, 12), "ratio") + lost}
        result["packed"].append({"case": str(case), "auto is": chosen(case, dtype), **by_name})
        tell(console, result)
    full = result["packed"][:4][-1]
    auto, dense = (full[name].get("ms", math.nan) for name in ("auto", "dense"))
    result["ratio"] = full["dense"].get("ratio", math.nan) if "ms" in full["auto"] else math.nan
    result["ours"] = f"{auto:.1f} ms auto"
    result["other"] = f"{dense:.1f} ms dense, {full['case']}"
    return result


def implementations(case: Case, dtype: Any, rounds: int) -> dict[str, Any]:
    """Every implementation on a case: milliseconds of the gradient, TFLOP/s of the products that
    the mask needs and their share of the chip's peak, or the reason why it cannot run; `auto` names
    the one that "auto" takes."""
    found: dict[str, Any] = {"case": str(case), "heads": case.heads, "kv_heads": case.kv_heads}
    found |= {"head_dim": case.head_dim, "causal": case.causal, "dtype": jnp.dtype(dtype).name}
    found |= {"auto": chosen(case, dtype)}
    names = [name for name, _ in explained(case, dtype)]
    steps, found["rows"] = _able({name: gradient(case, name, dtype) for name in names})
    flops, chip = needed_flops(case), chip_of(jax.devices()[0].device_kind)
    for row in rows(alternate(steps, rounds), "ratio"):
        rate = flops / row["ms"] * 1e3
        share = {} if chip is None else {"peak_share": rate / chip.peak(found["dtype"])}
        found["rows"].append(row | {"TFLOP/s": rate / 1e12} | share)
    return found


def _able(
    steps: Mapping[str, Callable[[], Any]],
) -> tuple[dict[str, Callable[[], Any]], list[dict[str, Any]]]:
    """Compiled steps that run, and a row with the reason for each that does not."""
    problems = {name: _problem(step) for name, step in steps.items()}
    lost = [{"name": name, **why} for name, why in problems.items() if why is not None]
    return {name: step for name, step in steps.items() if problems[name] is None}, lost


def _problem(step: Callable[[], Any]) -> dict[str, Any] | None:
    """`cannot`, why an implementation does not serve a case, or its `error`; None if it runs."""
    try:
        jax.block_until_ready(step())
    except Exception as error:
        if isinstance(error, ValueError) and str(error).startswith("Attention '"):
            return {"cannot": str(error)}
        if FULL in str(error):
            return {"cannot": "it needs more memory than this device has"}
        return failed(error)
    return None


def needed_flops(case: Case) -> float:
    """FLOPs of the products of one gradient, over the pairs that the mask lets see each other."""
    found = segments(case, np.random.default_rng(0))
    lengths = np.stack([(found == s).sum(1) for s in range(1, case.segments + 1)])
    pairs = (lengths * (case.asked or lengths)).sum() * (0.5 if case.causal else 1)
    return float(4 * (1 + _BACKWARD) * pairs * case.heads * case.head_dim)


def alternate(steps: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every call, in turn; the first round only compiles. Brief calls that were already
    compiled are made several times before they are waited for, so that a device's kernels are timed
    and not their start."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    times = dict.fromkeys(steps, 1)
    for at in range(rounds + 1):
        for name, step in steps.items():
            seconds[name].append(_timed(step, times[name]))
            if at == 0:
                times[name] = min(_MOST, max(1, int(_BRIEF / seconds[name][0])))
    return {name: times[1:] for name, times in seconds.items()}


def _timed(step: Callable[[], Any], times: int) -> float:
    with timed() as took:
        for _ in range(times - 1):
            step()
        jax.block_until_ready(step())
    return took.wall / times


def rows(took: dict[str, list[float]], ratio: str) -> list[dict[str, Any]]:
    """Median milliseconds, and the median over the rounds of each one's ratio to the first."""
    first = next(iter(took.values()), [])
    return [
        {
            "name": name,
            "ms": 1e3 * median(times),
            ratio: median(b / a for a, b in zip(first, times, strict=True)),
        }
        for name, times in took.items()
    ]


def gradient(case: Case, implementation: Any, dtype: Any) -> Callable[[], Any]:
    """A compiled call of the gradient by queries, keys and values."""
    rng = np.random.default_rng(0)
    segment = segments(case, rng)
    q_segment = segment
    if case.asked:
        asked = np.repeat(np.arange(1, case.segments + 1), case.asked)
        q_segment = np.tile(asked, (case.rows, 1))
    q = jnp.asarray(rng.normal(size=(*q_segment.shape, case.heads, case.head_dim)), dtype)
    shape = (2, *segment.shape, case.kv_heads, case.head_dim)
    k, v = jnp.asarray(rng.normal(size=shape), dtype)
    options: dict[str, Any] = {"causal": case.causal, "samples": case.segments}
    if case.causal:
        place = jnp.broadcast_to(jnp.arange(case.keys), segment.shape)
        options |= {"q_position": place, "kv_position": place}

    @partial(jax.grad, argnums=(0, 1, 2))
    def step(q, k, v, q_segment, segment):
        got = attend(q, k, v, q_segment, segment, implementation=implementation, **options)
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
    return next(name for name, objection in explained(case, dtype) if objection is None)


def explained(case: Case, dtype: Any) -> list[tuple[str, str | None]]:
    """Implementations as "auto" tries them for a case, with the reason against each."""
    queries = case.asked * case.segments or case.keys
    q, k = (
        jax.ShapeDtypeStruct((case.rows, length, heads, case.head_dim), dtype)
        for length, heads in ((queries, case.heads), (case.keys, case.kv_heads))
    )
    return explain(q, k, case.segments, case.causal)
