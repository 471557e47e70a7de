"""Layouts of packed rows, and what rows must keep."""

import numpy as np

from models import Layout
from models.inputs.packed_batch import counts_of


def layout(prefix, images, samples, text, per_image, state=0):
    return Layout(
        prefix=prefix,
        images=images,
        samples=samples,
        text=text,
        image_size=48,
        tokens_per_image=per_image,
        state_tokens=state,
        state_dim=4,
        horizon=4,
        action_dim=4,
    )


def assert_within(lay, row, images, text):
    """Every row, given by each sample's number of it, keeps all its budgets."""
    groups = lay.groups
    for amount, budget in (
        *zip(counts_of(images, len(groups)).T, (group.number for group in groups), strict=True),
        (text, lay.text),
        (np.ones_like(text), lay.samples),
        (lay.prefix_length(images, text), lay.prefix),
    ):
        assert np.bincount(row, weights=amount).max() <= budget


def samples(cameras, number=8192, seed=0):
    rng = np.random.default_rng(seed)
    return rng.choice(cameras, number), rng.integers(5, 61, number)
