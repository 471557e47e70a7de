"""Reads the meta/ folder of a LeRobot dataset, whatever version wrote it.

Templates in info.json name the files. Unknown keys and features are left alone, since LeRobot and
its users add some with every release.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Int64

from data.columns import arrow_type
from data.errors import DatasetError, MissingFileError, naming_damage, short
from data.files.folder import Folder
from data.files.json_file import read_json
from data.files.names import fill, pattern, plain_name

VISUAL = ("video", "image")
JOURNAL = "meta/recording.jsonl"
"""File of a recording that is in progress or was interrupted; only the episodes that meta/episodes
lists count."""
_INFO = "meta/info.json"


class Metadata(Protocol):
    """Episodes 0..e-1 as meta/ lists them, by ascending `numbers` (their `episode_index`).

    `texts` are the instructions listed for each episode (list<string>, None if there are none).
    `hints` is the data file, of `num_data_files`, that should hold the episode; with `wanders`, the
    episode may still be in another one. `listing` is the file that this information comes from.
    """

    listing: str
    tasks_file: str
    numbers: Int64[np.ndarray, " e"]
    lengths: Int64[np.ndarray, " e"]
    texts: pa.ListArray | None
    hints: Int64[np.ndarray, " e"]
    num_data_files: int
    wanders: bool

    def data_file(self, file: int) -> str:
        """Name of a parquet file."""
        ...

    def video(self, episode: int, camera: str) -> tuple[str, float]:
        """Name of the mp4 that holds an episode, and the time in seconds at which the episode
        starts in it."""
        ...

    def has_video(self, camera: str) -> Bool[np.ndarray, " e"]:
        """Mask of the episodes that have this camera of dtype video."""
        ...

    def tasks(self) -> dict[int, str]:
        """Instruction by task index."""
        ...


def read_info(folder: Folder) -> dict[str, Any]:
    """Content of info.json, with everything checked that reading depends on.

    Raises:
      MissingFileError: it is missing, so there is no dataset.
      DatasetError: it is not JSON, of an unknown version or storage, or lacks fps or features.
    """
    path = folder.path(_INFO)
    if not folder.exists(_INFO):
        raise MissingFileError(
            path,
            "file",
            f"is missing, so {folder.url} is not a LeRobot dataset; give the folder that holds "
            "meta/.",
        )
    info = read_json(folder.local(_INFO), path, "copy it again")
    version = info.get("codebase_version") if isinstance(info, dict) else None
    if not isinstance(version, str) or not version.startswith(("v2.", "v3.")):
        raise DatasetError(
            path,
            "codebase_version",
            f"is {short(version)}, but this reader knows v2.0, v2.1 and v3.0; "
            "convert the dataset with the LeRobot that wrote it.",
        )
    storage = info.get("storage_format", "parquet")
    if storage != "parquet":
        raise DatasetError(
            path,
            "storage_format",
            f"is {short(storage)}, but only parquet is read; export the dataset with LeRobot.",
        )
    for field, good, what in (
        ("fps", is_fps(info.get("fps")), "a positive number"),
        ("features", _are_features(info.get("features")), "features with a dtype and a shape"),
        ("total_episodes", info.get("total_episodes") != 0, "at least one episode"),
    ):
        if not good:
            raise DatasetError(
                path,
                field,
                f"is {short(info.get(field))}, expected {what}; record or copy it again.",
            )
    remedy = "{reason}; rename it there and in the files."
    with naming_damage(path, "features", remedy, caught=(ValueError,)):
        for name in info["features"]:
            plain_name(name)
    remedy = "{reason}; write the robot's name there."
    with naming_damage(path, "robot_type", remedy, caught=(ValueError,)):
        plain_name(robot_type(info) or "unknown")
    return info


def file_name(folder: Folder, info: Mapping[str, Any], field: str, **values: str | int) -> str:
    """The file name from the template `field` of info.json.

    Raises:
      DatasetError: it is not a template of these values.
    """
    return _made(fill, folder, info, field, values)


def file_pattern(folder: Folder, info: Mapping[str, Any], field: str) -> str:
    """A glob pattern of all files that the template `field` names.

    Raises:
      DatasetError: it is not a template of these files.
    """
    return _made(pattern, folder, info, field, _PLACES)


def by_number(name: str) -> list[str | int]:
    """Sort key that puts file-1000 after file-999."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def one_text_each(file: Path | str, indices: Iterable[int], texts: Iterable[str]) -> dict[int, str]:
    """The texts by their index.

    Raises:
      DatasetError: an index has two texts.
    """
    found: dict[int, str] = {}
    for index, text in zip(indices, texts, strict=True):
        if found.setdefault(index, text) != text:
            raise DatasetError(
                file,
                f"task_index {index}",
                f"has two texts, {short(found[index])} and {short(text)}; keep the one that its "
                "episodes show.",
            )
    return found


def robot_type(info: Mapping[str, Any]) -> str | None:
    """The robot's name in info.json; None if it is empty or not text."""
    name = info.get("robot_type")
    return name if isinstance(name, str) and name else None


def is_depth(feature: Mapping[str, Any]) -> bool:
    """True for a camera whose pixels are distances, which LeRobot marks with `is_depth_map`: in
    `info`, in `video_info` or beside them, with or without "video." before it, by its version."""
    places = (feature, feature.get("info"), feature.get("video_info"))
    marks = ("is_depth_map", "video.is_depth_map")
    return feature["dtype"] in VISUAL and any(
        isinstance(place, dict) and place.get(mark) for place in places for mark in marks
    )


def is_fps(value: object) -> bool:
    """True for a number of frames per second."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e6


_MOST_AXES, _MOST_VALUES = 16, 1 << 28
"""Limits of a feature's shape; an image of 64 megapixels has fewer values."""
_NUMBERS = ("chunk_index", "file_index", "episode_chunk", "episode_index")
_PLACES = {**dict.fromkeys(_NUMBERS, int), "video_key": str}


def _made(
    make: Callable[..., str], folder: Folder, info: Mapping[str, Any], field: str, fields: Any
) -> str:
    try:
        return make(info.get(field), **fields)
    except ValueError as error:
        raise DatasetError(
            folder.path(_INFO),
            field,
            f"is {short(info.get(field))}, expected a template with {', '.join(fields)} for files "
            f"inside the dataset ({error}); copy the file again, or do not use this dataset.",
        ) from None


def _are_features(features: object) -> bool:
    return isinstance(features, dict) and all(map(_is_feature, features.values()))


def _is_feature(feature: object) -> bool:
    if not isinstance(feature, dict) or not isinstance(feature.get("dtype"), str):
        return False
    if feature["dtype"] not in VISUAL and arrow_type(feature["dtype"]) is None:
        return True  # a kind that is not read
    shape = feature.get("shape")
    if not isinstance(shape, list | tuple) or len(shape) > _MOST_AXES:
        return False
    counts = (isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in shape)
    return all(counts) and math.prod(shape) <= _MOST_VALUES
