"""Latency of acting: from a camera's pictures and a prompt to a chunk of actions on the host, of
π0.5 and GR00T-N1.5 at their released sizes, in batches of 1, 8 and 32.

Weights and computing are bf16. A round prepares the observations, computes, and brings the chunks
back, as `tools.serve` does for as many robots that send requests at once.
"""

import time
from functools import partial
from typing import Any

import jax
import numpy as np

from models import Policy
from models.terminal import Console, track
from tools.bench.attempt import attempt, tell
from tools.bench.models.random_policy import random_policy
from tools.recipes.presets import load_preset

_CAMERAS = ("base", "wrist")
_WORDS = ("lift", "the", "red", "block", "and", "put", "it", "into", "the", "drawer")
_STATE, _BATCHES = 8, (1, 8, 32)


def run(console: Console, tiny: bool = False) -> dict[str, Any]:
    """Milliseconds from observation to chunk; `ratio` is the first model's chunks per second in the
    largest batch over those one at a time.

    Raises:
      ValueError: the first device is no GPU, and the sizes are the released ones.
    """
    if jax.default_backend() != "gpu" and not tiny:
        raise ValueError("The act benchmark needs a GPU; --tiny tries it on a CPU.")
    rounds, batches = (2, (1, 2)) if tiny else (50, _BATCHES)
    found = []
    for name in ("tiny", "groot-tiny") if tiny else ("pi05", "groot"):
        config = load_preset(name).model.computing(dtype="bfloat16")
        policy = random_policy(config, _WORDS, _CAMERAS, _STATE, sizes=batches)
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


def latency(policy: Policy, batch: int, rounds: int) -> dict[str, Any]:
    """Percentiles of the milliseconds of `rounds` rounds, after a first one of `start_seconds`,
    which compiles unless an earlier call left what it compiled."""
    rng, size = np.random.default_rng(0), policy.model.config.image_size
    shape = (batch, len(_CAMERAS), size, size, 3)
    seconds = []
    for at in range(rounds + 1):
        pictures = rng.integers(0, 256, shape, np.uint8)
        state = rng.normal(size=(batch, _STATE)).astype(np.float32)
        keys = [(at, row) for row in range(batch)]
        since = time.perf_counter()
        policy.act((pictures, state), [" ".join(_WORDS)] * batch, keys)
        seconds.append(time.perf_counter() - since)
    p50, p99 = 1000 * np.percentile(seconds[1:], (50, 99))
    return {
        "p50_ms": float(p50),
        "p99_ms": float(p99),
        "chunks/s": batch * 1000 / float(p50),
        "rounds": rounds,
        "start_seconds": seconds[0],
    }
