"""Changes that a user's own files make to a dataset: other wordings, a transform, and movements
summed over the steps of a chunk.

The wordings of an instruction and the transform of states and actions are read here, so that a
mistake in them is found and named at the start.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Float64, Int64

from data.dataset import Prompts, Runs, Subtasks, subtasks_of
from data.files.json_file import read_named
from data.frames import Frames, Rows, Squares, attribute_of
from data.mixture.frame_filter import FrameFilter, runs_within
from models.files import own_file

Wordings = Prompts


@dataclass(frozen=True, eq=False)
class RelabelledFrames:
    """`frames` with other wordings, with increments that cover a whole step, and with samples from
    some frames only.

    An increment (a movement since the last frame) becomes the movement within a step: the sum over
    `step` frames from the step's beginning, up to the episode's end. The first and the last frame
    may count in part. Step k of a chunk begins k times `step` frames after the chunk, possibly
    within a frame.

    Args:
      prompts: wordings of each task.
      increments: dims of a column that are increments.
      step: frames per step, not necessarily a whole number.
      every: frames from one sample to the next, counted in each episode.
      kept: frames to draw samples from; all, if None.
    """

    frames: Frames
    prompts: Prompts
    increments: Mapping[str, tuple[int, ...]]
    step: float
    every: int = 1
    kept: FrameFilter | None = None

    name = attribute_of("frames.name")
    digest = attribute_of("frames.digest")
    fps = attribute_of("frames.fps")
    image_size = attribute_of("frames.image_size")
    resize = attribute_of("frames.resize")
    fits = attribute_of("frames.fits")
    cameras = attribute_of("frames.cameras")
    lengths = attribute_of("frames.lengths")
    starts = attribute_of("frames.starts")
    present = attribute_of("frames.present")
    duplicate_of = attribute_of("frames.duplicate_of")
    stats = attribute_of("frames.stats")

    @property
    def runs(self) -> Runs:
        """Runs of frames with one task; if `every` is above 1, each frame to draw is a run of its
        own."""
        runs = self.frames.runs
        if self.kept is not None:
            runs = runs_within(runs, self.kept, self.starts)
        if self.every == 1:
            return runs
        begin = -(-runs.first // self.every)
        numbers = np.maximum(-(-(runs.first + runs.length) // self.every) - begin, 0)
        of = np.repeat(np.arange(len(numbers)), numbers)
        place = np.arange(len(of)) - np.repeat(np.cumsum(numbers) - numbers, numbers)
        first = (begin[of] + place) * self.every
        return Runs(runs.episode[of], first, np.ones_like(first), runs.task[of])

    @property
    def has_subtasks(self) -> bool:
        """True if the dataset has subtasks."""
        return subtasks_of(self.frames) is not None

    @property
    def subtasks(self) -> Subtasks | None:
        """The dataset's."""
        return subtasks_of(self.frames)

    def column(self, name: str, rows: Int64[np.ndarray, "*n"]) -> Float32[np.ndarray, "*n d"]:
        """Values of a column at these frames, as the dataset has them except for increments.

        Args:
          rows: frames at which a step begins, or chunks [n, h] of a `Feed`'s frames ahead. The
            first frame of each row is the sample's own; later ones stay at the episode's last frame
            once they reach it.
        """
        values = self.frames.column(name, rows)
        if name not in self.increments:
            return values
        dims = list(self.increments[name])
        episode = np.searchsorted(self.frames.starts, rows, "right") - 1
        first = self.frames.starts[episode]
        last = first + self.frames.lengths[episode] - 1
        begin = self._begins(rows)
        end = begin + self.step
        moved = np.zeros((*rows.shape, len(dims)))
        earliest, latest = np.floor(begin.min(initial=0)), np.ceil(end.max(initial=0))
        for later in range(int(earliest), int(latest)):
            share = np.minimum(later + 1, end) - np.maximum(later, begin)
            share = np.maximum(share, 0) * (rows + later <= last)
            at = np.clip(rows + later, first, last)
            more = self.frames.column(name, at) if later else values
            moved += share[..., None] * more[..., dims]
        values = values.copy()
        values[..., dims] = moved
        return values

    def sums_parts(self, ahead: Sequence[int]) -> bool:
        """True if there are increments and some steps of chunks with this `ahead` begin within
        frames."""
        return bool(self.increments) and bool(self._begins(np.array([ahead])).any())

    def _begins(self, rows: Int64[np.ndarray, "*n"]) -> Float64[np.ndarray, "*n"]:
        """Frames from each step's own frame to the step's beginning, -0.5 to 0.5; 0 where the own
        frame is held at the episode's end."""
        if rows.ndim == 1:
            return np.zeros(rows.shape)
        begin = np.arange(rows.shape[-1]) * self.step - (rows - rows[..., :1])
        return np.where(begin < 0.5, begin.round(9), 0.0)

    def images(self, rows: Rows, camera: str, out: Squares) -> None:
        """Fills each of `out` with a frame's image, as `Frames` does."""
        self.frames.images(rows, camera, out)


@dataclass(frozen=True)
class Transform:
    """A user's function from (state [n, s], actions [n, h, a]) to two such arrays. It is referred
    to by its file's name, so that worker processes find it too. `content` is the file's SHA-256: no
    other content runs, even if the file changes."""

    file: str = field(repr=False)
    function: str
    content: str

    @classmethod
    def find(cls, where: str) -> "Transform":
        """Find `path/to/file.py:function` without running it.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: `where` does not name a file and a function.
        """
        file, _, function = where.rpartition(":")
        if not file or not function:
            raise ValueError(f"transform is '{where}'; give path/to/file.py:function.")
        if not Path(file).is_file():
            raise FileNotFoundError(f"{file}: no such file, needed for transform '{where}'.")
        return cls(file, function, own_file.digest(file))

    @classmethod
    def read(cls, where: str, content: str = "") -> "Transform":
        """Load `path/to/file.py:function`; this runs the file.

        Args:
          content: SHA-256 that the file must have; any if empty.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: it has no such function, or other content.
        """
        found = cls.find(where)
        found = replace(found, content=content or found.content)
        if not callable(
            getattr(own_file.run_content(found.file, found.content), found.function, None)
        ):
            raise ValueError(
                f"{found.file} has no function '{found.function}', needed as a transform."
            )
        return found

    def __call__(
        self, state: Float32[np.ndarray, "n s"], actions: Float32[np.ndarray, "n h a"]
    ) -> tuple[Float32[np.ndarray, "n s2"], Float32[np.ndarray, "n h a2"]]:
        """Transform a batch with the function.

        Raises:
          ValueError: the result is not two arrays for the same samples and steps.
        """
        function: Callable[..., Any] = getattr(
            own_file.run_content(self.file, self.content), self.function
        )
        made = tuple(np.asarray(x, np.float32) for x in function(state, actions))
        kept = [x.shape[:-1] for x in made]
        if kept != [state.shape[:-1], actions.shape[:-1]]:
            raise ValueError(
                f"{self.file}: {self.function} returned arrays of shape {[x.shape for x in made]} "
                f"for a state of {state.shape} and actions of {actions.shape}; only the last axis "
                "may change."
            )
        return made[0], made[1]


def read_wordings(file: str, empty: str, prompts: Wordings) -> Wordings:
    """A dataset's wordings with the paraphrases of a JSON file, {instruction: [paraphrase, …]}.

    Args:
      file: its path; no paraphrases if empty.
      empty: replaces instructions without text.
      prompts: the dataset's own wordings of each task.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it holds something else, or none of the dataset's instructions.
    """
    known = tuple(tuple(w or empty for w in wordings) for wordings in prompts)
    if not file:
        return known
    more = read_named(file, "paraphrases", "prompts", "fix it")
    if not (isinstance(more, dict) and all(_are_texts(texts) for texts in more.values())):
        raise ValueError(f"{file}: expected a table with a list of texts for each instruction.")
    told = {wording for wordings in known for wording in wordings}
    if not told & set(more):
        raise ValueError(
            f"{file}: has none of the dataset's instructions ({sorted(told)[:3]}, …), only "
            f"{sorted(more)[:3]}, …; its keys must be exactly those instructions."
        )
    return tuple(
        tuple(dict.fromkeys([*wordings, *(t for w in wordings for t in more.get(w, ()))]))
        for wordings in known
    )


def _are_texts(texts: Any) -> bool:
    return isinstance(texts, list) and all(isinstance(t, str) and t.strip() for t in texts)
