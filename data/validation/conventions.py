"""Episodes that follow other conventions than the rest: joints in degrees among radians, a gripper
of the opposite sign; and angles that wrap, which jump by a full turn where the robot does not.

Numbers of each episode are compared with their medians over all. Only a gripper's dims are compared
by sign, since a joint may well move one way in one episode and the other way in the next: those
whose name says so, or the last of an arm without names, and only where they stay near two values.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Int64

from data.dataset import Dataset, dimension_names
from data.statistics.stats import Stats
from models.files.terminal import counted

_TURNS = {2 * math.pi: "2π", 360.0: "360°"}
_FACTOR, _ABOUT, _APART, _MOST_RADIANS = 180 / math.pi, 3.0, 4.0, 7.0
"""Degrees to a radian; how far a ratio of spreads may be from it, and from that of sizes; how far
apart those of an episode's dims; and the most that an angle in radians is."""
_ON, _STEPS = 2.0, 10
"""Most usual steps (90th percentile) by which an angle goes on where it wraps, and the fewest of
them that make a turn."""
_POINTS, _ENDS, _NEAR = 16, 0.2, 0.7
"""Moments of an episode at which a gripper is compared; and the share of its frames that are within
this part of its range from either end."""
_ALIKE, _MOST, _FEWEST, _RARE = 0.6, 0.8, 4, 0.25
"""Least correlation that tells a sign; the least share and the least number of episodes with it;
and the largest share with the other sign, unless the gripper's own state has only one."""
_GRIPPER = re.compile(r"grip|finger|jaw|claw", re.IGNORECASE)
_TWO_ARMS = 12


class OddEpisodes(NamedTuple):
    """A finding: its `kind` ("units", "gripper" or "wraps"), the column and its dims, the episodes
    concerned, and the rest of a sentence that begins with the column."""

    kind: str
    column: str
    dims: tuple[int, ...]
    episodes: tuple[int, ...]
    sentence: str


class Movement(NamedTuple):
    """Facts of some episodes of a column. `spread` and `size` are the standard deviation and the
    largest absolute value. `wraps` counts changes by a full turn but for a usual step, and `other`
    those of half a turn or less. For each dim of `grippers(dataset, column)`, `course` holds its
    values at some moments, centred and of length 1, and `side` is 1 where they are never negative
    and -1 where they are never positive; both are NaN where the dim does not go to and fro between
    two values."""

    episode: Int64[np.ndarray, " e"]
    spread: Float32[np.ndarray, "e d"]
    size: Float32[np.ndarray, "e d"]
    wraps: Int64[np.ndarray, "e d"]
    other: Int64[np.ndarray, "e d"]
    course: Float32[np.ndarray, "e g p"]
    side: Float32[np.ndarray, "e g"]


def grippers(dataset: Dataset, column: str) -> list[int]:
    """Dims that are a gripper's: those named so, or without any names the last of each arm."""
    feature = dataset.features[column]
    count = math.prod(feature["shape"])
    names = dimension_names(feature.get("names"), count)
    named = [dim for dim, name in enumerate(names) if _GRIPPER.search(name)]
    halves = [count // 2 - 1] if count >= _TWO_ARMS and count % 2 == 0 else []
    told = names != [str(dim) for dim in range(count)]
    return named if named or told else [*halves, count - 1]


def movement(
    episode: Int64[np.ndarray, " e"],
    lengths: Int64[np.ndarray, " e"],
    values: Float[np.ndarray, "n d"],
    stats: Stats,
    dims: Sequence[int],
) -> Movement:
    """Facts of episodes of at least one frame, whose values are end to end.

    Args:
      stats: statistics of the column over all episodes.
      dims: those of a gripper.
    """
    starts = np.cumsum(lengths) - lengths
    low, high = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
    mean = np.add.reduceat(values, starts) / lengths[:, None]
    squares = (values - np.repeat(mean, lengths, axis=0)) ** 2
    spread = np.sqrt(np.add.reduceat(squares, starts) / lengths[:, None])
    change = np.abs(np.diff(values, axis=0, prepend=values[:1]))
    change[starts] = 0
    turn = _turns(stats)
    small, jump = (change > 0) & (change <= turn / 2), change > 0.9 * turn
    usual = np.array([
        np.quantile(of[own], 0.9) if own.any() and full.any() else 0.0
        for of, own, full in zip(change.T, small.T, jump.T, strict=True)
    ])  # fmt: skip
    jump &= (np.abs(change - turn) <= _ON * usual) & (usual < turn / _STEPS)
    wraps, other = (np.add.reduceat(x, starts, dtype=np.int64) for x in (jump, small))
    held, least = values[:, dims], np.repeat(low[:, dims], lengths, axis=0)
    range_ = (high - low)[:, dims]
    part = (held - least) / np.where(range_ > 0, range_, 1).repeat(lengths, axis=0)
    near = np.add.reduceat(np.abs(part - 0.5) >= 0.5 - _ENDS, starts, dtype=np.int64)
    binary = (range_ > 0) & (near >= _NEAR * lengths[:, None])
    at = starts[:, None] + np.round(np.linspace(0, lengths - 1, _POINTS, axis=1)).astype(np.int64)
    course = held[at].swapaxes(1, 2)
    course = course - course.mean(axis=2, keepdims=True)
    length = np.linalg.norm(course, axis=2, keepdims=True)
    told = binary[..., None] & (length > 0)
    size = np.maximum(np.abs(low), np.abs(high))
    sides = ((low + high) / np.where(size > 0, size, 1))[:, dims]
    return Movement(
        episode,
        spread.astype(np.float32),
        size.astype(np.float32),
        wraps,
        other,
        np.where(told, course / np.where(told, length, 1), np.nan).astype(np.float32),
        np.where(binary, np.clip(sides, -1, 1), np.nan).astype(np.float32),
    )


def _turns(stats: Stats) -> Float[np.ndarray, " d"]:
    """A full turn of each dim by its extent, in radians or degrees; infinite for no angle."""
    extent = np.ravel(stats["max"] - stats["min"])
    return np.select([extent <= 1.03 * turn for turn in _TURNS], list(_TURNS), np.inf)


def joined(parts: Sequence[Movement]) -> Movement:
    """Facts of the episodes of all parts."""
    return Movement(*map(np.concatenate, zip(*parts, strict=True)))


def find_odd(
    dataset: Dataset,
    stats: Mapping[str, Stats],
    found: Mapping[str, Movement],
    actions: Sequence[str],
) -> Iterator[OddEpisodes]:
    """Findings from statistics and the facts of all episodes of some columns, of which `actions`
    are actions."""
    for column, facts in found.items():
        yield from _wrapping(column, facts, stats[column])
        yield from _other_units(column, facts)
    runs = dataset.runs
    first = np.searchsorted(runs.episode, np.arange(len(dataset.lengths)))
    tasks = runs.task[np.minimum(first, len(runs.task) - 1)]
    for column, facts in found.items():
        for g, dim in enumerate(grippers(dataset, column)):
            along = _along_tasks(facts.course[:, g], tasks[facts.episode])
            ways = [(facts.side[:, g], _RARE), (along, _RARE)]
            for other, state in found.items():
                if column in actions and other not in actions:
                    both = np.einsum("ep,egp->eg", facts.course[:, g], state.course)
                    same = both.shape[1] == facts.course.shape[1]
                    ways += [(both[:, g], 0.5)] if same else [(way, _RARE) for way in both.T]
            for signs, most in ways:
                odd = facts.episode[_minority(signs, most)].tolist()
                if odd:
                    yield OddEpisodes(
                        "gripper", column, (dim,), tuple(odd),
                        f"has the opposite sign in dimension {dim} of {listed(odd)}: a gripper "
                        "that closes where the others open; change the sign there, or leave those "
                        "episodes out.",
                    )  # fmt: skip
                    break


def _wrapping(column: str, facts: Movement, stats: Stats) -> Iterator[OddEpisodes]:
    counts, other = facts.wraps.sum(axis=0), facts.other.sum(axis=0)
    for turn, sign in _TURNS.items():
        dims = np.flatnonzero((counts > 0) & (other > 4 * counts) & (_turns(stats) == turn))
        if len(dims):
            odd = facts.episode[facts.wraps[:, dims].any(axis=1)].tolist()
            yield OddEpisodes(
                "wraps", column, tuple(dims.tolist()), tuple(odd),
                f"jumps by {sign} in dimension {', '.join(map(str, dims))} "
                f"({counted(counts[dims].sum(), 'such step')} in {listed(odd)}): an angle that "
                "wraps; unwrap it (numpy.unwrap), or give its sine and cosine, since a mean of "
                "both ends points the wrong way.",
            )  # fmt: skip


def _other_units(column: str, facts: Movement) -> Iterator[OddEpisodes]:
    """Episodes most of whose dims spread as many times as far as degrees do, among radians; or the
    other way round."""
    usual, size = np.nanmedian(facts.spread, axis=0), np.nanmedian(facts.size, axis=0)
    dims = usual > 1e-6 * np.maximum(size, 1)
    if dims.sum() < 2 or len(facts.spread) < 3:
        return
    radians = size[dims] <= _MOST_RADIANS
    ratio = np.log(np.maximum(facts.spread[:, dims], 1e-12) / usual[dims] / _FACTOR)
    inverse = ratio + 2 * np.log(_FACTOR)
    own = facts.size[:, dims] <= _MOST_RADIANS
    to_degrees = (np.abs(ratio) < np.log(_ABOUT)) & radians
    shrunk = np.log(np.maximum(facts.size[:, dims], 1e-12) / size[dims] * _FACTOR)
    alike = np.maximum(np.abs(inverse), np.abs(inverse - shrunk)) < np.log(_ABOUT)
    to_radians = alike & ~radians & own
    ends = (
        end(inverse, 1, where=to_radians, initial=start)
        for end, start in ((np.max, -np.inf), (np.min, np.inf))
    )
    to_radians &= (np.subtract(*ends) < np.log(_APART))[:, None]
    for mask, factor, unit, others in (
        (to_degrees & (to_degrees & ~own).any(axis=1)[:, None], ratio, "degrees", "radians"),
        (to_radians, inverse, "radians", "degrees"),
    ):
        rows = np.flatnonzero(mask.mean(axis=1) > 0.5)
        if len(rows):
            odd, first = facts.episode[rows].tolist(), rows[0]
            times = np.exp(np.median(factor[first][mask[first]]))
            times *= _FACTOR if unit == "degrees" else 1 / _FACTOR
            yield OddEpisodes(
                "units", column, tuple(np.flatnonzero(dims)[mask[first]].tolist()), tuple(odd),
                f"spreads {times:.3g} times as far as usual in most dimensions of {listed(odd)}, "
                f"as if in {unit} among {others}; convert those episodes.",
            )  # fmt: skip


def _along_tasks(
    course: Float32[np.ndarray, "e p"], tasks: Int64[np.ndarray, " e"]
) -> Float32[np.ndarray, " e"]:
    """Correlation of each episode with the main course of all that begin with its task, which most
    of them follow."""
    found = np.full(len(course), np.nan, np.float32)
    for task in np.unique(tasks):
        rows = np.flatnonzero((tasks == task) & np.isfinite(course[:, 0]))
        if len(rows) >= _FEWEST:
            along = course[rows] @ np.linalg.eigh(course[rows].T @ course[rows])[1][:, -1]
            against = _minority(along)
            usual = along if not len(against) else np.delete(along, against)
            found[rows] = along * np.sign(usual.sum())
    return found


def _minority(signs: Float32[np.ndarray, " e"], most: float = _RARE) -> Int64[np.ndarray, " _k"]:
    """Rows of the rarer sign, if nearly all episodes have a clear one, and at most this share of
    them that one."""
    told = np.isfinite(signs)
    clear = told & (np.abs(signs) > _ALIKE)
    if clear.sum() < max(_FEWEST, _MOST * told.sum()):
        return np.zeros(0, np.int64)
    if not (clear & (signs < 0)).any() or not (clear & (signs > 0)).any():
        return np.zeros(0, np.int64)
    ways = [np.flatnonzero(told & (way * signs > _ALIKE / 2)) for way in (-1, 1)]
    rarer = min(ways, key=lambda rows: (len(rows), np.argmax(clear) in rows))
    return rarer if len(rarer) <= most * clear.sum() else rarer[:0]


def listed(episodes: Sequence[int]) -> str:
    """Numbers of episodes in words, of many the first."""
    if len(episodes) == 1:
        return f"episode {episodes[0]}"
    shown = ", ".join(map(str, episodes[:5]))
    return f"{len(episodes)} episodes ({shown}{', …' if len(episodes) > 5 else ''})"
