"""Imports recordings of other formats as a LeRobot v3.0 dataset, one episode at a time.

All files are checked before the first is read. Reading and encoding are a job (data/files/job.py);
an episode is on disk when this process begins with the next one. After an interruption, the same
call with `resume` continues.
"""

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.errors import DatasetError, require_content
from data.files.checksums import digest_of
from data.files.job import Done, run_job
from data.files.json_file import read_json
from data.files.partial import require_apart
from data.lerobot.dataset import LeRobotDataset
from data.lerobot.importing.csv_files import CSV
from data.lerobot.importing.hdf5 import HDF5
from data.lerobot.importing.layout import ImportLayout
from data.lerobot.importing.mcap_files import MCAP
from data.lerobot.importing.recording import (
    CheckedRecording,
    ImportedEpisode,
    RecordingFormat,
    natural,
    require_alike,
)
from data.lerobot.importing.replay_buffer import ZARR
from data.lerobot.importing.rlds_folders import RLDS
from data.lerobot.importing.ros_bags import METADATA, ROS_BAG
from data.lerobot.meta_writer import IMPORTED
from data.lerobot.recording import features_of
from data.lerobot.writer import DatasetWriter, finished_recording
from data.statistics.pixels import Histogram
from data.video.encoding import EncodedFrames, VideoEncoding, write_video

FORMATS: tuple[RecordingFormat, ...] = (HDF5, ZARR, ROS_BAG, MCAP, CSV, RLDS)

Progress = Callable[[str, int, int], None]

_ENCODED, _DATABASE = ".encoded", ".db3"


class Unit(NamedTuple):
    """Episodes `first` to `stop` (exclusive; None: all others) of recording `number`, the `file`
    with this SHA-256."""

    number: int
    file: Path
    digest: str
    first: int
    stop: int | None


class ReadEpisodes(NamedTuple):
    """Episodes, each with its name, the number of episodes in its file and the seconds left out;
    and the next one's error, if any."""

    episodes: list[tuple[ImportedEpisode, str, int, float]]
    error: ValueError | OSError | None


@dataclass(frozen=True)
class RecordingsReading:
    """An import as a job: reads episodes and encodes their images to videos in `folder`. Frames
    whose shape differs from the dataset's `shapes` are not encoded; the writer refuses them."""

    format: str
    layout: ImportLayout
    shapes: dict[str, tuple[int, ...]]
    folder: Path

    def __call__(self, unit: Unit, done: Done) -> ReadEpisodes:
        read: list[tuple[ImportedEpisode, str, int, float]] = []
        kind = next(kind for kind in FORMATS if kind.name == self.format)
        try:
            with kind.episodes(unit.file, self.layout) as episodes:
                for pending in episodes[unit.first : unit.stop]:
                    episode = pending.read()
                    frames = {c: self._encoded(c, x) for c, x in episode.frames.items()}
                    about = pending.name, len(episodes), pending.left_out
                    read.append((episode._replace(frames=frames), *about))
                    done(1)
        except (ValueError, OSError) as error:
            if not read:
                raise
            return ReadEpisodes(read, error)
        return ReadEpisodes(read, None)

    def _encoded(self, camera: str, frames: Any) -> EncodedFrames:
        if frames.dtype != np.uint8 or frames.shape[1:] != self.shapes.get(camera):
            return EncodedFrames(None, frames.shape, np.zeros((3, 256), np.int64))
        path = self.folder / f"{uuid.uuid4().hex}.mp4"
        write_video(path, frames, self.layout.fps, VideoEncoding())
        return EncodedFrames(path, frames.shape, Histogram.of(frames).counts)


class ImportSummary(NamedTuple):
    """Number of recordings read, the episodes and frames written, the seconds cut out because of
    gaps, and the names of the data that the layout takes nothing from. `complete`: the import had
    ended before, and the seconds are not known."""

    recordings: int
    episodes: int
    frames: int
    left_out: float
    unused: tuple[str, ...]
    complete: bool = False


def import_dataset(
    paths: Sequence[str | Path],
    out: str | Path,
    layout: ImportLayout,
    *,
    resume: bool = False,
    progress: Progress | None = None,
) -> ImportSummary:
    """Writes the recordings at `paths` to the new folder `out`.

    Args:
      paths: files and folders of recordings of one format, in this order; within a folder, in the
        order of their names.
      resume: `out` may hold an interrupted import, or a complete one, which stays as it is.
      progress: called with the activity, the episodes done (recordings, if only the data tell their
        episodes) and the total.

    Raises:
      ValueError: `out` is not empty or inside a recording, the paths hold no recordings or several
        formats, a library is missing, or `resume` finds an import of other recordings or with
        another layout.
      DatasetError: a recording is damaged or not as the layout says; names file and place. Earlier
        episodes stay; once it is repaired or left out, `resume` continues.
      OSError: the disk is full or fails; `resume` continues.
    """
    report = progress or (lambda what, done, total: None)
    kind, files = find_recordings(paths)
    require_apart(out, files)
    checked = list[CheckedRecording]()
    for number, file in enumerate(files):
        report("Checking", number, len(files))
        checked.append(kind.check(file, layout))
        require_alike(file, "", checked[-1], checked[0], str(files[0]))
    counts = [one.episodes for one in checked]
    about = {"layout": {k: v for k, v in asdict(layout).items() if k != "name"}}

    def digested(activity: str) -> Iterator[str]:
        for number, file in enumerate(files):
            report(activity, number, len(files))
            yield digest_of([file, *kind.beside(file, layout)])

    if resume and (done := finished_recording(Path(out))) is not None:
        digests = list(digested("Comparing"))
        _require_same(done, _origin(about, files, digests))
        written = done.num_episodes, done.num_frames
        return ImportSummary(len(files), *written, 0.0, checked[0].unused, complete=True)
    with kind.episodes(files[0], layout) as episodes:
        features = _features(episodes[0].read())
    aside = Path(out).absolute().with_name(Path(out).name + _ENCODED)
    with DatasetWriter(
        out,
        fps=layout.fps,
        features=features,
        robot_type=layout.robot or None,
        resume=resume,
        about=about,
    ) as writer:
        before, units, digests = list(writer.notes), list[Unit](), list[str]()
        told = digested("Comparing" if before else "Reading")
        for number, (file, digest) in enumerate(zip(files, told, strict=True)):
            digests.append(digest)
            place = Path(os.path.abspath(file))
            notes = _notes_of(before, place, digest, Path(out))
            if not (notes and notes[-1]["last"]):
                units += _units(number, place, digest, len(notes), counts[number])
        if before:
            raise ValueError(
                f"{out}: has episodes of {before[0]['file']}, which is no longer among the "
                "recordings; give the same recordings as before."
            )
        shapes = {n: tuple(f["shape"]) for n, f in features.items() if f["dtype"] == "video"}
        reading = RecordingsReading(kind.name, layout, shapes, aside)
        try:
            for unit, (read, error) in zip(units, run_job(reading, units), strict=True):
                for part, (episode, name, of, left_out) in enumerate(read, unit.first + 1):
                    note: dict[str, Any] = {"file": str(unit.file), "sha256": unit.digest}
                    note |= {"last": part == of, "left_out": left_out}
                    _add(writer, episode, name, note)
                    share = part * counts[unit.number] // of
                    report("Importing", sum(counts[: unit.number]) + share, sum(counts))
                if error is not None:
                    raise error
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        writer.origin = _origin(about, files, digests)
        left_out = sum(note.get("left_out", 0.0) for note in writer.notes)
        written = writer.num_episodes, writer.num_frames
        return ImportSummary(len(files), *written, left_out, checked[0].unused)


def find_recordings(paths: Sequence[str | Path]) -> tuple[RecordingFormat, list[Path]]:
    """Format and files of the recordings at some paths.

    Raises:
      ValueError: there are none, or they are of several formats.
    """
    found: dict[Path, RecordingFormat] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise ValueError(f"{path}: does not exist; give files or folders of recordings.")
        here = dict(_within(path))
        if not here and path.suffix == _DATABASE:
            raise _killed(path.parent)
        if not here:
            raise ValueError(
                f"{path}: holds no recording; give files that end in .hdf5, .h5, .zarr, .zarr.zip, "
                ".mcap, .bag or .csv, or a folder of rosbag2 (metadata.yaml) or RLDS "
                "(features.json)."
            )
        found |= here
    for path in found:
        for file in path.iterdir() if path.is_dir() else (path,):
            if file.is_file():
                require_content(file)
    kinds = {kind.name: path for path, kind in found.items()}
    if len(kinds) > 1:
        said = ", ".join(f"{path} ({name})" for name, path in kinds.items())
        raise ValueError(f"Recordings are of several formats: {said}; import each separately.")
    if not found:
        raise ValueError("Give the files or folders of recordings to import.")
    return next(iter(found.values())), list(found)


def _within(path: Path) -> Iterator[tuple[Path, RecordingFormat]]:
    for kind in FORMATS:
        if kind.recognises(path):
            if not (path.is_file() or path.is_dir()):
                raise DatasetError(
                    path, "file", "is a pipe, device or broken link, not a file; copy it again."
                )
            yield path, kind
            return
    if path.is_dir():
        entries = sorted(path.iterdir(), key=lambda entry: natural(entry.name))
        if any(_DATABASE in entry.suffixes for entry in entries):
            raise _killed(path)
        for entry in entries:
            yield from _within(entry)


def _killed(bag: Path) -> DatasetError:
    """An error about a folder of rosbag2 that is not recognised, or about a file of it."""
    if (bag / METADATA).is_file():
        return DatasetError(bag, "file", "is in a bag; give the bag's folder.")
    return DatasetError(
        bag,
        METADATA,
        f"is missing, as in a bag whose recording was killed; run `ros2 bag reindex {bag}`, which "
        "writes it.",
    )


def _add(writer: DatasetWriter, episode: ImportedEpisode, name: str, note: dict[str, Any]) -> None:
    try:
        writer.add_episode(episode.columns, episode.frames, episode.task, note=note)
    except ValueError as error:
        place = name.removeprefix(note["file"]).strip(", ") or "recording"
        raise DatasetError(note["file"], place, str(error)) from None


def _units(number: int, file: Path, digest: str, first: int, count: int) -> Iterator[Unit]:
    """Units of a recording from its episode `first` on: one per episode, or one for all if only the
    data tell how many there are."""
    if count == 1:
        yield Unit(number, file, digest, first, None)
        return
    for part in range(first, count):
        yield Unit(number, file, digest, part, part + 1)


def _origin(about: dict[str, Any], files: Sequence[Path], digests: Sequence[str]) -> dict[str, Any]:
    """Data that determine an import: its layout, and the names and SHA-256 of the recordings."""
    recordings = [[file.name, digest] for file, digest in zip(files, digests, strict=True)]
    return json.loads(json.dumps({**about, "recordings": recordings}))


def _require_same(done: LeRobotDataset, origin: dict[str, Any]) -> None:
    """Raises ValueError if a finished dataset is not that of the import of this origin."""
    path = done.root / IMPORTED
    if not path.is_file():
        raise ValueError(
            f"{done.root}: is a finished dataset, and no {IMPORTED} tells what was imported to it; "
            "import to another folder."
        )
    known = read_json(path, path, "import to another folder")
    if known != origin:
        same = isinstance(known, dict) and known.get("recordings") == origin["recordings"]
        other = "with another layout or task" if same else "from other recordings"
        raise ValueError(
            f"{done.root}: is a finished dataset that was imported {other} (see {IMPORTED}); "
            "import these to another folder and join both with `tools.data edit`."
        )


def _notes_of(
    before: list[dict[str, Any]], file: Path, digest: str, out: Path
) -> list[dict[str, Any]]:
    """Removes the notes of this file's episodes from the front of `before`, and returns them."""
    if before and before[0]["file"] != str(file):
        raise ValueError(
            f"{out}: was started with {before[0]['file']}, but now there is {file}; give the same "
            "recordings, or another folder."
        )
    if before and before[0].get("sha256") != digest:
        raise ValueError(
            f"{out}: has episodes of {file}, whose content has changed since (its SHA-256 is "
            f"{digest[:12]}…); give the same recordings, or another folder."
        )
    count = next((k for k, note in enumerate(before, 1) if note["last"]), len(before))
    taken, before[:count] = before[:count], []
    return taken


def _features(episode: ImportedEpisode) -> dict[str, dict[str, Any]]:
    for name, names in episode.names.items():
        dims = episode.columns[name].shape[1]
        if len(names) != dims:
            raise ValueError(
                f"Column '{name}' has {dims} dims, but the layout names "
                f"{len(names)} of them; correct its names."
            )
    return features_of(episode.columns, episode.frames, episode.names)
