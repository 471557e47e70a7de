"""Distributions of one dataset, or of two beside each other, as part of a page: lengths, tasks, and
the values of every dimension."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape

import numpy as np

from data.dataset import Dataset, Report, dimension_names, first_prompts
from data.frames import Stats
from data.statistics.difference import RecordingDifference, difference
from data.statistics.histograms import BINS, Edges, histograms, shared_edges
from data.statistics.stats import compute
from models.files.page import listed

_MOST_TASKS = 30
_WIDTH, _HEIGHT = 200, 48

STYLE = """
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(11rem, 1fr));
  gap: .9rem; margin: .8rem 0 1.2rem; }
.chart svg { display: block; width: 100%; height: 3rem; border-bottom: 1px solid var(--line); }
.chart .a { fill: var(--main); opacity: .45; } .chart .b { fill: none; stroke: var(--other);
  stroke-width: 1.5; vector-effect: non-scaling-stroke; }
.key-a { color: var(--main); font-weight: 600; } .key-b { color: var(--other); font-weight: 600; }
.tasks { display: grid; grid-template-columns: max-content max-content minmax(0, 1fr);
  gap: .1rem .9rem; font-size: .9rem; overflow-wrap: anywhere; margin: .6rem 0 1.2rem; }
.tasks span { text-align: right; font-variant-numeric: tabular-nums; }
"""


def distributions(
    dataset: Dataset, stats: Mapping[str, Stats], against: Dataset | None, report: Report
) -> str:
    """Section of a page, as HTML.

    Args:
      stats: statistics of the columns to show.

    Raises:
      DatasetError: a column or image that is compared cannot be read.
      ValueError: there are two datasets, and one has values that are not finite.
    """
    sets = [dataset] if against is None else [dataset, against]
    told = None if against is None else difference(dataset, against, report)
    shared = {dim.column for dim in told.dims} if told else set(stats)
    names = [name for name in stats if name in shared]
    every = [stats] if against is None else [stats, compute(against, None, names, report)]
    edges = {name: shared_edges([one[name] for one in every]) for name in names}
    counts = []
    for number, one in enumerate(sets):
        report("Histograms", number, len(sets))
        counts.append(histograms(one, edges))
    seconds = [one.lengths / one.fps for one in sets]
    longest = max(float(s.max(initial=0)) for s in seconds)
    lengths = [np.histogram(s, BINS, (0, longest or 1))[0] for s in seconds]
    charts = "".join(
        f'<h2>{escape(name)}</h2><div class="charts">'
        f"{''.join(_dimensions(dataset, name, edges[name], [c[name] for c in counts], told))}</div>"
        for name in names
    )
    opened = " open" if told else ""
    return (
        f"<section><details{opened}><summary>Distributions</summary>{_head(told)}"
        f'<h2>Episodes</h2><div class="charts">'
        f"{_chart('seconds', (0.0, longest), lengths, '')}</div>"
        f'{_tasks(sets)}{charts}<p class="note">Frames (or episodes) in {BINS} bins, each dataset '
        "scaled to its fullest bin. The ends are the 1st and 99th percentiles of all values, plus "
        "a tenth on each side; values beyond are in the first or last bin.</p></details></section>"
    )


def _head(told: RecordingDifference | None) -> str:
    if told is None:
        return ""
    items = listed("findings", [escape(line) for line in told.findings])
    a, b = told.first, told.second
    return (
        f'<p class="note"><span class="key-a">■ {escape(a.path)}</span> '
        f"({a.episodes:,} episodes, {a.frames:,} frames) and "
        f'<span class="key-b">□ {escape(b.path)}</span> '
        f"({b.episodes:,} episodes, {b.frames:,} frames)</p>"
        + (items if told.findings else "<p>No difference that matters.</p>")
    )


def _dimensions(
    dataset: Dataset,
    name: str,
    edges: Edges,
    counts: Sequence[np.ndarray],
    told: RecordingDifference | None,
) -> Iterator[str]:
    compared = [dim for dim in told.dims if dim.column == name] if told else []
    labels = dimension_names(dataset.features[name].get("names"), edges.shape[1])
    for d, label in enumerate(labels):
        dim = compared[d] if compared else None
        more = f"; {100 * dim.outside:.3g} % of □ outside ■" if dim and dim.outside else ""
        ends = float(edges[0, d]), float(edges[1, d])
        yield _chart(label, ends, [each[d] for each in counts], more)


def _chart(label: str, ends: tuple[float, float], counts: Sequence[np.ndarray], more: str) -> str:
    areas = "".join(
        f'<path class="{kind}" d="{_steps(each)}"/>'
        for kind, each in zip("ab", counts, strict=False)
    )
    return (
        f'<div class="chart"><span class="name" title="{escape(label)}">{escape(label)}</span>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none">{areas}</svg>'
        f'<span class="range">{ends[0]:.3g} … {ends[1]:.3g}{more}</span></div>'
    )


def _steps(counts: np.ndarray) -> str:
    """Outline of a histogram, scaled to its highest bin."""
    width, most = _WIDTH / len(counts), max(1, int(counts.max()))
    tops = (_HEIGHT * (1 - counts / most)).tolist()
    inside = "".join(f"V{top:.1f}h{width:g}" for top in tops)
    return f"M0 {_HEIGHT}{inside}V{_HEIGHT}"


def _tasks(sets: Sequence[Dataset]) -> str:
    """Number of episodes by the task that they begin with; for two datasets, side by side."""
    counts = [first_prompts(one) for one in sets]
    every = sum(counts, Counter[str]())
    rows = "".join(
        "".join(
            f'<span class="key-{side}">{each[task] or "–"}</span>'
            for side, each in zip("ab", counts, strict=False)
        )
        + "<span></span>" * (2 - len(counts))
        + f"<div>{escape(task[:300])}</div>"
        for task, _ in every.most_common(_MOST_TASKS)
    )
    left = len(every) - _MOST_TASKS
    more = f'<p class="note">and {left} rarer tasks</p>' if left > 0 else ""
    return f'<h2>Tasks</h2><div class="tasks">{rows}</div>{more}'
