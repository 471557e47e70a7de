"""Consent to run the Python code that a mixture's file names.

A mixture in JSON or TOML may come from anybody, and a transform is a program that runs with the
user's rights. It therefore runs only if the user has agreed to exactly that content. Consent is
remembered by the content's SHA-256 in the user's settings folder; other content needs new consent.
"""

import os
from collections.abc import Callable
from pathlib import Path

from data.mixture.relabelled import Transform

Consent = Callable[[Path, Transform], bool]
"""Called with the mixture's file and a transform that it names; True if the user lets it run."""


def always(mixture: Path, transform: Transform) -> bool:
    """Consent to every transform that a mixture's file names, for files that are the user's own."""
    return True


def remembered(mixture: Path, transform: Transform) -> bool:
    """Consent if the user has agreed to this content before."""
    return (_folder() / transform.content).is_file()


def remember(mixture: Path, transform: Transform) -> None:
    """Records that the user agrees to this content; removing the record withdraws consent."""
    folder = _folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = f"{transform.function} of {Path(transform.file).resolve()}, for {mixture.resolve()}\n"
    (folder / transform.content).write_text(about)


def _folder() -> Path:
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "chiliad/trusted"
