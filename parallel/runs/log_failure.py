"""Handling of logs that cannot be written, as on a full disk. The trained state is worth more than
its log lines, so the run is told to stop, saves, and only then ends with the error.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from parallel.hosts import exits


class LogFailure:
    """The first error in writing a run's logs; `error` is None as long as there was none."""

    def __init__(self) -> None:
        self.error: OSError | None = None

    @contextmanager
    def kept(self, path: Path | None = None) -> Iterator[None]:
        """Keeps an error of the block, which writes to `path`, instead of raising it."""
        try:
            with naming(path):
                yield
        except OSError as error:
            self.error = self.error or error

    @contextmanager
    def first(self) -> Iterator[None]:
        """Says, before an error of the block, what could not be written earlier."""
        try:
            yield
        except OSError as error:
            if self.error is None:
                raise
            raise self.final(str(error)) from error

    def final(self, outcome: str) -> OSError:
        """The error to end the run with: it says what failed, then the `outcome` of the run. An
        error that may be a fault of the code is returned unchanged."""
        assert self.error is not None
        said = exits.sentence(self.error)
        return self.error if said is None else OSError(f"{said} {outcome}")


@contextmanager
def naming(path: Path | None) -> Iterator[None]:
    """Adds `path`, which the block writes to, to the block's errors; the error of a full disk does
    not name the file."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None and path is not None:
            error.filename = str(path)
        raise
