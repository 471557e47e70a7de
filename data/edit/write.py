"""Writes an edited dataset as LeRobot v3.0, file by file: rows, then each camera, then meta/.

Video packets are copied unless the images have to change, and the first and last frame of every
copied episode are then compared with the old ones. A journal in the folder lists the finished
files; an interrupted edit resumes after them and produces the same bytes.
"""

import shutil
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
from jaxtyping import Int64, UInt8

from data.columns import BOOKKEEPING, open_parquet, read_columns, to_numpy
from data.edit.journal import FileJournal
from data.edit.modality import MODALITY, write_edited_modality
from data.edit.plan import EditPlan, Part
from data.edit.subtasks import numbered_column, texts_to_number
from data.errors import DatasetError
from data.files.job import Done, adding_up, run_job
from data.files.partial import EDITED as JOURNAL
from data.files.texts import numbered_texts, texts_from
from data.lerobot.dataset import LeRobotDataset
from data.lerobot.meta_writer import EpisodeTable, copy_others, info_of, kept_info
from data.lerobot.metadata import is_depth
from data.lerobot.recording import DATA_PATH, VIDEO_PATH, DataFiles
from data.lerobot.remux import CopiedVideos
from data.statistics.pixels import Histogram
from data.video.encoding import write_video
from data.video.span import Packets
from data.video.video import VideoReader

Progress = Callable[[int, int], None]

_ROWS, _ENCODED = "rows", "encoded"


def write_plan(
    plan: EditPlan,
    root: Path,
    progress: Progress | None = None,
    *,
    data_megabytes: float = 100,
    video_megabytes: float = 200,
) -> None:
    """Writes the dataset to the folder `root`, where this plan may have been begun before. Its
    journal stays; the caller deletes it when the dataset is in its final place.

    Args:
      progress: called with the frames done and the total, each frame counted once for its rows and
        once for each camera.

    Raises:
      DatasetError: a file of a source is missing or damaged, or its packets cannot be copied.
      ValueError: another plan was begun there.
      OSError: the disk is full or fails; the same call resumes.
    """
    limits = {"data": data_megabytes, "video": video_megabytes}
    about = described(plan, data_megabytes, video_megabytes)
    with FileJournal(root / JOURNAL, about) as journal:
        if not journal.is_whole:
            _write(plan, root, journal, limits, progress)


def described(plan: EditPlan, data_megabytes: float, video_megabytes: float) -> dict[str, Any]:
    """Everything that determines the files of the dataset, as plain data."""
    return plan.to_json() | {"data": data_megabytes, "video": video_megabytes}


def _write(
    plan: EditPlan,
    root: Path,
    journal: FileJournal,
    limits: Mapping[str, float],
    progress: Progress | None,
) -> None:
    told = adding_up(progress, plan.work)
    rows = _Rows(plan, journal.entries(_ROWS))
    data = DataFiles(root, rows.stored, limits["data"])
    _track(journal, _ROWS, data, plan, partial(rows.add, data=data), told)
    for camera in plan.cameras:
        copied = CopiedVideos(root, camera, limits["video"])
        begun = len(journal.entries(camera))
        with _Camera(plan, camera, root / _ENCODED, begun) as pictures:
            add, check = partial(pictures.add, files=copied), partial(_require_same, plan, root)
            _track(journal, camera, copied, plan, add, told, partial(check, camera))
    _describe(plan, root, journal, rows, limits)
    journal.finish()


def _track(
    journal: FileJournal,
    track: str,
    files: DataFiles | CopiedVideos,
    plan: EditPlan,
    add: Callable[[int], dict[str, Any]],
    told: Done,
    check: Callable[[list[dict[str, Any]]], None] = lambda entries: None,
) -> None:
    """Writes the missing files of a track, and records each finished one."""
    begun = len(journal.entries(track))
    files.chunk, files.file = place = journal.place(track)
    entries: list[dict[str, Any]] = []

    def finished() -> None:
        if entries:
            check(entries)
            journal.add(track, place, entries)

    for part in plan.parts[:begun]:
        told(part.length)
    try:
        for number in range(begun, len(plan.parts)):
            entry = add(number)
            if (files.chunk, files.file) != place:
                finished()
                place, entries = (files.chunk, files.file), []
            entries.append(entry)
            told(plan.parts[number].length)
        files.close()
    except BaseException:
        with suppress(OSError):  # a full disk fails here again
            files.close()
        raise
    finished()


class _Rows:
    """Rows of the new dataset's episodes, with its tasks and subtasks in order of appearance."""

    def __init__(self, plan: EditPlan, entries: list[dict[str, Any]]) -> None:
        self._plan = plan
        self.stored = {n: f for n, f in plan.features.items() if f["dtype"] != "video"}
        self.stored |= BOOKKEEPING
        self.frames = sum(part.length for part in plan.parts[: len(entries)])
        self.tasks = numbered_texts(entries, "known")
        self.subtasks = numbered_texts(entries, "known_subtasks")
        self._numbered = numbered_column(plan.names)
        self._texts = [
            texts_to_number(source, names[self._numbered]) if self._numbered else None
            for source, names in zip(plan.sources, plan.names, strict=True)
        ]

    def add(self, number: int, data: DataFiles) -> dict[str, Any]:
        """Writes the rows of an episode; returns its entry, with the texts that are new in it."""
        part, known = self._plan.parts[number], (len(self.tasks), len(self.subtasks))
        source = self._plan.sources[part.source]
        values: dict[str, np.ndarray | pa.Array] = {}
        old_names = self._plan.names[part.source]
        casts = self._plan.casts
        read = [n for n in source.column_names if n in old_names.values() and n not in casts]
        (columns,) = source.stream([*read, "timestamp"], [part.episode])
        columns |= {
            name: _cast(source, part.episode, name, dtype)
            for name, dtype in casts.items()
            if name in old_names.values()
        }
        _require_forward(source, part, columns["timestamp"])
        for name, feature in self.stored.items():
            if name in BOOKKEEPING:
                continue
            if feature["dtype"] == "image":
                cells = source.encoded(part.episode, old_names[name])
                values[name] = cells if part.at is None else cells.take(pa.array(part.at))
            else:
                values[name] = _taken(columns[old_names[name]], part.at)
        instructions, tasks = self._told(source, part)
        if self._numbered and (texts := self._texts[part.source]) is not None:
            values[self._numbered] = self._renumbered(values[self._numbered], texts)
        steps = np.arange(part.length)
        values |= {
            "timestamp": (steps / self._plan.fps).astype(np.float32),
            "frame_index": steps,
            "episode_index": np.full(part.length, number),
            "index": self.frames + steps,
            "task_index": tasks,
        }
        self.frames += part.length
        return {
            "places": data.add(values),
            "instructions": instructions,
            "known": texts_from(self.tasks, known[0]),
            "known_subtasks": texts_from(self.subtasks, known[1]),
        }

    def _told(
        self, source: LeRobotDataset, part: Part
    ) -> tuple[list[str], Int64[np.ndarray, " t"]]:
        """Instructions of an episode, and the new task number of each frame."""
        if part.task:
            number = self.tasks.setdefault(part.task, len(self.tasks))
            return [part.task], np.full(part.length, number)
        (whole,) = (block["task_index"] for block in source.stream(["task_index"], [part.episode]))
        kept, named = _taken(whole, part.at), self._plan.task_names
        texts = {}
        for index in np.unique(whole).tolist():
            if index not in source.tasks:
                raise DatasetError(
                    source.path(source.metadata.tasks_file),
                    f"task_index {index}",
                    f"is the task of episode {source.episode_numbers[part.episode]} but has no "
                    "text; add its instruction.",
                )
            texts[index] = source.tasks[index]
        lost = set(texts.values()) - {texts[k] for k in np.unique(kept).tolist()}
        listed = [t for t in source.instructions(part.episode) if t not in lost]
        in_order = kept[np.sort(np.unique(kept, return_index=True)[1])].tolist()
        for index in in_order:
            text = named.get(texts[index], texts[index])
            self.tasks.setdefault(text, len(self.tasks))
        told = [named.get(text, text) for text in listed or [texts[in_order[0]]]]
        numbers = {k: self.tasks[named.get(texts[k], texts[k])] for k in in_order}
        return list(dict.fromkeys(told)), np.array([numbers[k] for k in kept.tolist()], np.int64)

    def _renumbered(self, told: Any, texts: tuple[str, ...]) -> np.ndarray:
        """The new subtask number of each frame; -1 stays."""
        flat = np.asarray(told).reshape(-1)
        numbers = {-1: -1} | {
            k: self.subtasks.setdefault(texts[k], len(self.subtasks))
            for k in dict.fromkeys(flat.tolist())
            if 0 <= k < len(texts)
        }
        return np.array([numbers[k] for k in flat.tolist()], flat.dtype)


def _cast(source: LeRobotDataset, episode: int, name: str, dtype: str) -> np.ndarray:
    """An episode's column in another type.

    Raises:
      DatasetError: it cannot hold a value: one that would be infinite, or another whole number.
    """
    values = source.as_stored(episode, name)
    with np.errstate(all="ignore"):
        cast = values.astype(dtype)
    infinite = np.isfinite(values) & ~np.isfinite(cast)
    lost = infinite if cast.dtype.kind == "f" else cast != values
    if lost.any():
        step = int(np.argmax(lost.reshape(len(lost), -1).any(axis=1)))
        raise DatasetError(
            source.file(episode),
            f"column '{name}'",
            f"is {values[lost][0]} at step {step} of episode {source.episode_numbers[episode]}, "
            f"which {dtype} cannot hold; cast it to another type.",
        )
    return cast


def _require_forward(source: LeRobotDataset, part: Part, times: np.ndarray) -> None:
    """Raises DatasetError if frames are not in the order of their times. That would be lost,
    because the new times follow from the rate."""
    kept = _taken(times.reshape(-1), part.at)
    if len(back := np.flatnonzero(np.diff(kept) < 0)):
        first = 0 if part.at is None else int(part.at[0])
        raise DatasetError(
            source.file(part.episode),
            "column 'timestamp'",
            f"goes back from {kept[back[0]]:g} s to {kept[back[0] + 1]:g} s after frame "
            f"{first + int(back[0])} of episode {source.episode_numbers[part.episode]}; leave the "
            "episode out, or trim it.",
        )


class _Camera:
    """Images of one camera from episode `begun` on: copied packets, or encoded again.

    Decoding and encoding are a job (data/files/job.py). Its videos stay in the folder `encoded`
    until this process, which copies all packets, has copied theirs.
    """

    def __init__(self, plan: EditPlan, camera: str, encoded: Path, begun: int) -> None:
        self._plan, self._camera, self._encoded = plan, camera, encoded
        self._open: Packets | None = None
        numbers = range(begun, len(plan.parts))
        self._seen = run_job(_Seeing(plan, camera, encoded.absolute()), numbers)

    def add(self, number: int, files: CopiedVideos) -> dict[str, Any]:
        """Appends the images of the next episode; returns its entry, empty if it has none."""
        plan, part, seen = self._plan, self._plan.parts[number], next(self._seen)
        if not seen:
            return {}
        if plan.encoding is not None:
            video = _encoded(self._encoded, number)
            places = files.add(video, part.length, plan.fps)
            video.unlink()
            return {"places": places, **seen}
        source, camera = plan.sources[part.source], plan.names[part.source][self._camera]
        path, start = source.video(part.episode, camera)
        if self._open is None or self._open.path != path:
            self.close()
            self._open = Packets(path)
        first = 0 if part.at is None else int(part.at[0])
        span = self._open.span(start, first, part.length, source.fps)
        places = files.add_span(span, part.length, plan.fps)
        return {"places": places, **seen, "from": str(path)}

    def close(self) -> None:
        """Closes the video that was read last."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def __enter__(self) -> "_Camera":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
        shutil.rmtree(self._encoded, ignore_errors=True)


@dataclass(frozen=True)
class _Seeing:
    """The work on a camera's images that other machines can do: an episode's pixel counts (but for
    depth), and the checksums of its first and last frame or, if it is encoded again, its video in
    `folder`. Empty if the episode has no images."""

    plan: EditPlan
    camera: str
    folder: Path

    def __call__(self, number: int, _: Done) -> dict[str, Any]:
        plan, part = self.plan, self.plan.parts[number]
        source, camera = plan.sources[part.source], plan.names[part.source][self.camera]
        if not source.has(camera)[part.episode]:
            return {}
        if camera in source.depth_cameras:
            path, start = source.video(part.episode, camera)
            length = int(source.lengths[part.episode])
            with VideoReader(path, depth=True) as reader:
                frames = _taken(reader.read(start, length, source.fps), part.at)
            return {"ends": [_sum(frames[0]), _sum(frames[-1])]}
        if part.at is None:
            frames = source.frames(part.episode, camera)
        else:
            frames = source.frames_at(part.episode, camera, part.at)
        pixels = {"pixels": Histogram.of(frames).to_text()}
        if plan.encoding is None:
            return pixels | {"ends": [_sum(frames[0]), _sum(frames[-1])]}
        aside = self.folder / f"{number}-{uuid.uuid4().hex[:8]}.mp4"
        write_video(aside, frames, plan.fps, plan.encoding)
        aside.replace(_encoded(self.folder, number))
        return pixels


def _encoded(folder: Path, number: int) -> Path:
    return folder / f"{number}.mp4"


def _sum(picture: UInt8[np.ndarray, "h w 3"]) -> int:
    return int(google_crc32c.value(picture.tobytes()))


def _require_same(plan: EditPlan, root: Path, camera: str, entries: list[dict[str, Any]]) -> None:
    """Checks the first and last frames of copied episodes, which are all in one file."""
    fps = plan.fps
    copied = [entry for entry in entries if "ends" in entry]
    if not copied:
        return
    places = [_place(entry) for entry in copied]
    depth = is_depth(plan.features[camera])
    with VideoReader(
        root / VIDEO_PATH.format(video_key=camera, **places[0]), depth=depth
    ) as reader:
        for entry, place in zip(copied, places, strict=True):
            start, end = place["from_timestamp"], place["to_timestamp"] - 1 / fps
            found = [_sum(reader.read(time, 1, fps)[0]) for time in (start, end)]
            if found != entry["ends"]:
                raise DatasetError(
                    entry["from"],
                    "packets",
                    "decode to different images once joined with other videos; give a codec, which "
                    "encodes them again.",
                )


def _describe(
    plan: EditPlan,
    root: Path,
    journal: FileJournal,
    rows: _Rows,
    limits: Mapping[str, float],
) -> None:
    """Writes meta/, with statistics of the rows as they were written."""
    shutil.rmtree(root / "meta", ignore_errors=True)
    features = dict(plan.features) | BOOKKEEPING
    episodes = EpisodeTable(root, features)
    cameras = {camera: journal.entries(camera) for camera in plan.cameras}
    written = _written(root, journal, rows)
    images = any(feature["dtype"] == "image" for feature in plan.features.values())
    numbers = range(len(plan.parts))
    stored = run_job(_StoredPixels(plan), numbers) if images else iter([{}] * len(numbers))
    for k, (entry, values) in enumerate(zip(journal.entries(_ROWS), written, strict=True)):
        seen = {camera: entries[k] for camera, entries in cameras.items() if entries[k]}
        pixels = {
            camera: Histogram.from_text(one["pixels"])
            for camera, one in seen.items()
            if "pixels" in one
        }
        pixels |= {camera: Histogram(counts) for camera, counts in next(stored).items()}
        places = dict(entry["places"])
        for one in seen.values():
            places |= one["places"]
        episodes.add(entry["instructions"], values, pixels, places)
    episodes.close()
    first = plan.sources[0]
    copy_others(first, root, but=[MODALITY])
    if first.folder.exists(MODALITY):
        write_edited_modality(first, plan.names[0], root)
    counts = episodes.num_episodes, episodes.num_frames, len(rows.tasks)
    info = kept_info(first) | {"robot_type": plan.robot}
    info |= info_of(features, plan.fps, limits, counts)
    episodes.finish(info, list(rows.tasks), list(rows.subtasks))


def _written(root: Path, journal: FileJournal, rows: _Rows) -> Any:
    """Columns of the episodes as the new files hold them, one row group for each."""
    kinds = {n: f for n, f in rows.stored.items() if f["dtype"] != "image"}
    files = (root / DATA_PATH.format(**_place(entry)) for entry in journal.entries(_ROWS))
    for path, episodes in groupby(files):
        opened = open_parquet(path)
        for group, _ in enumerate(episodes):
            table = read_columns(opened, list(kinds), path, [group])
            yield {name: to_numpy(path, name, table[name], kind) for name, kind in kinds.items()}


@dataclass(frozen=True)
class _StoredPixels:
    """Pixel counts of an episode's images that are stored in parquet, as a job."""

    plan: EditPlan

    def __call__(self, number: int, _: Done) -> dict[str, Int64[np.ndarray, "3 256"]]:
        plan, part = self.plan, self.plan.parts[number]
        source, names = plan.sources[part.source], plan.names[part.source]
        found = {}
        for name, feature in plan.features.items():
            if feature["dtype"] == "image" and not is_depth(feature):
                camera = names[name]
                if source.has(camera)[part.episode]:
                    at = np.arange(part.length) if part.at is None else part.at
                    frames = source.frames_at(part.episode, camera, at)
                    found[name] = Histogram.of(frames).counts
        return found


def _place(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Location of an entry's rows or images, by the last parts of the columns' names."""
    return {name.rpartition("/")[2]: value for name, value in entry["places"].items()}


def _taken(values: np.ndarray, at: Int64[np.ndarray, " t"] | None) -> np.ndarray:
    return values if at is None else values[at]
