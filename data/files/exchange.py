"""Exchanges two folders in one step, so that at any moment there is a folder at each path.

On Linux, renameat2 does so; where it or the file system cannot, successive renames come close.
"""

import ctypes
import errno
import os
from pathlib import Path

_EXCHANGE = 2
_HERE = -100


def exchange(first: Path, second: Path) -> None:
    """Exchanges two folders of one file system.

    Raises:
      OSError: one is missing, or may not be moved.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is not None:
        places = os.fsencode(first), os.fsencode(second)
        if rename(_HERE, places[0], _HERE, places[1], _EXCHANGE) == 0:
            return
        if (number := ctypes.get_errno()) not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise OSError(number, os.strerror(number), str(first))
    aside = second.with_name(second.name + ".aside")
    second.rename(aside)
    first.rename(second)
    aside.rename(first)
