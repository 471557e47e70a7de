"""Writes a whole dataset as one page: a row for each episode, with its images, task and statistics,
to filter, sort and flag for `tools.data edit`.

The page is a folder that works without a server: index.html holds the numbers, and the sheets
beside it hold the images of fifty episodes each. A sheet is named after the dataset's content and
appears when it is complete, so that an interrupted run resumes with the next one.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageOps

from data.dataset import Dataset, Report, frames_at
from data.errors import DatasetError
from data.statistics.episodes import EpisodeFacts, episode_facts, unlike
from data.statistics.idle import IdleLimits
from data.validation.check_columns import odd_episodes
from data.validation.looks import SIDE, moving, odd_looks
from data.view import browse_page, distributions
from data.view.page import STYLE
from models.files.page import listed, page, script_data
from models.files.whole_text import replacing, write_whole

PER_SHEET = 50
_MOMENTS, _WIDTH, _HEIGHT = 4, 96, 72
_MUCH_STILL, _MUCH_DOUBLED = 0.5, 0.05
_LONGEST_TASK = 500

_ODD = {
    "units": "other units",
    "gripper": "other sign",
    "wraps": "wraps",
    "blank": "blank",
    "frozen": "frozen",
    "same": "same picture",
}
"""Marks by the kinds of what `validate --look` finds."""
MARKS = (
    *("short", "long", "still", "doubled", "rough", "out of range", "not finite", "unreadable"),
    *_ODD.values(),
)
"""Reasons to look at an episode."""


def write_browser(
    dataset: Dataset,
    out: Path,
    report: Report,
    *,
    against: Dataset | None = None,
    limits: IdleLimits,
    columns: Sequence[str] = (),
) -> dict[str, int]:
    """Writes the folder; returns the number of episodes with each mark.

    Raises:
      ValueError: `out` has other files, or there are no episodes, no such columns of numbers, or no
        finite ones.
      DatasetError: a column cannot be read; unreadable images are marked on the page instead.
    """
    if not len(dataset.lengths):
        raise ValueError(f"{dataset.root}: has no episodes to show; record some first.")
    if out.exists() and not (out / "sheets").is_dir() and any(out.iterdir()):
        raise ValueError(f"{out}: already has other files; choose a folder that is new or empty.")
    facts = episode_facts(dataset, limits, columns, report)
    section = distributions.distributions(dataset, facts.stats, against, report)
    long = np.flatnonzero(dataset.lengths >= _MOMENTS).tolist()
    moved = moving(dataset, long, facts.stats)
    sheets, unreadable, odd = _sheets(dataset, out, moved, report)
    for one in odd_episodes(dataset, facts.stats, list(facts.stats), report):
        odd[_ODD[one.kind]].update(one.episodes)
    marked = _marked(dataset, facts, {"unreadable": set(unreadable), **odd})
    first = np.searchsorted(dataset.runs.episode, np.arange(len(dataset.lengths)))
    tasks = dataset.runs.task[np.minimum(first, len(dataset.runs.task) - 1)]
    data = {
        "digest": dataset.digest,
        "path": shlex.quote(str(dataset.root)),
        "fps": dataset.fps,
        "lengths": dataset.lengths.tolist(),
        "tasks": [wordings[0][:_LONGEST_TASK] for wordings in dataset.prompts],
        "task": tasks.tolist(),
        "still": facts.still.tolist(),
        "doubled": facts.doubled.tolist(),
        "outside": facts.outside.tolist(),
        "jerk": [float(f"{x:.3g}") if np.isfinite(x) else None for x in facts.jerk.tolist()],
        "marks": MARKS,
        "marked": (marked << np.arange(len(MARKS))[:, None]).sum(axis=0).tolist(),
        "unreadable": {str(i): why for i, why in unreadable.items()},
        "per_sheet": PER_SHEET,
        "sheets": sheets,
        "seen": dataset.present.T.astype(int).tolist(),
    }
    counts = dict(zip(MARKS, marked.sum(axis=1).tolist(), strict=True))
    write_whole(out / "index.html", _page(dataset, data, section, counts, limits))
    return counts


def _marked(dataset: Dataset, facts: EpisodeFacts, odd: Mapping[str, set[int]]) -> np.ndarray:
    """Masks of the episodes by mark [marks, e]; `odd` are episodes with others of the marks."""
    frames = np.maximum(1, dataset.lengths)
    short, long = unlike(dataset.lengths.astype(np.float64))
    found = {
        "short": short,
        "long": long,
        "still": facts.still > _MUCH_STILL * frames,
        "doubled": facts.doubled > _MUCH_DOUBLED * frames,
        "rough": unlike(facts.jerk)[1],
        "out of range": facts.outside > 0,
        "not finite": facts.broken > 0,
        **{mark: np.isin(np.arange(len(frames)), list(those)) for mark, those in odd.items()},
    }
    return np.stack([found[mark] for mark in MARKS]).astype(np.int64)


def _sheets(
    dataset: Dataset, out: Path, moved: set[int], report: Report
) -> tuple[list[list[str]], dict[int, str], dict[str, set[int]]]:
    """Files of each camera's sheets; episodes whose images cannot be read, with reasons; and those
    in which they are odd, by mark. `moved`: the episodes in which the robot moves."""
    folder, count = out / "sheets", len(dataset.lengths)
    folder.mkdir(parents=True, exist_ok=True)
    files: list[list[str]] = [[] for _ in dataset.cameras]
    unreadable: dict[int, str] = {}
    odd: dict[str, set[int]] = {mark: set() for mark in _ODD.values()}
    for first in range(0, count, PER_SHEET):
        episodes = range(first, min(first + PER_SHEET, count))
        seen: dict[str, np.ndarray] = {}
        for c, camera in enumerate(dataset.cameras):
            name = f"{dataset.digest[:12]}-{c}-{first // PER_SHEET:05d}.jpg"
            if not (folder / name).exists():
                _write_sheet(dataset, c, episodes, folder / name)
            with Image.open(folder / name) as sheet:
                said = json.loads(sheet.info["comment"])
                seen[camera] = _cells(sheet, len(episodes))
            unreadable |= {int(i): why for i, why in said.items()}
            files[c].append(f"sheets/{name}")
        for row, i in enumerate(episodes):
            there = zip(dataset.cameras, dataset.present[i], strict=True)
            shown = {c: seen[c][row] for c, has in there if has and i not in unreadable}
            for one in odd_looks(shown, i in moved) if dataset.lengths[i] else ():
                odd[_ODD[one.kind]].add(i)
        report("Pictures", episodes.stop, count)
    return files, unreadable, odd


def _cells(sheet: Image.Image, rows: int) -> UInt8[np.ndarray, "e m 16 16 3"]:
    """A sheet's images, each as `odd_looks` takes them."""
    small = sheet.resize((_MOMENTS * SIDE, rows * SIDE), Image.Resampling.BOX)
    return np.asarray(small).reshape(rows, SIDE, _MOMENTS, SIDE, 3).swapaxes(1, 2)


def _write_sheet(dataset: Dataset, camera: int, episodes: range, file: Path) -> None:
    """Images of a few moments of each episode, one episode below the other, on bars of their mean
    colour. The file's comment holds the reasons for missing images."""
    sheet = Image.new("RGB", (_MOMENTS * _WIDTH, len(episodes) * _HEIGHT))
    why: dict[int, str] = {}
    for y, i in enumerate(episodes):
        if not (dataset.present[i, camera] and dataset.lengths[i]):
            continue
        at = np.linspace(0, dataset.lengths[i] - 1, _MOMENTS).round().astype(np.int64)
        try:
            pictures = frames_at(dataset, i, dataset.cameras[camera], at)
        except DatasetError as error:
            why[i] = str(error)
            continue
        for x, picture in enumerate(pictures):
            mean = tuple(picture.mean(axis=(0, 1)).round().astype(int).tolist())
            small = ImageOps.pad(Image.fromarray(picture), (_WIDTH, _HEIGHT), color=mean)
            sheet.paste(small, (x * _WIDTH, y * _HEIGHT))
    with replacing(file) as partial:
        sheet.save(partial, "JPEG", quality=80, comment=json.dumps(why))


def _page(
    dataset: Dataset, data: dict[str, Any], section: str, counts: dict[str, int], limits: IdleLimits
) -> str:
    marks = "".join(
        f'<option value="{mark}">{mark} ({count:,})</option>'
        for mark, count in counts.items()
        if count
    )
    cameras = "".join(
        f'<option value="{c}">{escape(name)}</option>' for c, name in enumerate(dataset.cameras)
    )
    sorts = "".join(
        f'<option value="{value}">{text}</option>'
        for value, text in (
            ("number", "number"),
            ("length", "length"),
            ("still", "still"),
            ("doubled", "doubled"),
            ("jerk", "jerk"),
            ("outside", "out of range"),
        )
    )
    episodes, frames = len(dataset.lengths), int(dataset.lengths.sum())
    facts = [
        f"<b>{frames:,}</b> frames",
        f"<b>{frames / dataset.fps / 3600:.2f}</b> h at {dataset.fps:g} fps",
        f"<b>{len(dataset.prompts):,}</b> tasks",
    ]
    body = (
        f'<header><p class="eyebrow">{escape(str(dataset.root))}</p>'
        f"<h1>{episodes:,} episode{'s' * (episodes != 1)}</h1>{listed('facts', facts)}</header>"
        f"{section}"
        '<div class="flags" id="saved" hidden><div><a id="save" download="flagged.txt">Save the '
        'list of flagged episodes</a>, or edit them out:</div><code id="command"></code></div>'
        '<div class="bar"><input id="task" type="search" placeholder="task" aria-label="task">'
        '<input id="least" type="number" min="0" step="any" placeholder="from s" '
        'aria-label="seconds at least"><input id="most" type="number" min="0" step="any" '
        'placeholder="to s" aria-label="seconds at most">'
        '<select id="mark" aria-label="marks"><option value="">all episodes</option>'
        f'<option value="any">any mark</option>{marks}<option value="flagged">flagged</option>'
        f'</select><select id="sort" aria-label="order">{sorts}</select>'
        '<label><input id="down" type="checkbox"> descending</label>'
        f'<select id="camera" aria-label="camera">{cameras}</select>'
        '<button id="all">Flag shown</button><button id="none">Unflag shown</button></div>'
        f'<p id="count"></p><div id="rows"></div><p class="note">Still: no dimension varies '
        f"by more than {100 * limits.still:g} % of its range for {limits.seconds:g} s or more; "
        f"marked if more than {100 * _MUCH_STILL:g} % of the frames are. Doubled: the values are "
        f"those of the frame before; marked above {100 * _MUCH_DOUBLED:g} %. Jerk: of the median "
        "dimension, in ranges per s³. Out of range: frames in which a dimension lies beyond its "
        "range (1st to 99th percentile) by more than half of that range. Short, long and rough: "
        "more than three interquartile ranges from the quartiles.</p>"
        f"{script_data(data)}"
    )
    style = STYLE + distributions.STYLE + browse_page.STYLE
    return page(dataset.name, [body], style, script=browse_page.SCRIPT)
