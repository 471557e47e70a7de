"""A small layout of rows, and samples to lay into them."""

import numpy as np

from models import Layout, Sample

LAYOUT = Layout(
    prefix=24, images=3, samples=3, text=12, image_size=4, tokens_per_image=4, state_tokens=1,
    state_dim=2, horizon=2, action_dim=3,
)  # fmt: skip


def sample(images: int, text: int, value: int) -> Sample:
    return Sample(
        images=tuple(np.full((4, 4, 3), value + i, np.uint8) for i in range(images)),
        text=np.arange(value, value + text, dtype=np.int32),
        state=np.full(2, value, np.float32),
        actions=np.full((2, 3), value, np.float32),
        action_mask=np.ones((2, 3), bool),
        id=value,
    )
