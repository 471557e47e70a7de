"""How a process of a job ended, as its exit code; docs/multihost.md explains them."""

FAILED = 1
"""An error with its traceback."""
REFUSED = 2
"""Options, files or data that do not fit; the same command again would not help."""
STALLED = 42
"""Nothing went on for too long; the watchdog wrote all stacks and named the suspect."""
PEER_LOST = 43
"""Another process of the job failed."""
NON_FINITE = 44
"""A loss was not finite, and the run was not told to go on."""
INTERRUPTED = 130
"""Ctrl-C, the second time."""


def code(error: BaseException, begun: bool) -> int:
    """That of a process which an error ends; the error's own `exit_code` if it has one. Only what
    is wrong before training has begun is refused: a full disk is a ValueError too."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else FAILED if error.code else 0
    refused = not begun and isinstance(error, ValueError | FileNotFoundError)
    return getattr(error, "exit_code", REFUSED if refused else FAILED)
