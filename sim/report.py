"""One HTML file that says what a run came to: success against its controls, videos, training, time.

It needs no network, no script and no second file, so it can be mailed and still opens in ten years;
it follows the reader's light or dark theme. Everything a user wrote (prompts, names, configuration)
is escaped.
"""

import base64
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from sim import charts
from sim.clips import Clip, encode_jpeg, encode_mp4
from sim.results import Episode, Evaluation
from sim.statistics import Paired
from sim.style import STYLE

_ABOUT = {
    "trained": "the policy of this run",
    "untrained": "the same network before training",
    "expert": "the script that recorded the data; it sees the physics",
    "wrong prompt": "told another goal than the episode's own",
    "blank image": "shown images of zeros",
    "compared": "the policy of another checkpoint",
}
_HOLD_SECONDS = 1
"""How long a video rests on its last picture before it starts over."""


@dataclass(frozen=True)
class Report:
    """Plain data about one run."""

    title: str
    task: str
    evaluations: Mapping[str, Evaluation]
    """By name ("trained", "untrained", "expert", "wrong prompt", "blank image"); the first is the
    one the report is about."""
    metrics: Sequence[Mapping[str, float]]
    """Rows of metrics.jsonl; those with `step` and `loss` make the loss curve, those with `step`,
    `data_wait` and `step_seconds` (both in seconds, the wait being part of the step) the other."""
    fill: Mapping[str, float]
    """Share of the packed batches' places that held data, 0..1, by budget."""
    seconds: Mapping[str, float]
    """Wall time by stage, in the order they ran."""
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    """Of libraries, and the hardware."""
    comparisons: Mapping[str, Paired] = field(default_factory=dict)
    """The first evaluation against others on the same starts, by their names."""


def write_report(path: str | Path, report: Report) -> None:
    """Writes the page at once or not at all, creating its folder if need be.

    Raises:
      ValueError: the report holds no evaluation.
    """
    path, page = Path(path), render(report)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(page, encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def render(report: Report) -> str:
    """The page as text."""
    if not report.evaluations:
        raise ValueError("Report.evaluations is empty, expected at least the trained policy's.")
    name, main = next(iter(report.evaluations.items()))
    body = [
        _header(report, main),
        _section("Success", _success(report.evaluations) + _lost(report.evaluations)),
        _section("Paired comparison", _compared(name, report.comparisons)),
        _section("By task", _by_task(report.evaluations)),
        _section("By goal and wording", _by_goal(report.evaluations) + _by_prompt(name, main)),
        _section("Episodes", _videos(report.evaluations)),
        _section("Training", _training(report.metrics) + _fill(report.fill)),
        _section("Time", _time(report.seconds)),
        _section("To repeat this", _details(name, main, report)),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(report.title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n{''.join(body)}</body>\n</html>\n"
    )


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{content}\n</section>\n" if content else ""


def _header(report: Report, main: Evaluation) -> str:
    facts = []
    for name, other in list(report.evaluations.items())[1:]:
        text = f"{escape(name)} <b>{_percent(other.success.value)}</b>"
        if _redirected(other):
            text += f", named goal instead <b>{_percent(other.named.value)}</b>"
        facts.append(f"<li>{text}</li>")
    return (
        f'<header>\n<p class="eyebrow">Chiliad · task {escape(report.task)}</p>\n'
        f"<h1>{escape(report.title)}</h1>\n"
        f'<p class="headline"><strong>{_percent(main.success.value)}</strong> success'
        f"<span>{main.success.successes} of {main.success.trials} episodes, 95 % confidence "
        f"interval {main.success.interval_text}</span></p>\n"
        f'<ul class="facts">{"".join(facts)}</ul>\n</header>\n'
    )


def _success(evaluations: Mapping[str, Evaluation]) -> str:
    bars, rows = [], []
    for i, (name, e) in enumerate(evaluations.items()):
        kind = "main" if i == 0 else "plain"
        if _redirected(e):
            bars.append(charts.Bar(f"{name}: original goal", e.success, kind))
            bars.append(charts.Bar(f"{name}: named goal", e.named, "control"))
        else:
            bars.append(charts.Bar(name, e.success, kind))
        about = f"<small>{escape(_ABOUT[name])}</small>" if name in _ABOUT else ""
        rows.append(
            [
                f"{escape(name)}{about}",
                f"{e.success.successes}/{e.success.trials}",
                _percent(e.success.value),
                e.success.interval_text,
                f"{_percent(e.named.value)}<small>{e.named.interval_text}</small>"
                if _redirected(e)
                else "",
                f"{median(x.length for x in e.episodes):g}",
                f"{e.roughness:.3g}",
                f"{1000 * e.latency.p50:.1f} / {1000 * e.latency.p99:.1f}" if e.latency else "",
            ]
        )
    heads = ["Policy", "Episodes", "Success", "95 % CI", "Named goal", "Median steps"]
    heads += ["Roughness", "Call p50 / p99, ms"]
    return (
        f'<figure class="chart">{charts.rates(bars)}<figcaption>Share of episodes that reached '
        "their goal; whiskers are 95 % Wilson intervals.</figcaption></figure>\n"
        + _table("All conditions", heads, rows)
        + '<p class="note">Roughness is the mean absolute second difference of the executed '
        "actions. A call computes a chunk for every episode that waits; the first call, which "
        "compiles, is left out.</p>"
    )


def _lost(evaluations: Mapping[str, Evaluation]) -> str:
    """What was begun again or given up because a simulator failed, and clips left out."""
    notes = []
    for name, e in evaluations.items():
        if e.reruns:
            notes.append(f"{name}: {e.reruns} reruns after failures of the simulator.")
        notes += [
            f"{name}: {f.task}, seed {f.seed}, was given up and is not counted: {f.error}"
            for f in e.failures
        ]
        if e.unrepeatable:
            notes.append(
                f"{name}: {e.unrepeatable} videos are left out, as the episode came out otherwise "
                "when its actions were repeated."
            )
    return "".join(f'<p class="note">{escape(note)}</p>\n' for note in notes)


def _compared(name: str, comparisons: Mapping[str, Paired]) -> str:
    rows = [
        [
            f"{escape(name)} − {escape(other)}",
            f"{p.trials}",
            f"{100 * p.difference:+.1f}",
            " to ".join(f"{100 * end:+.1f}" for end in p.interval),
            f"{p.first_only}",
            f"{p.second_only}",
            f"{p.p_value:.3g}",
        ]
        for other, p in comparisons.items()
    ]
    heads = ["Policies", "Same starts", "Difference, points", "95 % CI", "Won", "Lost", "p"]
    note = (
        '<p class="note">Won and lost are the starts on which only one of both succeeded; p is of '
        "McNemar’s exact two-sided test, the interval is Newcombe’s for paired rates.</p>"
    )
    return _table("Success on the same starts", heads, rows) + note if rows else ""


def _by_task(evaluations: Mapping[str, Evaluation]) -> str:
    tables = {name: e.by_task for name, e in evaluations.items()}
    tasks = list(dict.fromkeys(task for table in tables.values() for task in table))
    if len(tasks) < 2:
        return ""
    rows = [
        [escape(task), *(_task_cell(table.get(task)) for table in tables.values())]
        for task in tasks
    ]
    note = '<p class="note">Below each rate: episodes, 95 % interval, mean steps.</p>'
    return _table("Success by task", ["Task", *map(escape, tables)], rows) + note


def _task_cell(e: Evaluation | None) -> str:
    if e is None:
        return ""
    rate = e.success
    return (
        f"{_percent(rate.value)}<small>{rate.successes}/{rate.trials}, {rate.interval_text}, "
        f"{e.mean_length:.0f} steps</small>"
    )


def _by_goal(evaluations: Mapping[str, Evaluation]) -> str:
    tables = {name: e.by_goal for name, e in evaluations.items()}
    goals = list(dict.fromkeys(goal for e in evaluations.values() for goal in e.goals))
    rows = [
        [
            escape(goal),
            *(
                f"{_percent(t[goal].value)}<small>{t[goal].successes}/{t[goal].trials}, "
                f"{t[goal].interval_text}</small>"
                if goal in t
                else ""
                for t in tables.values()
            ),
        ]
        for goal in goals
    ]
    return _table("Success by the episode's own goal", ["Goal", *map(escape, tables)], rows)


def _by_prompt(name: str, main: Evaluation) -> str:
    rows = [
        [
            f"“{escape(prompt)}”",
            f"{rate.successes}/{rate.trials}",
            _percent(rate.value),
            rate.interval_text,
            charts.strip(rate),
        ]
        for prompt, rate in main.by_prompt.items()
    ]
    heads = ["Prompt", "Episodes", "Success", "95 % CI", ""]
    return _table(f"Success by wording, {name}", heads, rows)


def _videos(evaluations: Mapping[str, Evaluation]) -> str:
    groups = []
    for name, evaluation in evaluations.items():
        if evaluation.clips:
            cards = "".join(
                _video(clip, evaluation.episodes[clip.episode], evaluation.fps)
                for clip in evaluation.clips
            )
            groups.append(f'<h3>{escape(name)}</h3>\n<div class="clips">{cards}</div>\n')
    if groups:
        groups.append(
            '<p class="note">Chosen to show every goal, and failures wherever there are any, so '
            "their proportion here is not the success rate.</p>"
        )
    return "".join(groups)


def _video(clip: Clip, episode: Episode, fps: int) -> str:
    rest = np.repeat(clip.frames[-1:], _HOLD_SECONDS * fps, 0)
    movie = _base64(encode_mp4(np.concatenate([clip.frames, rest]), fps))
    poster = _base64(encode_jpeg(clip.frames[0]))
    height, width = clip.frames.shape[1:3]
    good, outcome = _outcome(episode)
    text = escape(f"Video of the robot told “{episode.prompt}”: {outcome}")
    return (
        f'<figure class="clip"><video autoplay loop muted playsinline '
        f'width="{width}" height="{height}" aria-label="{text}" '
        f'poster="data:image/jpeg;base64,{poster}" src="data:video/mp4;base64,{movie}">{text}'
        f"</video><figcaption>“{escape(episode.prompt)}”"
        f'<span class="{"good" if good else "bad"}">{"✓" if good else "✗"} {escape(outcome)}</span>'
        f"<small>{episode.length} steps · seed {episode.seed}</small></figcaption></figure>\n"
    )


def _outcome(e: Episode) -> tuple[bool, str]:
    """Whether the robot did what it was told, and in words."""
    if e.goal == e.named_goal:
        return e.success, "success" if e.success else "failure"
    if e.named_achieved:
        return True, f"{e.named_goal}, as told"
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
        figures.append((charts.curve(step, loss, name="Loss", log=True), caption))
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
        chart = charts.curve(step, share, name="Data wait", unit=" %", bounds=(0, 100))
        figures.append((chart, caption))
    drawn = "".join(
        f'<figure class="chart">{chart}<figcaption>{caption}</figcaption></figure>\n'
        for chart, caption in figures
    )
    return f'<div class="pair">{drawn}</div>\n' if drawn else ""


def _fill(fill: Mapping[str, float]) -> str:
    rows = [
        [
            escape(budget),
            _percent(share),
            f'<span class="meter"><span style="width:{100 * min(max(share, 0), 1):.1f}%">'
            "</span></span>",
        ]
        for budget, share in fill.items()
    ]
    return _table("Packing: places that held data", ["Budget", "Filled", ""], rows)


def _time(seconds: Mapping[str, float]) -> str:
    if not seconds:
        return ""
    return (
        f'<figure class="chart">{charts.timeline(seconds)}<figcaption>Wall time by stage, '
        f"{charts.duration(sum(seconds.values()))} in all.</figcaption></figure>"
    )


def _details(name: str, main: Evaluation, report: Report) -> str:
    versions = [[escape(str(k)), escape(str(v))] for k, v in report.versions.items()]
    config = json.dumps(report.config, indent=2, ensure_ascii=False, default=str)
    episodes = [
        [
            escape(e.task),
            f"{e.seed}",
            escape(e.goal),
            f"“{escape(e.prompt)}”",
            "✓ success" if e.success else "✗ failure",
            f"{e.length}",
            f"{e.reward:.3g}",
        ]
        for e in main.episodes
    ]
    heads = ["Task", "Seed", "Goal", "Prompt", "Outcome", "Steps", "Return"]
    return (
        _table("Versions and hardware", ["What", "Which"], versions)
        + f"<details><summary>Configuration</summary><pre>{escape(config)}</pre></details>\n"
        + f"<details><summary>All {len(episodes)} episodes, {escape(name)}</summary>"
        + _table("Every episode once", heads, episodes)
        + "</details>"
    )


def _table(caption: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """`heads` and cells are HTML, the caption is text; the first cell of a row is its head."""
    if not rows:
        return ""
    top = "".join(f'<th scope="col">{h}</th>' if h else "<td></td>" for h in heads)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>\n'
        for row in rows
    )
    return (
        f'<div class="scroll"><table><caption>{escape(caption)}</caption>'
        f"<thead><tr>{top}</tr></thead>\n<tbody>{body}</tbody></table></div>\n"
    )


def _redirected(evaluation: Evaluation) -> bool:
    return any(e.goal != e.named_goal for e in evaluation.episodes)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}\u00a0%"


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
