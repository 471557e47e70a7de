"""Reads JSON of a dataset, which may hold anything: a million nested levels, a number of 5,000
digits, bytes that are not text."""

from pathlib import Path
from typing import Any

from data.errors import DatasetError, require_content
from data.files.limits import MOST_JSON, require_text
from models.files.foreign_json import loads


def read_json(path: Path, file: Path | str, remedy: str) -> Any:
    """Content of a JSON file.

    Args:
      file: its name in error messages.
      remedy: last words of error messages.

    Raises:
      DatasetError: the file is not JSON, too large, or Python cannot read it.
    """
    if isinstance(path, Path):
        require_text(file, "file", path.stat().st_size, MOST_JSON)
    require_content(path, file)
    try:
        return loads(path.read_text("utf-8"))
    except ValueError as error:
        reason = str(error).partition(";")[0]  # what follows is advice to programmers
        raise DatasetError(file, "file", f"is not valid JSON ({reason}); {remedy}.") from None


def read_named(file: str, what: str, field: str, remedy: str = "write it again") -> Any:
    """Content of the JSON file of `what` that a mixture names in `field`.

    Raises:
      FileNotFoundError: there is no such file.
      DatasetError: as `read_json`.
    """
    if not Path(file).is_file():
        raise FileNotFoundError(f"{file}: this file of {what} does not exist; correct '{field}'.")
    return read_json(Path(file), file, remedy)
