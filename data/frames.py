"""Numbered frames that training reads, with their columns, images and prompts.

A frame store and a dataset read directly from its mp4 files are both `Frames`, so plan, split and
loader treat them alike. A `Feed` says how one of them is read in a mixture, and
`fit_of` how the pictures of one of its cameras are resized.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

import numpy as np
from jaxtyping import Bool, Float32, Int64, Shaped

from data.dataset import Prompts, Runs
from models.inputs.pictures import PictureFit, Size, picture_fit

__all__ = ["ACTION", "STATE", "Feed", "Frames", "Runs", "Stats", "usual_columns"]

STATE, ACTION = "observation.state", "action"
_USUAL = ((STATE, "state", "observation.states"), (ACTION, "actions"))
"""Names of the columns of states and of actions: LeRobot's, openpi's, AgiBot's."""
_OF_FRAMES = ("timestamp", "index", "is_pad", "done")
"""Ends of the names of parts that tell about frames, not about the robot."""

Stats = dict[str, np.ndarray]
"""min, max, mean, std, q01, q10, q50, q90, q99 per dimension, and count [1]."""


def usual_columns(names: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The columns of states and those of actions among `names`: `observation.state` or `state`, and
    `action` or `actions`; where there is none, all columns that are parts of one, such as
    `observation.state.joint_position`, but for times, numbers and marks of frames."""
    known = [name for name in names if not name.endswith(_OF_FRAMES)]

    def of(usual: tuple[str, ...]) -> tuple[str, ...]:
        whole = [name for name in usual if name in known]
        heads = tuple(f"{name}." for name in usual)
        return tuple(whole[:1] or [name for name in known if name.startswith(heads)])

    return of(_USUAL[0]), of(_USUAL[1])


Rows = Int64[np.ndarray, " n"]
"""Numbers of frames."""
Squares = Sequence[Shaped[np.ndarray, "h w 3"]]
"""Memory that is filled with images."""


class Fitted(Protocol):
    """Settings of fitted images: they have the `image_size` and the kind of fit `resize`, but for
    cameras with another of `fits`."""

    @property
    def image_size(self) -> Size: ...
    @property
    def resize(self) -> str: ...
    @property
    def fits(self) -> Mapping[str, PictureFit]: ...


class Frames(Fitted, Protocol):
    """Episodes 0..e-1 end to end; a frame's number (its row) counts through all of them.

    `prompts` holds the wordings of each task; any of them may be shown. `present` says which
    episodes have which of `cameras` (full LeRobot names). `duplicate_of` is, for each episode, the
    first one with the same states and actions. `stats` holds the statistics of every column over
    all frames. `digest` identifies the content. Frames can be pickled, and used from any number of
    threads. Frames of a dataset with subtasks have subtasks too (`data.dataset.subtasks_of`).
    """

    @property
    def name(self) -> str: ...
    @property
    def digest(self) -> str: ...
    @property
    def fps(self) -> float: ...
    @property
    def cameras(self) -> tuple[str, ...]: ...
    @property
    def prompts(self) -> Prompts: ...
    @property
    def lengths(self) -> Int64[np.ndarray, " e"]: ...
    @property
    def starts(self) -> Int64[np.ndarray, " e"]: ...
    @property
    def runs(self) -> Runs: ...
    @property
    def present(self) -> Bool[np.ndarray, "e c"]: ...
    @property
    def duplicate_of(self) -> Int64[np.ndarray, " e"]: ...
    @property
    def stats(self) -> dict[str, Stats]: ...

    def column(self, name: str, rows: Int64[np.ndarray, "*n"]) -> Float32[np.ndarray, "*n d"]:
        """Values of a numeric column at these frames, in the dataset's units."""
        ...

    def images(self, rows: Rows, camera: str, out: Squares) -> None:
        """Fills each of `out` with a frame's image, fitted as `fit_of` says; `out` has that fit's
        dtype.

        Raises:
          DatasetError: an image cannot be read; names the file.
        """
        ...


def attribute_of(path: str) -> Any:
    """A property whose value is an attribute of an inner object, such as "frames.fps"."""
    return property(attrgetter(path))


def fit_of(images: Fitted, camera: str) -> PictureFit:
    """The way in which a camera's images are fitted."""
    return images.fits.get(camera) or picture_fit(images.resize, images.image_size)


@dataclass(frozen=True)
class Feed:
    """One dataset of a mixture, and how it is read.

    `cameras` are the dataset's own names in the order of the embodiment's cameras, None where the
    dataset lacks one. State and action are the named columns, end to end. Step k of an action chunk
    is the action `ahead[k]` frames after the observation, or before it if that is negative; a step
    takes `step` frames. `transform` changes states and actions, a whole batch at a time, in the
    dataset's units and before any scaling.
    """

    frames: Frames
    embodiment: int
    cameras: tuple[str | None, ...]
    ahead: tuple[int, ...]
    state: tuple[str, ...] = (STATE,)
    actions: tuple[str, ...] = (ACTION,)
    transform: (
        Callable[
            [Float32[np.ndarray, "n s"], Float32[np.ndarray, "n h a"]],
            tuple[Float32[np.ndarray, "n s2"], Float32[np.ndarray, "n h a2"]],
        ]
        | None
    ) = None
    step: float = 1.0
