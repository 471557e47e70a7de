"""Ends a process when the process that started it ends, even if that one is killed (Linux's
prctl(2), PR_SET_PDEATHSIG). Imports only the standard library.
"""

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def die_with_parent() -> None:
    """Has the calling process killed once its parent ends, as `preexec_fn` of `subprocess.Popen`;
    it does nothing except on Linux."""
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
