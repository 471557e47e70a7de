"""The user's cache, where what was fetched or derived is kept between commands."""

import os
from pathlib import Path


def user_cache(name: str) -> Path:
    """Folder `name` of this project's in XDG_CACHE_HOME, or ~/.cache; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "chiliad" / name
