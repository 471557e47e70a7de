"""Latency of acting: from pictures on the host and a prompt to a chunk of actions on the host, of
π0.5 and GR00T-N1.5 at their released sizes, in batches of 1, 8 and 32; or of π0.5 compared with
openpi's.

A round prepares the observations, computes in bf16, and brings the chunks back, as `tools.serve`
does for as many robots. openpi's half (tools/bench/peers/openpi.py) acts in turn with ours; on a
CPU, both have the widths of the pi05 benchmark, in f32.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np

from models import PiConfig, Policy
from models.files.terminal import Console, track
from models.layers.layers import Compute
from models.layers.stack import apart
from models.model import ModelConfig
from tools.bench.attempt import attempt, tell
from tools.bench.models import pi05
from tools.bench.models.random_policy import random_policy
from tools.bench.peer import asking
from tools.bench.timing import timed
from tools.recipes.presets import load_preset

_CAMERAS = ("base", "wrist")
_WORDS = ("lift", "the", "red", "block", "and", "put", "it", "into", "the", "drawer")
_STATE, _BATCHES = 8, (1, 8, 32)


def run(console: Console, peer: Path | None = None, tiny: bool = False) -> dict[str, Any]:
    """Milliseconds from observation to chunk. `ratio` is the first model's chunks per second in the
    largest batch over those one at a time; with a peer, openpi's milliseconds for one observation
    over ours.

    Args:
      peer: a Python that has openpi.
      tiny: small pictures or models, and a few rounds.

    Raises:
      ValueError: the first device is no GPU, no peer is given, and the sizes are the released ones.
      FileNotFoundError: there is no such Python.
    """
    rounds, batches = (2, (1, 2)) if tiny else (50, _BATCHES)
    if peer is not None:
        return compared(console, peer, _config(tiny), batches, rounds)
    if jax.default_backend() != "gpu" and not tiny:
        raise ValueError(
            "The act benchmark needs a GPU, or --peer PYTHON to compare small widths with openpi's "
            "on a CPU; --tiny tries it on a CPU."
        )
    found = []
    for name in ("tiny", "groot-tiny") if tiny else ("pi05", "groot"):
        config = load_preset(name).model.computing(dtype="bfloat16")
        policy = _policy(config, batches)
        for batch in track(batches, f"{name} acts", console=console):
            row = attempt(partial(latency, policy, batch, rounds))
            found.append({"model": name, "batch": batch, **row})
            tell(console, {"unit": "ms", "rows": found})
        del policy
        jax.clear_caches()
    one, many = (found[i].get("chunks/s", np.nan) for i in (0, len(batches) - 1))
    return {
        "ratio": many / one,
        "ours": f"{many:.1f} chunks/s in batches of {batches[-1]}",
        "other": f"{one:.1f} one at a time",
        "unit": "ms",
        "rows": found,
    }


def compared(
    console: Console, peer: Path, config: PiConfig, batches: Sequence[int], rounds: int
) -> dict[str, Any]:
    """Percentiles of the milliseconds of ours and openpi's in alternating rounds, and the median
    over the rounds of their ratio, for each size of batch."""
    policy, rows = _policy(config, batches), []
    theirs = pi05.their_config(config) | {"dtype": config.compute.dtype}
    with asking(peer, "openpi") as ask:
        about = ask(config=theirs, seed=0, steps=config.euler_steps)
        for batch in track(batches, "π0.5 and openpi's act", console=console):
            acting, took = acts(policy, batch), list[tuple[float, float]]()
            for _ in range(rounds + 1):  # the first compiles
                took.append((next(acting), ask(run="act", batch=batch)["seconds"]))
            ours, other = (percentiles(each) for each in zip(*took[1:], strict=True))
            ratio = median(b / a for a, b in took[1:])
            named = [(f"ours_{key}", ms) for key, ms in ours.items()]
            named += [(f"openpi_{key}", ms) for key, ms in other.items()]
            rows.append({"batch": batch, "ratio": ratio, **dict(named)})
    one = rows[0]
    return {
        "ratio": one["ratio"],
        "ours": f"{one['ours_p50_ms']:.0f} ms for one observation",
        "other": f"{one['openpi_p50_ms']:.0f} ms by openpi",
        "unit": "ms",
        "dtype": config.compute.dtype,
        "rounds": rounds,
        "rows": rows,
        "openpi": about,
    }


def _policy(config: ModelConfig, batches: Sequence[int]) -> Policy:
    """A policy whose layers are apart, as those of a served one are."""
    policy = random_policy(config, _WORDS, _CAMERAS, _STATE, sizes=batches)
    return replace(policy, params=apart(policy.params, policy.model.stacked, free=True))


def latency(policy: Policy, batch: int, rounds: int) -> dict[str, Any]:
    """Percentiles of the milliseconds of `rounds` rounds, after a first one of `start_seconds`,
    which compiles unless an earlier call left what it compiled."""
    start, *seconds = islice(acts(policy, batch), rounds + 1)
    found = percentiles(seconds)
    return found | {
        "chunks/s": batch * 1000 / found["p50_ms"],
        "rounds": rounds,
        "start_seconds": start,
    }


def acts(policy: Policy, batch: int) -> Iterator[float]:
    """Seconds from each of ever new observations on the host to their chunks on the host."""
    rng, size = np.random.default_rng(0), policy.model.config.image_size
    shape = (batch, len(_CAMERAS), size, size, 3)
    for at in count():
        pictures = rng.integers(0, 256, shape, np.uint8)
        state = rng.normal(size=(batch, _STATE)).astype(np.float32)
        keys = [(at, row) for row in range(batch)]
        with timed() as took:
            policy.act((pictures, state), [" ".join(_WORDS)] * batch, keys)
        yield took.wall


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Median and 99th percentile in milliseconds."""
    p50, p99 = 1000 * np.percentile(seconds, (50, 99))
    return {"p50_ms": float(p50), "p99_ms": float(p99)}


def _config(tiny: bool) -> PiConfig:
    """π0.5 as released in bf16 on a GPU, with the widths of the pi05 benchmark in f32 on a CPU."""
    if tiny:
        return replace(pi05.CONFIG, image_size=28)
    if jax.default_backend() == "gpu":
        return PiConfig(compute=Compute("bfloat16"))
    return pi05.CONFIG
