"""Records that pass from actors to the learner: how a chunk was drawn, its outcome, the episodes of
a ticket, and what a step learnt from. All are numpy on the host; only `Experience` goes to the
device.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from models.inputs.packed_batch import PackedBatch, Sample
from sim.protocol import Start


class SampledChunk(NamedTuple):
    """Draws of chunks, in the model's units: `m` of the denoising steps were random.

    A log-probability is that of `after` given `before`, for each number of a chunk, summed over the
    m steps; it is f32, whatever the model computes in.
    """

    actions: Float[Array | np.ndarray, "*b h a"]
    before: Float[Array | np.ndarray, "*b m h a"]
    after: Float[Array | np.ndarray, "*b m h a"]
    at: Int[Array | np.ndarray, "*b m"]
    """Indices of these denoising steps, 0 the first (at t = 1)."""
    log_prob: Float[Array | np.ndarray, "*b h a"]
    value: Float[Array | np.ndarray, "*b"]
    """The value head's estimate; 0 without one."""


@dataclass(frozen=True)
class Decision:
    """One chunk of one episode: the observation, how the chunk was drawn, and its outcome."""

    sample: Sample
    """The observation as the model takes it; `action_mask` is true for what was executed: real
    dims, and steps up to the episode's end."""
    drawn: SampledChunk
    version: int
    """Number of updates of the policy that drew it."""
    reward: Float[np.ndarray, " t"]
    """Rewards of the executed steps."""


@dataclass(frozen=True)
class Trajectory:
    """An episode from its beginning to its end."""

    start: Start
    member: int
    """Index in its ticket's group."""
    decisions: tuple[Decision, ...]
    terminated: bool
    """False if time ran out."""
    final_value: float
    """Estimate of the acting policy's value head for the last observation; it counts if time ran
    out."""
    success: bool
    last: Sample | None = None
    """That observation, for other value heads to estimate; None if no value head was asked."""


@dataclass(frozen=True)
class Ticket:
    """A group of episodes from one start, complete."""

    number: int
    trajectories: tuple[Trajectory, ...]
    redrawn: int = 0
    """Groups without signal that were drawn for it before this one."""

    @property
    def signal(self) -> bool:
        """True if some of the episodes succeeded and some did not."""
        return len({one.success for one in self.trajectories}) > 1

    @property
    def oldest(self) -> int:
        """Version of the oldest policy that acted in it."""
        return min(d.version for t in self.trajectories for d in t.decisions)


class TaskOutcome(NamedTuple):
    """Experience of a step in one task: episodes that ended, how many of them succeeded, control
    steps, and the sum of rewards. `groups`: groups of episodes drawn, those drawn again included;
    `signal`: how many of them had signal. Both are 0 where there are no groups."""

    episodes: int
    successes: int
    env_steps: int
    rewards: float
    groups: int = 0
    signal: int = 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Experience:
    """n decisions in the form that the learner takes, one row each: the observation (with
    `action_mask`), how the chunk was drawn, and what it was worth. Rows of weight 0 are padding."""

    batch: PackedBatch
    drawn: SampledChunk
    advantage: Float[Array | np.ndarray, " n"]
    target: Float[Array | np.ndarray, " n"]
    """The value head's targets."""
    version: Int[Array | np.ndarray, " n"]
    weight: Float[Array | np.ndarray, " n"]
    observed: Any = None
    """Result of `rl.flow_policy.observe` for the batch, where it is kept."""

    @property
    def acted(self) -> Bool[Array, "n h a"]:
        """True for the chunks' numbers that count."""
        return self.batch.action_mask[:, 0]
