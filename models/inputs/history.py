"""Past observations that a policy reads beside the present one.

The steps are those of an action chunk, so at any fps a past picture is as old in training as in
acting: frames where a robot has no `seconds`, else its seconds divided by the horizon. (MEM, arXiv
2603.03596, gives strides in time for the same reason.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int64

Padding = Literal["repeat", "mask"]
"""Values before an episode's start: the episode's first one, or none."""


@dataclass(frozen=True)
class History:
    """The past that is read: pairs of a column and how many steps ago its values were observed, as
    in `(("state", (1, 2)), ("images", (10, 20)))`, ascending. A column is "state", the name of a
    camera, or "images" for all other cameras. `padding`: what stands before an episode's start.
    `shown`: past pictures stand in the prefix as the present ones do, before them, the oldest
    first; all cameras then have the same past.

    Raises:
      ValueError: the steps of a column do not ascend from 1 on, or it stands there twice; or
        pictures are shown that not all cameras have, or that may be missing.
    """

    ago: tuple[tuple[str, tuple[int, ...]], ...] = ()
    padding: Padding = "repeat"
    shown: bool = False

    def __post_init__(self) -> None:
        columns = {name for name, _ in self.ago} - {"state"}
        if self.shown and (columns != {"images"} or self.padding != "repeat"):
            raise ValueError(
                f"observed shows past pictures in the prefix, but those of {sorted(columns)} with "
                f"padding '{self.padding}'; give those of all cameras, ('images', steps), repeated."
            )
        names = [name for name, _ in self.ago]
        for name, steps in self.ago:
            wrong = not steps or steps[0] < 1 or sorted(set(steps)) != list(steps)
            if wrong or names.count(name) > 1:
                raise ValueError(
                    f"observed.ago of '{name}' is {steps}; give each column once, with steps back "
                    "in ascending order, such as (1, 2, 3)."
                )

    @property
    def state(self) -> tuple[int, ...]:
        """Steps back of the past states."""
        return dict(self.ago).get("state", ())

    def camera(self, name: str) -> tuple[int, ...]:
        """Steps back of a camera's past pictures."""
        known = dict(self.ago)
        return known.get(name, known.get("images", ()))

    @property
    def pictures(self) -> int:
        """Past pictures of a camera at most, in slots of their own."""
        if self.shown:
            return 0
        return max((len(steps) for name, steps in self.ago if name != "state"), default=0)

    @property
    def views(self) -> int:
        """Pictures of each camera in the prefix."""
        return 1 + len(self.camera("images")) if self.shown else 1

    def columns(self, cameras: Sequence[str]) -> dict[str, tuple[int, ...]]:
        """Steps back of each column that has a past, for a robot with these cameras."""
        steps = {"state": self.state} | {name: self.camera(name) for name in cameras}
        return {name: ago for name, ago in steps.items() if ago}

    def frames(
        self, ago: Sequence[int], frame: Int64[np.ndarray, " n"], step: float
    ) -> tuple[Int64[np.ndarray, "n t"], Bool[np.ndarray, "n t"]]:
        """The frames of an episode that lie so many steps of `step` frames before `frame`, and
        which of them are read."""
        back = np.floor(np.array(ago) * step + 0.5).astype(np.int64)
        at = frame[:, None] - back
        return np.maximum(at, 0), (at >= 0) | (self.padding == "repeat")


NOW = History()
"""Nothing of the past."""
