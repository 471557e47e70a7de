"""Layouts of packed rows, and what rows must keep."""

import numpy as np

from models import Layout


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
    """Every row, given by each sample's number of it, keeps all four budgets."""
    for amount, budget in (
        (images, lay.images),
        (text, lay.text),
        (np.ones_like(text), lay.samples),
        (images * lay.tokens_per_image + text + lay.state_tokens, lay.prefix),
    ):
        assert np.bincount(row, weights=amount).max() <= budget


def samples(cameras, number=8192, seed=0):
    rng = np.random.default_rng(seed)
    return rng.choice(cameras, number), rng.integers(5, 61, number)
