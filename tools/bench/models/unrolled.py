"""Training steps of π0.5 and GR00T-N1.5 at their released widths on one GPU, layers as a loop and
one after the other (`compute.unroll`), which is predicted to be faster: docs/results/explain.md."""

from typing import Any

from models.terminal import Console
from tools.bench.models.step import Ways, compared

WAYS: Ways = {"bf16": {}, "bf16, unrolled": {"unroll": True}}


def run(console: Console, tiny: bool = False, rows: int = 8, samples: int = 4) -> dict[str, Any]:
    """Every model both ways; `ratio` is the first model's unrolled over as a loop.

    Raises:
      ValueError: the first device is no GPU, and the sizes are the released ones.
    """
    told = ", layers one after the other", "as a loop"
    return compared(console, WAYS, told, tiny, rows, samples)
