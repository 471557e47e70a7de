"""Recording of all requests and answers of a server as a LeRobot dataset: an episode for each
connection, and a new one whenever the prompt changes.

Answers never wait for the thread that writes: if its queue is full, exchanges are left out and
counted, in the log and in the column "dropped". Beyond a budget of memory for the pictures of open
episodes, the largest is written and continues as another.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from data.frames import ACTION, STATE
from data.lerobot.recording import video_feature
from data.lerobot.writer import DatasetWriter
from data.statistics.difference import DELTA_T
from data.video.encoding import even
from models.files.terminal import Console, counted, logger, say
from models.inputs.observation import Inputs, RobotObservation
from models.session import RobotSession
from tools.serving.client import Reply
from tools.serving.inputs import read_message
from tools.serving.server import Answers, PolicyServer

log = logger(__name__)

CHUNK, DROPPED = "action_chunk", "dropped"
_CAMERA = "observation.images."
_QUEUED = 64
_BYTES = 512 * 2**20


class Exchange(NamedTuple):
    """A request with its answer: the observation (its state None if the policy reads none), the
    chunk and the time of the request, in seconds."""

    observation: RobotObservation
    chunk: Float[np.ndarray, "h a"]
    time: float

    @property
    def prompt(self) -> str:
        """The prompt, always text in a client's message."""
        return str(self.observation.prompt)


@dataclass(frozen=True)
class RecordedCounts:
    """Counts of a recording. `dropped`: exchanges for which the writer was too slow; `unlike`:
    exchanges whose cameras, pictures or chunk differ in shape from the first one's; `unwritten`:
    exchanges of episodes that failed, and all exchanges after a disk failure, known when the
    recording has ended."""

    episodes: int
    frames: int
    dropped: int
    unlike: int
    unwritten: int

    def __str__(self) -> str:
        lost = f"; {self.dropped} were left out, because writing was too slow" * bool(self.dropped)
        lost += f"; {self.unlike} had other cameras or shapes than the first" * bool(self.unlike)
        lost += f"; {self.unwritten} could not be written" * bool(self.unwritten)
        exchanges = counted(self.frames, "exchange")
        return f"Recorded {exchanges} in {counted(self.episodes, 'episode')}{lost}."


@dataclass
class _Open:
    """An episode that may continue."""

    frames: list[Exchange] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    bytes: int = 0


class Recorder:
    """Records exchanges; use it as a context manager. The dataset appears when the block ends,
    whatever ended it; without any exchange, none appears.

    Args:
      path: folder to create.
      queued: exchanges that may wait for the writer.
      most_bytes: largest number of bytes of the pictures of all open episodes.

    Raises:
      ValueError: the folder exists and is not empty.
    """

    def __init__(self, path: Path, *, queued: int = _QUEUED, most_bytes: int = _BYTES) -> None:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ValueError(
                f"--record {path}: already exists and is not empty; choose another folder."
            )
        self.path, self._most_bytes = path, most_bytes
        self._queue = queue.SimpleQueue[tuple[int, Exchange | None, int] | None]()
        self._places = threading.BoundedSemaphore(queued)
        self._lock = threading.Lock()
        self._missed: dict[int, int] = {}
        self._dropped = self._unlike = self._episodes = self._frames = 0
        self._taken = self._unwritten = 0
        self._features: dict[str, dict[str, Any]] = {}
        self._open: dict[int, _Open] = {}
        self._writer: DatasetWriter | None = None
        self._failed: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)

    def add(self, client: int, exchange: Exchange) -> None:
        """Queues an exchange of a client; returns at once, whatever the writer does."""
        if not self._places.acquire(blocking=False):
            with self._lock:
                self._missed[client] = self._missed.get(client, 0) + 1
                self._dropped += 1
                first = self._dropped == 1
            if first:
                log.warning(
                    "the recording cannot keep up: from now on, exchanges that do not fit are "
                    "left out and counted (%s)",
                    self.path,
                )
            return
        with self._lock:
            missed = self._missed.pop(client, 0)
        self._queue.put((client, exchange, missed))

    def end(self, client: int) -> None:
        """Ends a client's episode."""
        self._queue.put((client, None, 0))

    @property
    def recorded(self) -> RecordedCounts:
        """Counts so far; final when the block has ended."""
        return RecordedCounts(
            self._episodes, self._frames, self._dropped, self._unlike, self._unwritten
        )

    def __enter__(self) -> "Recorder":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._queue.put(None)
        self._thread.join()
        if self._failed is not None:
            raise OSError(
                f"--record {self.path}: could not be written: {self._failed}. {self.recorded}"
            )

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            client, exchange, missed = item
            self._taken += exchange is not None
            try:
                if self._failed is None:
                    self._take(client, exchange, missed)
            except Exception as error:
                log.exception("the recording in %s cannot continue", self.path)
                self._failed = error
            finally:
                if exchange is not None:
                    self._places.release()
        try:
            self._finish()
        except Exception as error:
            self._failed = self._failed or error
        self._unwritten = self._taken - self._frames - self._unlike

    def _take(self, client: int, exchange: Exchange | None, missed: int) -> None:
        if exchange is None:
            self._write(client)
            return
        opened = self._open.get(client)
        if opened is not None and opened.frames[0].prompt != exchange.prompt:
            self._write(client)
        opened = self._open.setdefault(client, _Open())
        opened.frames.append(exchange)
        opened.dropped.append(missed)
        opened.bytes += sum(picture.nbytes for picture in exchange.observation.images.values())
        while sum(one.bytes for one in self._open.values()) > self._most_bytes:
            largest = max(self._open, key=lambda number: self._open[number].bytes)
            log.warning("client %d has a long episode, which is recorded as several", largest)
            self._write(largest)

    def _write(self, client: int) -> None:
        """Writes a client's open episode, if it has one."""
        opened = self._open.pop(client, None)
        if opened is None:
            return
        frames = opened.frames
        if self._writer is None:
            self._features = _features(frames[0])
            self._writer = DatasetWriter(self.path, fps=_rate(frames), features=self._features)
        alike = [_features(one) == self._features for one in frames]
        if not all(alike):
            self._unlike += alike.count(False)
            log.warning(
                "client %d sends or receives other cameras or shapes than the first recorded; "
                "%d exchanges are left out",
                *(client, alike.count(False)),
            )
        kept = [i for i, fits in enumerate(alike) if fits]
        if not kept:
            return
        columns, pictures = _columns([frames[i] for i in kept], [opened.dropped[i] for i in kept])
        task = frames[0].prompt.strip() or "(no prompt)"
        try:
            self._writer.add_episode(columns, pictures, task)
        except ValueError as error:
            log.warning("client %d: %d exchanges are left out: %s", client, len(kept), error)
            return
        self._episodes, self._frames = self._episodes + 1, self._frames + len(kept)

    def _finish(self) -> None:
        """Writes the open episodes and closes the dataset; after a failure, keeps complete ones."""
        if self._failed is None:
            for client in list(self._open):
                self._write(client)
        if self._writer is not None:
            if self._writer.num_episodes:
                self._writer.__exit__(None, None, None)
            else:
                with suppress(OSError):
                    self._writer.__exit__(ValueError, None, None)


@contextmanager
def recording(path: Path, server: PolicyServer, console: Console) -> Iterator[Recorder]:
    """Records the exchanges of a server, and prints at the end what was recorded.

    Raises:
      ValueError: as `Recorder`.
      OSError: the dataset could not be written.
    """
    with Recorder(path) as recorder:
        server.ended.append(lambda client: recorder.end(client.number))
        yield recorder
    say(console, f"{path}: {recorder.recorded}")


def recorded(answers: Answers, inputs: Inputs, recorder: Recorder | None) -> Answers:
    """The answers, recorded if there is a recorder."""
    return answers if recorder is None else RecordedAnswers(answers, inputs, recorder)


@dataclass(frozen=True, eq=False)
class _Asked:
    """A request with what a recording keeps of it."""

    request: Any
    client: int
    observation: RobotObservation
    time: float


@dataclass(eq=False)
class RecordedAnswers:
    """Answers of a policy, each recorded. They are as quick as without recording, except that each
    message is read twice.

    `inputs`: reads a client's message."""

    answers: Answers
    inputs: Inputs
    recorder: Recorder
    clock: Callable[[], float] = time.monotonic

    metadata: Mapping[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.metadata = self.answers.metadata

    def join(self, number: int) -> RobotSession:
        """Adds a client."""
        return self.answers.join(number)

    def leave(self) -> None:
        """Removes a client."""
        self.answers.leave()

    def read(self, message: Mapping[str, Any], session: RobotSession) -> _Asked:
        """A client's message as the policy reads it.

        Raises:
          ValueError: as raised by the policy, or a recording cannot keep the message.
        """
        now = self.clock()
        request = self.answers.read(message, session)
        return _Asked(request, session.number, read_message(self.inputs, message).observation, now)

    def submit(self, request: _Asked) -> Future[Reply]:
        """The answer, recorded once it is available if it is finite; only finite answers are
        sent."""
        future = self.answers.submit(request.request)
        future.add_done_callback(lambda done: self._record(request, done))
        return future

    def _record(self, asked: _Asked, done: Future[Reply]) -> None:
        if done.cancelled() or done.exception() is not None:
            return
        chunk = done.result().actions
        if np.isfinite(chunk).all():
            exchange = Exchange(asked.observation, chunk.copy(), asked.time)
            self.recorder.add(asked.client, exchange)


def _rate(frames: list[Exchange]) -> int:
    """Requests a second, rounded; exact times are in the column of time differences."""
    waits = np.diff([one.time for one in frames])
    return max(1, round(1 / max(float(np.median(waits)), 1e-3))) if len(waits) else 1


def _features(one: Exchange) -> dict[str, dict[str, Any]]:
    horizon, dims = one.chunk.shape

    def numbers(size: int) -> dict[str, Any]:
        return {"dtype": "float32", "shape": (size,), "names": None}

    found = {ACTION: numbers(dims), CHUNK: numbers(horizon * dims), DELTA_T: numbers(1)}
    found[DROPPED] = {"dtype": "int64", "shape": (1,), "names": None}
    if one.observation.state is not None:
        found[STATE] = numbers(len(one.observation.state))
    for camera, picture in one.observation.images.items():
        found[_full(camera)] = video_feature(even(picture).shape)
    return found


def _columns(
    frames: list[Exchange], dropped: list[int]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    chunks = np.stack([one.chunk for one in frames]).astype(np.float32)
    times = np.array([one.time for one in frames])
    columns: dict[str, np.ndarray] = {
        ACTION: chunks[:, 0],
        CHUNK: chunks.reshape(len(chunks), -1),
        DELTA_T: np.diff(times, prepend=times[:1])[:, None].astype(np.float32),
        DROPPED: np.array(dropped, np.int64)[:, None],
    }
    seen = [one.observation for one in frames]
    states = [one.state for one in seen if one.state is not None]
    if states:
        columns[STATE] = np.stack(states).astype(np.float32)
    pictures = {
        _full(camera): np.stack([even(one.images[camera]) for one in seen])
        for camera in seen[0].images
    }
    return columns, pictures


def _full(camera: str) -> str:
    """LeRobot's name for a camera."""
    return _CAMERA + camera.removeprefix(_CAMERA)
