"""Samples from the unpacked observations of openpi's users: images by camera name, masks, state and
a prompt as text or as token ids.

Keys and shapes are those of openpi's `Observation` before batching; every array may have a leading
batch axis or none.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from models.inputs.packed_batch import Sample
from models.inputs.processor import Processor

_KEYS = {"image", "image_mask", "state", "prompt", "tokenized_prompt", "tokenized_prompt_mask"}
_UNREAD = {"actions", "token_ar_mask", "token_loss_mask"}


def read_observation(
    observation: Mapping[str, Any],
    processor: Processor,
    *,
    vocabulary: int,
    embodiment: int = 0,
    actions: Float[np.ndarray, "b h _a"] | None = None,
) -> list[Sample]:
    """One sample for each of the B observations.

    Args:
      observation: "image" {camera: uint8 [h, w, 3] or [b, h, w, 3]}, optionally "image_mask"
        {camera: bool or [b]}, "state" [s] or [b, s], and "prompt" (a str, or one for each) or
        "tokenized_prompt" [t] or [b, t] (with "tokenized_prompt_mask", else zeros at its end are
        padding). A camera that is masked or absent costs nothing. The state may be absent where
        the policy does not read it, or reads it in a prompt that is tokenized already.
      vocabulary: rows of the model's embedding.
      actions: chunks to compare with, in the units of the embodiment.

    Raises:
      ValueError: a key or camera is unknown, something is absent or of another shape, a token id is
        out of range, or a prompt is too long.
    """
    unknown = sorted(set(observation) - _KEYS - _UNREAD)
    if unknown:
        raise ValueError(
            f"The observation has unknown entries {unknown}; the known ones are {sorted(_KEYS)}."
        )
    robot = processor.embodiments[embodiment]
    images = _images(observation, robot.cameras)
    state = observation.get("state")
    if state is None:
        spelt = processor.state_input == "text" and "tokenized_prompt" in observation
        if processor.state_input != "none" and not spelt:
            raise ValueError(f"The observation has no 'state'; '{robot.name}' needs one.")
        state = np.zeros(len(robot.state.offset))
    state = np.asarray(state, np.float32)
    tokens = _prompts(observation, vocabulary)
    sizes = {f"image {name}": len(x) for name, (x, _) in images.items() if x.ndim == 4}
    sizes |= {"state": len(state)} if state.ndim == 2 else {}
    sizes |= {"the prompt": len(tokens)} if isinstance(tokens, list) else {}
    sizes |= {} if actions is None else {"actions": len(actions)}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"The observation's batch sizes differ: {sizes}.")
    count = next(iter(sizes.values()), 1)
    return [
        processor.sample(
            [_one(images.get(name), i) for name in robot.cameras],
            state[i] if state.ndim == 2 else state,
            tokens[i] if isinstance(tokens, list) else tokens,
            embodiment=embodiment,
            actions=None if actions is None else np.asarray(actions[i], np.float32),
            id=i,
        )
        for i in range(count)
    ]


def _images(observation: Mapping[str, Any], cameras: tuple[str, ...]) -> dict[str, Any]:
    """By camera: pictures [h, w, 3] or [b, h, w, 3], and their mask, [] or [b]."""
    given, masks = observation.get("image", {}), observation.get("image_mask", {})
    strange = sorted((set(given) | set(masks)) - set(cameras))
    if strange:
        raise ValueError(
            f"The model does not know the camera{'s' if len(strange) > 1 else ''} "
            f"{', '.join(map(repr, strange))}; its cameras are {', '.join(map(repr, cameras))}."
        )
    images = {name: (np.asarray(x), np.asarray(masks.get(name, True))) for name, x in given.items()}
    for name, (x, mask) in images.items():
        if x.dtype != np.uint8 or x.ndim not in (3, 4) or x.shape[-1] != 3:
            raise ValueError(
                f"image '{name}' is {x.dtype} {list(x.shape)}; expected uint8 [h, w, 3] or "
                f"[b, h, w, 3]."
            )
        if mask.shape not in ((), x.shape[: x.ndim - 3]):
            raise ValueError(
                f"image_mask '{name}' has shape {list(mask.shape)}, which does not fit its image "
                f"{list(x.shape)}."
            )
    return images


def _one(image: Any, i: int) -> np.ndarray | None:
    if image is None:
        return None
    pictures, mask = image
    if not (mask[i] if mask.ndim else mask):
        return None
    return pictures[i] if pictures.ndim == 4 else pictures


def _prompts(observation: Mapping[str, Any], vocabulary: int) -> Any:
    """A prompt for all, or a list with one for each: text or token ids."""
    if ("prompt" in observation) == ("tokenized_prompt" in observation):
        raise ValueError(
            "The observation needs exactly one of 'prompt' (text) and 'tokenized_prompt' (token "
            "ids)."
        )
    if "prompt" in observation:
        text = observation["prompt"]
        return text if isinstance(text, str) else [str(one) for one in text]
    rows = observation["tokenized_prompt"]
    single = np.ndim(rows[0]) == 0
    tokens = [np.asarray(row, np.int32) for row in ([rows] if single else rows)]
    mask = observation.get("tokenized_prompt_mask")
    if mask is None:
        tokens = [np.trim_zeros(row, "b") for row in tokens]
    else:
        valid = [np.asarray(row, bool) for row in ([mask] if single else mask)]
        tokens = [row[keep] for row, keep in zip(tokens, valid, strict=True)]
    for row in tokens:
        wrong = row[(row < 0) | (row >= vocabulary)]
        if wrong.size:
            raise ValueError(
                f"tokenized_prompt holds {wrong[0]}; expected token ids from 0 to {vocabulary - 1}."
            )
    return tokens[0] if single else tokens
