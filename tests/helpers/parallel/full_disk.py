"""A disk that is full."""

import os
from pathlib import Path


def fill(where):
    """Puts this process's open files at `where` on a full disk from now on."""
    for opened in Path("/proc/self/fd").iterdir():
        if opened.exists() and str(opened.readlink()).startswith(str(where)):
            with open("/dev/full", "w") as full:
                os.dup2(full.fileno(), int(opened.name))
