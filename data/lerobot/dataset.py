"""Reads LeRobot datasets, v2.0 to v3.0, with pyarrow and PyAV alone, from disk, hub or bucket.

Opening reads meta/; parquet and video files are fetched and read on demand. Rows are found by their
own `episode_index`, and video frames by their number after the episode's start, because the
locations and times in the metadata are too often wrong. Statistics in the files are never used,
because LeRobot up to 0.5 wrote wrong ones; data/statistics/stats.py computes them.
"""

import hashlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Int64, UInt8

from data.columns import arrow_type, stored_dtype, to_numpy
from data.dataset import EpisodeAccess, Subtasks, card
from data.errors import DatasetError, MissingFileError
from data.files.folder import open_folder
from data.lerobot import subtasks
from data.lerobot.metadata import (
    VISUAL,
    Metadata,
    file_pattern,
    is_depth,
    read_info,
    robot_type,
)
from data.lerobot.rows import ParquetRows
from data.lerobot.task_runs import Prompts, Runs, runs_and_prompts
from data.lerobot.v21 import MetadataV21
from data.lerobot.v30 import MetadataV30
from data.video.seek import seek_table
from data.video.still_images import decode, encoded
from data.video.video import VideoReader
from models.files.address import parse, whole

VERSION = "v3.0"


class LeRobotDataset(EpisodeAccess):
    """A LeRobot dataset with episodes 0..e-1; `episode_numbers` are their LeRobot `episode_index`.

    `root` is the path or URL it was opened with; `path(name)` is a file's name in messages.
    `cameras` are full names without `depth_cameras`, whose images can only be copied. `features`
    are as in info.json, `present` says which episodes have which cameras, and `runs` which frames
    have which of `prompts`. For one thread at a time; pickles by location. `subtask_column` is read
    for subtasks instead of LeRobot's own column.
    """

    def __init__(
        self,
        path: str | Path,
        episodes: Sequence[int] | None = None,
        subtask_column: str = "",
    ) -> None:
        address, self.folder = parse(path), open_folder(path)
        self.root: Any = address.path if not address.is_remote else str(address)
        hub = address.protocol == "hf"  # named by organisation and name
        self.name = (
            "/".join(str(address).partition("@")[0].split("/")[-2:]) if hub else address.name
        )
        self.info = read_info(self.folder)
        self.fps: float = self.info["fps"]
        self.features: dict[str, dict[str, Any]] = self.info["features"]
        visual = [n for n, f in self.features.items() if f["dtype"] in VISUAL]
        self.depth_cameras = tuple(n for n in visual if is_depth(self.features[n]))
        self.cameras = tuple(n for n in visual if n not in self.depth_cameras)
        videos = tuple(n for n in visual if self.features[n]["dtype"] == "video")
        metadata = MetadataV30 if self.info["codebase_version"].startswith("v3.") else MetadataV21
        self.metadata: Metadata = metadata(self.folder, self.info, videos)
        self._rows = ParquetRows(self.folder, self.metadata, self.features)
        self._selected = None if episodes is None else tuple(sorted({int(n) for n in episodes}))
        self._subtask_column = subtask_column
        self._telling = subtasks.telling_column(self.folder, self.features, subtask_column)
        self._chosen = self._places()
        self._columns: dict[str, np.ndarray] = {}
        self._seen: dict[str, np.ndarray] = {}
        self._readers: dict[str, VideoReader] = {}

    def _repr_html_(self) -> str:
        return card(self, self.tasks.values())

    def __reduce__(self) -> tuple[Any, ...]:
        root = self.root if isinstance(self.root, str) else whole(self.root)
        return LeRobotDataset, (root, self._selected, self._subtask_column)

    def with_subtask_column(self, subtask_column: str) -> "LeRobotDataset":
        """The same dataset, with subtasks read from this column.

        Raises:
          DatasetError: there is no such column, or it cannot hold subtasks.
        """
        return LeRobotDataset(self.root, self._selected, subtask_column)

    def path(self, name: str) -> Path | str:
        """Path or URL of one of its files, for messages."""
        return self.folder.path(name)

    @cached_property
    def lengths(self) -> Int64[np.ndarray, " e"]:
        """Frames of each episode."""
        return self.metadata.lengths[self._chosen]

    @property
    def robot_type(self) -> str | None:
        """Robot's name in info.json."""
        return robot_type(self.info)

    @property
    def num_episodes(self) -> int:
        """Number of episodes listed, or selected."""
        return len(self._chosen)

    @cached_property
    def episode_numbers(self) -> Int64[np.ndarray, " e"]:
        """The `episode_index` of each episode, which is its position in a sound dataset."""
        return self.metadata.numbers[self._chosen]

    @property
    def num_frames(self) -> int:
        """Frames of all episodes together."""
        return int(self.lengths.sum())

    @cached_property
    def tasks(self) -> dict[int, str]:
        """Prompt by task index."""
        return self.metadata.tasks()

    @property
    def runs(self) -> Runs:
        """Runs of frames with one task. If an episode lists a single instruction, the metadata is
        trusted; the frames of all other episodes are read."""
        return self._told[0]

    @property
    def prompts(self) -> Prompts:
        """Wordings of each task of `runs`: its text, then instructions that its episodes list but
        that none of their frames refers to."""
        return self._told[1]

    @property
    def has_subtasks(self) -> bool:
        """True if a column holds subtasks; reads no data."""
        return self._telling is not None

    @cached_property
    def subtasks(self) -> Subtasks:
        """Runs of frames with one subtask, and their texts.

        Raises:
          DatasetError: a frame's subtask has no text.
        """
        column, lengths = self._telling, self.lengths
        if column is None:
            raise ValueError(f"{self.root}: no column holds subtasks.")
        if column == subtasks.ANNOTATIONS:
            cells = (self._rows.cells(int(place), column) for place in self._chosen)
            return subtasks.of_annotations(lengths, self.fps, cells)
        blocks = (block[column].reshape(-1) for block in self.stream([column]))
        if self.features[column]["dtype"] == "string":
            return subtasks.of_texts(lengths, blocks)
        texts = subtasks.read_texts(self.folder)
        return subtasks.of_indices(self.folder.path("data"), column, lengths, blocks, texts)

    @cached_property
    def present(self) -> Bool[np.ndarray, "e c"]:
        """True where an episode has a camera of `cameras`."""
        present = np.ones((self.num_episodes, len(self.cameras)), bool)
        for c, camera in enumerate(self.cameras):
            present[:, c] = self.has(camera)
        return present

    @cached_property
    def digest(self) -> str:
        """SHA-256, hexadecimal, over the bytes of metadata and parquet files and the sizes of image
        and video files.

        Raises:
          DatasetError: a file cannot be fetched or read.
        """
        digest = hashlib.sha256()
        if self.depth_cameras:
            digest.update(f"depth {self.depth_cameras}\n".encode())
        if self._selected is not None:
            digest.update(f"episodes {self._selected}\n".encode())
        if self._subtask_column:
            digest.update(f"subtasks {self._subtask_column}\n".encode())
        for name in self._files():
            digest.update(f"{name}:{self.folder.size(name)}\n".encode())
            if name.endswith((".parquet", ".json", ".jsonl")):
                with self.folder.local(name).open("rb") as content:
                    while block := content.read(1 << 20):
                        digest.update(block)
        return digest.hexdigest()

    @property
    def column_names(self) -> tuple[str, ...]:
        """Features that are columns of values (not images, nor kinds that this reader ignores)."""
        return tuple(n for n, f in self.features.items() if arrow_type(f["dtype"]) is not None)

    def stream(
        self, names: Sequence[str], episodes: Sequence[int] | np.ndarray | None = None
    ) -> Iterator[dict[str, np.ndarray]]:
        """Columns by name, each [n, *shape] (bookkeeping: [n]): some whole episodes at a time, in
        order, from a few row groups of one file at once.

        Raises:
          MissingFileError, DatasetError: a file is missing or damaged, a column is missing or of
            another type or shape than declared, or an episode's rows are not all there.
        """
        if episodes is None:
            yield from self._rows.blocks(names, self._chosen)
            self.require_no_strays()
        else:
            yield from self._rows.blocks(names, [self._place(i) for i in episodes])

    @property
    def counts_frames(self) -> bool:
        """True if its files lack frame_index, judged by the first one; frames are then counted."""
        return self._rows.counts_frames(int(self.metadata.hints[self._chosen[0]]))

    def require_no_strays(self) -> None:
        """Raises DatasetError if the files have rows of episodes that are not listed; not checked
        for a selection of episodes."""
        if self._selected is None:
            self._rows.require_no_strays()

    def column(self, name: str, episodes: Sequence[int] | None = None) -> np.ndarray:
        """One column of all frames (or of the given episodes), in episode order, [N, *shape]. A
        column of all frames is kept in memory.

        Raises:
          DatasetError: as `stream` does.
        """
        if name in self._columns and episodes is not None:
            spans = [slice(self._ends[i] - self.lengths[i], self._ends[i]) for i in episodes]
            return np.concatenate([self._columns[name][span] for span in spans])
        if name not in self._columns:
            values = np.concatenate([block[name] for block in self.stream([name], episodes)])
            if episodes is not None:
                return values
            self._columns[name] = values
        return self._columns[name]

    def columns(self, i: int) -> dict[str, np.ndarray]:
        """Episode i's columns by LeRobot name, each [T, *shape] (bookkeeping: [T]), without
        images."""
        (block,) = self.stream(self.column_names, [i])
        return block

    def task(self, i: int) -> str:
        """Episode i's prompt, that of its first frame.

        Raises:
          DatasetError: its task index has no text.
        """
        self._place(i)
        first = int(np.searchsorted(self.runs.episode, i))
        return self.prompts[self.runs.task[first]][0]

    def instructions(self, i: int) -> list[str]:
        """Instructions that episode i lists; its prompt, if it lists none."""
        texts = self.metadata.texts
        listed = None if texts is None else texts[self._place(i)].as_py()
        return [text for text in listed or () if text] or [self.task(i)]

    def encoded(self, i: int, camera: str) -> pa.Array:
        """Episode i's images of a camera of dtype image, depth too, as they are stored,
        struct<bytes, path>; nulls if it has none.

        Raises:
          DatasetError: an image is missing.
        """
        return encoded(self.folder, *self._cells(i, camera))

    def as_stored(self, i: int, name: str) -> np.ndarray:
        """Episode i's column of numbers in the type that its file has, whatever is declared.

        Raises:
          DatasetError: it has no numbers, or of another shape than declared.
        """
        file, column = self._rows.cells(self._place(i), name)
        dtype = stored_dtype(column) or self.features[name]["dtype"]
        return to_numpy(
            file, name, pa.chunked_array([column]), {**self.features[name], "dtype": dtype}
        )

    def frames(self, i: int, camera: str) -> UInt8[np.ndarray, "t h w 3"]:
        """Episode i as seen by `camera`.

        Raises:
          MissingFileError: its video is missing, or the episode lacks this camera.
          DatasetError: frames are missing or damaged, or have more than colour's 8 bits.
          ValueError: there is no such camera, or it is a depth camera.
        """
        place = self._place(i)
        if self._is_stored(camera):
            return decode(self.folder, *self._cells(i, camera))
        path, start = self.video(i, camera)
        reader = self._readers.get(camera)
        if reader is None or reader.path != path:
            if reader is not None:
                reader.close()
            reader = self._readers[camera] = VideoReader(path)
        return reader.read(start, int(self.metadata.lengths[place]), self.fps)

    def frames_at(
        self, i: int, camera: str, at: Int64[np.ndarray, " n"]
    ) -> UInt8[np.ndarray, "n h w 3"]:
        """Frames `at` of episode i as seen by `camera`; other groups of pictures are not decoded.

        Raises:
          IndexError: the episode has no such frame.
          MissingFileError, DatasetError: as `frames`.
        """
        self._place(i)
        length = int(self.lengths[i])
        if len(at) and not 0 <= at.min() <= at.max() < length:
            raise IndexError(
                f"{self.root}: episode {i} has {length} frames; of frames {at.min()} to "
                f"{at.max()}, some do not exist."
            )
        if self._is_stored(camera):
            return decode(self.folder, *self._cells(i, camera), at)
        path, start = self.video(i, camera)
        try:
            table = seek_table(path)
        except DatasetError:  # not an mp4, or damaged: reading from the start reports it
            return self.frames(i, camera)[at]
        return table.read(start, at, self.fps)

    def video(self, i: int, camera: str) -> tuple[Path, float]:
        """The mp4 that holds episode i of `camera`, fetched if it is remote, and the time in
        seconds at which the episode starts in it.

        Raises:
          MissingFileError: the episode lacks this camera, or the file is missing.
        """
        place = self._place(i)
        if not self.has(camera)[i]:
            number = self.metadata.numbers[place]
            raise MissingFileError(
                self.folder.path(self.metadata.listing),
                f"camera '{camera}'",
                f"episode {number} has no video from it; leave the camera or the episode out.",
            )
        name, start = self.metadata.video(place, camera)
        return self.folder.local(name), start

    def video_file(self, i: int, camera: str) -> str:
        """Name of the mp4 that holds episode i of `camera`, which is not fetched."""
        return self.metadata.video(self._place(i), camera)[0]

    def _is_stored(self, camera: str) -> bool:
        """True for a camera with images in parquet; raises ValueError if there is no such one, or
        it has depth."""
        if camera in self.depth_cameras:
            raise ValueError(
                f"{self.root}: '{camera}' is a depth camera, whose images are not colour; there "
                f"are {list(self.cameras)}."
            )
        if camera not in self.cameras:
            raise ValueError(f"{self.root}: no camera '{camera}'; there are {list(self.cameras)}.")
        return bool(self.features[camera]["dtype"] == "image")

    def _cells(self, i: int, camera: str) -> tuple[Any, str, pa.Array]:
        """File and column of episode i's stored images, and its cells."""
        file, cells = self._rows.cells(self._place(i), camera)
        return file, camera, cells

    def file(self, i: int) -> Path | str:
        """The parquet file that holds episode i's rows."""
        return self._rows.path(self._rows.place(self._place(i)).file)

    @cached_property
    def _ends(self) -> Int64[np.ndarray, " e"]:
        return np.cumsum(self.lengths)

    def has(self, camera: str) -> Bool[np.ndarray, " e"]:
        """Mask of the episodes that have this camera, which may be a depth camera."""
        if camera not in self._seen:
            is_video = self.features[camera]["dtype"] == "video"
            rows, metadata = self._rows, self.metadata
            there = metadata.has_video(camera) if is_video else rows.filled(camera, self._chosen)
            self._seen[camera] = there[self._chosen]
        return self._seen[camera]

    @cached_property
    def _told(self) -> tuple[Runs, Prompts]:
        texts = self.metadata.texts
        return runs_and_prompts(
            self.lengths,
            texts if texts is None or self._selected is None else texts.take(self._chosen),
            self.tasks,
            self.folder.path(self.metadata.tasks_file),
            lambda k: (block["task_index"] for block in self.stream(["task_index"], k)),
        )

    def _files(self) -> list[str]:
        """Names of the files that the digest covers."""
        names = self.folder.list("meta/**/*")
        if self._selected is None:
            names += map(self.metadata.data_file, range(self.metadata.num_data_files))
            if self.info.get("video_path"):
                names += self.folder.list(file_pattern(self.folder, self.info, "video_path"))
            images = any(f["dtype"] == "image" for f in self.features.values())
            return names + self.folder.list("images/**/*") if images else names
        files = {self._rows.place(int(k)).file for k in self._chosen}
        names += sorted({self.metadata.data_file(file) for file in files})
        seen = np.argwhere(self.present)
        videos = [(i, self.cameras[c]) for i, c in seen.tolist()]
        return names + sorted(
            {
                self.metadata.video(int(self._chosen[i]), camera)[0]
                for i, camera in videos
                if self.features[camera]["dtype"] == "video"
            }
        )

    def _places(self) -> Int64[np.ndarray, " e"]:
        """Positions of the selected episodes in the metadata."""
        numbers = self.metadata.numbers
        if self._selected is None:
            return np.arange(len(numbers))
        wanted = np.array(self._selected, np.int64)
        missing = wanted[~np.isin(wanted, numbers)]
        if len(missing) or not len(wanted):
            raise ValueError(
                f"{self.root}: no episode {missing[0] if len(missing) else 'is selected'}; "
                f"there are {len(numbers)}, numbered {numbers[0]} to {numbers[-1]}."
            )
        return np.searchsorted(numbers, wanted)

    def _place(self, i: int) -> int:
        if not 0 <= i < self.num_episodes:
            raise IndexError(f"{self.root}: no episode {i}; there are {self.num_episodes}.")
        return int(self._chosen[i])
