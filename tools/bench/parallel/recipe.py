"""The thousand-GPU recipe's own scaling table (arXiv 2603.11101, GR00T-N1.5 by plain data
parallelism, 128 samples per GPU), predicted by the planner's model of a step.

A step is T(n) = c · slowest(n) + exposed all-reduce(n), on the paper's nodes of eight with 3.2
Tb/s. Nothing in the paper says how step times vary, so the result is given without any variation
and with one number fitted; the hours of an epoch are those of `tools.plan --preset groot`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from models.files.terminal import Console
from parallel.mesh import AXES
from parallel.planning.cluster import make_cluster
from parallel.planning.communication import Collective, busy
from parallel.planning.predict import LEAST_EXPOSED, OVERLAP, profiler, search, slowest
from tools.plan import Machines, PlannedRun, describe, make_task

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
EPOCHS: Mapping[str, tuple[int, Mapping[int, float | None]]] = {
    "128 samples per GPU": (BATCH, {row.gpus: row.hours for row in PAPER}),
    "256 samples per GPU": (256, {1024: 48 / 60}),
    "512 samples per GPU": (512, {1024: 22 / 60}),
    "32 samples per GPU": (32, {1024: None}),
}
"""Samples per GPU and step (32: the plan's default), with the paper's hours of an epoch by GPUs."""
_TOLD = ("step_seconds", "mfu", "samples_per_second", "goodput", "epoch_hours", "remat")


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


def epochs() -> dict[str, dict[int, dict[str, Any]]]:
    """GR00T-N1.5's epoch of the paper's frames on H100s by samples per GPU and GPUs, as
    `tools.plan` predicts it, goodput in it, beside the paper's hours."""
    run = PlannedRun(preset="groot", dataset_frames=round(FRAMES))
    cluster = Machines().read()
    task = make_task(run, cluster)
    profiles = profiler(task, cluster.chip)
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for name, (batch, hours) in EPOCHS.items():
        found[name] = {}
        for gpus, paper in hours.items():
            grown = task.of_rows(round(batch * gpus / task.samples))
            larger = replace(cluster, devices=gpus)
            best = search(grown, larger, profiles=profiles)[0]
            told = describe(run, larger, best)
            mesh = " ".join(f"{axis}={n}" for axis, n in told["mesh"].items() if n > 1)
            found[name][gpus] = {key: told[key] for key in _TOLD} | {
                "samples_per_gpu": told["samples_per_second"] / gpus,
                "mesh": mesh,
                "paper_hours": paper,
            }
    return found


def efficiencies(jitter: float) -> dict[int, dict[str, float]]:
    """Efficiency from 256 GPUs up: the paper's, with no variation, with the planner's default, and
    with `jitter`."""
    found = {}
    for row in PAPER:
        ours = [efficiency(row.gpus, each) for each in (0.0, CLEAN, jitter)]
        paper = PAPER[0].step / row.step
        found[row.gpus] = {"paper": paper, "none": ours[0], "default": ours[1], "fit": ours[2]}
    return found


def run(console: Console) -> dict[str, Any]:
    """Efficiencies, and hours of an epoch. `ratio` is predicted over the paper's at 1024 with the
    fitted jitter."""
    fitted = fitted_jitter()
    rows = efficiencies(fitted)
    table = Table("GPUs", "paper", "no jitter", f"{CLEAN:.0%} jitter", f"fitted, {fitted:.1%}")
    for gpus, row in rows.items():
        table.add_row(f"{gpus:,}", *(f"{value:.1%}" for value in row.values()))
    console.print(table)
    predicted = epochs()
    console.print(_hours(predicted))
    last = rows[1024]
    return {
        "ratio": last["fit"] / last["paper"],
        "ours": f"{last['fit']:.1%} of linear at 1024 GPUs with the fitted jitter",
        "other": f"{last['paper']:.1%} in the paper",
        "jitter": fitted,
        "rows": rows,
        "epochs": predicted,
    }


def _hours(predicted: dict[str, dict[int, dict[str, Any]]]) -> Table:
    table = Table("GR00T-N1.5 on H100s", "GPUs", "hours of an epoch", "the paper's", "MFU")
    for name, by_gpus in predicted.items():
        for gpus, told in by_gpus.items():
            paper = "" if told["paper_hours"] is None else f"{told['paper_hours']:.2f}"
            ours = f"{told['epoch_hours']:.2f}"
            table.add_row(name, f"{gpus:,}", ours, paper, f"{told['mfu']:.1%}")
    return table
