"""GR00T's own inputs, as its processor makes them, converted to a batch with one sample per row.

They are used to compare a loaded policy with the release, number for number.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Bool, Float

from models.families.groot.model import GrootConfig
from models.inputs.packed_batch import PackedBatch


def groot_batch(
    observation: Mapping[str, ArrayLike],
    config: GrootConfig,
    actions: Float[ArrayLike, "b h a"] | None = None,
    action_mask: Bool[ArrayLike, "b h a"] | None = None,
) -> PackedBatch:
    """A batch of B rows of L prefix places (numpy).

    Args:
      observation: "images" uint8 [views, h, w, 3] and "image_sample" [views], the sample of each
        view; "input_ids" and "attention_mask" [b, l], in which every view has a run of
        `config.image_token`, in order; "state" [b, s] or [b, 1, s]; "embodiment_id" [b].
      actions: normalised chunks for the loss, zeros if None. `action_mask`: the entries that count,
        all if None.

    With `config.padding` "masked" the padded places are dropped and the row is padded at its end;
    with "released" they stay where they are, with the tokens they have.

    Raises:
      ValueError: an entry is missing or has another shape, an id is out of range, or the number of
        a sample's image tokens is not what its views fill.
    """
    given = _checked(observation, config)
    images, owner, ids, mask = (
        given[name] for name in ("images", "image_sample", "input_ids", "attention_mask")
    )
    samples, length = ids.shape
    views = [np.flatnonzero(owner == i) for i in range(samples)]
    slots = max(1, *map(len, views))
    tokens = config.tokens_per_image
    slot_images = np.zeros((samples, slots, *images.shape[1:]), np.uint8)
    text, source, segment, position = np.zeros((4, samples, length), np.int32)
    for i, own in enumerate(views):
        slot_images[i, : len(own)] = images[own]
        kept = slice(None) if config.padding == "released" else mask[i]
        words, valid = ids[i][kept], mask[i][kept]
        is_image = words == config.image_token
        if is_image.sum() != len(own) * tokens:
            raise ValueError(
                f"Sample {i} has {is_image.sum()} image tokens (id {config.image_token}) in "
                f"input_ids but {len(own)} views in image_sample, each of {tokens} tokens; give "
                f"every view {tokens} image tokens."
            )
        places = np.arange(len(words))
        text[i, places] = np.where(is_image, 0, words)
        source[i, places] = np.where(is_image, is_image.cumsum() - 1, slots * tokens + places)
        segment[i, places], position[i, places] = valid, places
    shape = (samples, config.horizon, config.action_dim)
    chunks = np.zeros(shape, np.float32) if actions is None else np.asarray(actions, np.float32)
    counted = np.ones(shape, bool) if action_mask is None else np.asarray(action_mask, bool)
    for name, array in {"actions": chunks, "action_mask": counted}.items():
        _check_shape(name, array, shape)
    arrays: dict[str, Any] = {
        "images": slot_images,
        "image_camera": np.tile(np.arange(slots, dtype=np.int32), (samples, 1)),
        "text": text,
        "prefix_source": source,
        "prefix_segment": segment,
        "prefix_position": position,
        "state": given["state"].astype(np.float32).reshape(samples, 1, -1),
        "actions": chunks[:, None],
        "action_mask": counted[:, None],
        "embodiment": given["embodiment_id"].astype(np.int32)[:, None],
        "weight": np.ones((samples, 1), np.float32),
        "sample_id": np.arange(samples, dtype=np.int32)[:, None],
        "targets": np.zeros((samples, 1, 0), np.int32),
        "target_kind": np.zeros((samples, 1, 0), np.int32),
    }
    return PackedBatch(**arrays)


def _checked(observation: Mapping[str, ArrayLike], config: GrootConfig) -> dict[str, np.ndarray]:
    names = ("images", "image_sample", "input_ids", "attention_mask", "state", "embodiment_id")
    absent = [name for name in names if name not in observation]
    if absent:
        raise ValueError(
            f"The observation lacks {', '.join(absent)}; GR00T needs {', '.join(names)}."
        )
    given = {name: np.asarray(observation[name]) for name in names}
    given["attention_mask"] = given["attention_mask"].astype(bool)
    samples, length = np.atleast_2d(given["input_ids"]).shape
    views, size = len(given["images"]), config.image_size
    state = (samples, config.state_dim)
    shapes: dict[str, tuple[int, ...]] = {
        "images": (views, size, size, 3),
        "image_sample": (views,),
        "input_ids": (samples, length),
        "attention_mask": (samples, length),
        "state": state if given["state"].ndim == 2 else (samples, 1, config.state_dim),
        "embodiment_id": (samples,),
    }
    for name, shape in shapes.items():
        _check_shape(name, given[name], shape)
    if given["images"].dtype != np.uint8:
        raise ValueError(f"images are {given['images'].dtype}; expected uint8 pixels, 0 to 255.")
    limits = {
        "image_sample": samples,
        "input_ids": config.vocabulary,
        "embodiment_id": config.embodiments,
    }
    for name, limit in limits.items():
        wrong = given[name][(given[name] < 0) | (given[name] >= limit)]
        if wrong.size:
            raise ValueError(f"{name} holds {wrong[0]}; expected 0 to {limit - 1}.")
    return given


def _check_shape(name: str, array: np.ndarray, expected: tuple[int, ...]) -> None:
    if array.shape != expected:
        raise ValueError(
            f"{name} has shape {list(array.shape)} but this model and batch need {list(expected)}."
        )
