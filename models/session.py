"""State that a policy needs of one robot between its calls: past observations, the last chunk, and
the mean of chunks that overlap.

Evaluation, the server, RL and notebooks hold one `RobotSession` for each robot (`Policy.session`),
and open loop one for each recorded episode. Nothing of it is sent or saved. A policy that looks at
one moment alone costs its session a few numbers: no observation is kept or copied.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from models.inputs.history import Padding
from models.inputs.observation import RobotObservation


class _Moment(NamedTuple):
    step: int
    values: Mapping[str, np.ndarray | None]


@dataclass(eq=False)
class RobotSession:
    """State of one robot. All steps are control steps since the episode's start.

    `number`: distinguishes the robot's noise from other robots'. `observed`: for "state" or a
    camera, the steps before an observation that the policy reads with it, such as (-2, -1, 0).
    `padding`: what it reads before the episode's start. `ensemble`: coefficient m of `answered`;
    None if each chunk replaces the last. `continues`: whether a chunk continues the last one
    (real-time chunking).

    Raises:
      ValueError: a step lies ahead, or `ensemble` is not finite or comes with `continues`.
    """

    number: int = 0
    observed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    padding: Padding = "repeat"
    ensemble: float | None = None
    continues: bool = False

    requests: int = field(default=0, init=False)
    """Number of answered requests."""
    step: int = field(default=0, init=False)
    """Step of the last observation."""
    begun: int = field(default=0, init=False)
    """Step at which the last chunk begins."""
    chunk: Float[np.ndarray, "h a"] | None = field(default=None, init=False)
    """The last chunk as the robot was given it, in its units."""
    _counts: Int[np.ndarray, " h"] = field(init=False)
    _moments: deque[_Moment] = field(init=False)

    def __post_init__(self) -> None:
        for column, steps in self.observed.items():
            if not steps or max(steps) > 0:
                raise ValueError(
                    f"observed['{column}'] is {steps}; give the steps before an observation that "
                    "are read with it, such as (-2, -1, 0)."
                )
        if self.ensemble is not None and not math.isfinite(self.ensemble):
            raise ValueError(f"ensemble is {self.ensemble}; give a finite coefficient.")
        if self.ensemble is not None and self.continues:
            raise ValueError(
                "A chunk that continues the last one (continues=True) already agrees with it; "
                "leave out either that or ensemble."
            )
        self.reset()

    @property
    def lookback(self) -> int:
        """Steps back to the oldest observation that the policy reads."""
        return -min((min(steps) for steps in self.observed.values()), default=0)

    @property
    def remembers(self) -> bool:
        """True if an answer depends on earlier calls even where no chunk is continued."""
        return self.lookback > 0 or self.ensemble is not None

    @property
    def key(self) -> tuple[int, int]:
        """Two integers for the noise of the next chunk."""
        return self.number, self.requests

    def reset(self) -> None:
        """Forgets everything but `number` and `requests`, as a new episode requires."""
        self.step = self.begun = 0
        self.chunk, self._counts = None, np.zeros(0, np.int64)
        self._moments = deque(maxlen=self.lookback + 1)

    def observe(self, observation: RobotObservation, step: int) -> RobotObservation:
        """The observation of a step with the past that the policy reads beside it; step 0 begins an
        episode.

        Steps need not follow each other, as messages may get lost: in the place of an observation
        that is missing stands the nearest one, of two equally near ones the earlier. An observation
        of a step again replaces that step's, and all later ones.
        """
        self.step = step
        if not self.lookback:
            return observation
        while self._moments and self._moments[-1].step >= step:
            self._moments.pop()
        values = {column: observation.value(column) for column in self.observed}
        self._moments.append(_Moment(step, values))
        past = {
            column: tuple(self._value(column, step + ago) for ago in steps)
            for column, steps in self.observed.items()
        }
        return replace(observation, past=past)

    def after(self, executed: int | None) -> int:
        """The step at which so many steps of the last chunk have been executed. None: 0, as the
        robot begins an episode."""
        return 0 if executed is None else self.begun + executed

    def left(self, executed: int | None, committed: int = 0) -> Float[np.ndarray, "t a"] | None:
        """The steps of the last chunk that are left to continue, the next one first; None where
        nothing is continued.

        Raises:
          ValueError: there is no last chunk, it has fewer steps, or some are committed in a session
            that continues nothing.
        """
        if executed is None:
            return None
        if self.chunk is None:
            raise ValueError("'executed' is given, but the robot has not received a chunk yet.")
        if executed > len(self.chunk):
            raise ValueError(
                f"'executed' is {executed}, but the last chunk had {len(self.chunk)} steps."
            )
        if committed and not self.continues:
            raise ValueError(
                "'committed' is given, but the session continues no chunks; begin it with "
                "continues=True."
            )
        return self.chunk[executed:] if self.continues else None

    def answered(self, chunk: Float[np.ndarray, "h a"]) -> Float[np.ndarray, "h a"]:
        """The chunk to execute from the last observation on, given the policy's.

        With `ensemble` m, its action at a step is the mean Σ wᵢ·aᵢ / Σ wᵢ, wᵢ = exp(−m·i), over
        all chunks since the episode's start that have an action for that step, a₀ the oldest
        chunk's (ACT, Zhao et al. 2023, arXiv 2304.13705, algorithm 2). It is computed online, as by
        LeRobot's ACTTemporalEnsembler, whose `temporal_ensemble_coeff` is m: with n chunks so far
        and Wₙ = w₀ + … + wₙ₋₁, the next mean is (mean·Wₙ + wₙ·a) / Wₙ₊₁. ACT uses m = 0.01, which
        gives older chunks slightly more weight.
        """
        if self.ensemble is not None:
            shift = self.step - self.begun if self.step else len(self._counts)
            before, last = self._counts[shift:], self.chunk
            self._counts = np.ones(len(chunk), np.int64)
            self._counts[: len(before)] += before
            if last is not None and len(before):
                weights = np.exp(-self.ensemble * np.arange(before.max() + 1))[:, None]
                sums, new = np.cumsum(weights, axis=0), chunk[: len(before)]
                mean = (last[shift:] * sums[before - 1] + new * weights[before]) / sums[before]
                chunk = np.concatenate([mean.astype(chunk.dtype), chunk[len(before) :]])
        self.begun, self.chunk = self.step, chunk
        self.requests += 1
        return chunk

    def _value(self, column: str, step: int) -> np.ndarray | None:
        if step < 0 and self.padding == "mask":
            return None
        nearest = min(self._moments, key=lambda moment: abs(moment.step - max(step, 0)))
        return nearest.values[column]
