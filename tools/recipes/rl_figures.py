"""Figures of RL runs: success on held-out starts and in training, the learner's metrics, the lag of
what it learnt from, and what each part waited for. A population has another figure: how its members
did, with which hyperparameters, and who copied whom."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from parallel.monitor.metrics import read_metrics
from rl.population.population import Generation, read_generations
from tools.recipes.closed_loop import read_closed_loop

_NAMED = 6
"""Largest number of tasks in a legend."""
LAG, IDLE = "lag/", "idle/"
"""Prefixes of metrics of one lag (decisions of this age) and one cause of waiting (seconds)."""

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


def write_population(directory: Path) -> list[Path]:
    """Draws population.svg and population.png in a population's folder; returns their paths.

    A member keeps its colour. Where it copies another, an arrow comes from that member. From then
    on, its line in the panel of who continues from whom has the colour of the member whose
    parameters it has, traced back to the beginning.
    """
    generations = read_generations(directory)
    tuned = list(generations[0].hyperparameters[0]) if generations else []
    rows = -(-(2 + len(tuned)) // 2)
    figure = Figure(figsize=(10, 3.2 * rows), layout="constrained")
    axes = list(figure.subplots(rows, 2).flat)
    _members(axes[0], generations)
    _lineage(axes[1], generations)
    for panel, name in zip(axes[2:], tuned, strict=False):
        _tuned(panel, generations, name)
    for panel in axes:
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    for panel in axes[2 + len(tuned) :]:
        panel.set_axis_off()
    paths = [directory / "population.svg", directory / "population.png"]
    figure.savefig(paths[0], metadata={"Date": None})
    figure.savefig(paths[1], dpi=120)
    return paths


def write_comparison(runs: Sequence[Path], path: Path) -> None:
    """Draws success on held-out starts of several runs, over the learner's steps and over the
    minutes that these steps took (with compilation, without evaluations).

    Raises:
      ValueError: a run has no evaluation.
    """
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    for k, run in enumerate(runs):
        evaluations = read_closed_loop(run)
        if not evaluations:
            raise ValueError(
                f"{run} has no evaluation in closed_loop.jsonl; give the folder of a tools.rl "
                "run whose eval_every is not 0."
            )
        took = {row["step"]: row["step_seconds"] for row in read_metrics(run) if "loss" in row}
        steps = [line["step"] for line in evaluations]
        minutes = [sum(s for at, s in took.items() if at < step) / 60 for step in steps]
        rates = [line["success"]["rate"] for line in evaluations]
        low, high = ([line["success"][end] for line in evaluations] for end in ("low", "high"))
        for axes, x in ((by_step, steps), (by_time, minutes)):
            axes.plot(x, rates, "o-", color=_colour(k), label=run.name, markersize=4)
            axes.fill_between(x, low, high, color=_colour(k), alpha=0.1)
    said = "success on held-out starts, 95 % interval"
    _finish(by_step, xlabel="learner's steps", ylabel=said, ylim=(0, 1.02))
    _finish(by_time, xlabel="minutes of acting and learning")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def total(rows: Rows, prefix: str) -> dict[str, float]:
    """Sums over all steps of the metrics whose names begin with `prefix`, by the rest of the
    name."""
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
        axes.plot(steps, rates, "o-", color="C1", label="held-out starts, 95 % interval")
        axes.fill_between(steps, low, high, color="C1", alpha=0.2)
        _tasks(axes, evaluations)
    _finish(axes, title="Success", xlabel="learner's steps", ylim=(-0.02, 1.02))


def _tasks(axes: Axes, evaluations: Sequence[Mapping[str, Any]]) -> None:
    """Draws a line for each of several tasks, dashed if held out; the first few are named."""
    tasks = list(dict.fromkeys(task for line in evaluations for task in line["by_task"]))
    beside = {task for line in evaluations for task in line.get("held_out", {}).get("tasks", ())}
    for k, task in enumerate(tasks if len(tasks) > 1 else []):
        seen = [line for line in evaluations if task in line["by_task"]]
        points = [(line["step"], line["by_task"][task]["rate"]) for line in seen]
        named = f"{task}, held out" if task in beside else task
        axes.plot(
            *zip(*points, strict=True),
            linestyle="--" if task in beside else "-",
            color=f"C{2 + k % 8}",
            linewidth=0.8,
            label=named if k < _NAMED else None,
        )


def _learner(axes: Axes, rows: Rows) -> None:
    for name, says in (
        ("ess", "effective sample size, share"),
        ("clip_fraction", "clipped, share"),
        ("truncated_fraction", "importance weights truncated, share"),
    ):
        shown = [(row["step"] + 1, row[name]) for row in rows if name in row]
        if shown:
            axes.plot(*zip(*shown, strict=True), label=says)
    _finish(axes, title="Learner", xlabel="learner's steps", ylim=(-0.02, 1.05))


def _lags(axes: Axes, rows: Rows) -> None:
    lags = {int(lag): count for lag, count in total(rows, LAG).items()}
    if lags:
        every = range(max(lags) + 1)
        share = [lags.get(lag, 0) / sum(lags.values()) for lag in every]
        axes.bar([str(lag) for lag in every], share)
    axes.set(title="Lag of the chunks learnt from", xlabel="policy versions", ylabel="share")
    axes.grid(alpha=0.3)


def _idle(axes: Axes, rows: Rows) -> None:
    seconds = total(rows, IDLE)
    if seconds:
        names = sorted(seconds, key=lambda name: seconds[name])
        axes.barh(names, [seconds[name] for name in names])
    axes.set(title="What the learner waited for", xlabel="seconds")
    axes.grid(alpha=0.3)


def _members(axes: Axes, generations: Sequence[Generation]) -> None:
    """Draws the success of each member; one that failed is marked at the bottom."""
    for k in range(len(generations[0].success) if generations else 0):
        points = [(g.step, g.success[k]) for g in generations]
        rates = [float("nan") if rate is None else rate for _, rate in points]
        size = max(4, 9 - 2 * k)  # so that equal values show
        steps = [step for step, _ in points]
        axes.plot(steps, rates, "o-", ms=size, color=_colour(k), label=f"member {k}")
        failed = [step for step, rate in points if rate is None]
        axes.plot(failed, [0] * len(failed), "x", color=_colour(k))
    for generation in generations:
        for k, parent in _copies(generation):
            _arrow(
                axes,
                (generation.step, generation.success[parent] or 0),
                (generation.step, generation.success[k] or 0),
                k,
            )
    title = "Success on held-out starts"
    _finish(axes, title=title, xlabel="learner's steps", ylim=(-0.02, 1.02))


def _lineage(axes: Axes, generations: Sequence[Generation]) -> None:
    count = len(generations[0].success) if generations else 0
    roots = list(range(count))
    for one, following in pairwise(generations):
        roots = [roots[parent] for parent in one.parents]
        for k, root in enumerate(roots):
            axes.plot([one.step, following.step], [k, k], color=_colour(root), lw=4, alpha=0.7)
        for k, parent in _copies(one):
            _arrow(axes, (one.step, parent), (one.step, k), roots[k])
    if generations:
        axes.plot(generations[-1].step, generations[-1].best, "*", color="black", ms=12)
    axes.set(title="Who continues from whom (★ best)", xlabel="learner's steps", ylabel="member")
    axes.set_yticks(range(count))
    axes.invert_yaxis()
    axes.grid(alpha=0.3)


def _tuned(axes: Axes, generations: Sequence[Generation], name: str) -> None:
    for k in range(len(generations[0].success)):
        steps = [generation.step for generation in generations]
        values = [generation.hyperparameters[k][name] for generation in generations]
        axes.step(steps, values, where="post", color=_colour(k))
        axes.plot(steps[:-1] or steps, values[:-1] or values, "o", color=_colour(k), ms=4)
    for before, after in pairwise(generations):
        for k, parent in _copies(after):
            come_from = before.hyperparameters[parent][name]
            _arrow(axes, (after.step, come_from), (after.step, after.hyperparameters[k][name]), k)
    axes.set(title=name, xlabel="learner's steps", yscale="log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.grid(alpha=0.3, which="both")


def _copies(generation: Generation) -> list[tuple[int, int]]:
    """Members that continue from another, each with that other member."""
    return [(k, parent) for k, parent in enumerate(generation.parents) if k != parent]


def _arrow(axes: Axes, begin: tuple[float, float], end: tuple[float, float], member: int) -> None:
    how = {"arrowstyle": "-|>", "color": _colour(member), "lw": 1.5, "shrinkA": 4, "shrinkB": 4}
    axes.annotate("", xy=end, xytext=begin, arrowprops=how)


def _colour(member: int) -> str:
    return f"C{member % 10}"


def _finish(axes: Axes, **labels: Any) -> None:
    axes.set(**labels)
    axes.grid(alpha=0.3)
    if axes.has_data():
        axes.legend(frameon=False)
