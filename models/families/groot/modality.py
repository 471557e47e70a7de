"""`meta/modality.json`, in which GR00T's datasets describe the columns of a LeRobot dataset: parts
of the state and of the actions by name, each a range of a column, and names of cameras.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.files.foreign_json import read_json, section

NAME = "meta/modality.json"
_COLUMNS = {"state": "observation.state", "action": "action"}

Range = tuple[int, int]


@dataclass(frozen=True)
class Modality:
    """`state` and `action`: the range [first, last) of each part, by name, in the order in which a
    policy reads them. `video`: the dataset's camera for each name. `annotation`: names of the
    tasks."""

    state: Mapping[str, Range]
    action: Mapping[str, Range]
    video: Mapping[str, str]
    annotation: Sequence[str] = ()


def read_modality(file: Path) -> Modality:
    """Contents of a modality.json.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a range or a camera is not written as in GR00T's files, or a part is of a column
        other than the state's and the actions'.
    """
    values, where = read_json(Path(file)), str(file)
    parts = {kind: section(values, kind, where) for kind in ("state", "action", "video")}
    absent = [kind for kind, found in parts.items() if not found]
    if absent:
        raise ValueError(
            f"{where} has no {absent[0]}; a modality.json has state, action and video."
        )
    return Modality(
        state=_ranges(parts["state"], "state", where),
        action=_ranges(parts["action"], "action", where),
        video={
            name: str(
                section(parts["video"], name, where).get("original_key")
                or f"observation.images.{name}"
            )
            for name in parts["video"]
        },
        annotation=tuple(section(values, "annotation", where)),
    )


def dataset_cameras(
    local: Callable[[str], Path | None], columns: Mapping[str, int], where: str
) -> dict[str, str] | None:
    """Cameras of a dataset by their names for the model, in the model's order, from its
    modality.json, whose ranges are compared with the columns; None if it has no such file.

    Args:
      local: the path of one of the dataset's files by its name; None if it has none.

    Raises:
      ValueError: as `read_modality` and `check_modality`.
    """
    if (file := local(NAME)) is None:
        return None
    found = read_modality(file)
    check_modality(found, columns, f"{where}/{NAME}")
    return dict(found.video)


def check_modality(modality: Modality, columns: Mapping[str, int], where: str) -> None:
    """Raises ValueError unless the parts cover all dims of a dataset's columns, each once and in
    order. Its statistics and its chunks are read in that order.

    Args:
      columns: dims of each column by name.
    """
    for kind, column in _COLUMNS.items():
        parts, whole = getattr(modality, kind), columns.get(column, 0)
        for name, (first, last) in parts.items():
            if last > whole:
                raise ValueError(
                    f"{where}: {kind}.{name} is {first} to {last}, but the dataset's {column} has "
                    f"{whole} dims; correct the range."
                )
        if dims(parts) != list(range(whole)):
            raise ValueError(
                f"{where}: the parts of {kind} are dims {dims(parts)} of {column}, which has "
                f"{whole}; only all of them in order can be read. To choose some, use a transform "
                "in a mixture (docs/mixtures.md) and remove modality.json."
            )


def dims(ranges: Mapping[str, Range]) -> list[int]:
    """The dims of a column that the parts have, in their order."""
    return [d for first, last in ranges.values() for d in range(first, last)]


def write_modality(modality: Modality, file: Path) -> None:
    """Writes a modality.json, and creates its folder."""

    def told(ranges: Mapping[str, Range]) -> dict[str, Any]:
        return {name: {"start": first, "end": last} for name, (first, last) in ranges.items()}

    values = {
        "state": told(modality.state),
        "action": told(modality.action),
        "video": {name: {"original_key": key} for name, key in modality.video.items()},
        "annotation": {name: {"original_key": "task_index"} for name in modality.annotation},
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(values, indent=2) + "\n")


def _ranges(parts: dict[str, Any], kind: str, where: str) -> dict[str, Range]:
    found = {}
    for name in parts:
        told = section(parts, name, where)
        first, last = told.get("start"), told.get("end")
        if type(first) is not int or type(last) is not int or not 0 <= first < last:
            raise ValueError(
                f"{where}: {kind}.{name} has start {str(first)[:20]} and end {str(last)[:20]}; "
                "expected whole numbers, start below end."
            )
        if told.get("original_key", _COLUMNS[kind]) != _COLUMNS[kind]:
            raise ValueError(
                f"{where}: {kind}.{name} has original_key {str(told['original_key'])[:60]}; only "
                f"parts of {_COLUMNS[kind]} can be read."
            )
        found[name] = first, last
    return found
