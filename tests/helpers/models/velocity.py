"""The velocity that a flow model predicts, in one call."""

from typing import Any

from jaxtyping import Array, Float

from models.inputs.packed_batch import PackedBatch
from models.model import FlowModel


def velocity_of(
    model: FlowModel,
    params: Any,
    batch: PackedBatch,
    noised: Float[Array, "r k c h a"],
    time: Float[Array, "r k c"] | Float[Array, "r k c h"],
) -> Float[Array, "r k c h a"]:
    """Velocity of C noised chunks per sample, f32, at a flow time for each chunk or for each of its
    steps."""
    return model.field(params, batch)(noised, time).velocity
