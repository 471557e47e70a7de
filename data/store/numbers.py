"""A dataset's numbers alone, as `Frames` without images, so that statistics and action tokens need
no decoding.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from data.dataset import Dataset
from data.files import cached
from data.frames import Rows, Squares
from data.store import tables
from data.store.checked_tables import CheckedTable
from data.store.episode_tables import DatasetTables
from models.inputs.pictures import PictureFit, Size


def cached_numbers(dataset: Dataset, cache: Path) -> "Numbers":
    """The numbers of a dataset's current content, copied to a cache if it lacks them. Processes
    that ask for them at the same time wait for the one that copies.

    Raises:
      DatasetError: a column is missing or of another type than declared.
    """
    folder = cache / f"{dataset.digest[:16]}-numbers"
    cached.make_folder(folder, partial(open_numbers, dataset))
    return Numbers(dataset, folder)


def open_numbers(dataset: Dataset, folder: Path) -> "Numbers":
    """Copies a dataset's numbers to a new folder, which the caller must delete.

    Raises:
      DatasetError: a column is missing or of another type than declared.
    """
    folder.mkdir(parents=True)
    tables.write(dataset, folder)
    return Numbers(dataset, folder)


@dataclass(frozen=True)
class Numbers(DatasetTables):
    """`Frames` that have no images; make it with `open_numbers`."""

    dataset: Dataset
    folder: Path
    image_size: Size = 0
    resize: str = "antialiased"
    fits: Mapping[str, PictureFit] = field(default_factory=dict)

    def images(self, rows: Rows, camera: str, out: Squares) -> None:
        """Raises ValueError: there are no images."""
        raise ValueError(f"{self.name}: it was opened without images.")

    def _table(self, name: str) -> CheckedTable:
        file = self.folder / name
        return CheckedTable(file.read_bytes(), file, len(self.cameras), self._dims)

    def _holds(self, name: str) -> bool:
        return (self.folder / name).is_file()
