"""Prompts that enter the vision stem (FiLM, arXiv 1709.07871; as in RT-1, arXiv 2212.06817): each
picture gets one embedding of its prompt. With them, a small policy trained from scratch learns
sooner which object is meant than by attention alone. Released policies do not use them.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from models.inputs.packed_batch import PackedBatch
from models.layers.layers import rotary

_BASE = 30.0
"""Base of the angles by which words are rotated; small because prompts are short."""


def image_prompts(
    batch: PackedBatch, text: Float[Array, "r t w"], tokens_per_image: int, ordered: bool = False
) -> Float[Array, "b w"]:
    """Mean embedding of the prompt of the sample that each image slot belongs to, b = r · i; zeros
    where the slot is empty.

    Args:
      text: embedding of each of the rows' text tokens.
      ordered: rotate each by its place in its prompt, so that the means of "red on blue" and "blue
        on red" differ.
    """
    slots, samples = batch.images.shape[1], batch.state.shape[1]
    places, row = slots * tokens_per_image, jnp.arange(text.shape[0])[:, None]
    owner = jnp.zeros((text.shape[0], places + text.shape[1] + samples), jnp.int32)
    owner = owner.at[row, batch.prefix_source].max(batch.prefix_segment)
    image_owner = owner[:, :places:tokens_per_image]
    text_owner = owner[:, places : places + text.shape[1]]
    if ordered:
        first = (text_owner[:, :, None] == text_owner[:, None]).argmax(-1)
        place = jnp.arange(text.shape[1]) - first
        text = rotary(text[:, :, None], place, _BASE)[:, :, 0]
    same = (image_owner[:, :, None] == text_owner[:, None]) & (image_owner[:, :, None] > 0)
    share = same / jnp.maximum(same.sum(-1, keepdims=True), 1)
    means = jnp.einsum("rit,rtw->riw", share.astype(text.dtype), text)
    return means.reshape(-1, text.shape[-1])
