"""The other half of a benchmark: a script under another Python, asked line by line, so that our
rounds and its rounds alternate."""

import json
import os
import reprlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import PIPE, Popen
from tempfile import TemporaryFile
from typing import IO, Any

from tools.bench.process import ending


@contextmanager
def asking(
    python: Path, script: str, environment: Mapping[str, str] | None = None
) -> Iterator[Callable[..., dict[str, Any]]]:
    """The script `peers/SCRIPT.py` as a function from one request to its answer; it ends with the
    block.

    Raises:
      FileNotFoundError: there is no such Python.
      ValueError: (by the function) the script ended without an answer.
    """
    check_python(python)
    file = Path(__file__).parent / "peers" / f"{script}.py"
    own = os.environ | dict(environment or {})
    with (
        TemporaryFile("w+", errors="replace") as wrong,
        Popen([python, file], stdin=PIPE, stdout=PIPE, stderr=wrong, text=True, env=own) as process,
    ):
        to, back = process.stdin, process.stdout
        assert to is not None
        assert back is not None

        def ask(**request: Any) -> dict[str, Any]:
            with suppress(BrokenPipeError):
                print(json.dumps(request), file=to, flush=True)
            answer = back.readline()
            if not answer:
                raise ValueError(
                    f"{python} gave no answer to {reprlib.repr(request)} and "
                    f"{ending(process.wait())}: {_last_line(wrong)}. The first lines of "
                    f"tools/bench/peers/{file.name} say what it needs."
                )
            return json.loads(answer)

        try:
            yield ask
        finally:
            with suppress(BrokenPipeError):
                to.close()


def no_peer(benchmark: str, has: str, file: str) -> ValueError:
    """The error of a benchmark that was given no other side."""
    return ValueError(
        f"The {benchmark} benchmark needs --peer PYTHON, the Python of an environment that has "
        f"{has}; the first lines of {file} say how to make one."
    )


def check_python(python: Path) -> None:
    """Raises FileNotFoundError if there is no such Python."""
    if not python.is_file():
        raise FileNotFoundError(
            f"--peer {python} is not a Python; give an environment's bin/python."
        )


def _last_line(said: IO[str]) -> str:
    said.seek(0)
    return (said.read().strip().splitlines() or ["it said nothing"])[-1]
