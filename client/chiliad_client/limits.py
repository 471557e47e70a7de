"""Safety limits for a robot's commands: ranges of the action, its largest change per tick, and a
box that the user's forward kinematics must stay in. Every command of the loop passes through them,
including those that hold and stop the robot.
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
    """An action [a] within the limits, and the limits that changed it: of "range", "step",
    "box"."""

    action: np.ndarray
    by: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class SafetyLimits:
    """Limits in the action's units: numbers [a], or one number for all dims.

    Args:
      low, high: range of the action.
      step: largest distance from the action that holds the robot: for absolute targets, the largest
        change per tick (speed / hz); for relative ones, their largest size.
      box: lower and upper corner, [k] each, for `forward` to stay between.
      forward: forward kinematics: the position [k] that an action [a] leads to, given the
        observation.

    Raises:
      ValueError: limits are invalid or contradict each other, or only one of `box` and `forward` is
        given.
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
            raise ValueError("`box` bounds the result of `forward`; give both, or neither.")
        if self.box is not None:
            corners = np.asarray(self.box, np.float64)
            if corners.ndim != 2 or len(corners) != 2 or (corners[0] > corners[1]).any():
                raise ValueError(f"box is {self.box!r}; give its lower and its upper corner.")
            object.__setattr__(self, "box", (corners[0], corners[1]))

    def check(self, rest: np.ndarray, seen: Mapping[str, Any]) -> None:
        """Raises ValueError, naming dim and value, unless a robot held by `rest` can start: it is
        within the limits, or one step brings it back into its ranges."""
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
                f"Action dim {d} holds the robot at {rest[d]:g}, {away[d]:g} outside its range "
                "and further than one step; move the robot by hand, or widen the range."
            )
        held = self._ranged(rest)
        if not self._inside(held, seen):
            raise ValueError(
                f"The robot is at {np.asarray(self._place(held, seen))}, outside the box "
                f"{self.box}; move it by hand, or widen the box."
            )

    def applied(self, wanted: np.ndarray, rest: np.ndarray, seen: Mapping[str, Any]) -> Limited:
        """The action to send instead of `wanted` [a]: clipped to its range, then to a step from
        `rest`, the action that holds the robot, then moved back towards `rest` until it is in the
        box. If `rest` itself is outside the box, the result is `rest`. A robot that is held outside
        its range therefore returns into it step by step.

        Raises:
          ValueError: `wanted` or `rest` is not finite.
        """
        if not (np.isfinite(wanted).all() and np.isfinite(rest).all()):
            raise ValueError(
                f"The action to send is {wanted} and the action that holds the robot is {rest}; "
                "both must be finite."
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
                f"`forward` returns shape {list(place.shape)}, but the corners of the box have "
                f"shape {list(self.box[0].shape)}; they must be equal."
            )
        return bool((place >= self.box[0]).all() and (place <= self.box[1]).all())

    def _drawn_back(
        self, action: np.ndarray, rest: np.ndarray, seen: Mapping[str, Any]
    ) -> np.ndarray:
        """The furthest point found inside the box on the way from `rest` to an action outside it;
        `rest` if `rest` itself is outside."""
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
