"""Exit codes of a job's processes, and errors as one sentence; docs/multihost.md explains the
codes."""

import errno
import os
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

FAILED = 1
"""An error with its traceback."""
REFUSED = 2
"""Options, files or data that do not fit; running the same command again would not help."""
STALLED = 42
"""No progress for too long; the watchdog wrote all stacks and named the suspect."""
PEER_LOST = 43
"""Another process of the job failed."""
NON_FINITE = 44
"""A loss was not finite, and the run was not set to continue."""
UNFINISHED = 75
"""Told to stop by SIGTERM before the end; what was made is kept, and the same command, started
again, continues (EX_TEMPFAIL)."""
INTERRUPTED = 130
"""Ctrl-C before the end; what was made is kept, after a second one up to the last checkpoint."""
ORDERLY = (UNFINISHED, INTERRUPTED)
"""Codes of processes that were told to stop and did: no failures, and nothing to restart."""

_REMEDIES = {
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room, or have the quota raised",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EROFS: "mount it for writing, or choose another place",
    errno.EACCES: "change its permissions, or choose another place",
    errno.EPERM: "change its permissions, or choose another place",
    errno.ENOTDIR: "remove the file that is in its folder's place, or choose another place",
    errno.EISDIR: "remove the folder in its place, or choose another place",
    errno.EEXIST: "remove what is in its place, or choose another place",
    errno.ELOOP: "remove the link in its place, or choose another place",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EIO: "repair the disk, or choose another place",
    errno.ESTALE: "mount its folder again",
    errno.ENODEV: "mount its folder again",
    errno.ENOTCONN: "mount its folder again",
    errno.ETIMEDOUT: "check whether its server can be reached",
}
"""Remedies for the errors that a disk, a file system or its permissions cause."""


class OutOfMemory(MemoryError):
    """Memory of the machine or of a device that did not suffice, as a sentence."""


@contextmanager
def in_memory(size: str, remedies: Sequence[str]) -> Iterator[None]:
    """Context manager in which memory that does not suffice is told in one sentence.

    Args:
      size: what the work takes at a time, such as "a step takes 8 rows of 900 places".
      remedies: what helps, in the order in which to try it.

    Raises:
      OutOfMemory: in place of the errors of Python, numpy and XLA.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, OutOfMemory) or (asked := _of_memory(error)) is None:
            raise
        tried = f"{', '.join(remedies[:-1])} or {remedies[-1]}"
        said = f"Memory ran out{asked}; {size}; in this order, try {tried}.{_quoted(error)}"
        raise OutOfMemory(said) from error


class Terminated(KeyboardInterrupt):
    """SIGTERM, in work that ends as it does by Ctrl-C."""


def of_signal(number: int) -> int:
    """Exit code of a process that a signal told to stop, 0 if none did (0)."""
    return {0: 0, signal.SIGINT: INTERRUPTED}.get(number, UNFINISHED)


def code(error: BaseException, begun: bool) -> int:
    """Exit code of a process that ends with an error: the error's own `exit_code` if it has one.
    `REFUSED` is only for errors before training has begun, since a full disk is a ValueError
    too."""
    if isinstance(error, KeyboardInterrupt):
        return UNFINISHED if isinstance(error, Terminated) else INTERRUPTED
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else FAILED if error.code else 0
    refused = not begun and isinstance(error, ValueError | FileNotFoundError)
    return getattr(error, "exit_code", REFUSED if refused else FAILED)


def sentence(error: BaseException, where: str | Path | None = None) -> str | None:
    """Sentence that explains an error whose cause lies outside the code, with a remedy; None for
    any other error, as its traceback is needed.

    Args:
      where: the file or folder that was being written, for errors that name none.
    """
    number, named = _of_the_disk(error)
    if number in _REMEDIES and number is not None:
        file = named or where
        place = "" if file is None else f"{file}: "
        return f"{place}{os.strerror(number)}; {_REMEDIES[number]}."
    if isinstance(error, OutOfMemory):
        return str(error)
    if (asked := _of_memory(error)) is not None:
        remedy = "take less at a time, or a machine with more memory"
        return f"Memory ran out{asked}; {remedy}.{_quoted(error)}"
    stated = isinstance(error, OSError) and number is None
    return str(error) if stated or isinstance(error, ValueError | FileNotFoundError) else None


def is_of_the_disk(error: BaseException) -> bool:
    """True if a disk, a file system or its permissions are at fault."""
    return _of_the_disk(error)[0] in _REMEDIES


def _of_memory(error: BaseException) -> str | None:
    """The bytes asked for, as a part of a sentence ("" if the error does not tell them); None if
    memory is not at fault."""
    text = str(error)
    ours = type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError")
    ours = ours and re.search("out of memory|allocat", text, re.IGNORECASE) is not None
    if not (ours or isinstance(error, MemoryError)):
        return None
    number, unit = r"\d[\d,]*\.?\d*(?:e\+?\d+)?", "bytes|B|[KMGTP]iB"
    asked = re.search(rf"allocat[^\d\n]* ({number}) ?({unit})", text, re.IGNORECASE)
    if asked is None:
        return ""
    power = "KMGTP".find(asked[2][0]) + 1
    size = float(asked[1].replace(",", "")) * 1024**power
    return f": {size / 1e9:,.1f} GB were asked for at once"


def _quoted(error: BaseException) -> str:
    """The first line of an error's words, to end a sentence with."""
    line = str(error).strip().partition("\n")[0]
    return f" ({line[:200]})" if line else ""


def _of_the_disk(error: BaseException) -> tuple[int | None, str | None]:
    """The errno and the file of a system error; tensorstore names both in a ValueError."""
    if isinstance(error, OSError):
        named = error.filename2 or error.filename  # for a copy or a move, the file being written
        return error.errno, None if named is None else str(named)
    number = re.search(r"os_error_code='(\d+)'", str(error))
    file = re.search(r'local file "([^"]+)"', str(error))
    return int(number[1]) if number else None, file[1] if file else None
