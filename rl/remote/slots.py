"""Slots that are simulated on another host as if they were local.

One thread there sends commands to a worker's slots and polls them. Here, a call is always under
way, which returns as soon as something has finished or when there are more commands. A worker that
dies or hangs is replaced; the episodes that ran in it are lost and reported as failed.
"""

import math
import os
import pickle
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from rl.remote.cluster import STARTING, Lost, RayWorker, unstarted
from sim.protocol import Outcome, Slots, Spec, Start, failed

_AT_A_TIME = 4
"""Number of concurrent calls: one waits for outcomes, the next ends its wait."""


class Told(NamedTuple):
    """A command to a slot: a method of `Slots` with its arguments."""

    method: str
    slot: int
    given: tuple[Any, ...]


class Opened(NamedTuple):
    """A worker's description of its slots."""

    spec: Spec
    slots: int
    lockstep: bool
    host: str
    process: int


class SlotsWorker:
    """The slots' end on the other host."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards all that follows
        self._thread: threading.Thread | None = None
        self._slots: Slots | None = None
        self._inbox: list[Told] = []
        self._outbox: list[Outcome] = []
        self._error: BaseException | None = None
        self._calls = 0

    def start(self, open_slots: Callable[[], Slots]) -> Opened:
        """Opens the slots, on the thread that will use them. If it is called again, this process
        was given up with everything that runs in it, so it ends to make room for another."""
        if self._thread is not None:
            os._exit(1)
        self._thread = threading.Thread(target=self._run, args=(open_slots,), daemon=True)
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._slots or self._error)
            if self._slots is None:
                assert self._error is not None
                raise self._error
            slots = self._slots
        return Opened(slots.spec, slots.count, slots.lockstep, socket.gethostname(), os.getpid())

    def exchange(self, told: list[Told]) -> bytes:
        """Sends commands to the slots. Returns outcomes as soon as there are some or the next call
        comes; they are pickled, so that keeping a part of them does not keep Ray's memory.

        Raises:
          Lost: `start` was not called in this process.
          BaseException: what the slots raised.
        """
        if self._thread is None:
            raise unstarted()
        with self._changed:
            self._calls += 1
            mine = self._calls
            self._inbox += told
            if told and self._slots is not None:
                self._slots.wake()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._error or self._outbox or self._calls > mine)
            if self._error:
                raise self._error
            outcomes, self._outbox = self._outbox, []
        return pickle.dumps(outcomes)

    def _run(self, open_slots: Callable[[], Slots]) -> None:
        try:
            slots = open_slots()
            with self._changed:
                self._slots = slots
                self._changed.notify_all()
            self._act(slots)
        except BaseException as error:  # the next call raises it
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _act(self, slots: Slots) -> None:
        busy: set[int] = set()
        while True:
            with self._changed:
                while not (self._inbox or busy):
                    self._changed.wait()
                inbox, self._inbox = self._inbox, []
            for told in inbox:
                getattr(slots, told.method)(told.slot, *told.given)
                busy.add(told.slot)
            outcomes = slots.poll()
            busy -= {outcome.slot for outcome in outcomes}
            if outcomes:
                with self._changed:
                    self._outbox += outcomes
                    self._changed.notify_all()


class RemoteSlots:
    """`sim.protocol.Slots` of a worker on whichever host has room. `ready` waits for it; make
    several first, and they start at the same time.

    Args:
      open_slots: makes the slots there.
      patience: seconds after which a worker that has not answered a command to a slot counts as
        hung.

    Attributes:
      restarts: number of times that the worker was replaced.
      spec: that of the slots; its name includes the worker's, for errors.
      reported_spec: the spec as the slots report it, the same whichever worker has them.
    """

    def __init__(
        self,
        name: str,
        open_slots: Callable[[], Slots],
        *,
        cpus: float = 1.0,
        gpus: float = 0.0,
        patience: float = 300.0,
    ) -> None:
        self.restarts = 0
        self._worker = RayWorker(name, SlotsWorker, cpus=cpus, gpus=gpus, threads=_AT_A_TIME)
        self._name, self._open, self._patience = name, open_slots, patience
        self._woken, self._news = threading.Event(), threading.Event()
        self._busy: dict[int, float] = {}  # deadlines of slots that have a command
        self._running: set[int] = set()  # slots whose episode lives there
        self._outbox: list[Told] = []
        self._calls: deque[Future[bytes]] = deque()
        self._ready: list[Outcome] = []
        self._starting: Future[Opened] | None = None
        self._start()

    def ready(self) -> None:
        """Waits until the slots are open.

        Raises:
          ValueError: there is no room for the worker, or its slots do not open.
        """
        if self._starting is not None:
            opened: Opened = self._worker.started(self._starting)
            self._starting = None
            self.count, self.lockstep, self.process = opened.slots, opened.lockstep, opened.process
            self._worker.name = f"{self._name} ({opened.host}, process {opened.process})"
            self.reported_spec = opened.spec
            self.spec = replace(opened.spec, name=f"{opened.spec.name} in {self._worker.name}")

    def begin(self, slot: int, start: Start) -> None:
        """Starts an episode."""
        self._running.add(slot)
        self._tell("begin", slot, start)

    def send(self, slot: int, actions: Float[np.ndarray, "t a"], film: bool = False) -> None:
        """Acts T steps, or until the episode ends."""
        self._tell("send", slot, actions, film)

    def demonstrate(self, slot: int, steps: int, noise: float = 0.0) -> None:
        """Lets the task's expert act T steps."""
        self._tell("demonstrate", slot, steps, noise)

    def poll(self, timeout: float | None = None) -> list[Outcome]:
        """Outcomes finished since the last call; see `sim.protocol.Slots`.

        Raises:
          ValueError: the worker is gone and cannot be replaced in time.
          BaseException: what the slots raised there, see `RayWorker.result`.
        """
        until = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            self._news.clear()
            self._receive()
            self._transmit()
            woken = self._woken.is_set()
            if woken:
                self._woken.clear()
            now = time.monotonic()
            if self._ready or woken or not self._busy or now >= until:
                finished, self._ready = self._ready, []
                return finished
            due = min(self._busy.values())
            if now < due:
                self._news.wait(min(until, due) - now)
            elif self._starting is not None:
                self._worker.started(self._starting, 0.0)
            else:
                self._give_up()

    def wake(self) -> None:
        """Makes the waiting poll, or else the next, return; from any thread, at any time."""
        self._woken.set()
        self._news.set()

    def close(self) -> None:
        """Ends the worker."""
        self._worker.close()

    def _tell(self, method: str, slot: int, *given: Any) -> None:
        if slot not in self._running:
            self._fail(slot, "was replaced")
            return
        due = self._patience if self._starting is None else STARTING
        self._busy[slot] = time.monotonic() + due
        self._outbox.append(Told(method, slot, given))

    def _transmit(self) -> None:
        if self._starting is None and (self._outbox or (self._busy and not self._calls)):
            outbox, self._outbox = self._outbox, []
            call = self._worker.call("exchange", outbox)
            self._calls.append(call)
            call.add_done_callback(lambda _: self._news.set())

    def _receive(self) -> None:
        if self._starting is not None and self._starting.done():
            self.ready()
            self._busy = dict.fromkeys(self._busy, time.monotonic() + self._patience)
        for call in [call for call in self._calls if call.done()]:
            self._calls.remove(call)
            try:
                outcomes = pickle.loads(self._worker.result(call))
            except Lost as lost:
                self._lose(str(lost))
                return
            for outcome in outcomes:
                del self._busy[outcome.slot]
                if outcome.ended:
                    self._running.remove(outcome.slot)
            self._ready += outcomes

    def _give_up(self) -> None:
        """Replaces a worker that hangs."""
        try:
            self._worker.replace(self._calls[0], self._patience)
        except Lost as lost:
            self._lose(str(lost))

    def _lose(self, why: str) -> None:
        busy = list(self._busy)
        for slot in busy:
            self._fail(slot, why)
        self._busy.clear()
        self._running.clear()
        self._outbox.clear()
        self._calls.clear()
        self.restarts += 1
        self._start()

    def _start(self) -> None:
        self._starting = self._worker.start(self._open)
        self._starting.add_done_callback(lambda _: self._news.set())

    def _fail(self, slot: int, why: str) -> None:
        self._ready.append(failed(slot, self.spec, f"{self._worker.name} {why}"))
