"""Slots with one simulator process each: a simulator that crashes, hangs or sends invalid messages
affects only its own episode and is replaced.

The processes (`sim.processes.child`) may use another Python (`sim.processes.interpreters`), and run
in parallel, also while the policy computes; the parent never waits for one in particular.
"""

import json
import math
import selectors
import socket
import sys
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from sim.processes import child
from sim.processes.worker import SimulatorProcess
from sim.protocol import Observation, Outcome, Spec, Start, failed

_STARTING = 300.0
"""Seconds within which a simulator must be ready for its first request."""
_WAKER = -1
"""Takes the place of a slot in the selector for calls of `wake`."""


class Processes:
    """`sim.protocol.Slots` over simulators in processes. Use it in a `with` block, or `close` it.

    Attributes:
      restarts: number of times that each slot's simulator was replaced.
    """

    lockstep = False

    def __init__(
        self,
        simulator: str | Path,
        count: int,
        *,
        python: str | Path = sys.executable,
        options: Mapping[str, Any] | None = None,
        patience: float = 60.0,
        remedy: str = "read the last lines of its output",
    ) -> None:
        """Starts all processes at once and waits until they are ready.

        Args:
          simulator: a Python file with a class `Simulator`, as in `sim.processes.child`.
          count: number of slots.
          python: the Python that runs it; needs numpy and the file's imports.
          options: keyword arguments of the class, as JSON.
          patience: seconds on one request after which a simulator counts as hung.
          remedy: what to do if it does not start, for the error: "make metaworld".

        Raises:
          ValueError: a simulator does not start; the message contains its stderr.
        """
        if count < 1 or patience <= 0:
            raise ValueError(
                f"count = {count} and patience = {patience}: expected at least one slot and more "
                "than 0 seconds."
            )
        self.count = count
        self.restarts = [0] * count
        self._command = (str(python), child.__file__, str(simulator), json.dumps(options or {}))
        self._patience = patience
        self._remedy = remedy
        self._selector = selectors.DefaultSelector()
        self._slots = [_Slot() for _ in range(count)]
        self._ready: list[Outcome] = []
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, _WAKER)
        ends = (self._woken, self._waker)
        self._finalizer = weakref.finalize(self, _close, self._slots, self._selector, ends)
        try:
            for i in range(count):
                self._start(i)
            while any(slot.process and slot.process.starting for slot in self._slots):
                self._wait(math.inf)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, slot: int, start: Start) -> None:
        """Starts an episode; an episode already in the slot is abandoned.

        Raises:
          ValueError: there is no such task or seed, or the slot is busy.
        """
        if start.task not in self.spec.tasks or start.seed < 0:
            raise ValueError(
                f"{self.spec.name} cannot begin {start}: its tasks are {list(self.spec.tasks)} and "
                "its seeds are not negative."
            )
        if self._slots[slot].process is None:
            self._start(slot)
            self.restarts[slot] += 1
        self._request(slot, {"do": "begin", "task": start.task, "seed": int(start.seed)})

    def send(self, slot: int, actions: Float[np.ndarray, "t a"], film: bool = False) -> None:
        """Acts T steps, or until the episode ends.

        Raises:
          ValueError: the actions have a wrong shape or are not finite, no episode is running, or
            the slot is busy.
        """
        actions = np.asarray(actions, np.float32)
        names = self.spec.action_names
        if actions.ndim != 2 or not len(actions) or actions.shape[1] != len(names):
            raise ValueError(
                f"Slot {slot} was sent actions of shape {actions.shape}, expected [at least one "
                f"step, {len(names)} actions ({', '.join(names)})]."
            )
        if not np.isfinite(actions).all():
            raise ValueError(
                f"Slot {slot} was sent actions that are not finite; expected finite numbers, so "
                f"check what the policy computes."
            )
        self._continue(slot, {"do": "send", "actions": actions, "film": bool(film)})

    def demonstrate(self, slot: int, steps: int, noise: float = 0.0) -> None:
        """Lets the task's expert act `steps` steps. Normal noise is added to its actions, with
        `noise` times their range as standard deviation, drawn from the episode's seed.

        Raises:
          ValueError: there is no expert, steps < 1, noise < 0, no episode is running, or the slot
            is busy.
        """
        if not self.spec.expert or steps < 1 or noise < 0:
            raise ValueError(
                f"{self.spec.name} cannot demonstrate {steps} steps with noise {noise}: expected "
                f"steps >= 1, noise >= 0 and a simulator with an expert (this one's: "
                f"{self.spec.expert})."
            )
        self._continue(slot, {"do": "demonstrate", "steps": int(steps), "noise": float(noise)})

    def poll(self, timeout: float | None = None) -> list[Outcome]:
        """Outcomes since the last call. If a slot is busy, waits for at least one, unless the
        timeout (seconds) passes or `wake` is called first.

        Raises:
          ValueError: a replacement simulator does not start.
        """
        until = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            busy = any(slot.busy for slot in self._slots)
            woken = self._wait(until if busy and not self._ready else -math.inf)
            if self._ready or woken or not busy or time.monotonic() >= until:
                finished, self._ready = self._ready, []
                return finished

    def wake(self) -> None:
        """Makes a waiting poll, or else the next one, return the finished outcomes. May be called
        from any thread at any time."""
        with suppress(OSError):  # full and so already awake, or closed
            self._waker.send(b"!")

    def close(self) -> None:
        """Kills the simulators, as the end of a `with` block and the end of our own process do."""
        self._finalizer()

    def _continue(self, i: int, request: dict[str, Any]) -> None:
        slot = self._slots[i]
        if not slot.running:
            raise ValueError(f"Slot {i} has no running episode; begin one first.")
        if slot.process is None:
            self._fail(i, slot.ending)
        else:
            self._request(i, request)

    def _request(self, i: int, request: dict[str, Any]) -> None:
        slot = self._slots[i]
        process = slot.process
        assert process is not None
        if slot.busy:
            raise ValueError(f"Slot {i} is busy; poll its outcome first.")
        slot.busy = slot.running = True
        process.outbox += child.pack(request)
        if not process.starting:
            process.deadline = time.monotonic() + self._patience
        if not process.write():
            self._selector.register(process.requests, selectors.EVENT_WRITE, i)

    def _wait(self, until: float) -> bool:
        """Waits for an event until `until`, or until a slot hangs; True if `wake` was called."""
        woken = False
        working = [s.process.deadline for s in self._slots if s.process and s.working]
        wait = min([until, *working]) - time.monotonic()
        for key, events in self._selector.select(None if wait == math.inf else max(wait, 0.0)):
            if key.data == _WAKER:
                woken = bool(self._woken.recv(4096))
                continue
            process = self._slots[key.data].process
            if process is None:
                continue  # ended when its message was read a moment ago
            if events & selectors.EVENT_READ:
                self._read(key.data, process)
            elif process.write():
                self._selector.unregister(process.requests)
        for i, slot in enumerate(self._slots):
            process = slot.process
            if process and slot.working and process.deadline < time.monotonic():
                waited = _STARTING if process.starting else self._patience
                process.abort()
                self._end(i, f"hung: no answer for {waited:g} s", grace=1.0)
        return woken

    def _read(self, i: int, process: SimulatorProcess) -> None:
        """Reads a simulator's output; any output shows that it is not hung."""
        slot = self._slots[i]
        try:
            message = process.read()
            process.deadline = max(process.deadline, time.monotonic() + self._patience)
            if message is None:
                return
            if process.starting:
                self.spec = _spec(message["spec"])
                process.starting, process.deadline = False, time.monotonic() + self._patience
            elif not slot.busy:
                raise ValueError("an answer without a request")
            else:
                outcome = _outcome(i, message)
                slot.busy, slot.running, slot.goal = False, not outcome.ended, outcome.goal
                self._ready.append(outcome)
        except EOFError:
            self._end(i, "died", grace=1.0)
        except (ValueError, KeyError, TypeError) as error:
            self._end(i, f"sent an invalid message ({error})")

    def _start(self, i: int) -> None:
        try:
            self._slots[i].process = process = SimulatorProcess(self._command, _STARTING)
        except OSError as error:
            raise ValueError(self._unstarted(f"cannot be run: {error}")) from error
        self._selector.register(process.replies, selectors.EVENT_READ, i)

    def _unstarted(self, what: str) -> str:
        python, _, simulator, options = self._command
        return (
            f"Simulator {simulator} with options {options} did not start under {python}; remedy: "
            f"{self._remedy}. It {what}"
        )

    def _end(self, i: int, what: str, grace: float = 0.0) -> None:
        """Ends a slot's process and reports it; the next `begin` starts another. The process has
        `grace` seconds to end by itself."""
        slot = self._slots[i]
        process, slot.process = slot.process, None
        assert process is not None
        self._selector.unregister(process.replies)
        with suppress(KeyError):
            self._selector.unregister(process.requests)
        slot.ending = process.end(what, grace)
        if process.starting:
            slot.busy = slot.running = False
            raise ValueError(self._unstarted(slot.ending))
        if slot.busy:
            self._fail(i, slot.ending)

    def _fail(self, i: int, what: str) -> None:
        slot = self._slots[i]
        slot.busy = slot.running = False
        error = f"The simulator of slot {i} {what}"
        self._ready.append(failed(i, self.spec, error, slot.goal))


def open_tasks(
    simulator: Path,
    python: Path,
    options: Mapping[str, Any],
    remedy: str,
    tasks: tuple[str, ...],
    count: int,
    size: int,
    *,
    patience: float = 60.0,
) -> Processes:
    """`Suite.open` for a simulator whose options are its `tasks`, the `size` of its pictures and
    the given ones; other arguments and errors as `Processes`."""
    options = {**options, "tasks": tasks, "size": size}
    return Processes(
        simulator, count, python=python, options=options, patience=patience, remedy=remedy
    )


@dataclass
class _Slot:
    process: SimulatorProcess | None = None
    busy: bool = False
    """Has a command that it has not answered yet."""
    running: bool = False
    """Has an episode that has not ended."""
    goal: int = 0
    ending: str = ""
    """Description of how its last process ended."""

    @property
    def working(self) -> bool:
        return self.busy or (self.process is not None and self.process.starting)


def _close(
    slots: list[_Slot], selector: selectors.BaseSelector, ends: tuple[socket.socket, ...]
) -> None:
    processes = [slot.process for slot in slots if slot.process is not None]
    for process in processes:
        process.kill()
    for process in processes:
        process.close()
    slots.clear()
    selector.close()
    for end in ends:
        end.close()


def _spec(fields: dict[str, Any]) -> Spec:
    """A `Spec` from JSON, which has lists where `Spec` has tuples."""
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    prompts = tuple(tuple(wordings) for wordings in fields["prompts"])
    return Spec(**fields | {"prompts": prompts})


def _outcome(slot: int, reply: dict[str, Any]) -> Outcome:
    observation = Observation(reply.pop("images"), reply.pop("state"))
    return Outcome(slot=slot, observation=observation, **reply)
