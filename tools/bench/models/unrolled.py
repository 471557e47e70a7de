"""Training steps of π0.5 and GR00T-N1.5 at their released widths on one GPU, layers as a loop and
one after the other (`compute.unroll`), which is predicted to be faster: docs/results/explain.md."""

import math
from typing import Any

from models.terminal import Console
from tools.bench.models.step import Ways, measured

WAYS: Ways = {"bf16": {}, "bf16, unrolled": {"unroll": True}}


def run(console: Console, tiny: bool = False, rows: int = 8, samples: int = 4) -> dict[str, Any]:
    """Every model both ways; `ratio` is the first model's unrolled over as a loop.

    Raises:
      ValueError: the first device is no GPU, and the sizes are the released ones.
    """
    found = measured(console, WAYS, tiny, rows, samples)
    ours, other = (found[i].get("samples/s", math.nan) for i in (1, 0))
    return {
        "ratio": ours / other,
        "ours": f"{ours:.1f} samples/s of {found[0]['model']}, layers one after the other",
        "other": f"{other:.1f} as a loop",
        "unit": "samples/s",
        "rows": found,
    }
