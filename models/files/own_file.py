"""Python files of a user, by their paths: presets, families, formats, optimizers, transforms.

A file runs with the user's rights, as `python file.py` would, so this module is only for files that
the user names on a command line or in a program. A path that a checkpoint or dataset names may come
from anyone, so it needs consent first (data/mixture/trust.py).
"""

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")


def run_file(path: Path | str) -> ModuleType:
    """The module that a file makes, registered so that pickle finds it. The file runs once for as
    long as its content stays the same.

    Raises:
      FileNotFoundError: the file is missing.
      ValueError: it is no Python file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file.")
    return _module(path, path.read_bytes())


def named_in_file(where: str) -> Any:
    """The object at `path/to/file.py:NAME`; the file runs.

    Raises:
      FileNotFoundError: the file is missing.
      ValueError: it has no such name, or `where` is of another form.
    """
    path, _, name = where.rpartition(":")
    if not path or not name:
        raise ValueError(f"'{where}' is not of the form path/to/file.py:NAME.")
    module = run_file(path)
    if not hasattr(module, name):
        raise ValueError(f"{path} has no '{name}'.")
    return getattr(module, name)


def check_choice(name: str, table: Mapping[str, Any], field: str) -> None:
    """Raises ValueError unless `by_name` could find an object of that name; no file runs."""
    if name not in table and ".py:" not in name:
        raise ValueError(
            f"{field} is '{name}'; choose one of {', '.join(sorted(table))}, or give "
            f"path/to/file.py:NAME."
        )


def by_name(name: str, table: Mapping[str, T], field: str) -> T:
    """The table's object of that name, or the one at `path/to/file.py:NAME`; the file runs.

    Args:
      field: name of the setting, for messages.

    Raises:
      FileNotFoundError: the file is missing.
      ValueError: neither the table nor the file has the name.
    """
    check_choice(name, table, field)
    return table[name] if name in table else named_in_file(name)


def load(where: str, kind: type[T], what: str) -> T:
    """The object of type `kind` at path/to/file.py:NAME; the file runs.

    Args:
      what: name of the object in messages.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: `where` is not a file and a name, or no object of that type has the name.
    """
    path, _, name = where.rpartition(":")
    if not path or not name:
        raise ValueError(f"{what} is '{where}'; give path/to/file.py:NAME of a {kind.__name__}.")
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such file, needed for {what} '{where}'.")
    found = getattr(run_file(path), name, None)
    if not isinstance(found, kind):
        raise ValueError(
            f"{path} has no {kind.__name__} named '{name}'; found {type(found).__name__}."
        )
    return found


def digest(file: Path | str) -> str:
    """SHA-256 of a file's content, hexadecimal."""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def run_content(file: str, content: str) -> ModuleType:
    """`run_file` of a file whose content must have the SHA-256 `content`.

    Raises:
      ValueError: the file has another SHA-256.
    """
    source = Path(file).read_bytes()
    if hashlib.sha256(source).hexdigest() != content:
        raise ValueError(
            f"{file} has changed: its SHA-256 was {content} when the run began; restore that "
            "content, or start another run."
        )
    return _module(Path(file), source)


def _module(path: Path, source: bytes) -> ModuleType:
    if path.suffix != ".py":
        raise ValueError(f"{path} is not a Python file; its name must end in .py.")
    place = f"{path.resolve()}\0".encode()
    name = f"{path.stem}_{hashlib.sha256(place + source).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    module.__file__ = str(path.resolve())
    sys.modules[name] = module  # where dataclasses and pickle look for it
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module
