"""What an RL run came to so far, as one figure: success on held-out starts and in training, what
the learner says, how old what it learnt from was, and what everybody waited for.

All is read from the run's metrics.jsonl and closed_loop.jsonl, so it can be drawn at any time.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from parallel.metrics import read_metrics
from tools.closed_loop import read_closed_loop

LAG, IDLE = "lag/", "idle/"
"""What metrics of one lag (decisions of this age) and one cause of waiting (seconds) begin with."""

Rows = Sequence[Mapping[str, float]]


def write_curves(directory: Path) -> list[Path]:
    """Draws curves.svg and curves.png in a run's folder; returns their paths."""
    rows = [row for row in read_metrics(directory) if "loss" in row]
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    axes = figure.subplots(2, 2).flat
    _success(axes[0], read_closed_loop(directory), rows)
    _learner(axes[1], rows)
    _lags(axes[2], rows)
    _idle(axes[3], rows)
    paths = [directory / "curves.svg", directory / "curves.png"]
    figure.savefig(paths[0], metadata={"Date": None})
    figure.savefig(paths[1], dpi=120)
    return paths


def total(rows: Rows, prefix: str) -> dict[str, float]:
    """Sums over all steps of the metrics that begin so, by the rest of their names."""
    sums: Counter[str] = Counter()
    for row in rows:
        for name, value in row.items():
            if name.startswith(prefix):
                sums[name.removeprefix(prefix)] += value  # type: ignore[assignment]
    return dict(sums)


def _success(axes: Axes, evaluations: Sequence[Mapping[str, Any]], rows: Rows) -> None:
    shown = [(row["step"] + 1, row["success"]) for row in rows if "success" in row]
    if shown:
        axes.plot(*zip(*shown, strict=True), color="C0", alpha=0.4, label="in training")
    if evaluations:
        steps = [line["step"] for line in evaluations]
        rates = [line["success"]["rate"] for line in evaluations]
        low, high = ([line["success"][end] for line in evaluations] for end in ("low", "high"))
        axes.plot(steps, rates, "o-", color="C1", label="held-out starts, 95 %")
        axes.fill_between(steps, low, high, color="C1", alpha=0.2)
    axes.set(title="Success", xlabel="learner's steps", ylim=(-0.02, 1.02))
    _finish(axes)


def _learner(axes: Axes, rows: Rows) -> None:
    for name, says in (
        ("ess", "effective sample size, share"),
        ("clip_fraction", "clipped, share"),
        ("grad_norm", "gradient norm"),
    ):
        shown = [(row["step"] + 1, row[name]) for row in rows if name in row]
        if shown:
            axes.plot(*zip(*shown, strict=True), label=says)
    axes.set(title="Learner", xlabel="learner's steps")
    _finish(axes)


def _lags(axes: Axes, rows: Rows) -> None:
    lags = {int(lag): count for lag, count in total(rows, LAG).items()}
    if lags:
        every = range(max(lags) + 1)
        share = [lags.get(lag, 0) / sum(lags.values()) for lag in every]
        axes.bar([str(lag) for lag in every], share)
    axes.set(title="Age of what was learnt from", xlabel="policy versions", ylabel="share")
    axes.grid(alpha=0.3)


def _idle(axes: Axes, rows: Rows) -> None:
    seconds = total(rows, IDLE)
    if seconds:
        names = sorted(seconds, key=lambda name: seconds[name])
        axes.barh(names, [seconds[name] for name in names])
    axes.set(title="Waiting by cause", xlabel="seconds")
    axes.grid(alpha=0.3)


def _finish(axes: Axes) -> None:
    axes.grid(alpha=0.3)
    if axes.has_data():
        axes.legend(frameon=False)
