"""git-LFS pointers: texts of three lines that stand for a file's content in a repository, and are
left in its place where git-lfs is not installed (its specification is docs/spec.md of git-lfs).
"""

import re
from pathlib import Path

_POINTER = re.compile(rb"version https://git-lfs\.github\.com/spec/v1\n(?:.*\n)*?size (\d+)")


def pointer(file: Path) -> str:
    """The rest of a sentence that begins with the file's name if it is a pointer, "" if it is
    not."""
    with file.open("rb") as opened:
        return pointer_in(opened.read(1024))


def pointer_in(content: bytes) -> str:
    """As `pointer`, of a file's first bytes."""
    found = _POINTER.match(content)
    if found is None:
        return ""
    return (
        f"is a git-LFS pointer to {int(found[1])} bytes, not the file itself; run `git lfs install "
        "&& git lfs pull` in its repository, or download it again."
    )


def refuse_pointer(file: Path) -> None:
    """Raises ValueError if a file is a pointer."""
    if told := pointer(file):
        raise ValueError(f"{file} {told}")
