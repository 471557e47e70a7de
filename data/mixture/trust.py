"""Consent to the Python that a mixture's file names.

A mixture in JSON or TOML may come from anybody, and a transform is a program that runs with the
user's rights. So it runs only where the user has agreed to that very content, which is remembered
by its SHA-256 in the folder of the user's settings; other content is asked for again.
"""

import os
from collections.abc import Callable
from pathlib import Path

from data.mixture.relabelled import Transform

Consent = Callable[[Path, Transform], bool]
"""True if the user lets (the mixture's file, the transform that it names) run."""


def always(mixture: Path, transform: Transform) -> bool:
    """Consent to all that a mixture's file names, for those that are the user's own."""
    return True


def remembered(mixture: Path, transform: Transform) -> bool:
    """Consent where the user has agreed to this content before."""
    return (_folder() / transform.content).is_file()


def remember(mixture: Path, transform: Transform) -> None:
    """Notes that the user agrees to this content; removing the note takes it back."""
    folder = _folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = f"{transform.function} of {Path(transform.file).resolve()}, for {mixture.resolve()}\n"
    (folder / transform.content).write_text(about)


def _folder() -> Path:
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "chiliad/trusted"
