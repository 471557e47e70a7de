"""A policy that is loaded and compiled on a thread of its own while the server already listens, so
that a robot started together with its server waits for it instead of failing.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from models.files.terminal import logger

log = logger(__name__)

Ready = TypeVar("Ready")

_THREAD = "startup"


def in_background(prepare: Callable[[], Ready]) -> asyncio.Future[Ready]:
    """Runs `prepare` on a thread. Nothing can interrupt a compiler, so the thread is a daemon and
    may outlive the event loop, see `is_preparing`."""
    future: Future[Ready] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            ready = prepare()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(ready)

    threading.Thread(target=run, name=_THREAD, daemon=True).start()
    return asyncio.wrap_future(future)


def go_on(work: Callable[[], None]) -> None:
    """Runs `work` on a thread as `in_background` does; if it fails, the log says how."""

    def run() -> None:
        try:
            work()
        except Exception:
            log.exception(
                "the other batch sizes could not be compiled; the smallest continues to serve"
            )

    threading.Thread(target=run, name=_THREAD, daemon=True).start()


def is_preparing() -> bool:
    """True while such a thread runs; the interpreter must not be torn down under it."""
    return any(thread.name == _THREAD for thread in threading.enumerate())
