"""A dataset's numbers alone, as `Frames` without pictures: what statistics and action tokens need
costs no decoding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Float32, Int64, UInt8

from data.dataset import Dataset
from data.files.folder import LocalFolder
from data.store import tables
from data.store.episode_tables import EpisodeTables
from data.store.kept_tables import Kept


def open_numbers(dataset: Dataset, folder: Path) -> "Numbers":
    """Copies a dataset's numbers to a new folder, of the caller's to delete.

    Raises:
      DatasetError: a column is missing or of another type than declared.
    """
    folder.mkdir(parents=True)
    tables.write(dataset, folder)
    return Numbers(dataset, folder)


@dataclass(frozen=True)
class Numbers(EpisodeTables):
    """`Frames` that have no pictures; make it with `open_numbers`."""

    dataset: Dataset
    folder: Path
    image_size: int = 0
    resize: str = "antialiased"

    @property
    def name(self) -> str:
        """The dataset's."""
        return self.dataset.name

    @property
    def digest(self) -> str:
        """The dataset's."""
        return self.dataset.digest

    @property
    def fps(self) -> float:
        """Frames a second."""
        return self.dataset.fps

    @property
    def cameras(self) -> tuple[str, ...]:
        """The dataset's, for its plan."""
        return tuple(self.dataset.cameras)

    def column(self, name: str, rows: Int64[np.ndarray, "*n"]) -> Float32[np.ndarray, "*n d"]:
        """Values of a column at these frames, in the dataset's units."""
        shape = (int(self.lengths.sum()), self._dims[name])
        return tables.read_rows(LocalFolder(self.folder), str(self.folder), name, shape, rows)

    def images(
        self,
        rows: Int64[np.ndarray, " n"],
        camera: str,
        out: Sequence[UInt8[np.ndarray, "s s 3"]],
    ) -> None:
        """Raises ValueError: there are none."""
        raise ValueError(f"{self.name}: its pictures were left out.")

    def _kept(self, name: str) -> Kept:
        file = self.folder / name
        return Kept(file.read_bytes(), file, len(self.cameras), self._dims)

    def _holds(self, name: str) -> bool:
        return (self.folder / name).is_file()

    @cached_property
    def _dims(self) -> dict[str, int]:
        return tables.numeric_columns(self.dataset)
