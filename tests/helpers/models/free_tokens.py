"""π0-FAST's language model alone, without the grammar of chunks."""

from typing import Any

from jaxtyping import Array, Int

from models.families.pi import targets
from models.families.pi.fast.model import Pi0Fast
from models.inputs.packed_batch import PackedBatch


def predict_tokens(
    model: Pi0Fast, params: Any, batch: PackedBatch, length: int, end: int
) -> Int[Array, "r k length"]:
    """The likeliest next tokens among all words, one by one, whether or not they spell a chunk; all
    tokens after the first `end` are `end`."""
    modules = model._modules.bind(params)
    cache, last = modules.begun(batch)
    return targets.greedy(
        modules.language, modules.embedded, modules.scorer, cache,
        slots=batch.state.shape[1], length=length, begin=last, end=end, gap=model._gap,
    )  # fmt: skip
