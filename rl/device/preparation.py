"""An environment's observations as a model's batch, and its chunks as the robot's actions, inside a
traced program.

What `Processor.sample`, `pack` and `Processor.actions` do on the host, with the same numbers.
Prompts are few, so they are tokenised and laid out once, and a row gathers its own.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from models import Policy
from models.inputs.packed_batch import PackedBatch, pack
from models.inputs.processor import Normalizer
from sim.protocol import Observation, Scene, State, Transition


class Traceable(Protocol):
    """A `sim.protocol.Environment` whose methods can be traced too; its state names the episodes
    by `seed` [n] and `episode` [n], and tells `step` [n], how many steps they have had."""

    name: str
    cameras: tuple[str, ...]
    state_names: tuple[str, ...]
    action_names: tuple[str, ...]
    image_size: int
    max_steps: int
    prompts: tuple[tuple[str, ...], ...]

    def goal(self, state: State) -> Int[Array, " n"]: ...

    def pure_reset(self, seeds: UInt32[Array, " n"]) -> State: ...

    def pure_observe(self, state: State) -> Observation: ...

    def pure_pictures(self, scene: Scene) -> Array: ...

    def pure_step(
        self, state: State, actions: Float[Array, "n t a"]
    ) -> tuple[State, Transition]: ...

    def step_chunk(
        self, state: State, actions: Float[Array, "n t a"]
    ) -> tuple[State, Transition]: ...


class Preparation:
    """What a policy's processor does for one environment, to trace.

    Raises:
      ValueError: the policy was trained on another robot or on pictures of another size, reads its
        state as text (tokens that no table can hold), or came without its preparation.
    """

    def __init__(self, policy: Policy, env: Traceable) -> None:
        processor = policy.processor
        if processor is None:
            raise ValueError(
                f"The policy came without its preparation, needed to act in {env.name}."
            )
        robot = processor.embodiments[policy.embodiment]
        dims = len(robot.state.offset), len(robot.actions.offset)
        if dims != (len(env.state_names), len(env.action_names)) or not set(robot.cameras) <= set(
            env.cameras
        ):
            raise ValueError(
                f"The policy acts for '{robot.name}' with cameras {list(robot.cameras)} and {dims} "
                f"state and action dims, but {env.name} has cameras {list(env.cameras)} and "
                f"{(len(env.state_names), len(env.action_names))}; take a policy trained on it."
            )
        if env.image_size != processor.image_size:
            raise ValueError(
                f"{env.name} draws pictures of {env.image_size} pixels, but the policy sees "
                f"{processor.image_size}; give the environment image_size={processor.image_size}."
            )
        if processor.state_input == "text":
            raise ValueError(
                "The policy reads its state as text, which a device cannot spell; choose placement "
                "'host', or a model whose state_input is 'token' or 'suffix'."
            )
        self._robot = robot
        self._cameras = [env.cameras.index(camera) for camera in robot.cameras]
        self._wordings = np.array([len(wordings) for wordings in env.prompts])
        self._table = _table(policy, [p for wordings in env.prompts for p in wordings])
        self.dims = dims[1]
        """Real ones of the model's action dims."""

    def batch(
        self, observation: Observation, goal: Int[Array, " n"], wording: Float[Array, " n"]
    ) -> PackedBatch:
        """A row for each observation; nothing of `action_mask` is true.

        Args:
          wording: a draw in [0, 1), which of the goal's wordings the prompt has.
        """
        counts = jnp.asarray(self._wordings)
        first = jnp.cumsum(counts) - counts
        at = first[goal] + jnp.int32(wording * counts[goal])
        rows = jax.tree.map(lambda x: jnp.asarray(x)[at], self._table)
        state = _exactly(jnp.asarray(observation.state), self._robot.state)
        padding = rows.state.shape[-1] - state.shape[-1]
        changed = {
            "images": observation.images[:, jnp.array(self._cameras)],
            "state": jnp.pad(state, ((0, 0), (0, padding)))[:, None],
        }
        return PackedBatch(**{**vars(rows), **changed})

    def actions(
        self, chunk: Float[Array, "n h _a"], state: Float[Array, "n _s"]
    ) -> Float[Array, "n h _d"]:
        """A model's chunks in the robot's units and dims; `state` is what was observed."""
        found = _exactly(chunk[..., : self.dims], self._robot.actions, inverse=True)
        relative = np.asarray(self._robot.relative)
        if not relative.size:
            return found
        origin = jnp.where(relative >= 0, state[:, relative], 0)
        return found + origin[:, None]

    def acted(self, steps: Int[Array, "*b"], shape: tuple[int, ...]) -> Bool[Array, "*b h a"]:
        """Which numbers of chunks of `shape` [..., h, a] were acted, if so many steps were."""
        horizon, width = shape[-2:]
        early = jnp.arange(horizon) < steps[..., None]
        return early[..., None] & (jnp.arange(width) < self.dims)


def _table(policy: Policy, prompts: Sequence[str]) -> PackedBatch:
    """A row for each prompt, with blank pictures."""
    processor, config = policy.processor, policy.model.config
    assert processor is not None
    robot = processor.embodiments[policy.embodiment]
    black = np.zeros((processor.image_size, processor.image_size, 3), np.uint8)
    still = np.zeros(len(robot.state.offset), np.float32)
    samples = [
        processor.sample([black] * len(robot.cameras), still, prompt, embodiment=policy.embodiment)
        for prompt in prompts
    ]
    images, text = len(robot.cameras), max(len(sample.text) for sample in samples)
    prefix = config.layout(prefix=0, samples=1, images=images).prefix_length(images, text)
    layout = config.layout(prefix=prefix, samples=1, images=images, text=text)
    return pack([[sample] for sample in samples], layout)


def _exactly(x: Float[Array, "*b d"], scaling: Normalizer, inverse: bool = False) -> Any:
    """In 64 bits and rounded once, as numpy does on the host."""
    offset, scale = np.asarray(scaling.offset), np.asarray(scaling.scale)
    with jax.enable_x64(True):
        wide = x.astype(jnp.float64)
        scaled = wide * scale + offset if inverse else (wide - offset) / scale
        return scaled.astype(jnp.float32)
