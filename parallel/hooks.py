"""Hooks: functions that a run calls every so many steps, such as evaluations."""

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

State = TypeVar("State")


class Hook(NamedTuple, Generic[State]):
    """`call(step, state, stopping)` after every `every` steps (0: never).

    It gets the number of steps made and the resulting state: the `TrainState` of a training run, or
    the policy's parameters in RL. It returns the metrics to log for that step and must not keep the
    state. Between its parts it calls `stopping()`, on all hosts alike, and returns at once if that
    is true. With `ends` it is also due after the last step, and in RL before the first.
    """

    every: int
    call: Callable[[int, State, Callable[[], bool]], dict[str, float]]
    ends: bool = False

    def due(self, done: int, steps: int) -> bool:
        """True if it is to be called after `done` of `steps` steps."""
        return due(done, self.every) or (self.every > 0 and self.ends and done == steps)


def due(done: int, every: int) -> bool:
    """True if what comes after every `every` steps (0: never) comes after `done`."""
    return every > 0 and done % every == 0
