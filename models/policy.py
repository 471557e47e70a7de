"""A trained model with its preparation: observations and prompts in, action chunks in the robot's
units out.

What evaluation, serving and RL share. One compiled program serves any batch whose longest prompt
falls into the same bucket.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float, UInt8

from models.inputs import PackedBatch, pack
from models.pi import Pi
from models.processor import Processor

_BUCKET = 32


@dataclass(frozen=True)
class Policy:
    """`steps`: Euler steps of the sampler. `embodiment`: index into the processor's."""

    model: Pi
    params: Any
    processor: Processor
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
        samples = [
            self.processor.sample(picture, state, prompt, embodiment=self.embodiment, id=i)
            for i, (picture, state, prompt) in enumerate(zip(images, states, prompts, strict=True))
        ]
        config = self.model.config
        text = -(-max(len(s.text) for s in samples) // _BUCKET) * _BUCKET
        layout = config.layout(
            prefix=images.shape[1] * config.vision.tokens(config.image_size) + text + 1,
            samples=1,
            images=images.shape[1],
            text=text,
        )
        batch = pack([[sample] for sample in samples], layout)
        chunks = self._sample(self.params, batch, np.uint32(seed))
        return self.processor.actions(np.asarray(chunks)[:, 0], self.embodiment)

    @cached_property
    def _sample(self) -> Any:
        def sample(params: Any, batch: PackedBatch, seed: Any) -> jax.Array:
            return self.model.sample_actions(params, batch, jax.random.key(seed), self.steps)

        return jax.jit(sample)
