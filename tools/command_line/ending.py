"""End of a command that cannot continue. If the cause lies outside the code, such as a full disk,
Ctrl-C or SIGTERM, the command ends with one line on stderr and an exit code, without a traceback.
"""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from models.files.terminal import harmless
from parallel.hosts import exits
from parallel.hosts.stop import terminable


@contextmanager
def in_a_line(kept: str = "", writing: str | Path | None = None) -> Iterator[None]:
    """Ends the program in this way if the block fails; errors that may be bugs in the code are
    raised.

    Args:
      kept: text on what is kept after a signal or a disk failure, and how to continue.
      writing: what the block writes, for errors that do not name their file.
    """
    try:
        with terminable():
            yield
    except KeyboardInterrupt as error:
        what = "Stopped by SIGTERM" if isinstance(error, exits.Terminated) else "Interrupted"
        _end(f"{what}. {kept}", exits.code(error, begun=True))
    except Exception as error:
        said = exits.sentence(error, writing)
        if said is None:
            raise
        more = f" {kept}" if exits.is_of_the_disk(error) else ""
        _end(f"error: {said}{more}", getattr(error, "exit_code", exits.FAILED))


def following(*words: str | Path) -> str:
    """A line with the command that usually comes next: its module in tools, then its arguments."""
    return f"Next: python -m tools.{shlex.join(map(str, words))}"


def _end(line: str, code: int) -> None:
    if code == exits.FAILED:
        sys.exit(harmless(line.rstrip()))
    print(harmless(line.rstrip()), file=sys.stderr)
    sys.exit(code)
