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
from data.video import VideoReader

VERSION = "v3.0"


def open_dataset(path: str | Path) -> "Dataset":
    """Opens the LeRobot v3.0 dataset in folder `path`; no frame is decoded yet.

    Raises:
      FileNotFoundError: there is no dataset, or a file of it is missing.
      ValueError: another version of the format, or broken metadata; names the file and field.
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
        try:
            self.fps: int = self.info["fps"]
            self.features: dict[str, dict[str, Any]] = self.info["features"]
            self.cameras = tuple(
                name for name, feature in self.features.items() if feature["dtype"] in _VISUAL
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{root / 'meta/info.json'}: field {error} is missing or of the wrong kind; "
                "copy the dataset's meta folder again."
            ) from None
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
            raise ValueError(
                f"{path}: columns are {table.column_names}, expected task_index and the text as "
                "'task' or pandas index; copy the file again."
            )
        return dict(zip(table["task_index"].to_pylist(), table[text].to_pylist(), strict=True))

    @property
    def column_names(self) -> tuple[str, ...]:
        """Features that are columns of values (not pictures, nor kinds this reader ignores)."""
        return tuple(n for n, f in self.features.items() if arrow_type(f["dtype"]) is not None)

    def column(self, name: str, episodes: Sequence[int] | None = None) -> np.ndarray:
        """One column of all frames (or of the given episodes), in episode order, [N, *shape].

        Raises:
          ValueError: missing or of another type or shape than declared; names file and column.
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
          ValueError: its task index has no text in meta/tasks.parquet.
        """
        index = int(self.column("task_index")[self._starts[i]])
        if index not in self.tasks:
            raise ValueError(
                f"{self.root / 'meta/tasks.parquet'}: task_index {index} of episode {i} has no "
                f"text (there are {sorted(self.tasks)}); add the row."
            )
        return self.tasks[index]

    def frames(self, i: int, camera: str) -> UInt8[np.ndarray, "t h w 3"]:
        """Episode i as seen by `camera`.

        Raises:
          ValueError: frames are missing or damaged; names the file and the frame.
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
        name = self.info["video_path"].format(video_key=camera, chunk_index=chunk, file_index=file)
        return self.root / name, float(row["from_timestamp"])

    @cached_property
    def data_files(self) -> list[Path]:
        """The parquet files of the frames, in order."""
        return _parquet_files(self.root, "data")

    @cached_property
    def _rows(self) -> Int64[np.ndarray, "n"]:
        """Row (over all files, end to end) of every frame, in episode and frame order."""
        episode = self._in_file_order("episode_index")
        known = self._episodes["episode_index"]
        stray = episode[~np.isin(episode, known)]
        if len(stray):
            raise ValueError(
                f"{self.root / 'data'}: {len(stray)} rows have episode_index {stray[0]} or another "
                "that meta/episodes does not list; copy or record the dataset again."
            )
        counts = np.bincount(np.searchsorted(known, episode), minlength=len(known))
        if not np.array_equal(counts, self.lengths):
            i = int(np.argmax(counts != self.lengths))
            raise ValueError(
                f"{self.root / 'meta/episodes'}: episode {i} has length {self.lengths[i]}, but "
                f"the data files hold {counts[i]} rows with its episode_index; "
                "the dataset is incomplete, copy or record it again."
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
        fields = ["episode_index", "length"]
        fields += [f"videos/{camera}/{field}" for camera in self._videos for field in _VIDEO_FIELDS]
        tables = [read_table(path, fields) for path in _parquet_files(self.root, "meta/episodes")]
        arrays = {f: np.concatenate([table[f].to_numpy() for table in tables]) for f in fields}
        order = np.argsort(arrays["episode_index"], kind="stable")
        return {field: array[order] for field, array in arrays.items()}

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
_VIDEO_FIELDS = ("chunk_index", "file_index", "from_timestamp")


def _read_info(root: Path) -> dict[str, Any]:
    path = root / "meta/info.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: missing, so {root} is no LeRobot dataset; give the folder that holds meta/."
        )
    try:
        info = json.loads(path.read_text())
        version = info["codebase_version"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: no JSON object with codebase_version ({error}); copy the file again."
        ) from None
    if version != VERSION:
        raise ValueError(
            f"{path}: codebase_version is {version}, but this reader needs {VERSION}; "
            "convert the dataset with LeRobot's convert_dataset_v21_to_v30."
        )
    return info


def _parquet_files(root: Path, folder: str) -> list[Path]:
    files = sorted((root / folder).glob("chunk-*/file-*.parquet"))
    if not files:
        raise FileNotFoundError(
            f"{root / folder}: no chunk-*/file-*.parquet in it; copy or record the dataset again."
        )
    return files
