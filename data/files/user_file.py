"""Python from a file of the user's: run once for each content, as a module that pickle finds.

For files that the user names on the command line or in a program, which run with the user's rights
as `python file.py` would. What is named by data, which may be anybody's, goes through
data/mixture/trust.py before.
"""

import hashlib
import sys
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")


def load(where: str, kind: type[T], what: str) -> T:
    """The object of type `kind` at path/to/file.py:NAME; the file runs.

    Args:
      what: messages call it that.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: `where` is no file and name, or the name is of no such object.
    """
    path, _, name = where.rpartition(":")
    if not path or not name:
        raise ValueError(f"{what} is '{where}'; give path/to/file.py:NAME of a {kind.__name__}.")
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such file, needed for {what} '{where}'.")
    found = run(path, digest(path)).get(name)
    if not isinstance(found, kind):
        raise ValueError(
            f"{path} has no {kind.__name__} named '{name}', it has {type(found).__name__}."
        )
    return found


def digest(file: str) -> str:
    """SHA-256 of a file's content, hexadecimal."""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


@lru_cache
def run(file: str, content: str) -> dict[str, Any]:
    """The names that a file defines; it runs at the first call.

    Args:
      content: SHA-256 that the file must have.

    Raises:
      ValueError: it has another one.
    """
    source = Path(file).read_bytes()
    if hashlib.sha256(source).hexdigest() != content:
        raise ValueError(
            f"{file} has changed: its SHA-256 was {content} when the run began; give it that "
            "content again, or start another run."
        )
    module = ModuleType(f"user_file_{content}")
    module.__file__ = file
    sys.modules[module.__name__] = module  # where dataclasses and pickle look for it
    exec(compile(source, file, "exec"), module.__dict__)
    return module.__dict__
