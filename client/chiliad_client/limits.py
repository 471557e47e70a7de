"""Safety limits of what a robot is told: ranges of the action, its largest change in a tick, and a
box that a user's forward kinematics must stay in. Every command of the loop goes through them,
those that hold and stop the robot too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Mapping, NamedTuple

import numpy as np

Bound = Any
"""A number, numbers [a], or None."""
Forward = Callable[["np.ndarray", Mapping[str, Any]], Any]

_HALVINGS = 24


class Limited(NamedTuple):
    """An action [a] within the limits, and those that changed it: of "range", "step", "box"."""

    action: np.ndarray
    by: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class SafetyLimits:
    """Numbers [a] in the action's units, or one for all of its dims.

    Args:
      low, high: range of the action.
      step: largest distance from the action that holds the robot: of absolute targets that is the
        largest change in a tick (speed / hz), of relative ones their largest size.
      box: corners [k] and [k] that `forward` stays between.
      forward: forward kinematics: the place [k] that an action [a] leads to, given what is seen.

    Raises:
      ValueError: they contradict each other, or a box lacks its `forward`.
    """

    low: Bound = None
    high: Bound = None
    step: Bound = None
    box: tuple[Any, Any] | None = None
    forward: Forward | None = None

    def __post_init__(self) -> None:
        for name in ("low", "high", "step"):
            bound = getattr(self, name)
            if bound is not None:
                array = np.asarray(bound, np.float64)
                if array.ndim > 1 or np.isnan(array).any():
                    raise ValueError(f"{name} is {bound!r}; give a number, or one for each dim.")
                object.__setattr__(self, name, array)
        if self.low is not None and self.high is not None and np.any(self.low > self.high):
            raise ValueError(f"low is {self.low} and high is {self.high}; low must not be above.")
        if self.step is not None and np.any(np.asarray(self.step) <= 0):
            raise ValueError(f"step is {self.step}; give distances above 0.")
        if (self.box is None) != (self.forward is None):
            raise ValueError("A box and `forward`, the kinematics that it bounds, need each other.")
        if self.box is not None:
            corners = np.asarray(self.box, np.float64)
            if corners.ndim != 2 or len(corners) != 2 or (corners[0] > corners[1]).any():
                raise ValueError(f"box is {self.box!r}; give its lower and its upper corner.")
            object.__setattr__(self, "box", (corners[0], corners[1]))

    def check(self, rest: np.ndarray, seen: Mapping[str, Any]) -> None:
        """Raises ValueError, which names dim and value, unless a robot that is held by `rest` can
        start: it stands within the limits, or is led back into its ranges by one step."""
        for name in ("low", "high", "step"):
            bound = getattr(self, name)
            if bound is not None and bound.ndim and bound.shape != rest.shape:
                raise ValueError(
                    f"{name} has {len(bound)} numbers, but actions have {len(rest)} dims; give one "
                    "for each."
                )
        away = np.abs(self._ranged(rest) - rest)
        beyond = away - (np.inf if self.step is None else self.step)
        d = int(np.argmax(beyond))
        if beyond[d] > 0:
            raise ValueError(
                f"Action dim {d} holds the robot at {rest[d]:g}, {away[d]:g} out of its range and "
                "further than a step; move the robot by hand, or widen the range."
            )
        held = self._ranged(rest)
        if not self._inside(held, seen):
            raise ValueError(
                f"The robot stands at {np.asarray(self._place(held, seen))}, outside the box "
                f"{self.box}; move it by hand, or widen the box."
            )

    def applied(self, wanted: np.ndarray, rest: np.ndarray, seen: Mapping[str, Any]) -> Limited:
        """The action to send in place of `wanted` [a]: cut to its range, then to a step from
        `rest`, the action that holds the robot, then drawn back towards that until it is in the
        box. Where nothing on the way is in the box, it is `rest`. So a robot that is held outside
        its range is led back into it step by step.

        Raises:
          ValueError: one of them is not finite.
        """
        if not (np.isfinite(wanted).all() and np.isfinite(rest).all()):
            raise ValueError(
                f"The robot was to be sent {wanted}, held by {rest}; both must be finite."
            )
        by = []
        action = self._ranged(wanted)
        if (action != wanted).any():
            by.append("range")
        if self.step is not None:
            stepped = np.clip(action, rest - self.step, rest + self.step)
            if (stepped != action).any():
                action = stepped
                by.append("step")
        if not self._inside(action, seen):
            action = self._drawn_back(action, rest, seen)
            by.append("box")
        return Limited(action, tuple(by))

    def _ranged(self, action: np.ndarray) -> np.ndarray:
        low = -np.inf if self.low is None else self.low
        high = np.inf if self.high is None else self.high
        return np.minimum(np.maximum(action, low), high)

    def _place(self, action: np.ndarray, seen: Mapping[str, Any]) -> Any:
        assert self.forward is not None
        return self.forward(action, seen)

    def _inside(self, action: np.ndarray, seen: Mapping[str, Any]) -> bool:
        if self.box is None:
            return True
        place = np.asarray(self._place(action, seen), np.float64)
        if place.shape != self.box[0].shape:
            raise ValueError(
                f"`forward` gives {list(place.shape)} numbers, but the box has "
                f"{list(self.box[0].shape)}; both are of the same space."
            )
        return bool((place >= self.box[0]).all() and (place <= self.box[1]).all())

    def _drawn_back(
        self, action: np.ndarray, rest: np.ndarray, seen: Mapping[str, Any]
    ) -> np.ndarray:
        """The furthest found point towards an action outside the box that is inside; `rest` if
        that is outside itself."""
        if not self._inside(rest, seen):
            return rest
        inside, outside = 0.0, 1.0
        for _ in range(_HALVINGS):
            middle = (inside + outside) / 2
            if self._inside(rest + middle * (action - rest), seen):
                inside = middle
            else:
                outside = middle
        return rest + inside * (action - rest)
