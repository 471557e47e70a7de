"""A tiny π0.5 and samples for it."""

from dataclasses import replace

import jax
import numpy as np

from models import Sample
from tests.helpers.models.pi_sizes import TINY

CONFIG = replace(TINY, state_dim=5, action_dim=6, horizon=4, film=True, chunks=2)


KEY = jax.random.key(7)


def samples(seed: int, count: int = 4) -> list[Sample]:
    rng = np.random.default_rng(seed)
    return [
        Sample(
            images=tuple(rng.integers(0, 256, (1 + i % 2, 8, 8, 3), dtype=np.uint8)),
            text=rng.integers(1, 40, 2 + 3 * (i % 3)).astype(np.int32),
            state=rng.normal(size=5).astype(np.float32),
            actions=rng.normal(size=(4, 6)).astype(np.float32),
            action_mask=rng.random((4, 6)) > 0.3,
            id=100 * seed + i,
        )
        for i in range(count)
    ]
