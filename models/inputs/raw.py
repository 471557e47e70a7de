"""Conversion of observations with the keys of a robot's own clients, such as openpi's examples for
LIBERO, DROID and ALOHA, or of a LeRobot dataset, to the form that `read_observation` takes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Shaped, UInt8


@dataclass(frozen=True)
class RawKeys:
    """Keys of an observation; "/" separates those of nested maps.

    `images`: pairs of a key and the policy's camera. `state`: keys whose numbers are concatenated.
    `prompt`: key of the task in words; if it is not sent, `default` is used. `ignored`: keys that
    may be sent and are not read.
    """

    images: tuple[tuple[str, str], ...]
    state: tuple[str, ...]
    prompt: str = "prompt"
    default: str = ""
    ignored: tuple[str, ...] = ()

    @property
    def own(self) -> set[str]:
        """Outermost keys that distinguish such an observation from openpi's `Observation`."""
        outermost = {key.split("/")[0] for key, _ in self.images}
        return {key for key, _ in self.images} | outermost


def is_raw(observation: Mapping[str, Any], keys: RawKeys | None) -> bool:
    """True if the observation has pictures under the robot's own keys."""
    return keys is not None and "image" not in observation and bool(keys.own & set(observation))


def read_raw(
    observation: Mapping[str, Any], keys: RawKeys, absent: tuple[str, ...], needs_state: bool = True
) -> dict[str, Any]:
    """An observation as "image" {camera: uint8 [(b,) h, w, 3]}, "state" [(b,) s] and "prompt" (or
    "tokenized_prompt", with its mask).

    Pictures may be floats from 0 to 1, and [3, h, w].

    Args:
      absent: cameras that may be missing.
      needs_state: the policy reads the state, or its actions are relative to it.

    Raises:
      ValueError: a key is missing or unknown, or a picture is of another shape.
    """
    flat = _flat(observation)
    words = ("tokenized_prompt", "tokenized_prompt_mask")
    known = {key for key, _ in keys.images} | {*keys.state, keys.prompt, *keys.ignored, *words}
    needed = {key for key, camera in keys.images if camera not in absent}
    if needs_state or set(keys.state) & set(flat):
        needed |= set(keys.state)
    missing, unknown = sorted(needed - set(flat)), sorted(set(flat) - known)
    if missing or unknown:
        wrong = [f"lacks {missing}"] if missing else []
        wrong += [f"has unknown entries {unknown}"] if unknown else []
        raise ValueError(
            f"The observation {' and '.join(wrong)}; expected {sorted(needed)} and "
            f"'{keys.prompt}', and optionally {sorted(known - needed)}."
        )
    read: dict[str, Any] = {
        "image": {camera: _picture(flat[key], key) for key, camera in keys.images if key in flat}
    }
    parts = [np.atleast_1d(np.asarray(flat[key])) for key in keys.state if key in flat]
    if parts:
        read["state"] = np.concatenate(parts, axis=-1)
    read |= {name: flat[name] for name in words if name in flat}
    if "tokenized_prompt" not in flat:
        words = flat.get(keys.prompt, keys.default)
        read["prompt"] = _words(keys.default if words == "" else words, keys.prompt)
    return read


def batched(observation: Mapping[str, Any], keys: RawKeys) -> bool:
    """True if pictures have a leading batch axis."""
    flat = _flat(observation)
    return any(np.ndim(flat[key]) == 4 for key, _ in keys.images if key in flat)


def _flat(observation: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in observation.items():
        nested = isinstance(value, Mapping)
        flat |= _flat(value, f"{before}{key}/") if nested else {f"{before}{key}": value}
    return flat


def _picture(image: Any, key: str) -> UInt8[np.ndarray, "*b h w 3"]:
    picture: Shaped[np.ndarray, ...] = np.asarray(image)
    if picture.ndim not in (3, 4):
        raise ValueError(
            f"'{key}' has shape {list(picture.shape)}; expected an image [h, w, 3] or [3, h, w]."
        )
    if np.issubdtype(picture.dtype, np.floating):
        if not (picture.min() >= 0 and picture.max() <= 1):
            raise ValueError(
                f"'{key}' holds {picture.min():g} to {picture.max():g}; expected uint8, or floats "
                "from 0 to 1."
            )
        picture = (255 * picture).astype(np.uint8)
    if picture.shape[-3] == 3:
        picture = np.moveaxis(picture, -3, -1)
    return picture


def _words(prompt: Any, key: str) -> str | list[str]:
    if isinstance(prompt, bytes):
        return prompt.decode("utf-8")
    if isinstance(prompt, np.ndarray) and prompt.ndim == 0:
        prompt = prompt.item()
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError(
                f"The observation's '{key}' is missing or empty; describe the task in words."
            )
        return prompt
    return [str(words) for words in prompt]
