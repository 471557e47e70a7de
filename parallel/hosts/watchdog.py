"""Ends a run that makes no progress, and reports which process is to blame and where each one
stands.

A thread in each process reports its progress to the coordination service; it runs while the main
thread hangs in a collective, which releases Python's lock. JAX's heartbeats end the peers of a dead
process, but nothing else detects one that is alive but stuck (jax#38503).
"""

import faulthandler
import json
import math
import os
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import jax

from models.files.terminal import harmless
from parallel.hosts import coordination, exits

PATIENCE = {"preparing": math.inf}
"""Seconds that a phase may take; `LONG` for phases not named, except "training"."""
LONG = 1800.0
REPORT = "CHILIAD_REPORT"
"""The file in which `tools.launch` looks for the first cause of a failure."""

_INTERVAL, _STEPS, _DEAF = 0.5, 20, 600.0
_VERDICT, _BEATS = "watchdog/verdict", "watchdog/beats"


class Beat(NamedTuple):
    """Progress of a process: steps dispatched, the seconds since its last progress, and how many
    seconds are allowed. `beats` increases as long as its watchdog lives."""

    phase: str
    step: int
    age: float
    allowed: float
    beats: int

    @property
    def overdue(self) -> bool:
        return self.age > self.allowed


class _Now(NamedTuple):
    phase: str
    step: int
    since: float


_now = _Now("starting", 0, time.monotonic())
_durations: deque[float] = deque(maxlen=32)


def note(phase: str, step: int | None = None) -> None:
    """Records that the run enters a phase ("preparing", "loading", "compiling", "training",
    "saving", "evaluating", "profiling") or, in "training", a step: `step` steps have been
    dispatched."""
    global _now
    before, now = _now, time.monotonic()
    if phase == before.phase == "training" and step == before.step + 1:
        _durations.append(now - before.since)
    _now = _Now(phase, before.step if step is None else step, now)


def alive() -> None:
    """Records progress within a phase, such as in an episode, and restarts the phase's time limit.
    May be called from any thread."""
    global _now
    _now = _now._replace(since=time.monotonic())


def suspects(beats: dict[int, Beat], silent: set[int]) -> list[int]:
    """Ranks that keep the others waiting: those whose watchdogs fell silent, else those at the
    lowest step, unless all are at that step."""
    if silent:
        return sorted(silent)
    lowest = min(beat.step for beat in beats.values())
    behind = sorted(rank for rank, beat in beats.items() if beat.step == lowest)
    return behind if len(behind) < len(beats) else []


class Watchdog:
    """Watches this process and, with the others' watchdogs, the job; use as a context manager.

    A process is overdue after `patience` seconds (or 20 median steps, if longer) without a step, or
    after `PATIENCE` in another phase. When all processes that still report are overdue, each writes
    its main thread's stack to stderr and all threads' stacks to `folder`/stacks, and ends with
    `exits.STALLED`. An error that leaves the block also ends all processes of the job: this one
    with the error's exit code, the others with `exits.PEER_LOST`; `sys.exit(exits.UNFINISHED)` ends
    all of them with that code.
    """

    def __init__(self, folder: Path, patience: float = 60.0) -> None:
        self._folder, self._patience = folder, patience
        self._client, self._rank = coordination.client(), jax.process_index()
        self._processes = jax.process_count()
        self._interval = max(_INTERVAL, self._processes / 128)
        self._seen: dict[int, tuple[int, float]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        _durations.clear()
        note("starting", 0)
        self._thread.start()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._ended.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        alone = self._client is None
        if error is None or (alone and isinstance(error, SystemExit)):
            return
        if isinstance(error, SystemExit) and error.code == exits.UNFINISHED:
            what = "told to stop with nothing to save"
            told = {"rank": self._rank, "what": what, "code": exits.UNFINISHED}
            self._follow(self._announce(told))
        what = f"{type(error).__name__}: {error}"
        code = exits.code(error, begun=_now.phase not in ("starting", "preparing"))
        first = self._announce({"rank": self._rank, "what": what, "code": exits.PEER_LOST})
        if first["rank"] != self._rank:  # this process's error only followed
            self._follow(first)
        _report(self._rank, what)
        if isinstance(error, KeyboardInterrupt):
            print(harmless(_interrupted(_now.phase)), file=sys.stderr, flush=True)
        elif (said := exits.sentence(error)) is not None:
            print(harmless(f"error: {said}"), file=sys.stderr, flush=True)
        elif not isinstance(error, SystemExit):
            lines = traceback.format_exception(error)
            print(harmless("".join(lines)), end="", file=sys.stderr, flush=True)
        if alone:
            sys.exit(code)
        self._leave(code)  # the interpreter's normal exit would wait for the others

    def _watch(self) -> None:
        count, failures = 0, 0
        while not self._ended.wait(self._interval):
            faulthandler.dump_traceback_later(_DEAF, exit=True)  # if this thread cannot run either
            count += 1
            now = _now
            age = time.monotonic() - now.since
            beat = Beat(now.phase, now.step, age, self._allowed(now.phase), count)
            try:
                if self._client is not None:
                    self._client.put(f"{_BEATS}/{self._rank}", json.dumps(beat))
                    verdict = self._client.get(_VERDICT)
                    if verdict is not None:
                        self._follow(json.loads(verdict))
                if beat.overdue:
                    self._judge(beat)
                failures = 0
            except jax.errors.JaxRuntimeError as error:
                failures += 1
                if failures == 3:
                    what = f"the coordination service cannot be reached ({error})"
                    self._follow({"rank": 0, "what": what, "code": exits.PEER_LOST})

    def _allowed(self, phase: str) -> float:
        if phase != "training":
            return max(PATIENCE.get(phase, LONG), self._patience)
        if not _durations:
            return self._patience
        usual = statistics.median(_durations) if len(_durations) > 4 else min(_durations)
        return max(self._patience, _STEPS * usual)

    def _judge(self, mine: Beat) -> None:
        """Ends the job unless others may be waiting for a process that is still at work."""
        beats, now = {self._rank: mine, **self._beats()}, time.monotonic()
        for rank in range(self._processes):
            count = beats[rank].beats if rank in beats else 0
            if rank not in self._seen or self._seen[rank][0] != count:
                self._seen[rank] = (count, now)
        silent = {r for r, (_, since) in self._seen.items() if now - since > self._patience}
        alive = [beat for rank, beat in beats.items() if rank not in silent]
        if len(alive) + len(silent) < self._processes or not all(beat.overdue for beat in alive):
            return
        blamed = suspects(beats, silent)
        standing = "; ".join(
            f"rank {rank} {beat.phase} at step {beat.step} for {beat.age:.0f} s"
            + (" and silent" if rank in silent else "")
            for rank, beat in sorted(beats.items())
            if rank in blamed or len(beats) <= 16
        )
        who = f"suspect: rank {', '.join(map(str, blamed))}" if blamed else "no single suspect"
        what = f"no progress for {mine.age:.0f} s; {who} ({standing})"
        suspect = (blamed or [self._rank])[0]
        self._follow(self._announce({"rank": suspect, "what": what, "code": exits.STALLED}))

    def _beats(self) -> dict[int, Beat]:
        found = {} if self._client is None else self._client.list(_BEATS)
        return {int(rank): Beat(*json.loads(value)) for rank, value in found.items()}

    def _announce(self, verdict: dict) -> dict:
        """Sends a verdict to all processes, or else returns that of the process that was first."""
        if self._client is None:
            return verdict
        try:
            return json.loads(self._client.put_first(_VERDICT, json.dumps(verdict)))
        except jax.errors.JaxRuntimeError:
            return verdict  # the service is gone, and the others with it

    def _follow(self, verdict: dict) -> None:
        """Reports what ended the job and where this process stood, and ends this process."""
        stalled, failed = verdict["code"] == exits.STALLED, verdict["code"] != exits.UNFINISHED
        how = "failed" if failed else "ended"
        what = verdict["what"] if stalled else f"rank {verdict['rank']} {how}: {verdict['what']}"
        if failed:
            _report(verdict["rank"], verdict["what"])
        with suppress(OSError):
            print(harmless(f"watchdog at {time.time():.3f}: {what}"), file=sys.stderr, flush=True)
        if stalled:
            with suppress(OSError):  # all may be waiting for a disk that is gone or full
                self._dump(what)
        self._leave(verdict["code"])

    def _dump(self, what: str) -> None:
        """Writes the main thread's stack to stderr, and all threads' stacks to the run's folder."""
        main = sys._current_frames()[threading.main_thread().ident or 0]
        stack = "".join(traceback.format_stack(main, 16))
        print(harmless(stack), end="", file=sys.stderr, flush=True)
        file = self._folder / "stacks" / f"rank-{self._rank}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as stream:
            print(f"{time.ctime()}: {what}", file=stream, flush=True)
            faulthandler.dump_traceback(stream, all_threads=True)

    def _leave(self, code: int) -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        if self._processes > 1:  # the others must still read the verdict, which rank 0 holds
            time.sleep((4 if self._rank == 0 else 2) * self._interval)
        os._exit(code)


def _interrupted(phase: str) -> str:
    if phase in ("starting", "preparing"):
        return "Interrupted while preparing; the finished part of the frame store is kept."
    return f"Interrupted while {phase}; --resume continues from the last checkpoint."


def _report(rank: int, what: str) -> None:
    """Writes the first cause to the file that the launcher reads; only the first writer counts."""
    path = os.environ.get(REPORT)
    if path is None:
        return
    try:
        with open(path, "x") as stream:
            json.dump({"rank": rank, "what": what}, stream)
    except OSError:  # another was first, or the disk is full, as the error itself says
        return
