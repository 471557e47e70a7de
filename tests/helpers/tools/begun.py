"""A benchmark as its published command starts it, ended after its first figure or the second of its
timed steps; a line of JSON then says which, and the seconds of cores and memory that it took.

    python -m tests.helpers.tools.begun learn --task tabletop-reach --json
"""

import json
import resource
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from parallel.monitor.speed import Speed
from tools.bench import attempt, timing

_STEPS = 2
_timed, _add = timing.timed, Speed.add
_steps, _ended = 0, ""


def main(words: list[str]) -> None:
    """Runs `python -m tools.bench` with these words."""
    global _ended
    timing.timed, attempt.tell, Speed.add = timed, tell, add  # type: ignore[assignment, method-assign]
    sys.argv = ["tools.bench", *words]
    try:
        runpy.run_module("tools.bench", run_name="__main__", alter_sys=True)
        _ended = "the end"
    finally:
        if _ended:
            print(json.dumps({"after": _ended, **_used()}))


@contextmanager
def timed() -> Iterator[timing.Took]:
    """Ends the benchmark with the second block."""
    with _timed() as took:
        yield took
    _step()


def tell(console: Any, found: Any) -> None:
    """Ends the benchmark with its first figure."""
    _end("the first figure")


def add(speed: Speed, seconds: float) -> None:
    """Ends the benchmark with a run's second step."""
    _add(speed, seconds)
    _step()


def _step() -> None:
    global _steps
    _steps += 1
    if _steps >= _STEPS:
        _end(f"{_STEPS} timed steps")


def _end(why: str) -> None:
    global _ended
    if not _ended:
        _ended = why
        sys.exit()


def _used() -> dict[str, float]:
    """Seconds of all processes' cores, and the GB of the largest process."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "cpu": round(sum(each.ru_utime + each.ru_stime for each in used), 1),
        "gb": round(max(each.ru_maxrss for each in used) * 1024 / 1e9, 2),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
