"""Idle stretches of a dataset as a page for a browser: for each episode, a line of how much the
robot moves around each frame, with left-out frames shaded."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np

from data.dataset import Dataset
from data.statistics.idle import IdleFrames, IdleLimits, ranges
from data.view.page import STYLE
from models.files.page import page
from models.files.whole_text import write_whole

_MOST_EPISODES = 200
_WIDTH, _HEIGHT = 1000, 40
_STYLE = """
.still { fill: var(--other); opacity: .35; } .doubled { fill: var(--cursor); opacity: .55; }
.threshold { stroke: var(--soft); stroke-dasharray: 4 4; stroke-width: 1;
  vector-effect: non-scaling-stroke; }
.idle { display: grid; grid-template-columns: 6rem minmax(0, 1fr) 9rem; gap: .8rem;
  align-items: center; border-top: 1px solid var(--line); padding: .2rem 0; font-size: .85rem; }
.idle svg { display: block; width: 100%; height: 2.5rem; }
.idle path { fill: none; stroke: var(--main); stroke-width: 1.2;
  vector-effect: non-scaling-stroke; }
"""


def write_idle_page(
    dataset: Dataset, limits: IdleLimits, found: Sequence[IdleFrames], path: Path
) -> None:
    """Writes the page; if there are many episodes, those with the most idle frames, in episode
    order."""
    counts = np.array([int((idle.still | idle.doubled).sum()) for idle in found])
    shown = np.sort(np.argsort(-counts, kind="stable")[:_MOST_EPISODES]).tolist()
    left = len(found) - len(shown)
    more = f" The {left} episodes with the fewest are not drawn." if left else ""
    body = (
        f'<header><p class="eyebrow">{escape(dataset.name)}</p>'
        f"<h1>{int(counts.sum())} of {int(dataset.lengths.sum())} frames are idle</h1>"
        f'<p class="note">Still (shaded): no dimension varies by more '
        f"than {100 * limits.still:g} % of its range for {limits.seconds:g} s or more. Doubled "
        "(bars): the values are those of the frame before. The line is the share of its range "
        "that the widest dimension passes through, on a square-root scale; the dashed line is the "
        f"limit.{more}</p></header>"
        f'<main class="alone"><section>{"".join(_row(i, found[i], limits) for i in shown)}'
        "</section></main>"
    )
    write_whole(path, page(f"{dataset.name}: idle frames", [body], STYLE + _STYLE))


def _row(episode: int, idle: IdleFrames, limits: IdleLimits) -> str:
    length = len(idle.still)
    step = _WIDTH / max(1, length)
    boxes = "".join(
        f'<rect class="{name}" x="{first * step:.2f}" y="0" width="{(stop - first) * step:.2f}" '
        f'height="{_HEIGHT}"/>'
        for name, mask in (("still", idle.still), ("doubled", idle.doubled))
        for first, stop in ranges(mask)
    )
    heights = _HEIGHT * (1 - np.sqrt(np.clip(idle.moved, 0, 1)))
    line = "".join(
        f"{'L' if frame else 'M'}{(frame + 0.5) * step:.2f} {y:.2f}"
        for frame, y in enumerate(heights.tolist())
    )
    limit = _HEIGHT * (1 - limits.still**0.5)
    said = f"{int(idle.still.sum())} still, {int(idle.doubled.sum())} doubled of {length}"
    return (
        f'<div class="idle"><span>episode {episode}</span>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none">{boxes}'
        f'<line class="threshold" x1="0" x2="{_WIDTH}" y1="{limit:.2f}" y2="{limit:.2f}"/>'
        f'<path d="{line}"/></svg><span class="note">{said}</span></div>'
    )
