"""Reads LeRobot v3.0 datasets with pyarrow and PyAV alone.

Episodes are found by the parquet's own `episode_index` and `frame_index`, because file numbers and
row ranges in the metadata of converted datasets are wrong often enough, and video frames by their
integer number after the episode's start. Keys this reader does not know are ignored.
"""

import io
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Int64, UInt8
from PIL import Image

from data.columns import BOOKKEEPING, arrow_type, read_table, to_numpy
from data.errors import DatasetError, MissingFileError
from data.video import VideoReader

VERSION = "v3.0"


def open_dataset(path: str | Path) -> "Dataset":
    """Opens the LeRobot v3.0 dataset in folder `path`; no frame is decoded yet.

    Raises:
      MissingFileError: there is no dataset, or a file of it is missing.
      DatasetError: another version of the format, or broken metadata; names the file and field.
    """
    return Dataset(Path(path))


class Dataset:
    """A LeRobot dataset on disk: `num_episodes` episodes, `cameras` by their full names, `features`
    as info.json has them, `lengths` int64 [E] in frames, `tasks` by task index.

    Numbers are read once and kept; frames are decoded when asked for. For one thread at a time.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.info = _read_info(root)
        self.fps: int = self.info["fps"]
        self.features: dict[str, dict[str, Any]] = self.info["features"]
        self.cameras = tuple(n for n, f in self.features.items() if f["dtype"] in _VISUAL)
        self._videos = tuple(c for c in self.cameras if self.features[c]["dtype"] == "video")
        self._episodes = self._read_episodes()
        self._columns: dict[str, np.ndarray] = {}
        self._readers: dict[str, VideoReader] = {}

    @property
    def lengths(self) -> Int64[np.ndarray, "e"]:
        """Frames of each episode."""
        return self._episodes["length"]

    @property
    def num_episodes(self) -> int:
        """Episodes listed in meta/episodes."""
        return len(self.lengths)

    @property
    def episode_numbers(self) -> Int64[np.ndarray, "e"]:
        """The `episode_index` of each episode, which is its position in a sound dataset."""
        return self._episodes["episode_index"]

    @property
    def num_frames(self) -> int:
        """Frames of all episodes together."""
        return int(self.lengths.sum())

    @cached_property
    def tasks(self) -> dict[int, str]:
        """Prompt by task index."""
        path = self.root / "meta/tasks.parquet"
        table = read_table(path)
        text = "task" if "task" in table.column_names else "__index_level_0__"
        if not {"task_index", text} <= set(table.column_names):
            raise DatasetError(
                path,
                "column 'task'",
                f"is missing (there are {table.column_names}, expected task_index and the text as "
                "'task' or pandas index); copy the file again.",
            )
        indices = to_numpy(path, "task_index", table["task_index"], BOOKKEEPING["task_index"])
        return dict(zip(indices.tolist(), table[text].to_pylist(), strict=True))

    @property
    def column_names(self) -> tuple[str, ...]:
        """Features that are columns of values (not pictures, nor kinds this reader ignores)."""
        return tuple(n for n, f in self.features.items() if arrow_type(f["dtype"]) is not None)

    def column(self, name: str, episodes: Sequence[int] | None = None) -> np.ndarray:
        """One column of all frames (or of the given episodes), in episode order, [N, *shape].

        Raises:
          DatasetError: missing or of another type or shape than declared; names file and column.
        """
        if name not in self._columns:
            self._columns[name] = self._in_file_order(name)[self._rows]
        values = self._columns[name]
        if episodes is None:
            return values
        return np.concatenate([values[self._span(i)] for i in episodes])

    def columns(self, i: int) -> dict[str, np.ndarray]:
        """Episode i's columns by LeRobot name, each [T, *shape] (bookkeeping: [T]); no frames."""
        span = self._span(i)
        return {name: self.column(name)[span] for name in self.column_names}

    def task(self, i: int) -> str:
        """Episode i's prompt, that of its first frame.

        Raises:
          DatasetError: its task index has no text in meta/tasks.parquet.
        """
        index = int(self.column("task_index")[self._starts[i]])
        if index not in self.tasks:
            raise DatasetError(
                self.root / "meta/tasks.parquet",
                f"task_index {index}",
                f"of episode {i} has no text (there are {sorted(self.tasks)}); add the row.",
            )
        return self.tasks[index]

    def locate(self, frame: int) -> tuple[int, int]:
        """Episode and step of a frame counted through the whole dataset."""
        episode = int(np.searchsorted(np.cumsum(self.lengths), frame, "right"))
        return episode, frame - int(self._starts[episode])

    def frames(self, i: int, camera: str) -> UInt8[np.ndarray, "t h w 3"]:
        """Episode i as seen by `camera`.

        Raises:
          DatasetError: frames are missing or damaged.
        """
        if camera not in self.cameras:
            raise ValueError(f"{self.root}: no camera '{camera}'; there are {list(self.cameras)}.")
        if camera not in self._videos:
            return self._stored_images(i, camera)
        path, start = self.video(i, camera)
        reader = self._readers.get(camera)
        if reader is None or reader.path != path:
            if reader is not None:
                reader.close()
            reader = self._readers[camera] = VideoReader(path)
        return reader.read(start, int(self.lengths[i]), self.fps)

    def episode(self, i: int) -> dict[str, Any]:
        """Episode i whole: its columns, every camera's frames uint8 [T, H, W, 3], and "task"."""
        frames = {camera: self.frames(i, camera) for camera in self.cameras}
        return {**self.columns(i), **frames, "task": self.task(i)}

    def video(self, i: int, camera: str) -> tuple[Path, float]:
        """The mp4 that holds episode i of `camera`, and the second at which it starts there."""
        row = {k: self._episodes[f"videos/{camera}/{k}"][i] for k in _VIDEO_FIELDS}
        chunk, file = int(row["chunk_index"]), int(row["file_index"])
        template: Any = self.info.get("video_path")
        try:
            name = template.format(video_key=camera, chunk_index=chunk, file_index=file)
        except (AttributeError, KeyError, IndexError, ValueError):
            raise DatasetError(
                self.root / "meta/info.json",
                "video_path",
                f"is {template!r}, expected a template of video_key, chunk_index and file_index; "
                "copy the file again.",
            ) from None
        return self.root / name, float(row["from_timestamp"])

    @cached_property
    def data_files(self) -> list[Path]:
        """The parquet files of the frames, in order."""
        return _parquet_files(self.root, "data")

    def data_file(self, frame: int) -> Path:
        """The parquet file that holds a frame counted through the whole dataset."""
        ends = np.cumsum([table.num_rows for _, table in self._tables])
        return self._tables[int(np.searchsorted(ends, self._rows[frame], "right"))][0]

    @cached_property
    def _rows(self) -> Int64[np.ndarray, "n"]:
        """Row (over all files, end to end) of every frame, in episode and frame order."""
        episode = self._in_file_order("episode_index")
        known = self.episode_numbers
        stray = episode[~np.isin(episode, known)]
        if len(stray):
            raise DatasetError(
                self.root / "data",
                "column 'episode_index'",
                f"{len(stray)} rows have {stray[0]} or another value that meta/episodes does not "
                "list; copy or record the dataset again.",
            )
        counts = np.bincount(np.searchsorted(known, episode), minlength=len(known))
        if not np.array_equal(counts, self.lengths):
            i = int(np.argmax(counts != self.lengths))
            raise DatasetError(
                self.root / "meta/episodes",
                "column 'length'",
                f"episode {i} has length {self.lengths[i]}, but the data files hold {counts[i]} "
                "rows of it; the dataset is incomplete, copy or record it again.",
            )
        return np.lexsort((self._in_file_order("frame_index"), episode))

    @cached_property
    def _tables(self) -> list[tuple[Path, pa.Table]]:
        columns = list({**dict.fromkeys(self.column_names), **BOOKKEEPING})
        return [(path, read_table(path, columns)) for path in self.data_files]

    def _in_file_order(self, name: str) -> np.ndarray:
        feature = BOOKKEEPING.get(name) or self.features[name]
        return np.concatenate(
            [to_numpy(path, name, table[name], feature) for path, table in self._tables]
        )

    @cached_property
    def _starts(self) -> Int64[np.ndarray, "e"]:
        return np.cumsum(self.lengths) - self.lengths

    def _span(self, i: int) -> slice:
        if not 0 <= i < self.num_episodes:
            raise IndexError(f"{self.root}: no episode {i}; there are {self.num_episodes}.")
        return slice(self._starts[i], self._starts[i] + self.lengths[i])

    def _read_episodes(self) -> dict[str, np.ndarray]:
        fields = {"episode_index": "int64", "length": "int64"}
        for camera in self._videos:
            fields |= {f"videos/{camera}/{name}": kind for name, kind in _VIDEO_FIELDS.items()}
        files = _parquet_files(self.root, "meta/episodes")
        tables = [(path, read_table(path, list(fields))) for path in files]
        arrays = {
            name: np.concatenate(
                [
                    to_numpy(path, name, table[name], {"dtype": kind, "shape": (1,)}).reshape(-1)
                    for path, table in tables
                ]
            )
            for name, kind in fields.items()
        }
        order = np.argsort(arrays["episode_index"], kind="stable")
        return {name: array[order] for name, array in arrays.items()}

    def _stored_images(self, i: int, camera: str) -> UInt8[np.ndarray, "t h w 3"]:
        """Frames of a camera whose encoded pictures lie in the parquet itself."""
        rows = self._rows[self._span(i)]
        pictures: dict[int, bytes] = {}
        first = 0
        for path in self.data_files:
            with pq.ParquetFile(path) as file:
                for group in range(file.num_row_groups):
                    end = first + file.metadata.row_group(group).num_rows
                    if ((rows >= first) & (rows < end)).any():
                        column = file.read_row_group(group, columns=[camera])[camera]
                        cells = column.combine_chunks().field("bytes")
                        wanted = rows[(rows >= first) & (rows < end)]
                        pictures |= {int(row): cells[row - first].as_py() for row in wanted}
                    first = end
        decoded = (Image.open(io.BytesIO(pictures[int(row)])).convert("RGB") for row in rows)
        return np.stack([np.asarray(picture) for picture in decoded])


_VISUAL = ("video", "image")
_VIDEO_FIELDS = {"chunk_index": "int64", "file_index": "int64", "from_timestamp": "float64"}


def _read_info(root: Path) -> dict[str, Any]:
    path = root / "meta/info.json"
    if not path.is_file():
        raise MissingFileError(
            path,
            "file",
            f"is missing, so {root} is no LeRobot dataset; give the folder that holds meta/.",
        )
    try:
        info = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DatasetError(path, "file", f"is no JSON ({error}); copy it again.") from None
    version = info.get("codebase_version") if isinstance(info, dict) else None
    if version != VERSION:
        raise DatasetError(
            path,
            "codebase_version",
            f"is {version!r}, but this reader needs '{VERSION}'; "
            "convert the dataset with LeRobot's convert_dataset_v21_to_v30.",
        )
    for field, good, what in (
        ("fps", _is_positive(info.get("fps")), "a positive number"),
        ("features", _are_features(info.get("features")), "features with a dtype and a shape"),
        ("total_episodes", info.get("total_episodes") != 0, "not 0, for the dataset is empty"),
    ):
        if not good:
            raise DatasetError(
                path, field, f"is {info.get(field)!r}, expected {what}; record or copy it again."
            )
    return info


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _are_features(features: object) -> bool:
    return isinstance(features, dict) and all(
        isinstance(feature, dict)
        and isinstance(feature.get("dtype"), str)
        and isinstance(feature.get("shape"), list)
        and all(isinstance(n, int) for n in feature["shape"])
        for feature in features.values()
    )


def _parquet_files(root: Path, folder: str) -> list[Path]:
    files = sorted((root / folder).glob("chunk-*/file-*.parquet"))
    if not files:
        raise MissingFileError(
            root / folder,
            "chunk-*/file-*.parquet",
            "no such file is there; copy or record the dataset again.",
        )
    return files
