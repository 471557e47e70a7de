"""Checks that a dataset's columns are fit for training, in passes over blocks of them.

The first looks for gaps in the numbering, values that are not finite and duplicate episodes; the
next ones compute exact statistics of values, of their changes from step to step and of their spread
in each episode; the last one finds the places where a value is far outside of these. Thresholds are
ratios of quantiles, which a few wrong values do not move.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64, Shaped

from data.columns import BOOKKEEPING
from data.dataset import Dataset, Report
from data.errors import DatasetError, Problem, error, from_error, warning
from data.files.job import Done, adding_up, run_job
from data.frames import usual_columns
from data.lake.ranges import episode_ranges, require_no_strays, streamed
from data.statistics.stats import Stats, describe_columns, numeric_columns
from data.validation.conventions import Movement, OddEpisodes, find_odd, grippers, joined, movement
from models.files.terminal import counted

_EXPLODED, _BROKEN, _LEAST_SIZE = 1e3, 1e6, 1e-3
"""Distances from the median for a warning and for an error, in multiples of the values' usual size;
and the least such size."""
_JUMP, _LEAST_CHANGE = 20.0, 1e-3
"""Limit of changes, in multiples of their 99th percentile; changes below this part of the range are
noise."""
_TODAY = 1e8
"""Seconds that only a time of day has."""
_SPREAD, _SIZE = 30.0, 10.0
"""Limits of an episode's spread: in multiples of the largest spread of nine in ten episodes, and of
the median's size."""


def check_columns(
    dataset: Dataset, report: Report, columns: Sequence[str] = (), further: Iterable[str] = ()
) -> tuple[list[Problem], dict[str, Stats], dict[int, int]]:
    """Problems of the columns, exact statistics of those that are sound, and the first episode of
    every task index.

    Args:
      columns: those that are trained on, which must be finite and are checked for values far
        outside and for doubled episodes; if none, those of a usual name.
      further: columns to check besides the numeric ones that the dataset lists.
    """
    names = list(dict.fromkeys([*numeric_columns(dataset), *further]))
    state, actions = usual_columns(names)
    trained = tuple(columns) or (*state, *actions)
    scan, problems = _scan(dataset, names, trained, report)
    if scan is None:
        return problems, {}, {}
    problems += scan.problems()
    sound = [n for n in scan.names if n not in BOOKKEEPING and not scan.holes.get(n)]
    stats = describe_columns(
        _Columns(dataset),
        sound,
        episode_ranges(dataset.lengths),
        lambda number: _telling(dataset, report, f"Statistics, pass {number}"),
    )
    moving = [name for name in trained if name in sound]
    if moving:
        problems += _constant(dataset, stats, moving)
        odd = odd_episodes(dataset, stats, moving, report)
        problems += [
            warning(dataset.file(one.episodes[0]), f"column '{one.column}'", one.sentence)
            for one in odd
        ]
        problems += _outside(dataset, stats, moving, odd, report)
    return problems, stats, scan.tasks


class _Scan:
    """Findings of one pass over all columns, or over those of a range of episodes."""

    def __init__(
        self, dataset: Dataset, names: Sequence[str], trained: Sequence[str], first: int = 0
    ) -> None:
        self.dataset, self.names, self.trained = dataset, list(names), trained
        self.holes: dict[str, tuple[int, int]] = {}
        self.wrong: dict[str, tuple[int, float, float]] = {}
        self.tasks: dict[int, int] = {}
        self.contents: list[bytes] = []
        self._ends = np.cumsum(dataset.lengths)
        self._frames, self._episodes = int(dataset.lengths[:first].sum()), first

    def join(self, later: "_Scan") -> None:
        """Takes the findings of the range that follows."""
        self.wrong = later.wrong | self.wrong
        self.tasks = later.tasks | self.tasks
        for name, (at, count) in later.holes.items():
            first, before = self.holes.get(name, (at, 0))
            self.holes[name] = (first, before + count)
        self.contents += later.contents

    def add(self, block: Mapping[str, np.ndarray]) -> None:
        """Looks at some whole episodes."""
        count = len(block[self.names[0]])
        last = int(np.searchsorted(self._ends, self._frames + count, "right"))
        episodes = slice(self._episodes, last)
        lengths = self.dataset.lengths[episodes]
        starts = np.cumsum(lengths) - lengths
        step = np.arange(count) - np.repeat(starts, lengths)
        self._expect("frame_index", block, step)
        self._expect("index", block, self._frames + np.arange(count))
        if "timestamp" in block and count:
            begin = np.repeat(block["timestamp"][np.minimum(starts, count - 1)], lengths)
            half = 0.5 / self.dataset.fps
            times = {"start": begin, "timestamp": block["timestamp"] - begin}
            self._expect("start", times, np.zeros(count), half)
            self._expect(
                "timestamp",
                times,
                step / self.dataset.fps,
                half + np.spacing(begin).astype(np.float64),
            )
        for name, values in block.items():
            if values.dtype.kind == "f" and name not in BOOKKEEPING:
                self._finite(name, values)
        if "task_index" in block:
            tasks, first = np.unique(block["task_index"], return_index=True)
            for task, frame in zip(tasks.tolist(), first.tolist(), strict=True):
                of = self._episodes + int(np.searchsorted(starts, frame, "right")) - 1
                self.tasks.setdefault(task, of)
        self._compare([block[n] for n in self.trained if n in block], starts, lengths)
        self._frames, self._episodes = self._frames + count, last

    def problems(self) -> Iterator[Problem]:
        """All findings of the pass."""
        for name, (at, actual, expected) in self.wrong.items():
            file, (episode, step) = _file(self.dataset, at), locate(self.dataset, at)
            if name == "timestamp":
                yield error(
                    file, "column 'timestamp'",
                    f"is {actual:g} s at frame {step} of an episode ({episode}), expected "
                    f"{expected:g} s at {self.dataset.fps} fps; correct fps or resample.",
                )  # fmt: skip
            elif name == "start":
                told = ", a time of day (seconds since 1970)" if actual > _TODAY else ""
                yield error(
                    file, "column 'timestamp'",
                    f"begins at {actual:.6g} s in episode {episode}{told}, expected 0 s; if its "
                    "images begin there too, `python -m tools.data edit` writes times from 0.",
                )  # fmt: skip
            else:
                yield error(
                    file, f"column '{name}'",
                    f"is {actual:g} where {expected:g} should follow (frame {at} of the dataset); "
                    "rows are missing or doubled; record or convert it again.",
                )  # fmt: skip
        for name, (at, count) in self.holes.items():
            episode, step = locate(self.dataset, at)
            tell = error if name in self.trained else warning
            yield tell(
                _file(self.dataset, at), f"column '{name}'",
                f"is not finite (NaN or infinite) at step {step} of episode {episode} and in "
                f"{counted(count, 'frame')} in all; repair or remove those episodes.",
            )  # fmt: skip
        seen: dict[bytes, int] = {}
        numbered = enumerate(self.contents)
        firsts = ((seen.setdefault(content, number), number) for number, content in numbered)
        if doubled := [pair for pair in firsts if pair[0] != pair[1]]:
            first, again = doubled[0]
            yield warning(
                _file(self.dataset, int(self._ends[again]) - 1), "columns of state and action",
                f"are the same in episodes {first} and {again} "
                f"({counted(len(doubled), 'doubled episode')} "
                "in all); they count twice, so hold out both or neither.",
            )  # fmt: skip

    def _expect(
        self,
        name: str,
        block: Mapping[str, np.ndarray],
        expected: Shaped[np.ndarray, " n"],
        tolerance: float | Shaped[np.ndarray, " n"] = 0.5,
    ) -> None:
        if name in block and name not in self.wrong:
            bad = ~(np.abs(block[name] - expected) < tolerance)
            if bad.any():
                at = int(np.argmax(bad))
                found = float(block[name][at]), float(expected[at])
                self.wrong[name] = (self._frames + at, *found)

    def _finite(self, name: str, values: Shaped[np.ndarray, " n *shape"]) -> None:
        bad = ~np.isfinite(values).reshape(len(values), -1).all(axis=1)
        if bad.any():
            first, count = self.holes.get(name, (self._frames + int(np.argmax(bad)), 0))
            self.holes[name] = (first, count + int(bad.sum()))

    def _compare(
        self,
        columns: Sequence[Shaped[np.ndarray, "n ..."]],
        starts: Int64[np.ndarray, " e"],
        lengths: Int64[np.ndarray, " e"],
    ) -> None:
        for start, length in zip(starts, lengths, strict=True) if columns else ():
            content = hashlib.blake2b(digest_size=16)
            for column in columns:
                content.update(column[start : start + length].tobytes())
            self.contents.append(content.digest())


def locate(dataset: Dataset, frame: int) -> tuple[int, int]:
    """Episode and step of a frame counted through the whole dataset."""
    ends = np.cumsum(dataset.lengths)
    episode = int(np.searchsorted(ends, frame, "right"))
    return episode, int(frame - ends[episode] + dataset.lengths[episode])


@dataclass(frozen=True)
class _Scanning:
    """The first pass over a range of episodes."""

    columns: "_Columns"
    names: tuple[str, ...]
    trained: tuple[str, ...]

    def __call__(self, episodes: range, done: Done) -> _Scan:
        scan = _Scan(self.columns.dataset, self.names, self.trained, episodes.start)
        for block in self.columns(self.names, episodes):
            scan.add(block)
            done(len(block[self.names[0]]))
        return scan


def _scan(
    dataset: Dataset, names: list[str], trained: tuple[str, ...], report: Report
) -> tuple[_Scan | None, list[Problem]]:
    """A pass over the columns that can be read; the others are problems."""
    problems: list[Problem] = []
    while names:
        ranges, scan = episode_ranges(dataset.lengths), _Scan(dataset, names, trained)
        done = _telling(dataset, report, "Values and numbering")
        try:
            for found in run_job(_Scanning(_Columns(dataset), tuple(names), trained), ranges, done):
                scan.join(found)
            require_no_strays(dataset, ranges)
        except DatasetError as raised:
            problems.append(from_error(raised))
            left = [name for name in names if raised.field != f"column '{name}'"]
            if left == names:
                break
            names = left
        else:
            return scan, problems
    return None, problems


def _constant(
    dataset: Dataset, stats: Mapping[str, Stats], names: Sequence[str]
) -> Iterator[Problem]:
    for name in names:
        still = np.flatnonzero(np.ravel(stats[name]["min"] == stats[name]["max"]))
        if len(still):
            yield warning(
                _file(dataset, 0), f"column '{name}'",
                f"never changes in dimension {', '.join(map(str, still))}; nothing can be learnt "
                "from it.",
            )  # fmt: skip


def odd_episodes(
    dataset: Dataset, stats: Mapping[str, Stats], names: Sequence[str], report: Report
) -> list[OddEpisodes]:
    """Episodes of other units or signs, and angles that wrap, in some columns of these
    statistics."""
    watching = _Watching(_Columns(dataset), {name: stats[name] for name in names})
    ranges, done = episode_ranges(dataset.lengths), _telling(dataset, report, "Conventions")
    parts = list(run_job(watching, ranges, done))
    found = {name: joined([part for of in parts for part in of[name]]) for name in names}
    actions = usual_columns(names)[1]
    return list(find_odd(dataset, stats, found, actions))


@dataclass(frozen=True)
class _Watching:
    """Facts of each column's episodes, from a range of them."""

    columns: "_Columns"
    stats: Mapping[str, Stats]

    def __call__(self, part: range, done: Done) -> dict[str, list[Movement]]:
        dataset, found = self.columns.dataset, {name: list[Movement]() for name in self.stats}
        for episodes in _episodes(self.columns, tuple(found), part):
            for name, of in found.items():
                values, dims = episodes.values(name), grippers(dataset, name)
                numbers, lengths = episodes.numbers, episodes.lengths
                of.append(movement(numbers, lengths, values, self.stats[name], dims))
            done(int(episodes.lengths.sum()))
        return found


class _Worst:
    """The place furthest beyond a limit, and how many places are beyond it."""

    def __init__(self, limit: Float64[np.ndarray, " d"]) -> None:
        self.limit, self.count, self.ratio = limit, 0, 1.0
        self.place = self.dim = 0
        self.value = 0.0

    def add(self, values: Float64[np.ndarray, "n d"], places: Int64[np.ndarray, " n"]) -> None:
        """Looks at values, of any sign, of these frames or episodes."""
        ratio = np.abs(values) / self.limit
        self.count += int((ratio > 1).any(axis=1).sum())
        if ratio.size and ratio.max() > self.ratio:
            row, self.dim = map(int, np.unravel_index(int(ratio.argmax()), ratio.shape))
            self.ratio, self.place = float(ratio.max()), int(places[row])
            self.value = float(values[row, self.dim])

    def join(self, later: "_Worst") -> None:
        """Takes the findings of a later range."""
        self.count += later.count
        if later.ratio > self.ratio:
            self.ratio, self.place = later.ratio, later.place
            self.dim, self.value = later.dim, later.value


def _outside(
    dataset: Dataset,
    stats: Mapping[str, Stats],
    names: Sequence[str],
    odd: Sequence[OddEpisodes],
    report: Report,
) -> Iterator[Problem]:
    """Values, changes from step to step and episodes far outside the usual, where `odd` does not
    explain them."""
    changing = bool((dataset.lengths > 1).any())
    kinds = ("changes", "spreads") if changing else ("spreads",)
    usual = describe_columns(
        _Changes(_Columns(dataset), tuple(names)),
        [f"{kind} of {name}" for name in names for kind in kinds],
        episode_ranges(dataset.lengths),
        lambda number: _telling(dataset, report, f"Changes, pass {number}"),
    )
    worst: dict[str, dict[str, _Worst]] = {}
    for name in names:
        values, spreads = (_flat(s) for s in (stats[name], usual[f"spreads of {name}"]))
        middle, extent = np.abs(values["q50"]), values["q99"] - values["q01"]
        size = np.maximum(np.maximum(extent, middle), _LEAST_SIZE)
        furthest = np.maximum(values["max"] - values["q50"], values["q50"] - values["min"])
        spread = np.maximum(_SPREAD * spreads["q90"], _SIZE * np.maximum(middle, 1))
        suspects = {
            "values": (furthest, _EXPLODED * size),
            "spreads": (spreads["max"], spread),
        }
        if changing:
            changes = _flat(usual[f"changes of {name}"])
            steady = (changes["q50"] > 0) & (changes["q99"] > _LEAST_CHANGE * extent)
            limit = np.where(steady, _JUMP * changes["q99"], np.inf)
            suspects["changes"] = (changes["max"], limit)
        for one in (one for one in odd if one.column == name):
            known = slice(None) if one.kind == "units" else list(one.dims)
            for kind in () if one.kind == "gripper" else kinds:
                suspects[kind][1][known] = np.inf
        found = {k: _Worst(limit) for k, (most, limit) in suspects.items() if (most > limit).any()}
        if found:
            worst[name] = found
    if worst:
        _look(dataset, worst, stats, report)
    for name, found in worst.items():
        yield from _tell(dataset, name, found)


@dataclass(frozen=True)
class _Changes:
    """Changes from step to step and spreads in each episode, as columns with their own names."""

    columns: "_Columns"
    names: tuple[str, ...]

    def __call__(self, wanted: Sequence[str], part: range) -> Iterator[dict[str, np.ndarray]]:
        for episodes in _episodes(self.columns, self.names, part):
            for name in self.names:
                found = {
                    f"changes of {name}": np.abs(episodes.changes(name)[0]),
                    f"spreads of {name}": episodes.spreads(name),
                }
                yield {what: values for what, values in found.items() if what in wanted}


@dataclass(frozen=True)
class _Finding:
    """Finds the places in a range of episodes where values exceed the limits."""

    columns: "_Columns"
    limits: Mapping[str, Mapping[str, Float64[np.ndarray, " _d"]]]
    middles: Mapping[str, Float64[np.ndarray, " _d"]]

    def __call__(self, part: range, done: Done) -> dict[str, dict[str, _Worst]]:
        worst = {n: {k: _Worst(x) for k, x in of.items()} for n, of in self.limits.items()}
        for episodes in _episodes(self.columns, tuple(worst), part):
            for name, found in worst.items():
                if "values" in found:
                    frames = episodes.first + np.arange(int(episodes.lengths.sum()))
                    found["values"].add(episodes.values(name) - self.middles[name], frames)
                if "changes" in found:
                    changes, steps = episodes.changes(name)
                    found["changes"].add(changes, episodes.first + steps)
                if "spreads" in found:
                    found["spreads"].add(episodes.spreads(name), episodes.numbers)
            done(int(episodes.lengths.sum()))
        return worst


def _look(
    dataset: Dataset,
    worst: Mapping[str, Mapping[str, _Worst]],
    stats: Mapping[str, Stats],
    report: Report,
) -> None:
    """A pass that finds the places of values that are known to exceed the limits."""
    finding = _Finding(
        _Columns(dataset),
        {name: {k: w.limit for k, w in found.items()} for name, found in worst.items()},
        {name: np.ravel(stats[name]["q50"]) for name in worst},
    )
    done = _telling(dataset, report, "Values far outside")
    for later in run_job(finding, episode_ranges(dataset.lengths), done):
        for name, found in later.items():
            for kind, place in found.items():
                worst[name][kind].join(place)


def _tell(dataset: Dataset, name: str, found: Mapping[str, _Worst]) -> Iterator[Problem]:
    """One sentence for the most serious finding, since one wrong value causes all of them."""
    field = f"column '{name}'"
    if worst := found.get("values"):
        episode, step = locate(dataset, worst.place)
        size = worst.ratio * _EXPLODED
        tell = error if size > _BROKEN else warning
        yield tell(
            _file(dataset, worst.place), field,
            f"is {worst.value:+.3g} from its median in dimension {worst.dim} at step {step} of "
            f"episode {episode}, {size:.0e} times its usual size "
            f"({counted(worst.count, 'such frame')} "
            "in all); repair or remove those episodes.",
        )  # fmt: skip
    elif worst := found.get("spreads"):
        frame = int(dataset.lengths[: worst.place].sum())
        yield warning(
            _file(dataset, frame), field,
            f"spreads by {worst.value:.3g} in dimension {worst.dim} of episode {worst.place}, "
            f"{worst.ratio * _SPREAD:.0f} times what it does in nine of ten episodes "
            f"({counted(worst.count, 'such episode')} in all); is it in another unit?",
        )  # fmt: skip
    elif worst := found.get("changes"):
        episode, step = locate(dataset, worst.place)
        yield warning(
            _file(dataset, worst.place), field,
            f"jumps by {worst.value:+.3g} in dimension {worst.dim} at step {step} of episode "
            f"{episode}, {worst.ratio * _JUMP:.0f} times the largest change in 99 % of its steps "
            f"({counted(worst.count, 'such step')} in all); look at it with `python -m "
            "tools.data view`, and "
            "remove the episode if frames are lost there.",
        )  # fmt: skip


class _Episodes(NamedTuple):
    """Some whole episodes end to end; `first` is their first frame's number in the dataset."""

    numbers: Int64[np.ndarray, " e"]
    lengths: Int64[np.ndarray, " e"]
    first: int
    columns: Mapping[str, np.ndarray]

    def values(self, name: str) -> Float64[np.ndarray, "n d"]:
        return self.columns[name].reshape(int(self.lengths.sum()), -1).astype(np.float64)

    def changes(self, name: str) -> tuple[Float64[np.ndarray, "m d"], Int64[np.ndarray, " m"]]:
        """Changes within episodes, and the frames (counted from `first`) that have them."""
        inside = np.ones(int(self.lengths.sum()), bool)
        inside[np.cumsum(self.lengths) - self.lengths] = False
        frames = np.flatnonzero(inside)
        values = self.values(name)
        return values[frames] - values[frames - 1], frames

    def spreads(self, name: str) -> Float64[np.ndarray, "e d"]:
        """Standard deviation in each episode."""
        starts, lengths = np.cumsum(self.lengths) - self.lengths, self.lengths[:, None]
        values = self.values(name)
        values -= np.repeat(np.add.reduceat(values, starts) / lengths, self.lengths, axis=0)
        return np.sqrt(np.add.reduceat(values**2, starts) / lengths)


def _episodes(columns: "_Columns", names: Sequence[str], part: range) -> Iterator[_Episodes]:
    """The columns of a range of episodes, some whole episodes at a time, without those that have no
    frames."""
    lengths = columns.dataset.lengths
    ends = np.cumsum(lengths)
    episode, first = part.start, int(lengths[: part.start].sum())
    for block in columns(names, part):
        count = len(block[names[0]])
        last = int(np.searchsorted(ends, first + count, "right"))
        numbers = np.arange(episode, last)[lengths[episode:last] > 0]
        yield _Episodes(numbers, lengths[numbers], first, block)
        first, episode = first + count, last


@dataclass(frozen=True)
class _Columns:
    """Columns of ranges of episodes, in blocks checked against what the dataset declares."""

    dataset: Dataset

    def __call__(self, names: Sequence[str], part: range) -> Iterator[Mapping[str, np.ndarray]]:
        dataset = self.dataset
        ends = np.cumsum(dataset.lengths)
        done = before = int(dataset.lengths[: part.start].sum())
        for block in streamed(dataset, names, part):
            rows = _rows(dataset, names, block)
            done += rows
            last = int(np.searchsorted(ends, done))
            if rows and done not in ends[last : last + 1]:
                raise _broken(dataset, names[0], "come in blocks, one of which ends at frame "
                    f"{done}, within an episode")  # fmt: skip
            yield block
        total = int(dataset.lengths[part.start : part.stop].sum())
        if done - before != total:
            raise _broken(
                dataset, names[0],
                f"are {done - before}, where the episodes have {total} frames",
            )  # fmt: skip


def _telling(dataset: Dataset, report: Report, what: str) -> Callable[[int], None]:
    """Reports the frames that a pass has done."""
    total = int(dataset.lengths.sum())
    report(what, 0, total)
    return adding_up(lambda done, total: report(what, min(done, total), total), total)


def _rows(dataset: Dataset, names: Sequence[str], block: Mapping[str, np.ndarray]) -> int:
    """Number of rows in a block; all its columns must have as many, in the declared shape."""
    rows = len(block[names[0]])
    for name in names:
        shape = dataset.features.get(name, {}).get("shape", (1,))
        if len(block[name]) != rows or block[name].size != rows * math.prod(shape):
            found = f"have shape {list(block[name].shape)}, expected {[rows, *shape]}"
            raise _broken(dataset, name, found)
    return rows


def _broken(dataset: Dataset, name: str, what: str) -> DatasetError:
    return DatasetError(
        dataset.root, f"column '{name}'", f"values {what}; correct the files or the reader."
    )


def _flat(stats: Stats) -> Stats:
    return {key: np.ravel(value) for key, value in stats.items()}


def _file(dataset: Dataset, frame: int) -> Path | str:
    """File of a frame's values."""
    return dataset.file(locate(dataset, frame)[0])
