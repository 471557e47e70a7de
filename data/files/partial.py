"""The folder `<out>.partial`, which holds a dataset until it is complete. Several commands share
the name, and none of them may remove what another one began and could resume, or write into what it
reads.
"""

from collections.abc import Iterable
from pathlib import Path

from models.files.address import parse

EDITED = "edit.jsonl"
"""File of a dataset that an edit has put in place, or is to, and not yet finished."""
_UNMARKED = {"data", "meta", "videos"}
_OF_OTHERS = ("meta/info.json", "meta/recording.jsonl")


def partial_of(out: Path) -> Path:
    """The folder that holds `out` until it is complete."""
    return out.with_name(out.name + ".partial")


def require_apart(out: str | Path, sources: Iterable[str | Path]) -> None:
    """Raises ValueError if a path or URL to write to is one of those to read from, or inside."""
    for source in sources:
        if parse(out).is_inside(parse(source)):
            raise ValueError(
                f"{out}: is inside of {source}, which is read; give a folder that is not."
            )


def require_leftover(partial: Path, *, whole: bool = False) -> None:
    """Checks that the folder, if it exists, holds no more than a few files of a dataset, left by a
    killed command, which makes them again.

    Args:
      whole: the folder may also hold a whole dataset, of which the command has another copy.

    Raises:
      ValueError: the folder holds something else, such as an interrupted edit.
    """
    if not partial.exists():
        return
    named = {path.name for path in partial.iterdir()} if partial.is_dir() else {partial.name}
    others = _OF_OTHERS[1:] if whole else _OF_OTHERS
    if named - _UNMARKED or any((partial / name).exists() for name in others):
        raise ValueError(
            f"{partial}: is in the way and holds the unfinished work of another command; finish it "
            "with that command, or rename or delete the folder."
        )
