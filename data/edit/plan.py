"""Plan of an edited LeRobot dataset: which frames of which episodes it has, under which names.

The plan uses only metadata, so that a mistake in a command is found before anything is written.
Episodes are numbered from 0 across all datasets that are joined, in their order.
"""

import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Int64

from data.columns import BOOKKEEPING, arrow_type
from data.dataset import flat_names, picture_shape
from data.edit.subtasks import require_one_numbering
from data.errors import DatasetError, short
from data.files.names import require_plain
from data.lerobot.dataset import LeRobotDataset
from data.lerobot.metadata import VISUAL, is_depth
from data.lerobot.recording import video_feature, video_info
from data.video.encoding import VideoEncoding

T = TypeVar("T")
Numbers = tuple[int, ...]
"""Episode numbers."""


class Trim(NamedTuple):
    """Frames to keep of `episodes` (None: all), from `first` to `stop` (exclusive; None: the
    end)."""

    episodes: Numbers | None
    first: int
    stop: int | None


@dataclass(frozen=True)
class Edit:
    """Changes to make; defaults change nothing.

    `delete` and `keep` choose episodes; `order` lists those that come first, and the others follow.
    `splits` are names with the episodes of each, or with shares of all, in order. `tasks` gives
    episodes (None: all) an instruction; the last one that names an episode counts. `task_names`
    replaces old wordings by new ones. `names` renames columns and cameras; `drop` removes some.
    `casts` gives columns, by their old names, another numpy type.
    With `encoding`, all images are encoded again. `fps` is a lower rate, at which the nearest
    frames are kept. `robot` is another robot's name.
    """

    delete: Numbers = ()
    keep: Numbers | None = None
    order: Numbers = ()
    splits: tuple[tuple[str, Numbers | float], ...] = ()
    trims: tuple[Trim, ...] = ()
    tasks: tuple[tuple[Numbers | None, str], ...] = ()
    task_names: tuple[tuple[str, str], ...] = ()
    names: tuple[tuple[str, str], ...] = ()
    drop: tuple[str, ...] = ()
    casts: tuple[tuple[str, str], ...] = ()
    encoding: VideoEncoding | None = None
    fps: float | None = None
    robot: str = ""


class Part(NamedTuple):
    """Frames of an episode of a source, in order: those `at`, or all if None. If `task` is not
    empty, it replaces the instructions of all of them."""

    source: int
    episode: int
    length: int
    at: Int64[np.ndarray, " t"] | None
    task: str


@dataclass(frozen=True)
class EditPlan:
    """A dataset to write; `parts` are its episodes.

    `features` are its columns and cameras, without bookkeeping; `names` maps them to each source's
    names, and `casts` those of columns that change their type to it. `encoding` is None if packets
    are copied.
    """

    sources: tuple[LeRobotDataset, ...]
    parts: tuple[Part, ...]
    features: Mapping[str, Mapping[str, Any]]
    names: tuple[Mapping[str, str], ...]
    task_names: Mapping[str, str]
    encoding: VideoEncoding | None
    fps: float
    robot: str | None
    casts: Mapping[str, str]

    @property
    def num_frames(self) -> int:
        """Frames of all episodes."""
        return sum(part.length for part in self.parts)

    @property
    def cameras(self) -> tuple[str, ...]:
        """Cameras that are videos in the new dataset."""
        return tuple(n for n, f in self.features.items() if f["dtype"] == "video")

    @property
    def work(self) -> int:
        """Frames to write, counted once for the rows and once for each camera."""
        return self.num_frames * (1 + len(self.cameras))

    def to_json(self) -> dict[str, Any]:
        """Everything that determines what is written, as plain data."""
        return {
            "sources": [source.digest for source in self.sources],
            "parts": [
                [part.source, part.episode, part.length, part.task]
                + ([] if part.at is None else [part.at.tolist()])
                for part in self.parts
            ],
            "names": [dict(names) for names in self.names],
            "features": list(self.features),
            "task_names": dict(self.task_names),
            "encoding": None if self.encoding is None else vars(self.encoding),
            "fps": self.fps,
            "robot": self.robot,
        } | ({"casts": dict(self.casts)} if self.casts else {})


def plan_edit(sources: Sequence[LeRobotDataset], edit: Edit) -> dict[str, EditPlan]:
    """Plans of the datasets to write, by the name of the split; without splits, one named "".

    Raises:
      ValueError: the edit names something that does not exist, leaves nothing, or joins datasets
        that differ; says which.
    """
    names = _names(sources, edit)
    fps = _rate(sources, edit)
    resampled = any(source.fps != fps for source in sources)
    encoding = (edit.encoding or VideoEncoding()) if resampled else edit.encoding
    known = [(s, i) for s, source in enumerate(sources) for i in range(source.num_episodes)]
    for _, text in edit.tasks:
        _require_text(text)
    trims = _last_given("trim", ((trim.episodes, trim) for trim in edit.trims), len(known))
    tasks = _last_given("task", edit.tasks, len(known))
    whole = EditPlan(
        sources=tuple(sources),
        parts=(),
        features=_features(sources, names, edit, encoding, fps),
        names=names,
        task_names=_task_names(sources, edit),
        encoding=encoding,
        fps=fps,
        robot=edit.robot or sources[0].robot_type,
        casts=dict(edit.casts),
    )
    chosen = _chosen(edit, len(known))
    parts = {
        number: _part(
            sources, number, *known[number], trims.get(number), tasks.get(number, ""), fps
        )
        for number in chosen
    }
    return {
        name: replace(whole, parts=tuple(parts[number] for number in numbers))
        for name, numbers in _splits(edit, chosen).items()
    }


def _chosen(edit: Edit, count: int) -> list[int]:
    """Episodes that stay, in their new order."""
    keep = range(count) if edit.keep is None else edit.keep
    for what, numbers in (("delete", edit.delete), ("keep", keep), ("order", edit.order)):
        _require_known(what, numbers, count)
    kept = sorted(set(keep) - set(edit.delete))
    lost = sorted(set(edit.order) - set(kept))
    if lost:
        raise ValueError(
            f"order names episode {lost[0]}, which the edit removes; delete it "
            "from order, or keep the episode."
        )
    if not kept:
        raise ValueError(f"The edit removes all {count} episodes; keep at least one.")
    first = set(edit.order)
    return [*edit.order, *(number for number in kept if number not in first)]


def _splits(edit: Edit, chosen: list[int]) -> dict[str, list[int]]:
    if not edit.splits:
        return {"": chosen}
    found: dict[str, list[int]] = {}
    known, taken = set(chosen), set[int]()
    at = 0
    for name, said in edit.splits:
        require_plain(name, "split")
        if name in found:
            raise ValueError(f"split '{name}' is named twice; give each split its own name.")
        if isinstance(said, float):
            if not 0 < said <= 1:
                raise ValueError(
                    f"split '{name}' has share {said:g}; give a share above 0 and at most 1."
                )
            stop = min(len(chosen), at + max(1, int(said * len(chosen) + 1e-9)))
            found[name], at = chosen[at:stop], stop
        else:
            named = set(said)
            if lost := sorted(named - known):
                raise ValueError(
                    f"split '{name}' names episode {lost[0]}, which does not exist or is removed "
                    "by the edit; leave it out of the split."
                )
            found[name] = [number for number in chosen if number in named]
        if not found[name]:
            raise ValueError(f"split '{name}' has no episodes; give it some or leave it out.")
        if twice := taken & set(found[name]):
            raise ValueError(f"Episode {min(twice)} is in two splits; name it once.")
        taken |= set(found[name])
    if all(isinstance(said, float) for _, said in edit.splits):
        total = sum(float(said) for _, said in edit.splits if isinstance(said, float))
        if total > 1 + 1e-9:
            raise ValueError(
                f"The shares of the splits add up to {total:g}; give at most 1 in total."
            )
        if total > 1 - 1e-9:  # left over by rounding
            found[edit.splits[-1][0]] += chosen[at:]
    return found


def _last_given(what: str, given: Iterable[tuple[Numbers | None, T]], count: int) -> dict[int, T]:
    """By episode, the last of the values that are given to it, if any is."""
    found = {}
    for numbers, value in given:
        for number in range(count) if numbers is None else numbers:
            _require_known(what, (number,), count)
            found[number] = value
    return found


def _task_names(sources: Sequence[LeRobotDataset], edit: Edit) -> dict[str, str]:
    told = {text for source in sources for text in source.tasks.values()}
    told |= {wording for source in sources for prompt in source.prompts for wording in prompt}
    for old, new in edit.task_names:
        _require_text(new)
        if old not in told:
            raise ValueError(
                f"There is no task {short(old)} to rename, only {short(sorted(told))}; give its "
                "exact text."
            )
    return dict(edit.task_names)


def _part(
    sources: Sequence[LeRobotDataset],
    number: int,
    source: int,
    episode: int,
    trim: Trim | None,
    task: str,
    fps: float,
) -> Part:
    length, own = int(sources[source].lengths[episode]), sources[source].fps
    first, stop = (0, length) if trim is None else (trim.first, trim.stop)
    stop = length if stop is None else stop
    if not 0 <= first < stop <= length:
        raise ValueError(
            f"Episode {number} has frames 0 to {length - 1}, but trim keeps {first} to {stop - 1}; "
            "keep at least one frame, and only frames that exist."
        )
    if own == fps:
        whole = (first, stop) == (0, length)
        return Part(source, episode, stop - first, None if whole else np.arange(first, stop), task)
    step = own / fps
    kept = int((stop - first - 1) / step + 1e-9) + 1
    at = first + np.floor(np.arange(kept) * step + 0.5).astype(np.int64)
    return Part(source, episode, kept, np.minimum(at, stop - 1), task)


def _rate(sources: Sequence[LeRobotDataset], edit: Edit) -> float:
    rates = sorted({source.fps for source in sources})
    if edit.fps is None:
        if len(rates) > 1:
            raise ValueError(
                f"The datasets have {', '.join(f'{rate:g}' for rate in rates)} fps; give a rate "
                "for all of them with fps."
            )
        return rates[0]
    if not 0 < edit.fps <= rates[0]:
        raise ValueError(
            f"fps is {edit.fps:g}, but a dataset has {rates[0]:g}; frames can be left out but not "
            f"added, so give a rate above 0 and at most {rates[0]:g}."
        )
    return int(edit.fps) if edit.fps == int(edit.fps) else edit.fps


def _names(sources: Sequence[LeRobotDataset], edit: Edit) -> tuple[dict[str, str], ...]:
    """Each source's names for the columns and cameras of the new dataset."""
    renamed, there = dict(edit.names), {name for source in sources for name in source.features}
    casts = dict(edit.casts)
    for what, named in (("rename", renamed), ("drop", edit.drop), ("cast", casts)):
        for name in named:
            if name in BOOKKEEPING or renamed.get(name) in BOOKKEEPING:
                raise ValueError(
                    f"{what} names '{name}', but every LeRobot dataset has the columns "
                    f"{', '.join(BOOKKEEPING)}; leave them as they are."
                )
            if name not in there:
                raise ValueError(
                    f"{what} names '{name}', but the columns and cameras are "
                    f"{', '.join(sorted(there - set(BOOKKEEPING)))}."
                )
    for name, dtype in casts.items():
        kind = arrow_type(dtype)
        told = {source.features[name]["dtype"] for source in sources if name in source.features}
        if kind is None or dtype == "string" or told & {*VISUAL, "string"}:
            raise ValueError(
                f"cast gives '{name}' ({', '.join(sorted(told))}) the type {short(dtype)}; name a "
                "column of numbers, and a type such as float32, int64 or bool."
            )
    for new in renamed.values():
        require_plain(new, "rename:")
    if edit.robot:
        require_plain(edit.robot, "robot:")
    found = []
    for source in sources:
        kept = [n for n in source.features if n not in BOOKKEEPING and n not in edit.drop]
        called = [renamed.get(name, name) for name in kept]
        twice = [name for name in called if called.count(name) > 1]
        if twice:
            raise ValueError(
                f"{source.root}: would have two columns named '{twice[0]}'; choose another name, "
                "or drop one of them."
            )
        if not kept:
            raise ValueError(f"{source.root}: no columns or cameras would be left; drop fewer.")
        found.append(dict(zip(called, kept, strict=True)))
    return tuple(found)


def _features(
    sources: Sequence[LeRobotDataset],
    names: Sequence[Mapping[str, str]],
    edit: Edit,
    encoding: VideoEncoding | None,
    fps: float,
) -> dict[str, Any]:
    """Features of the new dataset, which every source shares."""
    casts = {name: {"dtype": dtype} for name, dtype in edit.casts}
    of_source = [
        {new: {**source.features[old], **casts.get(old, {})} for new, old in mapping.items()}
        for source, mapping in zip(sources, names, strict=True)
    ]
    first = of_source[0]
    for source, features in zip(sources, of_source, strict=True):
        for name, feature in features.items():
            if feature["dtype"] not in VISUAL and arrow_type(feature["dtype"]) is None:
                raise DatasetError(
                    source.path("meta/info.json"),
                    f"feature '{name}'",
                    f"has dtype {short(feature['dtype'])}, which cannot be edited; drop it.",
                )
        for unlike in _unlike(first, features):
            raise ValueError(
                f"{sources[0].root} and {source.root} cannot be joined: {unlike}; rename or drop "
                "it, or join other datasets."
            )
        robots = {sources[0].robot_type, source.robot_type}
        if len(robots) > 1 and not edit.robot:
            raise ValueError(
                f"{sources[0].root} shows the robot {short(sources[0].robot_type)} and "
                f"{source.root} {short(source.robot_type)}; if they are the same robot, name it "
                "with robot."
            )
    require_one_numbering(sources, names, first)
    return {
        name: feature
        if encoding is None or feature["dtype"] not in (VISUAL if edit.encoding else ("video",))
        else _encoded(name, feature, encoding, fps)
        for name, feature in first.items()
    }


def _encoded(
    name: str, feature: Mapping[str, Any], encoding: VideoEncoding, fps: float
) -> Mapping[str, Any]:
    """Feature of a camera whose images, in parquet too, are encoded as video."""
    if is_depth(feature):
        raise ValueError(
            f"'{name}' is a depth camera, whose values would be lost by encoding it again; drop "
            "it, or leave codec and fps as they are."
        )
    size = picture_shape(feature)
    if size is None:
        raise ValueError(
            f"'{name}' has shape {short(feature['shape'])}, which is not the shape of an image; "
            "drop it, or leave codec and fps as they are."
        )
    if size[0] % 2 or size[1] % 2:
        raise ValueError(
            f"'{name}' has images of {size[0]} × {size[1]} pixels, but a video needs even numbers; "
            "drop it, or leave codec and fps as they are."
        )
    return {**video_feature((*size, 3)), "info": video_info(size, fps, encoding.codec)}


def _unlike(first: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    """Differences between the features of two datasets, each in words."""
    for name in [*first, *other]:
        if (name in first) != (name in other):
            yield f"only one of them has '{name}'"
            continue
        a, b = first[name], other[name]
        depths = [_depth(f) for f in (a, b)]
        if depths[0] != depths[1]:
            yield f"'{name}' has depth {depths[0]} in one and {depths[1]} in the other"
        if a["dtype"] != b["dtype"]:
            yield f"'{name}' is {a['dtype']} in one and {b['dtype']} in the other"
        shapes = [picture_shape(f) if f["dtype"] in VISUAL else tuple(f["shape"]) for f in (a, b)]
        if shapes[0] != shapes[1]:
            yield f"'{name}' has shape {shapes[0]} in one and {shapes[1]} in the other"
        labels = [flat_names(f.get("names")) for f in (a, b)]
        if a["dtype"] not in VISUAL and all(labels) and labels[0] != labels[1]:
            yield (
                f"the dimensions of '{name}' are {short(labels[0])} in one and {short(labels[1])} "
                "in the other"
            )


def _depth(feature: Mapping[str, Any]) -> dict[str, Any] | None:
    """Scale and unit of a depth camera's values, as LeRobot keeps them; None for any other."""
    if not is_depth(feature):
        return None
    places = (feature.get("info"), feature.get("video_info"))
    about = [item for place in places if isinstance(place, dict) for item in place.items()]
    told = {name.removeprefix("video."): value for name, value in about}
    return {n: v for n, v in told.items() if n.startswith("depth_") or n == "use_log"}


def _require_known(what: str, numbers: Sequence[int], count: int) -> None:
    wrong = [number for number in numbers if not 0 <= number < count]
    if wrong:
        raise ValueError(
            f"{what} names episode {wrong[0]}; there are {count}, numbered 0 to {count - 1}."
        )
    if len(set(numbers)) < len(numbers):
        twice = next(number for number, named in Counter(numbers).items() if named > 1)
        raise ValueError(f"{what} names episode {twice} twice; name it once.")


_BREAKS = {"Cc", "Zl", "Zp", "Cs"}
"""Unicode categories of control characters, line and paragraph separators, and surrogates."""


def _require_text(text: str) -> None:
    if not text.strip() or _BREAKS.intersection(map(unicodedata.category, text)):
        raise ValueError(
            f"A task would become {short(text)}; give an instruction that is not empty and has no "
            "line breaks or control characters."
        )
