"""Errors of a dataset on disk, and problems that a check finds in one. Each names the file and the
field, so that it can be found and corrected."""

import reprlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from models.files.lfs import pointer
from models.files.terminal import first_line


class DatasetError(ValueError):
    """A file of a dataset does not hold what it should; the message is one sentence, with the
    remedy."""

    def __init__(self, file: Path | str, field: str, sentence: str) -> None:
        super().__init__(file, field, sentence)
        self.file, self.field, self.sentence = file, field, sentence

    def __str__(self) -> str:
        return f"{self.file}, {self.field}: {self.sentence}"


class MissingFileError(DatasetError, FileNotFoundError):
    """A file that the dataset's metadata promises is not there."""


def require_content(path: Path, file: Path | str | None = None) -> None:
    """Raises DatasetError, which calls the file `file`, or `path` if None, if it is only git-LFS's
    pointer to its content."""
    if told := pointer(path):
        raise DatasetError(file or path, "file", told)


Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Problem:
    """One finding; `message` is a sentence that begins with the file and the field."""

    severity: Severity
    file: str
    field: str
    message: str


def error(file: Path | str, field: str, sentence: str) -> Problem:
    """Problem that makes training wrong or impossible."""
    return Problem("error", str(file), field, str(DatasetError(file, field, sentence)))


def warning(file: Path | str, field: str, sentence: str) -> Problem:
    """Problem that does not prevent correct reading, or may be intended."""
    return Problem("warning", str(file), field, str(DatasetError(file, field, sentence)))


def from_error(raised: DatasetError) -> Problem:
    """Problem that reading a file raised."""
    return error(raised.file, raised.field, raised.sentence)


def caught(check: Iterable[Problem]) -> Iterator[Problem]:
    """The same problems; a DatasetError that ends the check becomes the last of them."""
    try:
        yield from check
    except DatasetError as raised:
        yield from_error(raised)


@contextmanager
def naming_damage(
    file: Path | str,
    field: str,
    sentence: str,
    *,
    caught: tuple[type[Exception], ...] = (Exception,),
    kept: tuple[type[Exception], ...] = (),
) -> Iterator[None]:
    """Turns a library's exception about a damaged file into a DatasetError that names the file.

    Args:
      sentence: its `{reason}` is replaced by the first line of the exception's message.
      caught: exceptions to turn; a DatasetError and the types in `kept` pass unchanged.
    """
    try:
        yield
    except Exception as raised:
        if isinstance(raised, (DatasetError, *kept)) or not isinstance(raised, caught):
            raise
        if isinstance(file, Path) and file.is_file():
            require_content(file)
        raise DatasetError(file, field, sentence.format(reason=first_line(raised))) from None


def short(value: object) -> str:
    """A value as shown in messages, without the middle of a long or deep one."""
    return _SHORT.repr(value)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200
