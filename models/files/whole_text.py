"""Files that are written whole or not at all, such as pages and findings, and read whole."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EINVAL, ENOTDIR
from os import strerror
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Writes `text` to a file, and creates its folder if needed. A link, or something that is not a
    regular file such as a pipe, is written through.

    Raises:
      OSError: the disk is full or fails; names the file, which is unchanged.
    """
    try:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            path.write_text(text, "utf-8")
            return
        with replacing(path) as partial:
            partial.write_text(text, "utf-8")
    except FileExistsError as error:  # of a folder below a file
        raise NotADirectoryError(ENOTDIR, strerror(ENOTDIR), str(path)) from error
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def read_whole(path: Path) -> bytes:
    """The content of a regular file; a pipe or a device may have no end.

    Raises:
      OSError: it is something else, or cannot be read.
    """
    if path.exists() and not path.is_file():
        raise OSError(EINVAL, "it is not a regular file", str(path))
    return path.read_bytes()


def require_replaceable(path: Path) -> None:
    """Raises ValueError if something other than a regular file is there, which writing a whole file
    would remove."""
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "a device or a pipe"
        raise ValueError(f"{path}: is {what}, which a file cannot replace; give another path.")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that replaces it when the block succeeds and is removed if it
    fails.

    Raises:
      ValueError: `path` is a folder, a device or a pipe.
    """
    require_replaceable(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
