"""The thousand-GPU recipe's own scaling table (arXiv 2603.11101, GR00T-N1.5 by plain data
parallelism, 128 samples per GPU), predicted by the planner's model of a step.

A step is T(n) = c · slowest(n) + exposed all-reduce(n). The network is the paper's: nodes of eight
with 3.2 Tb/s. Nothing in the paper says how step times vary, which is what matters here, so the
result is given without any variation and with one number fitted, and says which is which.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from models.terminal import Console
from parallel.mesh import AXES
from parallel.planning.cluster import make_cluster
from parallel.planning.cost import Collective, busy
from parallel.planning.predict import LEAST_EXPOSED, OVERLAP, slowest

FRAMES, BATCH = 100e6, 128
PARAMETERS = 2.7e9
"""Parameters of GR00T-N1.5, all trained, with gradients in f32: the most that the paper's set-up
can send."""
CLEAN = 0.01
"""The planner's default deviation of step times."""


class Row(NamedTuple):
    """A row of the paper's sweep."""

    gpus: int
    hours: float

    @property
    def step(self) -> float:
        """Seconds, from the hours of an epoch."""
        return self.hours * 3600 / (FRAMES / (self.gpus * BATCH))


PAPER = (Row(256, 2.55), Row(512, 1.24), Row(1024, 0.73))


def exposed(gpus: int, compute: float) -> float:
    """Seconds of the gradients' all-reduce that backward does not hide."""
    sizes = dict.fromkeys(AXES, 1) | {"data": gpus}
    cluster = make_cluster("h100", gpus, nic_gbps=400)
    sent = max(busy(Collective("all-reduce", "data", 4 * PARAMETERS, 100), sizes, cluster))
    return max(sent - OVERLAP * compute, LEAST_EXPOSED * sent)


def step(gpus: int, compute: float, jitter: float) -> float:
    """Seconds of a step."""
    return compute * slowest(gpus, jitter) + exposed(gpus, compute)


def compute_of(row: Row, jitter: float) -> float:
    """Seconds of a row's step spent on compute and data, given its wait for the slowest."""
    compute = row.step
    for _ in range(20):
        compute = (row.step - exposed(row.gpus, compute)) / slowest(row.gpus, jitter)
    return compute


def fitted_jitter(rows: Sequence[Row] = PAPER) -> float:
    """The deviation of a GPU's step times that explains all rows best, by least squares of the
    relative error, the scale being free."""

    def error(jitter: float) -> float:
        ratios = np.log([row.step / slowest(row.gpus, jitter) for row in rows])
        return float(np.var(ratios))

    return float(min(np.arange(0, 0.6, 0.001), key=error))


def efficiency(gpus: int, jitter: float, base: Row = PAPER[0]) -> float:
    """Rate per GPU over that of the base row, whose step sets the compute."""
    compute = compute_of(base, jitter)
    return step(base.gpus, compute, jitter) / step(gpus, compute, jitter)


def run(console: Console) -> dict[str, Any]:
    """Efficiency from 256 GPUs up: the paper's, with no variation, the planner's default, and the
    fitted one. `ratio` is predicted over the paper's at 1024 with the fitted one."""
    fitted = fitted_jitter()
    table = Table("GPUs", "paper", "no jitter", f"{CLEAN:.0%} jitter", f"fitted, {fitted:.1%}")
    results = {}
    for row in PAPER:
        paper = PAPER[0].step / row.step
        ours = [efficiency(row.gpus, jitter) for jitter in (0.0, CLEAN, fitted)]
        results[row.gpus] = {"paper": paper, "none": ours[0], "default": ours[1], "fit": ours[2]}
        table.add_row(f"{row.gpus:,}", f"{paper:.1%}", *(f"{value:.1%}" for value in ours))
    console.print(table)
    last = results[1024]
    return {
        "ratio": last["fit"] / last["paper"],
        "ours": f"{last['fit']:.1%} of linear at 1024 GPUs with the fitted jitter",
        "other": f"{last['paper']:.1%} in the paper",
        "jitter": fitted,
        "rows": results,
    }
