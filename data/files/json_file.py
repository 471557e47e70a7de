"""JSON of a dataset, which may hold anything: nested a million levels deep, a number of 5,000
digits, bytes that are no text."""

import json
from pathlib import Path
from typing import Any

from data.errors import DatasetError


def read_json(path: Path, file: Path | str, remedy: str) -> Any:
    """Content of a JSON file.

    Args:
      file: what error messages call it.
      remedy: their last words.

    Raises:
      DatasetError: it is no JSON, or none that Python takes.
    """
    try:
        return json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        reason = str(error).partition(";")[0]  # what follows is advice to programmers
        raise DatasetError(file, "file", f"is no JSON ({reason}); {remedy}.") from None
