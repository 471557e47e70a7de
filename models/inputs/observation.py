"""Observation of a robot at one moment, as everything that acts takes it, and how openpi's users
write it down: images by camera name, masks, state and a prompt as text or as token ids.

Keys and shapes are those of openpi's `Observation` before batching; every array may have a leading
batch axis or none.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Num, UInt8

from models.inputs.packed_batch import Sample
from models.inputs.processor import Processor

_KEYS = {"image", "image_mask", "state", "prompt", "tokenized_prompt", "tokenized_prompt_mask"}
_UNREAD = {"actions", "token_ar_mask", "token_loss_mask"}


@dataclass(frozen=True, eq=False)
class RobotObservation:
    """Pictures, state and prompt of one moment, in the robot's units.

    `images`: by camera of the embodiment, of any size; one that is absent or masked is left out.
    `prompt`: text, or the token ids of all of it. `state`: None where none is given. `past`: values
    of earlier moments, see `RobotSession.observe`.
    """

    images: Mapping[str, UInt8[np.ndarray, "_h _w 3"]]
    prompt: str | Int[np.ndarray, " _t"]
    state: Num[np.ndarray, " _s"] | None = None
    past: Mapping[str, tuple[np.ndarray | None, ...]] = field(default_factory=dict)

    def value(self, column: str) -> np.ndarray | None:
        """The state, if `column` is "state", or else the picture of that camera."""
        return self.state if column == "state" else self.images.get(column)


def read_observation(
    observation: Mapping[str, Any],
    cameras: tuple[str, ...],
    *,
    vocabulary: int,
    rows: Mapping[str, int] | None = None,
) -> list[RobotObservation]:
    """One observation for each of the B that a mapping holds.

    Args:
      observation: "image" {camera: uint8 [h, w, 3] or [b, h, w, 3]}, optionally "image_mask"
        {camera: bool or [b]}, "state" [s] or [b, s], and "prompt" (a str, or one for each) or
        "tokenized_prompt" [t] or [b, t] (with "tokenized_prompt_mask", else zeros at its end are
        padding). A camera that is masked or absent costs nothing.
      cameras: of the embodiment.
      vocabulary: rows of the model's embedding; 0 for a model without language, which needs no
        prompt.
      rows: batch sizes, by name, of what else has a batch axis.

    Raises:
      ValueError: a key or camera is unknown, something is absent or of another shape, or a token id
        is out of range.
    """
    unknown = sorted(set(observation) - _KEYS - _UNREAD)
    if unknown:
        raise ValueError(
            f"The observation has unknown entries {unknown}; the known ones are {sorted(_KEYS)}."
        )
    images = _images(observation, cameras)
    state = observation.get("state")
    state = None if state is None else np.asarray(state)
    tokens = _prompts(observation, vocabulary)
    sizes = {f"image {name}": len(x) for name, (x, _) in images.items() if x.ndim == 4}
    sizes |= {"state": len(state)} if state is not None and state.ndim == 2 else {}
    sizes |= {"the prompt": len(tokens)} if isinstance(tokens, list) else {}
    sizes |= rows or {}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"The observation's batch sizes differ: {sizes}.")
    count = next(iter(sizes.values()), 1)
    return [
        RobotObservation(
            {name: x for name in images if (x := _one(images[name], i)) is not None},
            tokens[i] if isinstance(tokens, list) else tokens,
            state[i] if state is not None and state.ndim == 2 else state,
        )
        for i in range(count)
    ]


def samples_of(
    observations: Sequence[RobotObservation],
    processor: Processor,
    *,
    embodiment: int = 0,
    actions: Float[np.ndarray, "b h _a"] | None = None,
) -> list[Sample]:
    """One sample for each observation. The state may be absent where the policy does not read it,
    or reads it in a prompt that is tokenized already.

    Args:
      actions: chunks to compare with, in the units of the embodiment.

    Raises:
      ValueError: a camera is unknown, a picture is not one, the state is absent, or as
        `Processor.sample`.
    """
    robot = processor.embodiments[embodiment]
    for one in observations:
        _check_cameras(one.images, robot.cameras)
        for name, x in one.images.items():
            if x.dtype != np.uint8 or x.ndim != 3 or x.shape[-1] != 3:
                raise ValueError(
                    f"image '{name}' is {x.dtype} {list(x.shape)}; expected uint8 [h, w, 3]."
                )
        spelt = processor.state_input == "text" and not isinstance(one.prompt, str)
        if one.state is None and processor.state_input != "none" and not spelt:
            raise ValueError(f"The observation has no 'state'; '{robot.name}' needs one.")
    nothing = np.zeros(len(robot.state.offset))
    return [
        processor.sample(
            [one.images.get(name) for name in robot.cameras],
            np.asarray(nothing if one.state is None else one.state, np.float32),
            one.prompt,
            embodiment=embodiment,
            actions=None if actions is None else np.asarray(actions[i], np.float32),
            past=one.past,
            id=i,
        )
        for i, one in enumerate(observations)
    ]


def _check_cameras(names: Iterable[str], cameras: tuple[str, ...]) -> None:
    strange = sorted(set(names) - set(cameras))
    if strange:
        raise ValueError(
            f"The model does not know the camera{'s' if len(strange) > 1 else ''} "
            f"{', '.join(map(repr, strange))}; its cameras are {', '.join(map(repr, cameras))}."
        )


def _images(observation: Mapping[str, Any], cameras: tuple[str, ...]) -> dict[str, Any]:
    """By camera: pictures [h, w, 3] or [b, h, w, 3], and their mask, [] or [b]."""
    given, masks = observation.get("image", {}), observation.get("image_mask", {})
    _check_cameras({*given, *masks}, cameras)
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
    pictures, mask = image
    if not (mask[i] if mask.ndim else mask):
        return None
    return pictures[i] if pictures.ndim == 4 else pictures


def _prompts(observation: Mapping[str, Any], vocabulary: int) -> Any:
    """A prompt for all, or a list with one for each: text or token ids."""
    if not vocabulary and not observation.keys() & {"prompt", "tokenized_prompt"}:
        return ""
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
