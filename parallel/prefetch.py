"""Keeps a few batches on the device ahead of the step that needs them.

A thread takes batches from the loader and puts them on the device, so the main thread waits only
when data is late; `wait` gives the time, which is what a faster loader could save.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_END = object()
_LOOK, _PATIENCE = 0.1, 5.0


class GivenUp(Exception):
    """The wait for an item was given up."""


class Prefetcher(AbstractContextManager["Prefetcher[T]"], Generic[T]):
    """Iterates over `put(item)` for the items of `source`, up to `depth` of them ahead.

    An exception of the source or of `put` is raised by the `next` that would have returned that
    item. For the last `next`, `wait` is the time in seconds that it waited, and `ready` is the
    number of items that were ready when it was called. Use as a context manager.
    """

    def __init__(self, source: Iterator[Any], put: Callable[[Any], T], depth: int = 2) -> None:
        self.wait, self.ready = 0.0, 0
        self._queue: queue.Queue[Any] = queue.Queue(maxsize=max(depth, 1))
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._fill, args=(source, put), name="prefetch", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> "Prefetcher[T]":
        return self

    def __next__(self) -> T:
        return self.take(lambda: False)

    def take(self, given_up: Callable[[], bool]) -> T:
        """The next item; raises GivenUp once `given_up` returns True, at most a tenth of a second
        later."""
        start, self.ready = time.perf_counter(), self._queue.qsize()
        while not given_up():
            try:
                item, error = self._queue.get(timeout=_LOOK)
                break
            except queue.Empty:
                continue
        else:
            raise GivenUp
        self.wait = time.perf_counter() - start
        if error is not None or item is _END:
            self._queue.put((item, error))  # the next call gets the same answer
            raise StopIteration if error is None else error
        return item

    def close(self) -> None:
        """Ends the thread and drops items that were fetched but not taken; a thread whose source
        does not return within five seconds is left behind."""
        self._stop.set()
        until = time.perf_counter() + _PATIENCE
        while self._thread.is_alive() and time.perf_counter() < until:
            try:
                self._queue.get(timeout=0.05)
            except queue.Empty:
                self._thread.join(timeout=0.05)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fill(self, source: Iterator[Any], put: Callable[[Any], T]) -> None:
        try:
            for item in source:
                self._queue.put((put(item), None))
                if self._stop.is_set():
                    return
            self._queue.put((_END, None))
        except BaseException as error:  # raised by __next__
            self._queue.put((None, error))
        finally:
            close = getattr(source, "close", None)
            if close is not None:
                close()
