"""What is wrong with a dataset on disk, always by file and field, so that it can be found and
mended."""

import reprlib
from pathlib import Path


class DatasetError(ValueError):
    """A file of a dataset does not hold what it should; one sentence, with the remedy."""

    def __init__(self, file: Path | str, field: str, sentence: str) -> None:
        super().__init__(file, field, sentence)
        self.file, self.field, self.sentence = file, field, sentence

    def __str__(self) -> str:
        return f"{self.file}, {self.field}: {self.sentence}"


class MissingFileError(DatasetError, FileNotFoundError):
    """A file that the dataset's metadata promises is not there."""


def short(value: object) -> str:
    """A value as messages show it, the middle of a long or deep one left out."""
    return _SHORT.repr(value)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200
