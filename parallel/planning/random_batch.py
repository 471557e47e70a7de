"""Rows of random samples in the sizes of any model, with every place filled."""

import numpy as np

from models.inputs.packed_batch import PackedBatch, Sample, pack
from models.model import ModelConfig

_CAMERAS, _PROMPT = 2, 32


def random_batch(config: ModelConfig, rows: int, samples: int) -> PackedBatch:
    """Rows of two-camera samples with prompts of one length, all places filled; without prompts for
    a model that reads none."""
    rng, prompt = np.random.default_rng(0), _PROMPT if config.vocabulary else 0
    picture, shape = (config.image_size,) * 2 + (3,), (config.horizon, config.action_dim)

    def sample(i: int) -> Sample:
        return Sample(
            images=tuple(rng.integers(0, 256, (_CAMERAS, *picture), dtype=np.uint8)),
            text=rng.integers(1, max(config.vocabulary, 2), prompt).astype(np.int32),
            state=rng.normal(size=config.state_dim).astype(np.float32),
            actions=rng.normal(size=shape).astype(np.float32),
            action_mask=np.ones(shape, bool),
            id=i,
        )

    tokens = _CAMERAS * config.tokens_per_image + prompt + int(config.state_input == "token")
    layout = config.layout(
        prefix=samples * tokens,
        samples=samples,
        images=samples * _CAMERAS,
        text=samples * prompt,
    )
    ids = np.arange(rows * samples).reshape(rows, samples)
    return pack([[sample(int(i)) for i in row] for row in ids], layout)
