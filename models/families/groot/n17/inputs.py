"""GR00T-N1.7's own inputs, as its processor makes them, as a batch with one sample per row.

They are used to compare a loaded policy with the release, number for number.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Float32

from models.families.groot.n17.model import Groot17Config
from models.inputs.packed_batch import PackedBatch, Sample, most_images, pack
from models.layers.qwen.vision import MERGE

_IMAGE_TOKEN = 151_655
_NEEDED = "pixel_values", "image_grid_thw", "input_ids", "attention_mask", "state", "embodiment_id"


def groot17_batch(
    observation: Mapping[str, ArrayLike],
    config: Groot17Config,
    actions: Float[ArrayLike, "b h a"] | None = None,
    action_mask: Bool[ArrayLike, "b h a"] | None = None,
) -> PackedBatch:
    """A batch of B rows (numpy), without the samples' padding.

    Args:
      observation: "pixel_values" [patches, d] and "image_grid_thw" [pictures, 3] of all samples in
        order; "input_ids" and "attention_mask" [b, l], in which "mm_token_type_ids" [b, l], if
        given, says which are pictures' tokens (else those of the release's id); "state" [b, 1, s]
        or [b, s]; "embodiment_id" [b].
      actions: normalised chunks for the loss, zeros if None. `action_mask`: the entries that count,
        all if None.

    Raises:
      ValueError: an entry is missing, or the pictures' tokens are not those that they fill.
    """
    if absent := [name for name in _NEEDED if name not in observation]:
        raise ValueError(
            f"The observation lacks {', '.join(absent)}; GR00T-N1.7 needs {', '.join(_NEEDED)}."
        )
    given = {name: np.asarray(observation[name]) for name in observation}
    ids, there = given["input_ids"], given["attention_mask"].astype(bool)
    pictured = given.get("mm_token_type_ids", ids == _IMAGE_TOKEN) == 1
    pictures = _pictures(given["pixel_values"], given["image_grid_thw"], config)
    fills = [x.shape[0] * x.shape[1] // config.vision.edge**2 for x in pictures]
    shape, at = (len(ids), config.horizon, config.action_dim), 0
    chunks = np.zeros(shape, np.float32) if actions is None else np.asarray(actions, np.float32)
    counted = np.ones(shape, bool) if action_mask is None else np.asarray(action_mask, bool)
    samples = []
    for i, words in enumerate(ids):
        own, shown = words[there[i]], pictured[i][there[i]]
        ends, first = np.cumsum(fills[at:]), at
        at += int(np.searchsorted(ends, shown.sum(), "right"))
        if shown.sum() != sum(fills[first:at]):
            raise ValueError(
                f"Sample {i} has {shown.sum()} tokens of pictures in input_ids, which its pictures "
                "in image_grid_thw do not fill; give those of whole pictures."
            )
        begins = np.flatnonzero(shown)[np.cumsum([0, *fills[first:at]])[:-1]]
        samples.append(
            Sample(
                images=tuple(pictures[first:at]),
                text=own[~shown].astype(np.int32),
                state=given["state"][i].reshape(-1).astype(np.float32),
                actions=chunks[i],
                action_mask=counted[i],
                embodiment=int(given["embodiment_id"][i]),
                id=i,
                image_at=tuple((~shown).cumsum()[begins].tolist()),
            )
        )
    sized = config.for_pictures(tuple(dict.fromkeys(x.shape[:2] for x in pictures)))
    images = most_images(samples, sized.layout(prefix=0, samples=1, images=0))
    layout = sized.layout(prefix=ids.shape[1], samples=1, images=images)
    return pack([[sample] for sample in samples], layout)


def _pictures(
    patches: Float[np.ndarray, "n d"], grids: Any, config: Groot17Config
) -> list[Float32[np.ndarray, "_h _w 3"]]:
    """Pictures in grey levels from their patches, in blocks, of pixels from −1 to 1."""
    p, m, made, at = config.vision.patch, MERGE, [], 0
    for _, high, wide in np.asarray(grids).tolist():
        own = patches[at : at + high * wide].reshape(high // m, wide // m, m, m, 3, 2, p, p)
        whole = own[..., 0, :, :].transpose(0, 2, 5, 1, 3, 6, 4).reshape(high * p, wide * p, 3)
        made.append(((whole / 2 + 0.5) * 255).astype(np.float32))
        at += high * wide
    return made
