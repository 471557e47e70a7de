"""Python files of a user's own, by their paths: presets, families of models, optimizers.

A file runs with the user's rights, so only what he names on a command line or in a file of his own
comes here, never a path that a checkpoint or dataset names.
"""

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def run_file(path: Path | str) -> ModuleType:
    """The module that a file makes; run once as long as its content stays.

    Raises:
      FileNotFoundError: the file is missing.
      ValueError: it is no Python file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file.")
    place = f"{path.resolve()}\0".encode()
    name = f"{path.stem}_{hashlib.sha256(place + path.read_bytes()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    found = importlib.util.spec_from_file_location(name, path.resolve())
    if found is None or found.loader is None:
        raise ValueError(f"{path} is no Python file; its name must end in .py.")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def named_in_file(where: str) -> Any:
    """The object at `path/to/file.py:NAME`, whose file runs.

    Raises:
      FileNotFoundError: the file is missing.
      ValueError: it has no such name, or `where` is of another form.
    """
    path, _, name = where.rpartition(":")
    if not path or not name:
        raise ValueError(f"'{where}' is no path/to/file.py:NAME.")
    module = run_file(path)
    if not hasattr(module, name):
        raise ValueError(f"{path} has no '{name}'.")
    return getattr(module, name)
