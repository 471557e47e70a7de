"""Writes text files, such as pages and findings, whole or not at all."""

from errno import ENOTDIR
from os import strerror
from pathlib import Path

from data.files.folder import replacing


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
