"""A finding about a dataset: how bad it is, where it is, and one sentence with the remedy."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from data.errors import DatasetError

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Problem:
    """One finding; `message` is a sentence that begins with the file and the field."""

    severity: Severity
    file: str
    field: str
    message: str


def error(file: Path | str, field: str, sentence: str) -> Problem:
    """What makes training wrong or impossible."""
    return Problem("error", str(file), field, str(DatasetError(file, field, sentence)))


def warning(file: Path | str, field: str, sentence: str) -> Problem:
    """What is read right anyway, or may be meant so."""
    return Problem("warning", str(file), field, str(DatasetError(file, field, sentence)))


def from_error(raised: DatasetError) -> Problem:
    """What reading a file raised."""
    return error(raised.file, raised.field, raised.sentence)


def caught(check: Iterable[Problem]) -> Iterator[Problem]:
    """The same problems, with an error that ends the check as the last of them."""
    try:
        yield from check
    except DatasetError as raised:
        yield from_error(raised)
