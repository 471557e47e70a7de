"""The few charts that a report needs, as inline SVG that takes its colours from the page's CSS.

They are drawn here and not by a plotting library so that they follow the reader's light or dark
theme, take only a few kB and contain no foreign metadata. Every function returns one `<svg>`
element; texts are escaped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from math import ceil, floor, log10

import numpy as np
from jaxtyping import Float, Int

from sim.statistics import Rate

STYLE = """
svg { display: block; width: 100%; height: auto; }
section > .chart > svg { max-width: 52rem; min-width: 34rem; }
svg text { font-size: 14px; fill: var(--ink); }
svg .tick { font-size: 12.5px; fill: var(--soft); }
svg .value, svg .label.main { font-weight: 600; }
svg .grid { stroke: var(--line); }
svg .plain { --of: var(--plain); } svg .control { --of: var(--other); }
svg rect, svg circle { fill: var(--of, var(--main)); }
svg rect.track { fill: var(--line); }
svg polygon { fill: var(--of, var(--main)); opacity: .13; }
svg .whisker { stroke: var(--ink); stroke-width: 1.5; fill: none; }
svg polyline { fill: none; stroke: var(--of, var(--main)); stroke-linejoin: round; }
svg .raw { stroke-width: 1; opacity: .3; }
svg .line { stroke-width: 2; }
svg .recorded { stroke: var(--plain); stroke-width: 2.5; }
svg .predicted { stroke-width: 1.2; }
"""

_POINTS = 600
"""Largest number of points drawn per line; no chart is wider than that many pixels."""


@dataclass(frozen=True)
class Bar:
    """One row of `bars`, from `start` over `value` on, optionally with an interval; `said` and
    `between` are the two in words. `kind` is a CSS class: main, plain or control."""

    label: str
    kind: str
    value: float
    said: str
    interval: tuple[float, float] | None = None
    between: str = ""
    start: float = 0.0


def rate_bar(label: str, rate: Rate, kind: str) -> Bar:
    """A rate in percent."""
    low, high = rate.interval
    said = f"{100 * rate.value:.1f} %"
    return Bar(label, kind, 100 * rate.value, said, (100 * low, 100 * high), rate.interval_text)


def bars(drawn: Sequence[Bar], *, name: str, most: float, unit: str = "") -> str:
    """Horizontal bars on an axis of 0..most, with their intervals as whiskers."""
    left, right, row, most = 206, 540, 34, most or 1.0
    height, scale = row * len(drawn) + 26, (right - left) / most
    parts = []
    for tick in _ticks(0, most, 4):
        x = left + scale * tick
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height - 24}"/>')
        parts.append(_text(x, height - 6, f"{tick:g}{unit}", "tick", "middle"))
    for i, bar in enumerate(drawn):
        y = i * row + row / 2
        parts.append(_text(left - 12, y + 5, bar.label, f"label {bar.kind}", "end"))
        parts.append(_bar(bar, left + scale * bar.start, scale, y, 16))
        parts.append(_text(right + 14, y + 5, bar.said, "value", "start"))
        parts.append(_text(right + 96, y + 5, bar.between, "tick", "start"))
    said = "; ".join(f"{bar.label}: {bar.said} {bar.between}".strip() for bar in drawn)
    return _svg(760, height, f"{name}. {said}", parts)


def timeline(seconds: Mapping[str, float]) -> str:
    """Stages one after the other, each a bar from its start to its end."""
    starts = accumulate(seconds.values(), initial=0.0)
    drawn = [
        Bar(stage, "main", spent, duration(spent), start=start)
        for (stage, spent), start in zip(seconds.items(), starts, strict=False)
    ]
    return bars(drawn, name="Time by stage", most=sum(seconds.values()), unit=" s")


def strip(rate: Rate) -> str:
    """One bar with its interval, small enough for a table cell."""
    track = '<rect class="track" x="0" y="3" width="120" height="8" rx="2"/>'
    return _svg(120, 14, str(rate), [track, _bar(rate_bar("", rate, "main"), 0, 1.2, 7, 8)])


def traces(
    recorded: Float[np.ndarray, " t"],
    chunks: Sequence[tuple[Sequence[int], Float[np.ndarray, " _h"]]],
    name: str,
) -> str:
    """A recorded action over an episode's frames, with the chunks predicted along the way drawn
    over it. A chunk is the frames of its steps and their values."""
    width, top, bottom = 480, 6, 58
    values = np.concatenate([recorded, *(predicted for _, predicted in chunks)])
    low, high = float(values.min()), float(values.max())
    span = high - low or 1.0
    last = max(len(recorded) - 1, 1)

    def path(frames: Sequence[int], line: Float[np.ndarray, " _h"]) -> str:
        return " ".join(
            f"{width * frame / last:.1f},{bottom - (bottom - top) * (value - low) / span:.1f}"
            for frame, value in zip(frames, line.tolist(), strict=True)
        )

    keep = np.unique(np.linspace(0, len(recorded) - 1, min(len(recorded), _POINTS)).astype(int))
    parts = [f'<polyline class="recorded" points="{path(keep.tolist(), recorded[keep])}"/>']
    parts += [
        f'<polyline class="predicted" points="{path(frames, line)}"/>' for frames, line in chunks
    ]
    summary = f"{name}, {low:.3g} to {high:.3g}: recorded, and {len(chunks)} predicted chunks"
    return _svg(width, 64, summary, parts)


@dataclass(frozen=True)
class Course:
    """One line of `courses`: values over steps, optionally with an interval for each. `kind` is the
    CSS class of everything drawn for it; `noisy` values are faint, under a centred moving mean over
    5 % of them."""

    label: str
    kind: str
    x: Float[np.ndarray, " n"]
    y: Float[np.ndarray, " n"]
    interval: tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]] | None = None
    noisy: bool = False


def courses(
    drawn: Sequence[Course],
    *,
    name: str,
    unit: str = "",
    log: bool = False,
    bounds: tuple[float, float] | None = None,
    labelled: bool = False,
) -> str:
    """Values over steps, on one pair of axes; none may be empty.

    Args:
      log: logarithmic y axis; values must be positive.
      bounds: bounds of the y axis; those of the values if None.
      labelled: write each line's label at its end, on a wider chart.
    """
    width, left, right, top, bottom = 720 if labelled else 480, 60, 462, 10, 206
    right += 90 * labelled
    values = np.concatenate([course.y for course in drawn])
    low, high = bounds or _apart_from_one_value(float(values.min()), float(values.max()), log)
    scale = np.log10 if log else np.asarray
    y0, y1 = float(scale(low)), float(scale(high))
    x0 = min(float(course.x[0]) for course in drawn)
    x1 = max(x0 + 1, *(float(course.x[-1]) for course in drawn))

    def across(x):
        return left + (right - left) * (x - x0) / (x1 - x0)

    def down(y):
        return bottom - (bottom - top) * (scale(np.clip(y, low, high)) - y0) / (y1 - y0)

    def path(x, y) -> str:
        return " ".join(f"{u:.1f},{v:.1f}" for u, v in zip(across(x), down(y), strict=True))

    parts = []
    for tick in _log_ticks(low, high) if log else _ticks(low, high, 4):
        at = float(down(tick))
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(_text(left - 8, at + 4, f"{tick:g}{unit}", "tick", "end"))
    for tick in _ticks(x0, x1, 4):
        if tick == round(tick):
            parts.append(_text(float(across(tick)), bottom + 20, f"{tick:,g}", "tick", "middle"))
    said, ends = [], []
    for course in drawn:
        x, y = course.x, course.y
        keep = np.unique(np.linspace(0, len(x) - 1, min(len(x), _POINTS)).astype(int))
        shapes = []
        if course.interval is not None:
            around = np.concatenate([course.interval[0], course.interval[1][::-1]])
            shapes.append(f'<polygon points="{path(np.concatenate([x, x[::-1]]), around)}"/>')
        if course.noisy:
            shapes.append(f'<polyline class="raw" points="{path(x[keep], y[keep])}"/>')
        shown = _moving_mean(y, max(1, len(y) // 20), keep) if course.noisy else y[keep]
        shapes.append(f'<polyline class="line" points="{path(x[keep], shown)}"/>')
        ends.append(float(down(shown[-1])))
        shapes.append(f'<circle cx="{across(x[-1]):.1f}" cy="{ends[-1]:.1f}" r="3"/>')
        smoothed = ", smoothed" if course.noisy else ""
        said.append(f"{course.label}{smoothed}: {shown[-1]:.4g}{unit} at step {x[-1]:g}")
        title = f"<title>{escape(said[-1])}</title>"
        parts.append(f'<g class="{course.kind}">{title}{"".join(shapes)}</g>')
    if labelled:
        for course, at in zip(drawn, _apart(ends, 16), strict=True):
            parts.append(_text(right + 12, at + 4, course.label, f"label {course.kind}", "start"))
    return _svg(width, 232, f"{name}. {'; '.join(said)}", parts)


def duration(seconds: float) -> str:
    """Duration as text, such as "4.2 s" or "3 min 05 s"."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


def _bar(bar: Bar, left: float, scale: float, y: float, thick: float) -> str:
    """A bar from `left` on, and its whiskers; `scale` is in pixels per unit of the value."""
    drawn = (
        f'<rect class="{bar.kind}" x="{left:.1f}" y="{y - thick / 2:g}" '
        f'width="{max(1.5, scale * bar.value):.1f}" height="{thick}" rx="2"/>'
    )
    if bar.interval is None:
        return drawn
    a, b, cap = left + scale * bar.interval[0], left + scale * bar.interval[1], thick / 3
    return (
        f'{drawn}<path class="whisker" d="M{a:.1f} {y:g}H{b:.1f}'
        f'M{a:.1f} {y - cap:.1f}v{2 * cap:.1f}M{b:.1f} {y - cap:.1f}v{2 * cap:.1f}"/>'
    )


def _apart(heights: Sequence[float], least: float) -> list[float]:
    """Heights moved down as little as possible so that any two are at least `least` apart."""
    placed = [0.0] * len(heights)
    before = -least
    for i in sorted(range(len(heights)), key=lambda i: heights[i]):
        before = placed[i] = max(heights[i], before + least)
    return placed


def _svg(width: int, height: int, summary: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(summary)}">'
        f"<title>{escape(summary)}</title>{''.join(parts)}</svg>"
    )


def _text(x: float, y: float, text: str, kind: str, anchor: str) -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def _apart_from_one_value(low: float, high: float, log: bool) -> tuple[float, float]:
    """Bounds of an axis; if all values are the same, bounds around that value."""
    if low < high:
        return low, high
    apart = abs(low) / 2 or 1.0
    return (low / 2, high * 2) if log else (low - apart, high + apart)


def _moving_mean(
    y: Float[np.ndarray, " n"], window: int, at: Int[np.ndarray, " k"]
) -> Float[np.ndarray, " k"]:
    """Means around the positions `at`. Each sums its own window, since a running sum would lose all
    precision after a huge value."""
    start, stop = np.maximum(at - window // 2, 0), np.minimum(at + window // 2 + 1, len(y))
    sums = np.add.reduceat(np.append(y, 0.0), np.stack([start, stop], 1).ravel())[::2]
    return sums / (stop - start)


def _ticks(low: float, high: float, count: int) -> list[float]:
    """Round values within [low, high], about `count` of them after the first."""
    raw = (high - low) / count
    power = 10.0 ** floor(log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first, last = ceil(low / step - 1e-9), floor(high / step + 1e-9)
    return [float(f"{i * step:.10g}") for i in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    if high / low < 4:
        return _ticks(low, high, 4)
    digits = (1, 2, 5) if high / low < 200 else (1,)
    first, last = floor(log10(low)), ceil(log10(high))
    decades = range(first, last + 1, 1 + (last - first) // 10)
    return [v for p in decades for d in digits if low <= (v := float(f"{d}e{p}")) <= high]
