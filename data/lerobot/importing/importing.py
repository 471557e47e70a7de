"""Recordings of other formats as a LeRobot v3.0 dataset, an episode at a time.

All files are looked at before the first is read; an episode is on disk when the next is begun, and
what interrupts the work, the same call with `resume` goes on with.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from data.lerobot.importing.csv_files import CSV
from data.lerobot.importing.hdf5 import HDF5
from data.lerobot.importing.layout import ImportLayout
from data.lerobot.importing.mcap_files import MCAP
from data.lerobot.importing.recording import (
    ImportedEpisode,
    PendingEpisode,
    RecordingFormat,
    natural,
)
from data.lerobot.importing.replay_buffer import ZARR
from data.lerobot.importing.ros_bags import ROS_BAG
from data.lerobot.recording import features_of
from data.lerobot.writer import DatasetWriter

FORMATS: tuple[RecordingFormat, ...] = (HDF5, ZARR, ROS_BAG, MCAP, CSV)

Progress = Callable[[str, int, int], None]


class ImportSummary(NamedTuple):
    """Recordings read, and what they came to."""

    recordings: int
    episodes: int
    frames: int


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
      paths: files and folders of recordings of one format, in this order; those within a folder in
        the order of their names.
      resume: `out` may hold an import that was cut off.
      progress: called with what is done, episodes (recordings, where only data tell) and all.

    Raises:
      ValueError: `out` is not empty, the paths hold no recordings or several formats, a library is
        missing, or `resume` finds other recordings than those that it was begun with.
      DatasetError: a recording is damaged or not as the layout says; names file and place. Episodes
        before it stay, and once it is repaired or left out, `resume` goes on.
      OSError: the disk is full or fails; `resume` goes on.
    """
    report = progress or (lambda what, done, total: None)
    kind, files = find_recordings(paths)
    counts = []
    for number, file in enumerate(files):
        report("Checking", number, len(files))
        counts.append(kind.check(file, layout))
    with kind.episodes(files[0], layout) as episodes:
        features = _features(episodes[0].read())
    with DatasetWriter(
        out,
        fps=layout.fps,
        features=features,
        robot_type=layout.robot,
        resume=resume,
        about={"layout": {k: v for k, v in asdict(layout).items() if k != "name"}},
    ) as writer:
        before = list(writer.notes)
        for number, file in enumerate(files):
            size = _bytes(file)
            notes = _notes_of(before, file, size, Path(out))
            if notes and notes[-1]["last"]:
                continue
            with kind.episodes(file, layout) as episodes:
                for part, episode in enumerate(episodes[len(notes) :], len(notes) + 1):
                    note = {"file": str(file), "bytes": size, "last": part == len(episodes)}
                    _add(writer, episode, note)
                    share = part * counts[number] // len(episodes)
                    report("Importing", sum(counts[:number]) + share, sum(counts))
        if before:
            raise ValueError(
                f"{out}: has episodes of {before[0]['file']}, which is not among the recordings "
                "now; give the same ones."
            )
        return ImportSummary(len(files), writer.num_episodes, writer.num_frames)


def find_recordings(paths: Sequence[str | Path]) -> tuple[RecordingFormat, list[Path]]:
    """Format and files of the recordings at some paths.

    Raises:
      ValueError: there are none, or of several formats.
    """
    found: dict[Path, RecordingFormat] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise ValueError(f"{path}: does not exist; give files or folders of recordings.")
        here = dict(_within(path))
        if not here:
            raise ValueError(
                f"{path}: holds no recording; their names end in .hdf5, .h5, .zarr, .zarr.zip, "
                ".mcap, .bag or .csv, or they are a rosbag2 folder with metadata.yaml."
            )
        found |= here
    kinds = {kind.name: path for path, kind in found.items()}
    if len(kinds) > 1:
        said = ", ".join(f"{path} ({name})" for name, path in kinds.items())
        raise ValueError(f"Recordings are of several formats: {said}; import each by itself.")
    if not found:
        raise ValueError("Give the files or folders of recordings to import.")
    return next(iter(found.values())), list(found)


def _within(path: Path) -> Iterator[tuple[Path, RecordingFormat]]:
    for kind in FORMATS:
        if kind.recognises(path):
            yield path, kind
            return
    if path.is_dir():
        for entry in sorted(path.iterdir(), key=lambda entry: natural(entry.name)):
            yield from _within(entry)


def _add(writer: DatasetWriter, pending: PendingEpisode, note: dict[str, Any]) -> None:
    columns, frames, task, _ = pending.read()
    try:
        writer.add_episode(columns, frames, task, note=note)
    except ValueError as error:
        raise ValueError(f"{pending.name}: {error}") from None


def _notes_of(
    before: list[dict[str, Any]], file: Path, size: int, out: Path
) -> list[dict[str, Any]]:
    """Takes the notes of this file's episodes from the front of those of all.

    Raises:
      ValueError: they are of another file.
    """
    if before and (before[0]["file"], before[0]["bytes"]) != (str(file), size):
        raise ValueError(
            f"{out}: was begun with {before[0]['file']} of {before[0]['bytes']} bytes, but now "
            f"there is {file} of {size}; give the same recordings, or another folder."
        )
    count = next((k for k, note in enumerate(before, 1) if note["last"]), len(before))
    taken, before[:count] = before[:count], []
    return taken


def _bytes(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _features(episode: ImportedEpisode) -> dict[str, dict[str, Any]]:
    for name, names in episode.names.items():
        dims = episode.columns[name].shape[1]
        if len(names) != dims:
            raise ValueError(
                f"Column '{name}' has {dims} dims, but the layout names "
                f"{len(names)} of them; correct its names."
            )
    return features_of(episode.columns, episode.frames, episode.names)
