"""A tiny π0.5 and samples for it."""

import jax
import numpy as np

from models import Sample
from models.layers.gemma import GemmaConfig
from models.layers.layers import Compute
from models.layers.siglip import SiglipConfig
from models.pi.model import PiConfig

CONFIG = PiConfig(
    vision=SiglipConfig(width=16, depth=1, hidden=24, heads=2, patch=4),
    language=GemmaConfig(width=16, depth=3, hidden=24, heads=2, kv_heads=1, head_dim=8),
    expert=GemmaConfig(width=12, depth=3, hidden=16, heads=2, kv_heads=1, head_dim=8),
    image_size=8,
    vocabulary=260,
    state_dim=5,
    action_dim=6,
    horizon=4,
    state_input="token",
    film=True,
    chunks=2,
    compute=Compute(dtype="float32"),
)


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
