"""Reads RLDS datasets (Open X-Embodiment, DROID, BridgeData) as TFDS stores them on disk, without
TensorFlow.

A dataset is a data.dataset.Dataset: columns are named by their keys within a step, joined by dots,
and LeRobot's bookkeeping columns are generated. A record holds a whole episode with its images; all
data read from it is checked against its checksum.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from jaxtyping import Bool, Int64, UInt8

from data.columns import BOOKKEEPING
from data.dataset import EpisodeAccess, Runs
from data.errors import DatasetError, MissingFileError, naming_damage, short
from data.files.folder import Folder, open_folder
from data.files.json_file import read_json
from data.files.names import fill, plain_name
from data.rlds.features import STEPS, Leaf, decode_column, decode_pictures, read_leaves
from data.rlds.index import Index, find_index, read_episode
from data.rlds.tf_example import feature_spans, feature_values
from data.rlds.tfrecord import RecordSpan
from models.files.address import parse
from models.files.terminal import logger
from models.files.user_cache import user_cache

_USUAL_FPS = 10.0
_INFO, _FEATURES = "dataset_info.json", "features.json"
_AGAIN = "{reason}; download it again."

_log = logger(__name__)


def open_rlds(
    path: str | Path,
    fps: float | None = None,
    split: str = "train",
    cache_dir: str | Path | None = None,
) -> "RldsDataset":
    """Opens the RLDS dataset in `path`, the folder with features.json or the one above it.

    Args:
      path: on disk, or a URL that `data.files.folder.open_folder` accepts; files of a URL are
        fetched first.
      fps: steps per second, which RLDS does not record; 10 with a warning if None.
      cache_dir: folder for the index of episodes that the first opening makes;
        ~/.cache/chiliad/rlds if None.

    Raises:
      MissingFileError: there is no dataset, or a file of it is missing.
      DatasetError: its metadata or a record is broken; names the file and field.
    """
    root = _version(path)
    if fps is None:
        _log.warning("%s: RLDS does not store a frame rate; assuming %g fps.", root, _USUAL_FPS)
        fps = _USUAL_FPS
    return RldsDataset(root, fps, split, Path(cache_dir or user_cache("rlds")))


class RldsDataset(EpisodeAccess):
    """One split of an RLDS dataset on disk, with episodes in the order of its shards.

    `cameras` names its image features but for `depth_cameras`, which are left out, and `features`
    describes all its columns and cameras as LeRobot's info.json does. The episode read last is
    kept. It can be pickled, and used from several threads.
    """

    def __init__(self, path: str | Path, fps: float, split: str, cache_dir: Path) -> None:
        self.fps, self.split, self._cache_dir = fps, split, cache_dir
        self.folder = open_folder(path)
        self.root: Any = str(address) if (address := parse(path)).is_remote else address.path
        self._info_path = self.folder.path(_INFO)
        self._info, features = (_json(self.folder, name) for name in (_INFO, _FEATURES))
        with naming_damage(self.folder.path(_FEATURES), "file", _AGAIN, caught=(ValueError,)):
            self._leaves = read_leaves(features)
        with naming_damage(self._info_path, "name", _AGAIN, caught=(ValueError,)):
            self.name = plain_name(self._info.get("name"))
        steps = {leaf.name: leaf for leaf in self._leaves if leaf.key.startswith(STEPS)}
        self._pictures = {name: leaf for name, leaf in steps.items() if leaf.is_camera}
        self._columns = {
            name: leaf for name, leaf in steps.items() if leaf.is_column and name not in BOOKKEEPING
        }
        self.cameras = tuple(self._pictures)
        self.depth_cameras = tuple(name for name, leaf in steps.items() if leaf.is_depth)
        self.column_names = (*self._columns, *BOOKKEEPING)
        self._last: tuple[int, bytes, dict[str, tuple[int, int]]] | None = None
        self._lock = Lock()

    def __reduce__(self) -> tuple[Callable[..., "RldsDataset"], tuple[Any, ...]]:
        return RldsDataset, (self.root, self.fps, self.split, self._cache_dir)

    @cached_property
    def features(self) -> dict[str, dict[str, Any]]:
        """Dtype, shape and names of each column and camera."""
        columns = {
            name: {"dtype": leaf.dtype, "shape": list(leaf.shape) or [1], "names": None}
            for name, leaf in self._columns.items()
        }
        axes = ["height", "width", "channels"]
        cameras = {
            name: {"dtype": "image", "shape": [*self._size(name), 3], "names": axes}
            for name in self.cameras
        }
        return {**columns, **cameras, **BOOKKEEPING}

    @property
    def lengths(self) -> Int64[np.ndarray, " e"]:
        """Steps of each episode."""
        return self._index.lengths

    @property
    def robot_type(self) -> str | None:
        """None, because RLDS does not record it."""
        return None

    @property
    def num_episodes(self) -> int:
        """Records of the split."""
        return len(self.lengths)

    @property
    def num_frames(self) -> int:
        """Steps of all episodes together."""
        return int(self.lengths.sum())

    @property
    def episode_numbers(self) -> Int64[np.ndarray, " e"]:
        """0, 1, … in the order of the shards."""
        return np.arange(self.num_episodes)

    @property
    def runs(self) -> Runs:
        """Runs of steps with the same instructions."""
        return self._index.runs

    @property
    def prompts(self) -> tuple[tuple[str, ...], ...]:
        """Wordings of each task. A step's wordings are its `language_instruction`s that are not
        empty, or ("",) if all of them are empty."""
        return self._index.prompts

    @property
    def present(self) -> Bool[np.ndarray, "e c"]:
        """True where an episode has a camera of `cameras`: everywhere, except where `has_CAMERA` in
        the episode's metadata (as in BridgeData) is false."""
        return self._index.present

    @cached_property
    def digest(self) -> str:
        """Hexadecimal SHA-256 over the metadata, steps per second and every record's checksum."""
        content = hashlib.sha256(b"%r\n" % self.fps + self._description)
        content.update(self._index.span[:, 1:].tobytes())
        return content.hexdigest()

    def column(self, name: str, episodes: Sequence[int] | None = None) -> np.ndarray:
        """One column of all steps (or of the given episodes), [N, *shape], bookkeeping [N].

        Reads the files from end to end; `stream` does so once for several columns.

        Raises:
          DatasetError: a record is damaged or holds something else; names file and record.
        """
        return np.concatenate([block[name] for block in self.stream([name], episodes)])

    def columns(self, i: int) -> dict[str, np.ndarray]:
        """Episode i's columns, each [T, *shape] (bookkeeping: [T]); no images."""
        return {name: self._column(i, name) for name in self.column_names}

    def stream(
        self, names: Sequence[str], episodes: Sequence[int] | None = None
    ) -> Iterator[dict[str, np.ndarray]]:
        """The named columns of all (or of the given) episodes, one episode at a time."""
        for i in range(self.num_episodes) if episodes is None else episodes:
            yield {name: self._column(i, name) for name in names}

    def file(self, i: int) -> Path | str:
        """The dataset's folder; the record of an episode would not help to find what is wrong."""
        return self.root

    def task(self, i: int) -> str:
        """Episode i's prompt: the first wording at its first step."""
        self._check(i)
        return self.prompts[self.runs.task[np.searchsorted(self.runs.episode, i)]][0]

    def frames(self, i: int, camera: str) -> UInt8[np.ndarray, "t h w 3"]:
        """Episode i as seen by `camera`.

        Raises:
          DatasetError: an image is missing or cannot be decoded; names file and record.
        """
        if camera not in self._pictures:
            raise ValueError(f"{self.root}: no camera '{camera}'; there are {list(self.cameras)}.")
        return self._decoded(i, self._pictures[camera], decode_pictures)

    def _column(self, i: int, name: str) -> np.ndarray:
        if name not in BOOKKEEPING:
            if name not in self._columns:
                raise ValueError(
                    f"{self.folder.path(_FEATURES)}: no column '{name}'; there are "
                    f"{list(self.column_names)}."
                )
            return self._decoded(i, self._columns[name], decode_column)
        self._check(i)
        length = int(self.lengths[i])
        steps = np.arange(length)
        if name == "timestamp":
            return (steps / self.fps).astype(np.float32)
        if name == "task_index":
            mine = slice(*np.searchsorted(self.runs.episode, [i, i + 1]))
            return np.repeat(self.runs.task[mine], self.runs.length[mine])
        return {
            "frame_index": steps,
            "episode_index": np.full(length, i),
            "index": steps + self._starts[i],
        }[name]

    def _decoded(
        self, i: int, leaf: Leaf, decode: Callable[[Leaf, Any, int], np.ndarray]
    ) -> np.ndarray:
        self._check(i)
        path = self.folder.local(self._shards[self._index.shard[i]])
        number = int(self._index.number[i])
        with self._lock:
            if self._last is None or self._last[0] != i:
                self._last = None
                data = read_episode(path, number, RecordSpan(*map(int, self._index.span[i])))
                self._last = i, data, feature_spans(lambda at, n: data[at : at + n], len(data))
            _, data, places = self._last
        field = f"record {number}, feature '{leaf.key}'"
        sentence = "{reason}; make the dataset again, or leave this feature out of features.json."
        with naming_damage(path, field, sentence, caught=(ValueError,)):
            if leaf.key not in places:
                raise ValueError("is missing")
            at, size = places[leaf.key]
            return decode(leaf, feature_values(data[at : at + size]), int(self.lengths[i]))

    def _size(self, camera: str) -> list[int]:
        leaf = self._pictures[camera]
        if None in leaf.shape[:2]:
            return list(self.frames(0, camera).shape[1:3])
        return [int(n) for n in leaf.shape[:2] if n is not None]

    def _check(self, i: int) -> None:
        if not 0 <= i < self.num_episodes:
            raise IndexError(f"{self.root}: no episode {i}; there are {self.num_episodes}.")

    @cached_property
    def _starts(self) -> Int64[np.ndarray, " e"]:
        return np.cumsum(self.lengths) - self.lengths

    @cached_property
    def _index(self) -> Index:
        return find_index(
            self._description,
            self.folder,
            self._shards,
            self._records,
            self._leaves,
            self._cache_dir,
        )

    @cached_property
    def _description(self) -> bytes:
        files = (_INFO, _FEATURES)
        return b"\n".join(
            [self.split.encode(), *(self.folder.local(n).read_bytes() for n in files)]
        )

    @cached_property
    def _shards(self) -> list[str]:
        count = len(self._records)
        field = f"splits/{self.split}/filepathTemplate"
        template = self._field(field, self._split.get("filepathTemplate") or _TEMPLATE, str)
        kind = self._field("fileFormat", self._info.get("fileFormat") or "tfrecord", str)
        names = {"DATASET": self.name, "SPLIT": self.split, "NUM_SHARDS": f"{count:05d}"}
        sentence = "{reason}; download it again, or do not use this dataset."
        with naming_damage(self._info_path, field, sentence, caught=(ValueError,)):
            return [
                fill(
                    template,
                    **names,
                    FILEFORMAT=kind,
                    SHARD_INDEX=f"{k:05d}",
                    SHARD_X_OF_Y=f"{k:05d}-of-{count:05d}",
                )
                for k in range(count)
            ]

    @cached_property
    def _records(self) -> list[int]:
        field = f"splits/{self.split}/shardLengths"
        lengths = self._field(field, self._split.get("shardLengths"), list)
        if not lengths or not all(str(n).isdecimal() for n in lengths):
            raise DatasetError(
                self._info_path, field, f"is {short(lengths)}, expected the records of each shard; "
                "download it again.",
            )  # fmt: skip
        return [int(n) for n in lengths]

    @cached_property
    def _split(self) -> dict[str, Any]:
        splits = self._field("splits", self._info.get("splits"), list)
        named = {str(s.get("name")): s for s in splits if isinstance(s, dict)}
        if self.split not in named:
            raise DatasetError(
                self._info_path, "splits", f"has no '{self.split}'; there are {list(named)}."
            )
        return named[self.split]

    def _field(self, field: str, value: Any, kind: type) -> Any:
        if not isinstance(value, kind):
            raise DatasetError(
                self._info_path,
                field,
                f"is {short(value)}, expected a {kind.__name__}; download it again.",
            )
        return value


_TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"


def _version(path: str | Path) -> str | Path:
    """`path`, or its only sub-folder, if that holds the description of an RLDS dataset."""
    folder = open_folder(path)
    if folder.exists(_FEATURES):
        return path
    found = folder.list(f"*/{_FEATURES}")
    if len(found) != 1:
        what = f"there are {found}" if found else "is missing, so this is not an RLDS dataset"
        raise MissingFileError(
            folder.path(_FEATURES),
            "file",
            f"{what}; give the folder of one version of a dataset (NAME/1.0.0).",
        )
    version = found[0].partition("/")[0]
    return path / version if isinstance(path, Path) else f"{path.rstrip('/')}/{version}"


def _json(folder: Folder, name: str) -> dict[str, Any]:
    path = folder.path(name)
    found = read_json(folder.local(name), path, "download it again")
    if not isinstance(found, dict):
        raise DatasetError(path, "file", "is not a JSON object; download it again.")
    return found
