"""One page on several runs: their table, learning curves, differences between their configs, and
films of the same starts side by side.

Like a report, the page is self-contained: no network, no script, no second file. Checkboxes beside
the runs' names hide their curves, with CSS alone.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from html import escape

import numpy as np

from models.files.page import listed, page, section, table
from models.files.terminal import harmless
from sim.report import charts
from sim.report.page import STYLE, chart
from tools.runs.films import Film, read_films
from tools.runs.run_record import Points, RunRecord, differences, finite
from tools.runs.table import HEADS, cells, written

METRICS = ("loss", "val_*", "success", "grad_norm", "learning_rate", "samples_per_second")
"""Metrics that are drawn, in this order, unless others are asked for."""

_COLOURS = 8
_NOISY = 200
"""Curves with more values than this are drawn faint, under their mean."""


def render(runs: Sequence[RunRecord], metrics: Sequence[str] = METRICS, refresh: int = 0) -> str:
    """The page as text.

    Args:
      metrics: names of the metrics to draw, or patterns such as val_*.
      refresh: seconds after which a browser reloads the page; 0: never.
    """
    names = ", ".join(run.name for run in runs)
    title = f"{len(runs)} runs: {names}" if len(runs) > 1 else f"Run {names}"
    found = [read_films(run.folder) for run in runs]
    said = [line for run in runs for line in run.damage] + [line for _, d in found for line in d]
    said += [f"Data of {run.name}: {line}" for run in runs for line in run.warnings]
    damage = listed("findings note", [_text(line) for line in said]) if said else ""
    shorter = title if len(title) < 80 else f"{len(runs)} runs"
    live = (
        f'<p class="note">In progress: this page reloads every {refresh} seconds.</p>'
        if refresh
        else ""
    )
    body = [
        f'<header>\n<p class="eyebrow">Chiliad</p>\n<h1>{_text(shorter)}</h1>\n{live}</header>\n',
        section("Runs", _legend(runs) + damage),
        section("Learning curves", _curves(runs, metrics)),
        section("Configs", _configs(runs)),
        section("Films", _films(runs, [films for films, _ in found])),
    ]
    head = f'<meta http-equiv="refresh" content="{refresh}">\n' if refresh else ""
    return page(harmless(title), body, STYLE + _STYLE + _hiding(len(runs)), head)


def _legend(runs: Sequence[RunRecord]) -> str:
    rows = []
    for k, run in enumerate(runs):
        name, *others = cells(run)
        tick = (
            f'<label class="{_kind(k)}"><input type="checkbox" id="run{k}" checked><i></i>'
            f"{_text(name)}</label>"
        )
        status = others.pop()
        said = f'<span class="status {status.split()[0]}">{_text(status)}</span>'
        rows.append([tick, *map(_text, others), said])
    return table([escape(head) for head in HEADS], rows, kind="runs")


def _curves(runs: Sequence[RunRecord], patterns: Sequence[str]) -> str:
    names = list(dict.fromkeys(name for run in runs for name in run.names))
    chosen = dict.fromkeys(n for pattern in patterns for n in names if fnmatchcase(n, pattern))
    figures = [_curve(name, [run.points(name) for run in runs], runs) for name in chosen]
    if any(fnmatchcase("success", pattern) for pattern in patterns):
        figures.insert(0, _success(runs))
    unknown = [
        pattern
        for pattern in patterns
        if pattern not in METRICS and not any(fnmatchcase(n, pattern) for n in (*names, "success"))
    ]
    drawn = f'<div class="pair">{"".join(figures)}</div>\n' if any(figures) else ""
    if unknown:
        said = f"No run has {', '.join(unknown)} yet; available: {', '.join(names) or 'none'}."
        drawn += f'<p class="note">{_text(said)}</p>\n'
    return drawn or '<p class="note">There is nothing to draw yet.</p>\n'


def _curve(name: str, points: Sequence[Points], runs: Sequence[RunRecord]) -> str:
    sound = [finite(one) for one in points]
    values = [value for one in sound for _, value in one]
    if not values:
        return _figure("", name, sum(map(len, points)))
    log = min(values) > 0 and max(values) / min(values) > 20
    drawn = [
        charts.Course(harmless(run.name), _kind(k), *_arrays(one), noisy=len(one) > _NOISY)
        for k, (run, one) in enumerate(zip(runs, sound, strict=True))
        if one
    ]
    plot = charts.courses(drawn, name=harmless(name), log=log)
    lost = sum(map(len, points)) - len(values)
    return _figure(plot, f"{name}, logarithmic" if log else name, lost)


def _success(runs: Sequence[RunRecord]) -> str:
    drawn = []
    for k, run in enumerate(runs):
        lines = [(line["step"], line["success"]) for line in run.evaluations]
        if lines:
            x, y = _arrays([(step, 100 * rate["rate"]) for step, rate in lines])
            low, high = (np.array([100.0 * r[end] for _, r in lines]) for end in ("low", "high"))
            drawn.append(charts.Course(harmless(run.name), _kind(k), x, y, (low, high)))
    if not drawn:
        return ""
    plot = charts.courses(drawn, name="Success", unit=" %", bounds=(0, 100))
    return _figure(plot, "success on held-out starts, 95 % interval", 0)


def _figure(plot: str, name: str, lost: int) -> str:
    count = "1 value that is not a number" if lost == 1 else f"{lost} values that are not numbers"
    left_out = f"; left out: {count}" if lost else ""
    return chart(plot, f"<b>{_text(name)}</b>{left_out}")


def _arrays(points: Points) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.array(points, np.float64).T
    return x, y


def _configs(runs: Sequence[RunRecord]) -> str:
    if len(runs) < 2:
        return ""
    found = differences(runs)
    if not found:
        return '<p class="note">They are the same.</p>\n'
    rows = [
        [_text(name).replace(".", ".<wbr>"), *(_text(written(v)) for v in values)]
        for name, values in found.items()
    ]
    return table(["", *(_text(run.name) for run in runs)], rows)


def _films(runs: Sequence[RunRecord], films: Sequence[Sequence[Film]]) -> str:
    shown = [k for k, own in enumerate(films) if own]
    if not shown:
        return ""
    by_start = [{film.start: film for film in films[k]} for k in shown]
    starts = list(dict.fromkeys(start for own in by_start for start in own))
    starts.sort(key=lambda start: -sum(start in own for own in by_start))
    rows = []
    for start in starts:
        task, prompt, seed = map(_text, start)
        about = f"“{prompt}”<small>{task} · seed {seed}</small>"
        rows.append([about, *(_film(own.get(start)) for own in by_start)])
    return table(["", *(_text(runs[k].name) for k in shown)], rows, kind="films")


def _film(film: Film | None) -> str:
    if film is None:
        return '<span class="note">none</span>'
    poster = f' poster="{film.poster}"' if film.poster else ""
    kind, mark = ("good", "✓") if film.good else ("bad", "✗")
    return (
        f'<video autoplay loop muted playsinline{poster} src="{film.source}"></video>'
        f'<span class="{kind}">{mark} {_text(film.outcome.lstrip("✓✗ "))}</span>'
    )


def _text(text: str) -> str:
    return escape(harmless(text))


def _kind(k: int) -> str:
    """CSS classes of the run with this number: its own, its colour, its dashes."""
    return f"run{k} colour{k % _COLOURS} dashes{k // _COLOURS % 3}"


def _hiding(count: int) -> str:
    return "".join(
        f"body:has(#run{k}:not(:checked)) svg .run{k} {{ display: none; }}\n" for k in range(count)
    )


_LIGHT = ("#2f6bd8", "#c2571a", "#1d7a46", "#8a3fb0", "#b8860b", "#0e7c86", "#c02a5b", "#5c6570")
_DARK = ("#6b9df5", "#f0935a", "#5cc48a", "#c58ae6", "#e0b84a", "#4fc3cd", "#f2789f", "#9aa4b0")


def _colours(values: Sequence[str]) -> str:
    return "".join(f".colour{k} {{ --of: {value}; }}\n" for k, value in enumerate(values))


_STYLE = f"""
body {{ max-width: 78rem; }}
{_colours(_LIGHT)}
@media (prefers-color-scheme: dark) {{ {_colours(_DARK)} }}
svg g .raw {{ opacity: .12; }}
.dashes1 .line {{ stroke-dasharray: 6 3; }} .dashes2 .line {{ stroke-dasharray: 2 3; }}
.runs label {{ display: flex; gap: .5rem; align-items: center; cursor: pointer;
  overflow-wrap: anywhere; min-width: 9rem; }}
.runs input {{ accent-color: var(--of); margin: 0; }}
.runs i {{ flex: none; width: 1.4rem; border-top: 3px solid var(--of); }}
.runs .dashes1 i {{ border-top-style: dashed; }} .runs .dashes2 i {{ border-top-style: dotted; }}
.films {{ width: auto; }}
.status {{ font-weight: 600; }}
.finished {{ color: var(--good); }} .running {{ color: var(--main); }}
.interrupted {{ color: var(--bad); }}
.films th, .films td {{ min-width: 9rem; }}
.films video {{ width: 11rem; max-width: 100%; margin-bottom: .3rem; }}
"""
