"""The user's cache, which keeps downloaded and derived files between commands."""

import os
from pathlib import Path


def user_cache(name: str) -> Path:
    """This project's folder `name` in XDG_CACHE_HOME, or ~/.cache; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "chiliad" / name
