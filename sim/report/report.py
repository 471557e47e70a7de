"""One HTML file with the results of a run: success compared with its controls, videos, training and
time.

It needs no network, no script and no second file, and follows the reader's light or dark theme. All
text from users (prompts, names, configuration) is escaped.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from models.files.page import listed, page, section, table
from models.files.whole_text import write_whole
from sim.clips import Clip
from sim.report import charts, tables
from sim.report.page import STYLE, Encode, chart, repetition, video
from sim.results import Episode, Evaluation, Perturbed
from sim.statistics import Paired


@dataclass(frozen=True)
class Report:
    """Plain data about one run."""

    title: str
    task: str
    evaluations: Mapping[str, Evaluation]
    """Evaluations by name ("trained", "untrained", "expert", "wrong prompt", "blank image"); the
    first is the report's subject."""
    metrics: Sequence[Mapping[str, float]]
    """Rows of metrics.jsonl; those with `step` and `loss` make the loss curve; those with `step`,
    `data_wait` and `step_seconds` (both in seconds, with the wait as part of the step) make the
    other."""
    fill: Mapping[str, float]
    """Share of the packed batches' places that held data, 0..1, by budget."""
    seconds: Mapping[str, float]
    """Wall time by stage, in the order they ran."""
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    """Versions of libraries, and the hardware."""
    encode: Encode
    comparisons: Mapping[str, Paired] = field(default_factory=dict)
    """The first evaluation compared with others on the same starts, by their names."""
    perturbed: Mapping[str, Perturbed] = field(default_factory=dict)
    """The first evaluation's policy under changes, by their names."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Changes under which the policy could not act, and the reasons."""


def write_report(path: str | Path, report: Report) -> None:
    """Writes the page as a whole or not at all, creating its folder if needed.

    Raises:
      ValueError: the report holds no evaluation.
    """
    write_whole(Path(path), render(report))


def render(report: Report) -> str:
    """The page as HTML text."""
    if not report.evaluations:
        raise ValueError("Report.evaluations is empty, expected at least the trained policy's.")
    name, main = next(iter(report.evaluations.items()))
    changed = {change: p.evaluation for change, p in report.perturbed.items()}
    robustness = tables.robustness(name, main, report.perturbed, report.left_out)
    body = [
        _header(report, main),
        section("Success", tables.success(report.evaluations) + tables.lost(report.evaluations)),
        section("Robustness", robustness + tables.lost(changed)),
        section("Paired comparison", tables.compared(name, report.comparisons)),
        section("By task", tables.by_task(report.evaluations)),
        section(
            "By goal and wording", tables.by_goal(report.evaluations) + tables.by_prompt(name, main)
        ),
        section("Episodes", _videos(report, {**report.evaluations, **changed})),
        section("Training", _training(report.metrics) + _fill(report.fill)),
        section("Time", _time(report.seconds)),
        section("To repeat this", _details(name, main, report)),
    ]
    return page(report.title, body, STYLE)


def _header(report: Report, main: Evaluation) -> str:
    facts = []
    for name, other in list(report.evaluations.items())[1:]:
        text = f"{escape(name)} <b>{tables.percent(other.success.value)}</b>"
        if tables.redirected(other):
            named = tables.percent(other.named.value) if other.named else "not measured"
            text += f", named goal instead <b>{named}</b>"
        facts.append(text)
    return (
        f'<header>\n<p class="eyebrow">Chiliad · task {escape(report.task)}</p>\n'
        f"<h1>{escape(report.title)}</h1>\n"
        f'<p class="headline"><strong>{tables.percent(main.success.value)}</strong> success'
        f"<span>{main.success.successes} of {main.success.trials} episodes, 95 % confidence "
        f"interval {main.success.interval_text}</span></p>\n"
        f"{listed('facts', facts)}</header>\n"
    )


def _videos(report: Report, evaluations: Mapping[str, Evaluation]) -> str:
    groups = []
    for name, evaluation in evaluations.items():
        if evaluation.clips:
            cards = "".join(
                _video(clip, evaluation.episodes[clip.episode], evaluation.fps, report)
                for clip in evaluation.clips
            )
            groups.append(f'<h3>{escape(name)}</h3>\n<div class="clips">{cards}</div>\n')
    if groups:
        groups.append(
            '<p class="note">Chosen to show every goal, and failures wherever there are any, so '
            "their proportion here is not the success rate.</p>"
        )
    return "".join(groups)


def _video(clip: Clip, episode: Episode, fps: int, report: Report) -> str:
    good, outcome = _outcome(episode)
    kind, mark = {True: ("good", "✓"), False: ("bad", "✗"), None: ("", "–")}[good]
    shown = video(
        clip.frames, fps, report.encode, f"Video of the robot told “{episode.prompt}”: {outcome}"
    )
    return (
        f'<figure class="clip">{shown}<figcaption>“{escape(episode.prompt)}”'
        f'<span class="{kind}">{mark} {escape(outcome)}</span>'
        f"<small>{episode.length} steps · seed {episode.seed}</small></figcaption></figure>\n"
    )


def _outcome(e: Episode) -> tuple[bool | None, str]:
    """True if the robot did as told, None if that is not measured, and the outcome in words."""
    if e.goal == e.named_goal:
        return e.success, "success" if e.success else "failure"
    if e.named_achieved:
        return True, f"{e.named_goal}, as told"
    if e.named_achieved is None and not e.success:
        return None, f"not {e.goal}; {e.named_goal} is not measured"
    return False, f"{e.goal} instead" if e.success else f"neither {e.named_goal} nor {e.goal}"


def _training(metrics: Sequence[Mapping[str, float]]) -> str:
    figures = []
    losses = [(row["step"], row["loss"]) for row in metrics if {"step", "loss"} <= row.keys()]
    usable = [(step, loss) for step, loss in losses if math.isfinite(loss) and loss > 0]
    if usable:
        step, loss = np.array(usable, np.float64).T
        tail = loss[-max(1, len(loss) // 20) :].mean()
        lost = len(losses) - len(usable)
        caption = f"<b>Loss</b> by step, logarithmic; {loss[0]:.3g} at first, {tail:.3g} at last"
        caption += f"; left out: {lost} not finite or not positive." if lost else "."
        loss_of = charts.Course("this run", "main", step, loss, noisy=True)
        figures.append(chart(charts.courses([loss_of], name="Loss", log=True), caption))
    waits = [
        (row["step"], row["data_wait"], row["step_seconds"])
        for row in metrics
        if {"step", "data_wait", "step_seconds"} <= row.keys() and row["step_seconds"] > 0
    ]
    if waits:
        step, wait, whole = np.array(waits, np.float64).T
        share = 100 * wait / whole
        caption = (
            f"<b>Waiting for data</b>, percent of each step's time; "
            f"{100 * wait.sum() / whole.sum():.1f} % of all training time, "
            f"median step {1000 * np.median(whole):.0f} ms."
        )
        wait_of = charts.Course("this run", "main", step, share, noisy=True)
        drawn = charts.courses([wait_of], name="Data wait", unit=" %", bounds=(0, 100))
        figures.append(chart(drawn, caption))
    return f'<div class="pair">{"".join(figures)}</div>\n' if figures else ""


def _fill(fill: Mapping[str, float]) -> str:
    rows = [
        [
            escape(budget),
            tables.percent(share),
            f'<span class="meter"><span style="width:{100 * min(max(share, 0), 1):.1f}%">'
            "</span></span>",
        ]
        for budget, share in fill.items()
    ]
    return table(["Budget", "Filled", ""], rows, "Packing: places that held data")


def _time(seconds: Mapping[str, float]) -> str:
    if not seconds:
        return ""
    total = charts.duration(sum(seconds.values()))
    return chart(charts.timeline(seconds), f"Wall time by stage, {total} in all.")


def _details(name: str, main: Evaluation, report: Report) -> str:
    return (
        repetition(report.versions, report.config)
        + f"<details><summary>All {len(main.episodes)} episodes, {escape(name)}</summary>"
        + f"{tables.episodes(main)}</details>"
    )
