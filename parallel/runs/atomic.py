"""Atomic file replacement: a file is replaced as a whole or not at all, even if the process or the
machine stops."""

import os
from pathlib import Path

from models.files.on_disk import to_disk
from models.files.whole_text import require_replaceable


def replace_text(path: Path, text: str) -> None:
    """Makes `text` the content of a file, which is on disk on return; its folder is created if
    needed.

    Raises:
      ValueError: `path` is a folder, a device or a pipe.
    """
    require_replaceable(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    to_disk(path.parent)
