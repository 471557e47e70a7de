"""Several noised chunks of one observation share its prefix: action chunks per second of training.

Mini-Diffuser's level-2 minibatch (arXiv 2505.09430): n chunks cost one prefix and n suffixes. Sizes
and batch are those of the pi05 benchmark; steps alternate, and ratios are taken within a round.
"""

from dataclasses import replace
from statistics import median
from typing import Any

import jax

from models import Pi
from models.files.terminal import Console
from tools.bench.models.attention import alternate
from tools.bench.models.pi05 import CONFIG, random_batch, rows, trainer

_CHUNKS, _ROUNDS = (1, 2, 4, 8), 6


def run(console: Console) -> dict[str, Any]:
    """Chunks per second of a training step; `ratio` is that of 8 chunks over 1."""
    batch = rows(CONFIG, random_batch(CONFIG))
    params = jax.jit(Pi(CONFIG).init)(jax.random.key(0))
    console.print(f"Timing training steps of {_CHUNKS} chunks per observation in turn")
    steps = {str(n): trainer(Pi(replace(CONFIG, chunks=n)), params, batch) for n in _CHUNKS}
    took = list(alternate(steps, _ROUNDS).values())
    count, table = batch.weight.size, []
    for n, times in zip(_CHUNKS, took, strict=True):
        gains = [n * one / several for one, several in zip(took[0], times, strict=True)]
        rate = count * n / median(times)
        table.append({"chunks": n, "chunks/s": rate, "ratio": median(gains)})
    return {
        "ratio": table[-1]["ratio"],
        "ours": f"{table[-1]['chunks/s']:.2f} chunks/s, {_CHUNKS[-1]} an observation",
        "other": f"{table[0]['chunks/s']:.2f} chunks/s, one an observation",
        "unit": "chunks/s",
        "table": table,
    }
