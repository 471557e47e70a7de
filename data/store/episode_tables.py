"""Tables of every episode and of every column, as `data.store.tables.write` wrote them. A frame
store and a dataset read without one both have these tables; only the source of the files differs.
"""

from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float32, Int64

from data.dataset import Dataset, Prompts, Runs, Subtasks
from data.files.folder import LocalFolder
from data.frames import attribute_of
from data.statistics.stats import Stats
from data.store import checked_tables, tables
from data.store.checked_tables import CheckedTable


class EpisodeTables:
    """The part of `Frames` that is read once, from files that `_table` gives."""

    @cached_property
    def lengths(self) -> Int64[np.ndarray, " e"]:
        """Frames of each episode."""
        return self._episodes["lengths"]

    @cached_property
    def starts(self) -> Int64[np.ndarray, " e"]:
        """Number of each episode's first frame; frames are numbered through all episodes."""
        return np.cumsum(self.lengths) - self.lengths

    @cached_property
    def present(self) -> Bool[np.ndarray, "e c"]:
        """True where an episode has images of a camera."""
        return self._episodes["present"]

    @cached_property
    def duplicate_of(self) -> Int64[np.ndarray, " e"]:
        """For each episode the first one with the same states and actions."""
        return self._episodes["alike"]

    @cached_property
    def runs(self) -> Runs:
        """Consecutive frames of an episode with the same task."""
        return Runs(*(self._episodes[name] for name in checked_tables.RUNS))

    @cached_property
    def prompts(self) -> Prompts:
        """The wordings of each task."""
        return checked_tables.read_prompts(self._table(tables.PROMPTS))

    @cached_property
    def has_subtasks(self) -> bool:
        """True if the dataset had subtasks."""
        return self._holds(tables.SUBTASKS)

    @cached_property
    def subtasks(self) -> Subtasks:
        """Runs of frames with one subtask, and their texts."""
        kept = self._table(tables.SUBTASKS), self._table(tables.SUBTASK_TEXTS)
        return checked_tables.read_subtasks(*kept, self.lengths)

    @cached_property
    def stats(self) -> dict[str, Stats]:
        """Statistics of every column over all frames."""
        return checked_tables.read_stats(self._table(tables.STATS))

    @cached_property
    def _episodes(self) -> dict[str, np.ndarray]:
        return checked_tables.read_episodes(self._table(tables.EPISODES), len(self.prompts))

    def _table(self, name: str) -> CheckedTable:
        """Content of one of `data.store.tables.FILES`, or of those that are optional."""
        raise NotImplementedError

    def _holds(self, name: str) -> bool:
        """True if there is such a file."""
        raise NotImplementedError


class DatasetTables(EpisodeTables):
    """Tables in a folder on disk, of an opened dataset that provides the rest."""

    dataset: Dataset
    folder: Path

    name = attribute_of("dataset.name")
    digest = attribute_of("dataset.digest")
    fps = attribute_of("dataset.fps")

    @property
    def cameras(self) -> tuple[str, ...]:
        """Full names."""
        return tuple(self.dataset.cameras)

    def column(self, name: str, rows: Int64[np.ndarray, "*n"]) -> Float32[np.ndarray, "*n d"]:
        """Values of a column at these frames, in the dataset's units.

        Raises:
          ValueError: there is no such column.
        """
        if name not in self._dims:
            raise ValueError(f"{self.name}: no column '{name}'; there are {list(self._dims)}.")
        shape = (int(self.lengths.sum()), self._dims[name])
        return tables.read_rows(LocalFolder(self.folder), self.folder.name, name, shape, rows)

    @cached_property
    def _dims(self) -> dict[str, int]:
        return tables.numeric_columns(self.dataset)
