"""Many callers, one compiled policy: submitted items are gathered into batches and answered through
futures.

Serving, evaluation and RL share it (dynamic batching as in RL-VLA3, arXiv 2602.05765). A batch runs
when it is full, when its first item has waited long enough, or when no other caller can submit.
"""

import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_RECENT = 1024


@dataclass(frozen=True)
class Statistics:
    """Counts of a batcher's work so far."""

    batches: dict[int, int]
    """Number of batches run, by number of items."""
    rows: int
    """Rows run: the items, with each batch padded to the next of the sizes."""
    failed: int
    """Items whose batch raised; they count in `batches` too."""
    cancelled: int
    """Items cancelled by their caller, or by `close`, before their batch ran."""
    refused: int
    """Items that were refused because the queue stayed full for all of their timeout."""
    waited: float
    """Seconds that all items together spent in the queue."""
    running: float
    """Seconds spent in `run`."""
    waits: tuple[float, ...]
    """Seconds that each of the last 1024 items spent in the queue, oldest first."""
    depth: int
    """Items in the queue now."""
    deepest: int
    """Largest number of items that the queue has held."""

    @property
    def items(self) -> int:
        """Number of items run."""
        return sum(size * count for size, count in self.batches.items())

    @property
    def fill(self) -> float:
        """Share of the rows that were items."""
        return self.items / self.rows if self.rows else 1.0


class _Waiting(NamedTuple, Generic[Item, Result]):
    item: Item
    future: "Future[Result]"
    arrival: float


class Batcher(Generic[Item, Result]):
    """Runs submitted items in batches, in order of arrival, on a thread of its own.

    A batch has at most the largest of `sizes` items. It runs as soon as it has that many,
    `deadline` seconds after its first item arrived, or when `outstanding()` is 0 or less; time in
    the queue while another batch runs counts. An exception goes only to the futures of its own
    batch. An item whose future was cancelled in time is not run. Callbacks of futures are called on
    the batcher's thread and must not wait for it.

    Args:
      run: returns one result for each item that it is given, as `Policy.sample_actions` does.
      sizes: batch sizes, such as `policy.sizes`.
      deadline: in seconds; 0 runs whatever is in the queue.
      capacity: most items that the queue holds.
      outstanding: how many callers could still submit before they are answered; asked on the
        batcher's thread, after every arrival and every `recheck`.
      clock: monotonic time in seconds.

    Raises:
      ValueError: sizes, deadline or capacity are out of range.
    """

    def __init__(
        self,
        run: Callable[[list[Item]], Sequence[Result]],
        *,
        sizes: Sequence[int],
        deadline: float,
        capacity: int,
        outstanding: Callable[[], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not sizes or min(sizes) < 1 or capacity < max(sizes) or not deadline >= 0:
            raise ValueError(
                f"A batcher needs sizes of at least 1, a capacity of at least the largest and a "
                f"deadline of at least 0 s, got {list(sizes)}, {capacity} and {deadline} s."
            )
        self._run, self._outstanding, self._clock = run, outstanding, clock
        self._sizes, self._deadline, self._capacity = sorted(sizes), deadline, capacity
        self._changed = threading.Condition()  # guards all attributes below
        self._queue: deque[_Waiting[Item, Result]] = deque()
        self._changes = 0
        self._closed = False
        self._batches: Counter[int] = Counter()
        self._rows = self._failed = self._cancelled = self._refused = self._deepest = 0
        self._waited = self._running = 0.0
        self._waits: deque[float] = deque(maxlen=_RECENT)
        self._thread = threading.Thread(target=self._work, name="batcher", daemon=True)
        self._thread.start()

    def submit(self, item: Item, timeout: float | None = None) -> "Future[Result]":
        """Adds an item to the queue and returns the future of its result.

        Args:
          timeout: seconds to wait while the queue is full; 0 refuses at once, None waits without
            limit.

        Raises:
          queue.Full: the queue had no place in time.
          RuntimeError: the batcher is closed.
        """
        with self._changed:
            if not self._changed.wait_for(self._has_place, timeout):
                self._refused += 1
                raise queue.Full(
                    f"The batcher's queue was full ({self._capacity} items) for {timeout} s; "
                    f"submit again later."
                )
            if self._closed:
                raise RuntimeError("The batcher is closed and takes no more items.")
            future: Future[Result] = Future()
            self._queue.append(_Waiting(item, future, self._clock()))
            self._deepest = max(self._deepest, len(self._queue))
            self._notify()
        return future

    def recheck(self) -> None:
        """Makes the batcher look at `outstanding` again, after a caller has left for good."""
        with self._changed:
            self._notify()

    def close(self, drain: bool = True) -> None:
        """Stops taking items, and returns when all that were taken are answered; without `drain`,
        items that still wait are cancelled instead."""
        with self._changed:
            self._closed = True
            dropped = [] if drain else list(self._queue)
            if not drain:
                self._queue.clear()
                self._cancelled += len(dropped)
            self._notify()
        for waiting in dropped:
            waiting.future.cancel()
            waiting.future.set_running_or_notify_cancel()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def statistics(self) -> Statistics:
        """A snapshot of the counts."""
        with self._changed:
            return Statistics(
                batches=dict(sorted(self._batches.items())),
                rows=self._rows,
                failed=self._failed,
                cancelled=self._cancelled,
                refused=self._refused,
                waited=self._waited,
                running=self._running,
                waits=tuple(self._waits),
                depth=len(self._queue),
                deepest=self._deepest,
            )

    def __enter__(self) -> "Batcher[Item, Result]":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _has_place(self) -> bool:
        if len(self._queue) >= self._capacity:
            self._drop_cancelled()
        return self._closed or len(self._queue) < self._capacity

    def _notify(self) -> None:
        self._changes += 1
        self._changed.notify_all()

    def _drop_cancelled(self) -> None:
        live = []
        for waiting in self._queue:
            if waiting.future.cancelled():
                waiting.future.set_running_or_notify_cancel()
                self._cancelled += 1
            else:
                live.append(waiting)
        self._queue = deque(live)

    def _work(self) -> None:
        while self._step():
            pass

    def _step(self) -> bool:
        """Runs one batch; returns False at the end. Whatever is raised goes to the callers."""
        try:
            batch = self._next()
        except BaseException as error:  # `outstanding` raised
            with self._changed:
                batch = self._take()
            self._settle(batch, error)
            return True
        if batch is None:
            return False
        start = self._clock()
        try:
            results = list(self._run([waiting.item for waiting in batch])) if batch else []
            if len(results) != len(batch):
                raise ValueError(f"`run` returned {len(results)} results for {len(batch)} items.")
        except BaseException as error:
            self._settle(batch, error, self._clock() - start)
        else:
            self._settle(batch, results, self._clock() - start)
        return True

    def _settle(
        self,
        batch: list[_Waiting[Item, Result]],
        outcome: list[Result] | BaseException,
        seconds: float = 0.0,
    ) -> None:
        with self._changed:
            self._running += seconds
            self._failed += len(batch) if isinstance(outcome, BaseException) else 0
        for i, waiting in enumerate(batch):
            if isinstance(outcome, BaseException):
                waiting.future.set_exception(outcome)
            else:
                waiting.future.set_result(outcome[i])

    def _next(self) -> list[_Waiting[Item, Result]] | None:
        """The next batch, when it is time to run it; None at the end."""
        while True:
            with self._changed:
                self._drop_cancelled()
                if not self._queue:
                    if self._closed:
                        return None
                    self._changed.wait()
                    continue
                left = self._queue[0].arrival + self._deadline - self._clock()
                if self._closed or len(self._queue) >= self._sizes[-1] or left <= 0:
                    return self._take()
                changes = self._changes
            # called without the lock, so that it may take locks under which others submit
            if self._outstanding is not None and self._outstanding() <= 0:
                with self._changed:
                    return self._take()
            with self._changed:
                if self._changes == changes:
                    self._changed.wait(left)

    def _take(self) -> list[_Waiting[Item, Result]]:
        batch: list[_Waiting[Item, Result]] = []
        now = self._clock()
        while self._queue and len(batch) < self._sizes[-1]:
            waiting = self._queue.popleft()
            if not waiting.future.set_running_or_notify_cancel():
                self._cancelled += 1
                continue
            batch.append(waiting)
            self._waits.append(now - waiting.arrival)
            self._waited += now - waiting.arrival
        if batch:
            self._batches[len(batch)] += 1
            self._rows += next(size for size in self._sizes if size >= len(batch))
        self._changed.notify_all()
        return batch
