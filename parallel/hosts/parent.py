"""The end of a process with the one that started it, even where that one is killed (Linux's
prctl(2), PR_SET_PDEATHSIG). Imports the standard library alone.
"""

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def die_with_parent() -> None:
    """Has the calling process killed once its parent ends, as `preexec_fn` of `subprocess.Popen`;
    elsewhere than on Linux it does nothing."""
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
