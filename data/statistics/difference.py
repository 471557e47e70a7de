"""Comparison of two recordings: rate, cameras, names, ranges, prompts and images, and sentences
about differences that would be a problem for a policy trained on the first.

Numbers are exact over all frames; images come from a few episodes. Swapped channels and upside-down
images are found by trial: each common mistake is undone in the second recording's mean image, and
the result is compared with the first's.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float, Float64, UInt8
from PIL import Image

from data.columns import BOOKKEEPING
from data.dataset import Dataset, Report, dimension_names, first_prompts, frames_at
from data.frames import usual_columns
from data.statistics.stats import compute, numeric_columns

DELTA_T = "delta_t"
"""Column with the seconds since the previous observation, in recordings of a server."""

_LOOKS, _FRAMES, _THUMB = 6, 8, 16
_SHARE, _BEYOND = 0.01, 1.0
_ALIKE, _DARK, _LIKE = 0.04, 0.12, 0.5
"""Limits: the root mean square distance of mean images that needs no explanation, as a part of
white; the same for mean brightness; and the distance after undoing a mistake, as a part of the
distance before."""
_UNITS = {57.29578: "degrees and radians", 1000.0: "metres and millimetres"}
_WITHIN = 0.05

Picture = Float[np.ndarray, "h w 3"]
MISTAKES: Mapping[str, Callable[[Picture], Picture]] = {
    "its red and blue channels are swapped": lambda x: x[..., ::-1],
    "it is upside-down": lambda x: x[::-1],
    "it is mirrored left to right": lambda x: x[:, ::-1],
    "it is turned by 180°": lambda x: x[::-1, ::-1],
    "it is upside-down, and its red and blue channels are swapped": lambda x: x[::-1, :, ::-1],
    "it is turned by 180°, and its red and blue channels are swapped": lambda x: x[
        ::-1, ::-1, ::-1
    ],
}
"""Common mistakes with images; each undoes itself."""


@dataclass(frozen=True)
class DimDifference:
    """One dim of a column (by its name in the first) in both recordings. `first` and `second` hold
    min, q01, q50, q99 and max. `outside`: share of the second's frames beyond the first's least and
    greatest value; `beyond`: the farthest of them, in half ranges (q01 to q99) of the first, 0 if
    none is."""

    column: str
    name: str
    first: tuple[float, ...]
    second: tuple[float, ...]
    outside: float
    beyond: float


@dataclass(frozen=True)
class CameraLooks:
    """Images of a camera: [height, width], and mean and standard deviation of red, green and
    blue, of 0 to 1."""

    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class RecordingFacts:
    """Facts about one recording. `delta_t` is the median and the greatest time between frames, in
    seconds, if recorded. `prompts` gives the number of episodes of each, `columns` the names of
    their dims."""

    path: str
    robot: str | None
    fps: float
    episodes: int
    frames: int
    delta_t: tuple[float, float] | None
    columns: Mapping[str, tuple[str, ...]]
    cameras: Mapping[str, CameraLooks]
    prompts: Mapping[str, int]


@dataclass(frozen=True)
class RecordingDifference:
    """Two recordings beside each other, and sentences about the differences that matter."""

    first: RecordingFacts
    second: RecordingFacts
    dims: tuple[DimDifference, ...]
    findings: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """The whole comparison as JSON values."""
        return asdict(self)


def difference(first: Dataset, second: Dataset, report: Report) -> RecordingDifference:
    """Compares two recordings; `findings` say how the second departs from the first.

    Raises:
      ValueError: one has no frames.
      DatasetError: a column or image cannot be read.
    """
    sets = (first, second)
    shared, lacking = _paired(first, second)
    fit = {a: b for a, b in shared.items() if _dims(first, a) == _dims(second, b)}
    looks = [_looks(one, report) for one in sets]
    facts = tuple(
        _facts(one, {name: camera.looks for name, camera in seen.items()})
        for one, seen in zip(sets, looks, strict=True)
    )
    dims = tuple(_compared(first, second, fit, report))
    unlike = (
        f"Column '{a}' has {_dims(first, a)} dims in the first and {_dims(second, b)} in the "
        "second."
        for a, b in shared.items()
        if a not in fit
    )
    findings = [
        *_of_facts(facts[0], facts[1], shared),
        *lacking,
        *unlike,
        *(line for dim in dims for line in _of_dim(dim)),
        *_of_pictures(looks[0], looks[1]),
    ]
    return RecordingDifference(facts[0], facts[1], dims, tuple(findings))


def _paired(first: Dataset, second: Dataset) -> tuple[dict[str, str], list[str]]:
    """The second's name for each column that both have, where states (and actions) go by any of
    their usual names; and a sentence for each state or action that one of the two lacks."""
    ours, theirs = (
        [n for n in numeric_columns(one) if n not in (*BOOKKEEPING, DELTA_T)]
        for one in (first, second)
    )
    pairs, lacking = {name: name for name in ours if name in theirs}, list[str]()
    for a, b in zip(usual_columns(ours), usual_columns(theirs), strict=True):
        if len(a) == len(b) == 1:
            pairs |= {a[0]: b[0]}
            continue
        for which, names, others in (("second", a, theirs), ("first", b, ours)):
            lacking += [f"The {which} has no column '{n}'." for n in names if n not in others]
    return pairs, lacking


@dataclass(frozen=True, eq=False)
class _Seen:
    """Facts about a camera's images, and a small version of their mean."""

    looks: CameraLooks
    mean: Float64[np.ndarray, "h w 3"]


def _facts(dataset: Dataset, cameras: Mapping[str, CameraLooks]) -> RecordingFacts:
    kept = [name for name in numeric_columns(dataset) if name not in BOOKKEEPING]
    return RecordingFacts(
        path=str(dataset.root),
        robot=dataset.robot_type,
        fps=float(dataset.fps),
        episodes=len(dataset.lengths),
        frames=int(dataset.lengths.sum()),
        delta_t=_delta_t(dataset),
        columns={name: _names(dataset, name) for name in kept},
        cameras=cameras,
        prompts=dict(first_prompts(dataset).most_common()),
    )


def _dims(dataset: Dataset, name: str) -> int:
    return int(np.prod(dataset.features[name]["shape"]))


def _names(dataset: Dataset, name: str) -> tuple[str, ...]:
    return tuple(dimension_names(dataset.features[name].get("names"), _dims(dataset, name)))


def _delta_t(dataset: Dataset) -> tuple[float, float] | None:
    """Median and greatest time between two frames of an episode."""
    name = next((n for n in (DELTA_T, "timestamp") if n in dataset.column_names), None)
    if name is None:
        return None
    values = np.concatenate([np.ravel(block[name]) for block in dataset.stream([name])])
    starts = np.cumsum(dataset.lengths) - dataset.lengths
    inside = np.ones(len(values), bool)
    inside[starts[dataset.lengths > 0]] = False
    steps = values[inside] if name == DELTA_T else np.diff(values, prepend=0)[inside]
    return (float(np.median(steps)), float(steps.max())) if len(steps) else None


def _compared(
    first: Dataset, second: Dataset, names: Mapping[str, str], report: Report
) -> Iterator[DimDifference]:
    if not names:
        return
    ours = compute(first, None, list(names), report)
    others = compute(second, None, list(names.values()), report)
    frames = int(second.lengths.sum())
    for name, other in names.items():
        a, b = ({k: np.ravel(v) for k, v in of.items()} for of in (ours[name], others[other]))
        slack = 1e-6 * np.maximum(np.abs(a["min"]), np.abs(a["max"])) + 1e-9
        outside = np.zeros(len(a["min"]), np.int64)
        for block in second.stream([other]):
            values = block[other].reshape(len(block[other]), -1)
            outside += ((values < a["min"] - slack) | (values > a["max"] + slack)).sum(0)
        half = np.maximum((a["q99"] - a["q01"]) / 2, slack)
        beyond = np.maximum(a["min"] - b["min"], b["max"] - a["max"]) / half
        for d, dim in enumerate(_names(first, name)):
            quantiles = ("min", "q01", "q50", "q99", "max")
            yield DimDifference(
                column=name,
                name=dim,
                first=tuple(float(a[q][d]) for q in quantiles),
                second=tuple(float(b[q][d]) for q in quantiles),
                outside=float(outside[d] / frames),
                beyond=float(max(beyond[d], 0.0)) if outside[d] else 0.0,
            )


def _looks(dataset: Dataset, report: Report) -> dict[str, _Seen]:
    """Cameras by name, from a few images of a few episodes."""
    found = {}
    for c, camera in enumerate(dataset.cameras):
        there = np.flatnonzero(dataset.present[:, c] & (dataset.lengths > 0))
        if not len(there):
            continue
        chosen = np.unique(there[np.linspace(0, len(there) - 1, _LOOKS).round().astype(int)])
        thumbs: list[Picture] = []
        means, squares, size = [], [], (0, 0)
        for n, episode in enumerate(chosen.tolist()):
            last = int(dataset.lengths[episode]) - 1
            at = np.unique(np.linspace(0, last, _FRAMES).round().astype(np.int64))
            seen = frames_at(dataset, episode, camera, at)
            size = seen.shape[1:3]
            thumbs += map(_thumb, seen)
            means.append((seen / 255.0).mean((0, 1, 2)))
            squares.append(((seen / 255.0) ** 2).mean((0, 1, 2)))
            report(f"Looking at {camera}", n + 1, len(chosen))
        mean = np.mean(means, axis=0)
        std = np.sqrt(np.maximum(np.mean(squares, axis=0) - mean**2, 0))
        looks = CameraLooks(size, tuple(mean.tolist()), tuple(std.tolist()))
        found[camera] = _Seen(looks, np.mean(thumbs, axis=0))
    return found


def _thumb(picture: UInt8[np.ndarray, "_h _w 3"]) -> Float64[np.ndarray, "h w 3"]:
    small = Image.fromarray(picture).resize((_THUMB, _THUMB), Image.Resampling.BOX)
    return np.asarray(small) / 255.0


def _of_facts(
    first: RecordingFacts, second: RecordingFacts, shared: Mapping[str, str]
) -> Iterator[str]:
    if first.fps != second.fps:
        yield f"The first has {first.fps:g} frames per second, the second {second.fps:g}."
    if first.delta_t and second.delta_t and second.delta_t[1] > 3 * second.delta_t[0]:
        yield (
            f"Frames of the second are up to {second.delta_t[1]:.3g} s apart, but "
            f"{second.delta_t[0]:.3g} s at the median: its recording was held up."
        )
    for name, its in shared.items():
        dims, theirs = first.columns[name], second.columns[its]
        if len(theirs) == len(dims) and theirs != dims:
            moved = "in another order" if sorted(theirs) == sorted(dims) else "under other names"
            yield f"Column '{name}' has its dims {moved}: {list(dims)} and {list(theirs)}."
    for one, other, which in ((first, second, "second"), (second, first, "first")):
        lacking = sorted(set(_short(one.cameras)) - set(_short(other.cameras)))
        if lacking:
            yield f"The {which} has no camera {', '.join(map(repr, lacking))}."
    strange = [prompt for prompt in second.prompts if prompt not in first.prompts]
    if strange:
        yield (
            f"{len(strange)} of the second's {len(second.prompts)} prompts are not in the first, "
            f"such as {strange[0][:80]!r}."
        )


def _short(cameras: Mapping[str, Any]) -> dict[str, str]:
    """Full names by their last parts."""
    return {name.rpartition(".")[2]: name for name in cameras}


def _of_dim(dim: DimDifference) -> Iterator[str]:
    """At most one sentence: the likeliest cause of values out of place."""
    low, high = dim.first[1], dim.first[3]
    other_low, other_high = dim.second[1], dim.second[3]
    spread, theirs = high - low, other_high - other_low
    where = f"{dim.column} '{dim.name}'"
    size = max(abs(low), abs(high), 1e-9)
    if theirs <= 1e-6 * size < spread:
        yield f"{where} never changes in the second, but spreads by {spread:.3g} in the first."
        return
    for factor, units in _UNITS.items():
        for ratio in (factor, 1 / factor):
            if spread > 1e-6 * size and abs(theirs / spread / ratio - 1) < _WITHIN:
                yield f"{where} varies {ratio:.3g} times as much in the second: {units}?"
                return
    near = 0.1 * max(spread, 1e-9)
    mirrored = abs(other_low + high) < near and abs(other_high + low) < near
    same = abs(other_low - low) < near and abs(other_high - high) < near
    if mirrored and not same:
        yield f"{where} has the opposite sign in the second."
    elif dim.outside > _SHARE and dim.beyond > _BEYOND:
        yield (
            f"{where} is outside the first's range in {100 * dim.outside:.3g} % of the second's "
            f"frames, by up to {dim.beyond:.3g} half ranges."
        )


def _of_pictures(first: Mapping[str, _Seen], second: Mapping[str, _Seen]) -> Iterator[str]:
    ours, theirs = _short(first), _short(second)
    for name in [name for name in ours if name in theirs]:
        a, b = first[ours[name]], second[theirs[name]]
        if a.looks.size != b.looks.size:
            yield (
                f"Camera '{name}' has images of {_by(a.looks.size)} in the first and "
                f"{_by(b.looks.size)} in the second."
            )
        plain = _apart(a.mean, b.mean)
        if plain <= _ALIKE:
            continue
        tried = {why: _apart(a.mean, undo(b.mean)) for why, undo in MISTAKES.items()}
        distance = partial(_apart, b.mean)
        tried |= {
            f"it shows what camera '{other}' shows there": distance(first[full].mean)
            for other, full in ours.items()
            if other != name
        }
        why = min(tried, key=lambda why: tried[why])
        if tried[why] < _LIKE * plain:
            yield f"Camera '{name}' of the second resembles the first's best if {why}."
        darker = float(np.mean(b.looks.mean) - np.mean(a.looks.mean))
        if abs(darker) > _DARK:
            yield (
                f"Camera '{name}' is {'brighter' if darker > 0 else 'darker'} in the second: mean "
                f"{np.mean(b.looks.mean):.2f} instead of {np.mean(a.looks.mean):.2f}, where white "
                "is 1."
            )


def _apart(a: Picture, b: Picture) -> float:
    return float(np.sqrt(np.mean((a - b) ** 2)))


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]} × {size[1]} pixels"
