"""The few charts that a report needs, as inline SVG that takes its colours from the page's CSS.

They are drawn here and not by a plotting library so that they follow the reader's light or dark
theme, take only a few kB and contain no foreign metadata. Every function returns one `<svg>`
element; texts are escaped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

import numpy as np
from jaxtyping import Float, Int

from sim.statistics import Rate

_POINTS = 600
"""Largest number of points drawn per line; no chart is wider than that many pixels."""


@dataclass(frozen=True)
class Bar:
    """One row of `rates`; `kind` is a CSS class: main, plain or control."""

    label: str
    rate: Rate
    kind: str


def rates(bars: Sequence[Bar]) -> str:
    """Horizontal bars 0..100 % with their 95 % intervals as whiskers."""
    left, right, row = 206, 536, 36
    height = row * len(bars) + 26
    parts = []
    for percent in range(0, 101, 25):
        x = left + (right - left) * percent / 100
        parts.append(f'<line class="grid" x1="{x:g}" x2="{x:g}" y1="0" y2="{height - 24}"/>')
        parts.append(_text(x, height - 6, f"{percent} %", "tick", "middle"))
    for i, bar in enumerate(bars):
        y = i * row + row / 2
        parts.append(_text(left - 12, y + 5, bar.label, f"label {bar.kind}", "end"))
        parts.append(_rate(bar.rate, bar.kind, left, right, y, 18))
        parts.append(_text(right + 14, y + 5, f"{100 * bar.rate.value:.1f} %", "value", "start"))
        parts.append(_text(right + 84, y + 5, bar.rate.interval_text, "tick", "start"))
    summary = "; ".join(f"{bar.label}: {bar.rate}" for bar in bars)
    return _svg(720, height, f"Success rates. {summary}", parts)


@dataclass(frozen=True)
class Amount:
    """One row of `amounts`, optionally with an interval; `kind` as in `Bar`."""

    label: str
    value: float
    kind: str
    interval: tuple[float, float] | None = None


def amounts(bars: Sequence[Amount], summary: str) -> str:
    """Horizontal bars from 0, with their intervals as whiskers."""
    left, right, row = 190, 540, 30
    height = row * len(bars) + 26
    ends = [bar.value if bar.interval is None else bar.interval[1] for bar in bars]
    most = max(ends) or 1.0
    parts = []
    for tick in _ticks(0, most, 4):
        x = left + (right - left) * tick / most
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height - 24}"/>')
        parts.append(_text(x, height - 6, f"{tick:g}", "tick", "middle"))
    for i, bar in enumerate(bars):
        y = i * row + row / 2
        interval = None if bar.interval is None else tuple(end / most for end in bar.interval)
        parts.append(_text(left - 12, y + 5, bar.label, f"label {bar.kind}", "end"))
        parts.append(_bar(bar.value / most, interval, bar.kind, left, right, y, 16))
        parts.append(_text(right + 14, y + 5, f"{bar.value:.3g}", "value", "start"))
        if bar.interval is not None:
            low, high = bar.interval
            parts.append(_text(right + 96, y + 5, f"{low:.3g}–{high:.3g}", "tick", "start"))
    said = "; ".join(f"{bar.label}: {bar.value:.3g}" for bar in bars)
    return _svg(760, height, f"{summary} {said}", parts)


@dataclass(frozen=True)
class Series:
    """One line of `lines`, with a value for each step; `kind` as in `Bar`."""

    label: str
    values: Sequence[float]
    kind: str


def lines(drawn: Sequence[Series], summary: str) -> str:
    """Values by step, on an axis from 0 up; each line has its label at its end."""
    left, right, top, bottom = 52, 560, 14, 206
    count = max(len(line.values) for line in drawn)
    most = max(max(line.values) for line in drawn) or 1.0

    def across(step: float) -> float:
        return left + (right - left) * step / max(count - 1, 1)

    def down(value: float) -> float:
        return bottom - (bottom - top) * value / most

    parts = []
    for tick in _ticks(0, most, 4):
        at = down(tick)
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(_text(left - 8, at + 4, f"{tick:g}", "tick", "end"))
    for tick in _ticks(0, max(count - 1, 1), 5):
        if tick == round(tick):
            parts.append(_text(across(tick), bottom + 20, f"{tick:g}", "tick", "middle"))
    labels = _apart([down(line.values[-1]) for line in drawn], 16)
    for line, y in zip(drawn, labels, strict=True):
        points = [(across(step), down(value)) for step, value in enumerate(line.values)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        end = points[-1]
        parts.append(f'<polyline class="line {line.kind}" points="{path}"/>')
        parts.append(f'<circle class="{line.kind}" cx="{end[0]:.1f}" cy="{end[1]:.1f}" r="3"/>')
        parts.append(_text(right + 12, y + 4, line.label, f"label {line.kind}", "start"))
    said = "; ".join(
        f"{line.label} from {line.values[0]:.3g} to {line.values[-1]:.3g}" for line in drawn
    )
    return _svg(720, 232, f"{summary} {said}", parts)


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


def strip(rate: Rate) -> str:
    """One bar with its interval, small enough for a table cell."""
    track = '<rect class="track" x="0" y="3" width="120" height="8" rx="2"/>'
    return _svg(120, 14, str(rate), [track, _rate(rate, "main", 0, 120, 7, 8)])


def curve(
    x: Float[np.ndarray, " n"],
    y: Float[np.ndarray, " n"],
    *,
    name: str,
    unit: str = "",
    log: bool = False,
    bounds: tuple[float, float] | None = None,
) -> str:
    """y over training steps: every value faint, a centred moving mean over 5 % of them strong.

    Args:
      log: logarithmic y axis; y must be positive.
      bounds: bounds of the y axis; those of y if None.
    """
    left, right, top, bottom = 52, 448, 14, 206
    keep = np.unique(np.linspace(0, len(x) - 1, min(len(x), _POINTS)).astype(int))
    smooth = _moving_mean(y, max(1, len(y) // 20), keep)
    low, high = bounds or _apart_from_one_value(float(y.min()), float(y.max()), log)
    scale = np.log10 if log else np.asarray
    y0, y1 = float(scale(low)), float(scale(high))
    x0, x1 = float(x[0]), float(max(x[-1], x[0] + 1))

    def across(v):
        return left + (right - left) * (v - x0) / (x1 - x0)

    def down(v):
        return bottom - (bottom - top) * (scale(np.clip(v, low, high)) - y0) / (y1 - y0)

    parts = []
    for tick in _log_ticks(low, high) if log else _ticks(low, high, 4):
        at = float(down(tick))
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(_text(left - 8, at + 4, f"{tick:g}{unit}", "tick", "end"))
    for tick in _ticks(x0, x1, 4):
        parts.append(_text(float(across(tick)), bottom + 20, f"{tick:,g}", "tick", "middle"))
    for values, kind in ((y[keep], "raw"), (smooth, "smooth")):
        points = zip(x[keep], values, strict=True)
        path = " ".join(f"{across(at):.1f},{down(value):.1f}" for at, value in points)
        parts.append(f'<polyline class="{kind}" points="{path}"/>')
    end = float(down(smooth[-1]))
    parts.append(f'<circle class="end" cx="{across(x[-1]):.1f}" cy="{end:.1f}" r="3.5"/>')
    summary = (
        f"{name}, smoothed, from {smooth[0]:.4g}{unit} at step {x[0]:g} "
        f"to {smooth[-1]:.4g}{unit} at step {x[-1]:g}"
    )
    return _svg(480, 232, summary, parts)


@dataclass(frozen=True)
class Course:
    """One run in `courses`: values over training steps, optionally with an interval for each.
    `kind` is the CSS class of everything drawn for it; `noisy` values are faint, under a moving
    mean."""

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
) -> str:
    """Values of several runs over their training steps, on one pair of axes; none may be empty.

    Args:
      log: logarithmic y axis; values must be positive.
      bounds: bounds of the y axis; those of the values if None.
    """
    left, right, top, bottom = 60, 462, 10, 206
    values = np.concatenate([course.y for course in drawn])
    low, high = bounds or _apart_from_one_value(float(values.min()), float(values.max()), log)
    scale = np.log10 if log else np.asarray
    y0, y1 = float(scale(low)), float(scale(high))
    x0 = min(float(course.x[0]) for course in drawn)
    x1 = max(x0 + 1, *(float(course.x[-1]) for course in drawn))

    def path(x, y) -> str:
        across = left + (right - left) * (x - x0) / (x1 - x0)
        down = bottom - (bottom - top) * (scale(np.clip(y, low, high)) - y0) / (y1 - y0)
        return " ".join(f"{u:.1f},{v:.1f}" for u, v in zip(across, down, strict=True))

    parts = []
    for tick in _log_ticks(low, high) if log else _ticks(low, high, 4):
        at = float(path(np.array([x0]), np.array([tick])).partition(",")[2])
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(_text(left - 8, at + 4, f"{tick:g}{unit}", "tick", "end"))
    for tick in _ticks(x0, x1, 4):
        at = left + (right - left) * (tick - x0) / (x1 - x0)
        parts.append(_text(at, bottom + 20, f"{tick:,g}", "tick", "middle"))
    said = []
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
        last = path(x[-1:], shown[-1:]).split(",")
        shapes.append(f'<circle cx="{last[0]}" cy="{last[1]}" r="3"/>')
        smoothed = ", smoothed" if course.noisy else ""
        told = f"{course.label}{smoothed}: {shown[-1]:.4g}{unit} at step {x[-1]:g}"
        said.append(told)
        parts.append(f'<g class="{course.kind}"><title>{escape(told)}</title>{"".join(shapes)}</g>')
    return _svg(480, 232, f"{name}. {'; '.join(said)}", parts)


def timeline(seconds: Mapping[str, float]) -> str:
    """Stages one after the other, each a bar from its start to its end."""
    left, right, row = 178, 610, 28
    total = sum(seconds.values()) or 1.0
    height = row * len(seconds) + 24
    parts = []
    for tick in _ticks(0, total, 5):
        x = left + (right - left) * tick / total
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height - 24}"/>')
        parts.append(_text(x, height - 6, f"{tick:g} s", "tick", "middle"))
    start = 0.0
    for i, (stage, spent) in enumerate(seconds.items()):
        y, x = i * row + row / 2, left + (right - left) * start / total
        width = max(1.5, (right - left) * spent / total)
        parts.append(_text(left - 12, y + 5, stage, "label", "end"))
        parts.append(
            f'<rect class="main" x="{x:.1f}" y="{y - 7}" width="{width:.1f}" height="14" rx="2"/>'
        )
        parts.append(_text(right + 14, y + 5, duration(spent), "value", "start"))
        start += spent
    summary = "; ".join(f"{stage}: {duration(spent)}" for stage, spent in seconds.items())
    return _svg(720, height, f"Time by stage. {summary}", parts)


def duration(seconds: float) -> str:
    """Duration as text, such as "4.2 s" or "3 min 05 s"."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


def _rate(rate: Rate, kind: str, left: float, right: float, y: float, thick: float) -> str:
    return _bar(rate.value, rate.interval, kind, left, right, y, thick)


def _bar(
    value: float,
    interval: tuple[float, ...] | None,
    kind: str,
    left: float,
    right: float,
    y: float,
    thick: float,
) -> str:
    """A bar whose length is the fraction `value`, 0..1, of the distance from left to right."""
    span = right - left
    drawn = (
        f'<rect class="{kind}" x="{left}" y="{y - thick / 2:g}" '
        f'width="{max(1.5, span * value):.1f}" height="{thick}" rx="2"/>'
    )
    if interval is None:
        return drawn
    a, b, cap = left + span * interval[0], left + span * interval[1], thick / 3
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
