"""The few charts a report needs, as inline SVG that takes its colours from the page's CSS.

Drawn here and not by a plotting library so that they follow the reader's light or dark theme, weigh
a few kB and carry no foreign metadata. Every function returns one `<svg>` element; texts are
escaped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

import numpy as np
from jaxtyping import Float

from sim.statistics import Rate

_POINTS = 600
"""Most points drawn per line; a chart is no wider than that many pixels."""


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
      bounds: of the y axis; those of y if None.
    """
    left, right, top, bottom = 52, 448, 14, 206
    smooth = _moving_mean(y, max(1, len(y) // 20))
    low, high = bounds or (float(y.min()), float(y.max()))
    if low == high:
        low, high = (low / 2, high * 2) if log else (low - 1, high + 1)
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
    keep = np.unique(np.linspace(0, len(x) - 1, min(len(x), _POINTS)).astype(int))
    for values, kind in ((y, "raw"), (smooth, "smooth")):
        path = " ".join(f"{across(x[i]):.1f},{down(values[i]):.1f}" for i in keep)
        parts.append(f'<polyline class="{kind}" points="{path}"/>')
    end = float(down(smooth[-1]))
    parts.append(f'<circle class="end" cx="{across(x[-1]):.1f}" cy="{end:.1f}" r="3.5"/>')
    summary = (
        f"{name}, smoothed, from {smooth[0]:.4g}{unit} at step {x[0]:g} "
        f"to {smooth[-1]:.4g}{unit} at step {x[-1]:g}"
    )
    return _svg(480, 232, summary, parts)


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
    """Such as "4.2 s" or "3 min 05 s"."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


def _rate(rate: Rate, kind: str, left: float, right: float, y: float, thick: float) -> str:
    span, (low, high) = right - left, rate.interval
    a, b, cap = left + span * low, left + span * high, thick / 3
    return (
        f'<rect class="{kind}" x="{left}" y="{y - thick / 2:g}" '
        f'width="{max(1.5, span * rate.value):.1f}" height="{thick}" rx="2"/>'
        f'<path class="whisker" d="M{a:.1f} {y:g}H{b:.1f}'
        f'M{a:.1f} {y - cap:.1f}v{2 * cap:.1f}M{b:.1f} {y - cap:.1f}v{2 * cap:.1f}"/>'
    )


def _svg(width: int, height: int, summary: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(summary)}">'
        f"<title>{escape(summary)}</title>{''.join(parts)}</svg>"
    )


def _text(x: float, y: float, text: str, kind: str, anchor: str) -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def _moving_mean(y: Float[np.ndarray, " n"], window: int) -> Float[np.ndarray, " n"]:
    total = np.concatenate([[0.0], np.cumsum(y)])
    i = np.arange(len(y))
    start, stop = np.maximum(i - window // 2, 0), np.minimum(i + window // 2 + 1, len(y))
    return (total[stop] - total[start]) / (stop - start)


def _ticks(low: float, high: float, count: int) -> list[float]:
    """Round values within [low, high], about `count` apart from the first."""
    raw = (high - low) / count
    power = 10.0 ** floor(log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first, last = ceil(low / step - 1e-9), floor(high / step + 1e-9)
    return [float(f"{i * step:.10g}") for i in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    if high / low < 4:
        return _ticks(low, high, 4)
    digits = (1, 2, 5) if high / low < 200 else (1,)
    decades = range(floor(log10(low)), ceil(log10(high)) + 1)
    return [v for p in decades for d in digits if low <= (v := float(f"{d}e{p}")) <= high]
