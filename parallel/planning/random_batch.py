"""Rows of random samples in the sizes of any model, with every place filled."""

import numpy as np
from jaxtyping import UInt8

from models.inputs.packed_batch import (
    ImageSlots,
    PackedBatch,
    Sample,
    count_code,
    counts_of,
    most_images,
    pack,
)
from models.model import ModelConfig

_CAMERAS, _PROMPT = 2, 32


def random_batch(config: ModelConfig, rows: int, samples: int) -> PackedBatch:
    """Rows of samples with two pictures of each size that the model reads and with prompts of one
    length, all places filled; without what a model does not read."""
    rng, prompt = np.random.default_rng(0), _PROMPT if config.vocabulary else 0
    sizes, shape = config.pictures, (config.horizon, config.action_dim)
    past = config.observed.pictures

    def picture(size: ImageSlots) -> UInt8[np.ndarray, "h w 3"]:
        return rng.integers(0, 256, (*size.shape, 3), dtype=np.uint8)

    def sample(i: int) -> Sample:
        return Sample(
            images=tuple(picture(size) for size in sizes for _ in range(_CAMERAS)),
            text=rng.integers(1, max(config.vocabulary, 2), prompt).astype(np.int32),
            state=rng.normal(size=config.state_dim).astype(np.float32),
            actions=rng.normal(size=shape).astype(np.float32),
            action_mask=np.ones(shape, bool),
            id=i,
            past=tuple(
                tuple(picture(size) for _ in range(past)) for size in sizes for _ in range(_CAMERAS)
            ),
            past_state=tuple(rng.normal(size=(len(config.observed.state), config.state_dim))),
        )

    ids = np.arange(rows * samples).reshape(rows, samples)
    packed = [[sample(int(i)) for i in row] for row in ids]
    empty = config.layout(prefix=0, samples=1, images=0)
    one = most_images(packed[0], empty)
    layout = config.layout(
        prefix=samples * empty.prefix_length(one, prompt),
        samples=samples,
        images=int(count_code(samples * counts_of(one, len(empty.groups)))),
        text=samples * prompt,
    )
    return pack(packed, layout)
