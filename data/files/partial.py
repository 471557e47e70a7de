"""`<out>.partial`, in which a dataset lies until it is whole: several commands share the name, and
none of them may remove what another has begun and could go on with.
"""

from pathlib import Path

_UNMARKED = {"data", "meta", "videos"}
_OF_OTHERS = ("meta/info.json", "meta/recording.jsonl")


def partial_of(out: Path) -> Path:
    """The folder in which `out` lies until it is whole."""
    return out.with_name(out.name + ".partial")


def require_leftover(partial: Path, *, whole: bool = False) -> None:
    """Checks that the folder, if it is there, holds no more than a few files of a dataset, which
    the command that was killed among them makes again.

    Args:
      whole: it may hold a whole dataset too, of which the command has another copy.

    Raises:
      ValueError: it holds something else, such as an edit that was interrupted.
    """
    if not partial.exists():
        return
    named = {path.name for path in partial.iterdir()} if partial.is_dir() else {partial.name}
    others = _OF_OTHERS[1:] if whole else _OF_OTHERS
    if named - _UNMARKED or any((partial / name).exists() for name in others):
        raise ValueError(
            f"{partial}: is in the way and holds what another command has begun; finish that by "
            "its own command, or rename or delete the folder."
        )
