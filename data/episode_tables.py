"""What is known of every episode and of every column, as `data.tables.write` left it.

A frame store and a dataset read without one have these tables in common; they differ in where the
files come from.
"""

import io
import json
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Int64

from data import tables
from data.frames import Runs
from data.stats import Stats


class EpisodeTables:
    """The part of `Frames` that is read once, from files that `_kept` gives."""

    @cached_property
    def lengths(self) -> Int64[np.ndarray, "e"]:
        """Frames of each episode."""
        return self._episodes["lengths"]

    @cached_property
    def starts(self) -> Int64[np.ndarray, "e"]:
        """Number of each episode's first frame; frames are numbered through all episodes."""
        return np.cumsum(self.lengths) - self.lengths

    @cached_property
    def present(self) -> Bool[np.ndarray, "e c"]:
        """Which episodes have pictures of which camera."""
        return self._episodes["present"]

    @cached_property
    def alike(self) -> Int64[np.ndarray, "e"]:
        """For each episode the first one with the same states and actions."""
        return self._episodes["alike"]

    @cached_property
    def runs(self) -> Runs:
        """Consecutive frames of an episode with the same task."""
        return Runs(*(self._episodes[f"run_{field}"] for field in Runs._fields))

    @cached_property
    def prompts(self) -> tuple[tuple[str, ...], ...]:
        """The wordings of each task."""
        return tuple(map(tuple, json.loads(self._kept(tables.PROMPTS))))

    @cached_property
    def stats(self) -> dict[str, Stats]:
        """Statistics of every column over all frames."""
        return tables.read_stats(self._kept(tables.STATS))

    @cached_property
    def _episodes(self) -> dict[str, np.ndarray]:
        with np.load(io.BytesIO(self._kept(tables.EPISODES))) as file:
            return dict(file)

    def _kept(self, name: str) -> bytes:
        """What one of `data.tables.FILES` holds."""
        raise NotImplementedError
