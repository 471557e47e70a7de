"""Recording of a robot's observations and commands: one .npz file for each episode, written by a
thread while the robot acts. Memory holds a few ticks, and the loop never waits for the disk.
`python -m tools.data from-robot` makes a LeRobot dataset of the files.

A file has columns [ticks, …] under LeRobot's names, images as `observation.images.NAME/000000` and
so on (.jpg, or .npy), and `task`, `hz`, `dropped`, `robot` and `names` (JSON: those of the dims, by
column).
"""

from __future__ import annotations

import io
import json
import logging
import queue
import threading
import zipfile
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any, Mapping, NamedTuple

import numpy as np

from .compatibility import flat
from .contract import Command
from .wire import encoder, is_picture

log = logging.getLogger("chiliad_client")

MODES = ("act", "hold", "stop")
"""Meanings of the numbers in the column `mode`."""
_QUEUED = 64


class _Edge(NamedTuple):
    """Start of an episode, or its end if there is no prompt; `dropped`: ticks dropped so far."""

    dropped: int
    hz: float = 0.0
    prompt: str | None = None


class _Tick:
    def __init__(self, seen: Mapping[str, Any], command: Command, seconds: float) -> None:
        self.pictures: dict[str, np.ndarray] = {}
        self.numbers: dict[str, np.ndarray] = {}
        for name, value in flat(seen).items():
            array = np.array(value)
            if array.ndim == 3:
                channels_last = array.shape[2] == 3 or array.shape[0] != 3
                self.pictures[name] = array if channels_last else array.transpose(1, 2, 0)
            elif array.dtype.kind in "biuf":
                self.numbers[f"observation.{name}"] = np.atleast_1d(array).astype(np.float32)
        self.command, self.seconds = command, seconds


class EpisodeRecorder:
    """Recorder of episodes, a context manager: the recording is complete when its block ends. A
    file that is being written has the suffix .partial; a killed process leaves it behind,
    unreadable.

    Args:
      folder: for `episode_000000.npz` and so on, numbered after the existing files.
      jpeg: quality, 1 to 100, at which images are stored as JPEG; None stores them as they are, in
        about ten times the bytes (two cameras of 640 × 480 at 30 Hz: 55 MB a second). Images that
        are not uint8 [h, w, 3] always are, and all are, with a warning, if no JPEG encoder is
        installed.
      queued: ticks that may wait for the disk; more are dropped and counted.
    """

    def __init__(self, folder: str | Path, *, jpeg: int | None = 90, queued: int = _QUEUED) -> None:
        self.folder, self._jpeg = Path(folder), jpeg
        try:
            self._encode = None if jpeg is None else encoder()
        except ImportError:
            self._encode = None
            log.warning(
                "%s: images are stored as they are, in about ten times the bytes of JPEG, which "
                "needs simplejpeg or pillow: pip install './client[jpeg]'",
                folder,
            )
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._places = threading.BoundedSemaphore(queued)
        self._dropped = self._written = 0
        self._robot: dict[str, str] = {}
        self._failed: Exception | None = None
        self._file: zipfile.ZipFile | None = None
        self._path = self.folder
        self._rows: dict[str, list[Any]] = {}
        self._about: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._run, name="chiliad recorder", daemon=True)

    def describe(self, robot: Any) -> None:
        """Keeps a robot's `name`, `state_names` and `action_names`, as far as it has them (names in
        lists), for the episodes that begin from now on."""
        of = {"observation.state": "state_names", "action": "action_names"}
        told = {c: getattr(robot, a, None) for c, a in of.items()}
        names = {c: list(map(str, x)) for c, x in told.items() if isinstance(x, (list, tuple))}
        self._robot = {"robot": str(getattr(robot, "name", "")), "names": json.dumps(names)}

    def begin(self, hz: float, prompt: str) -> None:
        """Begins an episode, after ending the current one if there is one."""
        self._queue.put(_Edge(self._dropped, hz, prompt))

    def add(self, seen: Mapping[str, Any], command: Command, seconds: float) -> None:
        """Adds one tick; never waits. Arrays are copied. If the disk lags, the tick is dropped and
        counted."""
        if not self._places.acquire(blocking=False):
            self._dropped += 1
            if self._dropped == 1:
                log.warning("%s: the disk is too slow; ticks are dropped and counted", self.folder)
            return
        self._queue.put(_Tick(seen, command, seconds))

    def end(self) -> None:
        """Ends the episode."""
        self._queue.put(_Edge(self._dropped))

    @property
    def dropped(self) -> int:
        """Ticks dropped so far."""
        return self._dropped

    @property
    def written(self) -> int:
        """Bytes of the finished episodes."""
        return self._written

    def __enter__(self) -> EpisodeRecorder:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.end()
        self._queue.put(None)
        self._thread.join()
        if self._failed is not None:
            raise OSError(f"{self.folder}: the recording could not be written: {self._failed}")

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                if self._failed is None:
                    self._take(item)
            except Exception as error:
                log.exception("%s: the recording failed", self.folder)
                self._failed = error
                with suppress(Exception):
                    if self._file is not None:
                        self._file.close()
            finally:
                if isinstance(item, _Tick):
                    self._places.release()

    def _take(self, item: Any) -> None:
        if isinstance(item, _Tick):
            self._write(item)
            return
        self._finish(item.dropped)
        if item.prompt is not None:
            there = [int(path.stem[-6:]) for path in self.folder.glob("episode_??????.npz")]
            self._path = self.folder / f"episode_{max(there, default=-1) + 1:06d}.npz"
            self._file = zipfile.ZipFile(self._partial, "w")
            self._rows = defaultdict(list)
            self._about = {**self._robot, "task": item.prompt, "hz": item.hz}
            self._about["before"] = item.dropped

    @property
    def _partial(self) -> Path:
        return self._path.with_name(self._path.name + ".partial")

    def _write(self, tick: _Tick) -> None:
        if self._file is None:
            raise ValueError("a tick came outside an episode; call `begin` first")
        number, command = len(self._rows["tick"]), tick.command
        for name, picture in tick.pictures.items():
            member = f"observation.images.{name}/{number:06d}"
            if self._encode is None or not is_picture(picture):
                self._file.writestr(f"{member}.npy", _npy(picture))
            else:
                self._file.writestr(f"{member}.jpg", self._encode(picture, self._jpeg))
        planned = np.full(len(command.sent), np.nan) if command.planned is None else command.planned
        row = {
            **tick.numbers,
            "action": command.sent.astype(np.float32),
            "planned": np.asarray(planned, np.float32),
            "tick": command.tick,
            "seconds": tick.seconds,
            "mode": MODES.index(command.mode),
            "age": -1 if command.age is None else command.age,
            "limited": bool(command.limited),
        }
        for name, value in row.items():
            self._rows[name].append(value)

    def _finish(self, dropped: int) -> None:
        """Writes the columns of the current episode and gives its file the final name."""
        file, self._file = self._file, None
        if file is None:
            return
        for name, values in self._rows.items():
            file.writestr(f"{name}.npy", _npy(np.array(values)))
        before = self._about.pop("before")
        for name, value in {**self._about, "dropped": dropped - before}.items():
            file.writestr(f"{name}.npy", _npy(np.array(value)))
        file.close()
        if self._rows["tick"]:
            self._partial.replace(self._path)
            size, ticks = self._path.stat().st_size, len(self._rows["tick"])
            self._written += size
            log.info("%s: %d ticks, %.1f MB", self._path, ticks, size / 1e6)
        else:
            self._partial.unlink()


def _npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, allow_pickle=False)
    return file.getvalue()
