"""Acting in RL: prepared observations go in, and random chunks come out, with the record of how
they were drawn.

Batches are those of `models.policy`: few sizes, few text lengths, and a row's answer depends only
on its own observation and key.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from models.layers.functional import Params
from models.policy import Policy
from models.requests import Request
from models.robot_policy import RobotPolicy
from models.session import RobotSession
from rl import flow_policy
from rl.config import FlowConfig
from rl.records import SampledChunk
from sim.protocol import Observation


class Answer(NamedTuple):
    """A chunk to execute, in the robot's units, and how it was drawn (numpy, one row)."""

    actions: Float[np.ndarray, "h a"]
    drawn: SampledChunk


@dataclass(frozen=True)
class FlowActor:
    """`robot` gives the model, the preparation and the sizes of batches; its parameters and steps
    are not used. Parameters, as `flow_policy.init` makes them, come with each call: arrays on the
    device, with the same dtypes and shardings from call to call, because any other kind is compiled
    again.
    """

    robot: RobotPolicy
    flow: FlowConfig

    @property
    def policy(self) -> Policy:
        """The robot's policy."""
        return self.robot.policy

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of the batches that are computed."""
        return self.policy.sizes

    def session(self) -> RobotSession:
        """See `rl.host.rollout.Actor`."""
        return self.policy.session()

    def prepare(
        self, observation: Observation, prompt: str, key: tuple[int, int], session: RobotSession
    ) -> Request:
        """See `rl.host.rollout.Actor`."""
        seen = session.observe(self.robot.observed(observation, prompt), key[1])
        (request,) = self.policy.prepare([seen], np.asarray([key]))
        return request

    def answer(self, params: Params, requests: Sequence[Request]) -> list[Answer]:
        """One answer for each request. With a single batch size, an answer depends only on its
        request and key, bit for bit.

        Raises:
          ValueError: a request continues a chunk.
        """
        if any(request.left is not None for request in requests):
            raise ValueError(
                "A request continues a chunk (Request.left), but a continued chunk has no "
                "log-probability; leave out 'previous' when preparing requests for RL."
            )
        keys = np.stack([request.key for request in requests])
        rows: list[Any] = [None] * len(requests)
        for at, count, batch in self.policy.batches(requests):
            drawn = jax.device_get(self._draw(params, batch, keys[at]))
            for row, i in enumerate(at[:count]):
                rows[i] = SampledChunk(*(x[row] for x in drawn))
        states = np.stack([request.state for request in requests])
        actions = self.policy.robot_actions(np.stack([row.actions for row in rows]), states)
        return [Answer(*pair) for pair in zip(actions, rows, strict=True)]

    def warm(self, params: Params) -> None:
        """Compiles `answer` in advance for texts as long as the robot's prompts need."""
        self.policy.warm(text=self.robot.longest_text, compute=partial(self.answer, params))

    @cached_property
    def _draw(self) -> Any:
        model, config = self.policy.model, self.flow
        return jax.jit(lambda p, batch, keys: flow_policy.draw(model, p, batch, keys, config))
