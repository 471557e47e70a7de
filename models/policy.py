"""A trained model with its preparation: observations and prompts in, action chunks in the robot's
units out.

What evaluation, serving and RL share. One compiled program serves any batch whose longest prompt
falls into the same bucket.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, UInt8

from models import flow
from models.groot import Groot
from models.groot_inputs import groot_batch
from models.inputs import PackedBatch, Sample, pack
from models.observation import read_observation
from models.pi import Pi
from models.processor import Processor

_BUCKET = 32


@dataclass(frozen=True)
class Policy:
    """`steps`: Euler steps of the sampler. `embodiment`: index into the processor's. GR00T's
    checkpoints come without a processor; their policies take the model's own inputs."""

    model: Pi | Groot
    params: Any
    processor: Processor | None
    steps: int = 10
    embodiment: int = 0

    def act(
        self,
        observation: tuple[UInt8[ArrayLike, "n c h w 3"], Float[ArrayLike, "n s"]],
        prompts: list[str],
        seed: int,
    ) -> Float[np.ndarray, "n t a"]:
        """Chunks for N observations, each (pictures in the embodiment's camera order, state).

        The noise of observation i depends on (`seed`, i) alone.

        Raises:
          ValueError: cameras or state dims are not the embodiment's.
        """
        images, states = (np.asarray(x) for x in observation)
        processor = self._prepared()
        samples = [
            processor.sample(picture, state, prompt, embodiment=self.embodiment, id=i)
            for i, (picture, state, prompt) in enumerate(zip(images, states, prompts, strict=True))
        ]
        chunks = self._sample(self.params, self._rows(samples), np.uint32(seed), None)
        return processor.actions(np.asarray(chunks)[:, 0], self.embodiment, states)

    def infer(
        self,
        observation: Mapping[str, Any],
        noise: Float[ArrayLike, "b h a"] | None = None,
        seed: int = 0,
    ) -> dict[str, Float[np.ndarray, "b h a"]]:
        """{"actions": chunks in the robot's units} for openpi's observation, see
        `read_observation`; for GR00T's inputs, see `groot_batch`, in the model's units.

        Args:
          noise: where integration starts, in the model's dims; drawn from (`seed`, i) if None.

        Raises:
          ValueError: the observation is not one that this policy reads.
        """
        batch = self._batch(observation)
        start = None if noise is None else np.asarray(noise, np.float32)[:, None]
        chunks = np.asarray(self._sample(self.params, batch, np.uint32(seed), start))[:, 0]
        if isinstance(self.model, Groot):
            return {"actions": chunks}
        state = observation.get("state")
        return {"actions": self._prepared().actions(chunks, self.embodiment, state)}

    def loss(
        self,
        observation: Mapping[str, Any],
        actions: Float[ArrayLike, "b h a"],
        *,
        action_mask: Bool[ArrayLike, "b h a"] | None = None,
        noise: Float[ArrayLike, "b h a"] | None = None,
        time: Float[ArrayLike, "b"] | None = None,
        seed: int = 0,
    ) -> Float[np.ndarray, "*b_h"]:
        """Squared velocity error as the peers give it: openpi's [b, h], averaged over all of the
        model's action dims, or GR00T's scalar, averaged over the entries of `action_mask`.

        Args:
          actions: chunks in the robot's units.
          noise, time: of the flow (1 is noise, 0 is data); drawn from (`seed`, i) if None.

        Raises:
          ValueError: as `infer`.
        """
        batch = self._batch(observation, np.asarray(actions, np.float32), action_mask)
        drawn = flow.draw(jax.random.key(seed), batch.sample_id, 1, batch.actions.shape[2:])
        at = drawn[0] if time is None else np.asarray(time, np.float32)[:, None, None]
        chunk = drawn[1] if noise is None else np.asarray(noise, np.float32)[:, None, None]
        error = np.asarray(self._error(self.params, batch, chunk, at))
        if isinstance(self.model, Groot):
            counted = np.asarray(batch.action_mask)[:, 0]
            total = (error * counted).sum(dtype=np.float64)
            return np.asarray(total / counted.sum(), np.float32)
        return error.mean(-1)

    def _prepared(self) -> Processor:
        if self.processor is None:
            raise ValueError(
                "This policy came without its preparation (scales, tokenizer); give infer and loss "
                "the model's own inputs, as models.groot_inputs.groot_batch describes them."
            )
        return self.processor

    def _batch(
        self, observation: Mapping[str, Any], actions: Any = None, action_mask: Any = None
    ) -> PackedBatch:
        if isinstance(self.model, Groot):
            return groot_batch(observation, self.model.config, actions, action_mask)
        if action_mask is not None:
            raise ValueError(
                "action_mask is GR00T's; openpi's loss averages over every action dim."
            )
        processor = self._prepared()
        if actions is not None:
            processor = replace(processor, horizon=actions.shape[1])
        samples = read_observation(
            observation,
            processor,
            vocabulary=self.model.config.vocabulary,
            embodiment=self.embodiment,
            actions=actions,
        )
        return self._rows(samples)

    def _rows(self, samples: list[Sample]) -> PackedBatch:
        """One sample a row, text rounded up to a bucket."""
        config = self.model.config
        images = max(1, *(len(sample.images) for sample in samples))
        text = -(-max(len(sample.text) for sample in samples) // _BUCKET) * _BUCKET
        prefix = images * config.vision.tokens(config.image_size) + text + 1
        layout = config.layout(prefix=prefix, samples=1, images=images, text=text)
        layout = replace(layout, horizon=len(samples[0].actions))
        return pack([[sample] for sample in samples], layout)

    @cached_property
    def _sample(self) -> Any:
        @jax.jit
        def sample(params: Any, batch: PackedBatch, seed: Any, noise: Any) -> jax.Array:
            return self.model.sample_actions(params, batch, jax.random.key(seed), self.steps, noise)

        return sample

    @cached_property
    def _error(self) -> Any:
        @jax.jit
        def error(params: Any, batch: PackedBatch, noise: Any, time: Any) -> jax.Array:
            noised, target = flow.interpolate(batch.actions[:, :, None], noise, time)
            return ((self.model.velocity(params, batch, noised, time) - target) ** 2)[:, 0, 0]

        return error
