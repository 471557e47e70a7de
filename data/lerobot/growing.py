"""A dataset while it is recorded: LeRobot v3.0 with separate files for every episode, so that
finished episodes can be read at any moment, whatever ends the recording.

An episode is written to a separate folder and moved into place file by file. Its entry in
meta/episodes comes last, and an episode without one does not count.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt8

from data.columns import open_parquet, read_columns, to_numpy
from data.files.texts import numbered_texts, texts_from
from data.lerobot.meta_writer import EpisodeTable, write_json, write_tasks
from data.lerobot.metadata import JOURNAL
from data.lerobot.recording import DATA_PATH, FILES_PER_CHUNK, VIDEO_PATH, DataFiles
from data.statistics.pixels import Histogram
from data.video.encoding import EncodedFrames, VideoEncoding, write_video
from models.files.on_disk import to_disk

_EPISODES = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
_ASIDE = ".unfinished"
_TEXTS = ("tasks", "subtasks")


class FinishedEpisode(NamedTuple):
    """An episode on disk: its instruction, numeric and text columns, and pixel counts and videos by
    camera."""

    task: str
    values: dict[str, np.ndarray]
    pixels: dict[str, Histogram]
    videos: dict[str, Path]


USUAL = VideoEncoding()
"""The encoding of recordings that ask for no other."""


class GrowingDataset:
    """The recording in the folder `root`, new or resumed; no other process may write to it
    meanwhile.

    Args:
      features: all features, bookkeeping included.
      about: plain data that determines what is recorded.
      encoding: encoding of the cameras' videos.

    Attributes:
      tasks, subtasks: texts with their numbers.
      num_frames: frames of the finished episodes.
      notes: notes of the finished episodes, in order.

    Raises:
      ValueError: something else was recorded there, or another process is recording.
    """

    def __init__(
        self,
        root: Path,
        features: Mapping[str, Mapping[str, Any]],
        fps: int,
        about: Any,
        encoding: VideoEncoding = USUAL,
    ) -> None:
        self.root, self.features, self.fps, self.encoding = root, features, fps, encoding
        if encoding != USUAL:
            about = {**about, "encoding": vars(encoding)}
        self.cameras = [n for n, f in features.items() if f["dtype"] == "video"]
        self._columns = {n: f for n, f in features.items() if f["dtype"] != "video"}
        self._header = json.loads(json.dumps({"about": about, "features": features, "fps": fps}))
        self._existed = root.is_dir()
        (root / "meta").mkdir(parents=True, exist_ok=True)
        self._journal = (root / JOURNAL).open("a+b", buffering=0)  # nothing to flush on close
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._journal.close()
            raise ValueError(
                f"{root}: is being recorded by another process; wait for it."
            ) from None
        self._size = 0
        try:
            self._entries = self._read()
        except OSError:  # the disk had no room even for the header
            begun = b"\n" in (root / JOURNAL).read_bytes()
            self._journal.close()
            if not begun:
                self._leave_nothing()
            raise
        self.num_frames = sum(entry["length"] for entry in self._entries)
        shutil.rmtree(root / _ASIDE, ignore_errors=True)
        self.tasks, self.subtasks = (numbered_texts(self._entries, kind) for kind in _TEXTS)
        self._listed = {kind: len(getattr(self, kind)) for kind in _TEXTS}

    @property
    def num_episodes(self) -> int:
        """Finished episodes."""
        return len(self._entries)

    @property
    def notes(self) -> list[dict[str, Any]]:
        """Notes of the finished episodes."""
        return [entry["note"] for entry in self._entries]

    def add(
        self,
        task: str,
        values: Mapping[str, np.ndarray],
        frames: Mapping[str, "UInt8[np.ndarray, 't h w 3'] | EncodedFrames"],
        info: Mapping[str, Any],
        note: Mapping[str, Any],
    ) -> None:
        """Adds the next episode, which is on disk on return; if interrupted, none of it counts.

        Args:
          info: info.json with this episode counted.
        """
        number, length, aside = self.num_episodes, len(values["index"]), self.root / _ASIDE
        data = DataFiles(aside, self._columns, np.inf)
        try:
            data.add(values)
            data.close()
        finally:
            data.abandon()
        pixels = {}
        for camera in self.cameras:
            pictures, video = frames[camera], aside / f"{camera}.mp4"
            if isinstance(pictures, EncodedFrames):
                assert pictures.path is not None
                shutil.move(pictures.path, video)
                pixels[camera] = Histogram(pictures.pixels)
            else:
                pixels[camera] = Histogram.of(pictures)
                write_video(video, pictures, self.fps, self.encoding)
        table = EpisodeTable(aside, self.features)
        table.num_episodes, table.num_frames = number, self.num_frames
        table.add([task], values, pixels, self._places(number, length))
        table.close()
        write_json(aside / "meta/info.json", info)
        new = {kind: texts_from(getattr(self, kind), self._listed[kind]) for kind in _TEXTS}
        longer = [kind for kind, texts in new.items() if texts]
        for kind in longer:
            write_tasks(aside, list(getattr(self, kind)), kind.removesuffix("s"))
        entry = {
            "length": length,
            "task": task,
            **new,
            "pixels": {camera: counts.to_text() for camera, counts in pixels.items()},
            "note": dict(note),
        }
        moves = [
            (f"{camera}.mp4", self._name(VIDEO_PATH, number, video_key=camera))
            for camera in self.cameras
        ]
        moves += [(f"meta/{kind}.parquet",) * 2 for kind in longer]
        moves += [(self._name(DATA_PATH, 0), self._name(DATA_PATH, number))]
        moves += [(self._name(_EPISODES, 0), self._name(_EPISODES, number))]
        for name, _ in moves:
            to_disk(aside / name)
        size = self._write(entry)
        if number == 0:
            shutil.copyfile(aside / "meta/info.json", self.root / "meta/info.json")
        for name, place in moves:
            (self.root / place).parent.mkdir(parents=True, exist_ok=True)
            (aside / name).replace(self.root / place)
        self._entries.append(json.loads(json.dumps(entry)))
        self._listed = {kind: len(getattr(self, kind)) for kind in _TEXTS}
        self.num_frames += length
        self._size = size
        (aside / "meta/info.json").replace(self.root / "meta/info.json")
        for folder in sorted({(self.root / place).parent for _, place in moves}):
            to_disk(folder)

    def finished(self) -> Iterator[FinishedEpisode]:
        """All finished episodes, read back from disk."""
        for number, entry in enumerate(self._entries):
            path = self.root / self._name(DATA_PATH, number)
            with open_parquet(path) as opened:
                table = read_columns(opened, list(self._columns), path)
            yield FinishedEpisode(
                entry["task"],
                {n: to_numpy(path, n, table[n], f) for n, f in self._columns.items()},
                {c: Histogram.from_text(text) for c, text in entry["pixels"].items()},
                {c: self.root / self._name(VIDEO_PATH, number, video_key=c) for c in self.cameras},
            )

    def close(self) -> None:
        """Stops writing; the folder stays as it is, or is removed if no episode was finished."""
        self._journal.close()
        if not is_growing(self.root):
            return
        with suppress(OSError):
            shutil.rmtree(self.root / _ASIDE)
        if self._entries:
            if not (self.root / self._name(_EPISODES, self.num_episodes)).exists():
                self._remove(self.num_episodes)
        else:
            self._leave_nothing()

    def _leave_nothing(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        if self._existed:
            self.root.mkdir(exist_ok=True)

    def _read(self) -> list[dict[str, Any]]:
        """The finished episodes; all that goes beyond them is discarded."""
        self._journal.seek(0)
        lines = self._journal.read().split(b"\n")[:-1]
        if not lines:
            self._size = self._write(self._header)
            return []
        try:
            header, *entries = (json.loads(line) for line in lines)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.root / JOURNAL}: is damaged ({error}).") from None
        if header != self._header:
            raise ValueError(
                f"{self.root}: {_difference(header, self._header)}; continue with the options that "
                "it was started with, or choose another folder."
            )
        listed = 0
        while (self.root / self._name(_EPISODES, listed)).exists():
            listed += 1
        if listed > len(entries):
            raise ValueError(
                f"{self.root / JOURNAL}: lists {len(entries)} episodes, but {listed} are there: it "
                "was damaged; use the dataset as it is, or record it again."
            )
        self._remove(listed)
        self._size = sum(len(line) + 1 for line in lines[: 1 + listed])
        return entries[:listed]

    def _remove(self, number: int) -> None:
        """Removes the files of an unfinished episode."""
        names = [self._name(DATA_PATH, number)]
        names += [self._name(VIDEO_PATH, number, video_key=camera) for camera in self.cameras]
        for name in names:
            with suppress(OSError):
                (self.root / name).unlink(missing_ok=True)

    def _write(self, line: Any) -> int:
        """Appends a line to the journal, after those that count; returns the bytes of them all."""
        self._journal.truncate(self._size)
        content = json.dumps(line, ensure_ascii=False).encode() + b"\n"
        while content:
            content = content[self._journal.write(content) :]
        os.fsync(self._journal.fileno())
        return self._journal.tell()

    def _name(self, template: str, number: int, **values: str) -> str:
        chunk, file = divmod(number, FILES_PER_CHUNK)
        return template.format(chunk_index=chunk, file_index=file, **values)

    def _places(self, number: int, length: int) -> dict[str, int | float]:
        chunk, file = divmod(number, FILES_PER_CHUNK)
        found: dict[str, int | float] = {}
        for at in ("data", "meta/episodes", *(f"videos/{camera}" for camera in self.cameras)):
            found |= {f"{at}/chunk_index": chunk, f"{at}/file_index": file}
        for camera in self.cameras:
            found[f"videos/{camera}/from_timestamp"] = 0.0
            found[f"videos/{camera}/to_timestamp"] = length / self.fps
        return found


def is_growing(root: Path) -> bool:
    """True if a recording was begun there and has not ended."""
    return (root / JOURNAL).is_file()


def _difference(header: Any, other: Any) -> str:
    """The first difference between two recordings, in words."""
    for name, now in {**header, **other}.items():
        before = header.get(name)
        if before != now:
            if isinstance(before, dict) and isinstance(now, dict):
                return _difference(before, now)
            return f"was recorded with {name} {before!r}, but now it is {other.get(name)!r}"
    return "was recorded with other options"
