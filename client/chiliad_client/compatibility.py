"""Compatibility of a robot with a server: checks, before the robot moves, that its observations and
actions match what the policy reads and answers. Errors say what to change.
"""

from __future__ import annotations

from typing import Any, Mapping

import numpy as np

CONTROLS = ("executed", "committed")
"""Keys of real-time chunking in a request: the fields of `chunks.Continuation`."""


def check_inputs(url: str, metadata: Mapping[str, Any], seen: Mapping[str, Any]) -> None:
    """Raises ValueError unless an observation, prompt included, matches the inputs that the server
    declares. A server that declares none, such as openpi's, is assumed to read it."""
    inputs = metadata.get("inputs")
    if not isinstance(inputs, Mapping) or metadata.get("replay"):
        return
    given = flat(seen)
    needed = [key for key, kind in inputs.items() if not _told(kind).get("optional")]
    missing = [key for key in needed if last_part(key) not in given]
    if missing:
        raise ValueError(
            f"{url} reads {list(inputs)}, but the robot's observation lacks {missing}; it has "
            f"{list(seen)}. Rename its keys, or start the server with --inputs KEY=CAMERA."
        )
    for key, kind in inputs.items():
        value, told = given.get(last_part(key)), _told(kind)
        if value is None:
            continue
        if told.get("dtype") == "uint8" and not _is_picture(value):
            raise ValueError(
                f"{url} reads '{key}' as uint8 [height, width, 3], but the robot gives "
                f"{_kind(value)}; give the camera's image unchanged, in RGB."
            )
        shape = told.get("shape")
        length = shape[0] if isinstance(shape, (list, tuple)) and len(shape) == 1 else None
        if isinstance(length, int) and np.shape(value) != (length,):
            raise ValueError(
                f"{url} reads '{key}' with {length} numbers, but the robot gives {_kind(value)}; "
                "the order and number of its joints must be those of the training data."
            )


def check_actions(url: str, metadata: Mapping[str, Any], dims: int) -> None:
    """Raises ValueError if the server declares actions with other dims than the robot's."""
    shape = _told(metadata.get("actions")).get("shape")
    if isinstance(shape, (list, tuple)) and shape and shape[-1] != dims:
        raise ValueError(
            f"{url} answers with actions of {shape[-1]} dims, but the robot's `hold` has {dims}; "
            "serve a policy for this robot, or let `act` and `hold` use the actions that the "
            "policy was trained on."
        )


def continues(url: str, metadata: Mapping[str, Any], wanted: bool | None) -> bool:
    """True if the server's last chunk is to be continued: the server offers it and `wanted` is not
    False.

    Raises:
      ValueError: continuation is wanted but not offered, or what is offered is no list.
    """
    told = metadata.get("chunking") or ()
    if not isinstance(told, (list, tuple)):
        raise ValueError(
            f"{url} declares chunking as {_kind(told)}, expected a list of keys; serve the policy "
            "with this version of Chiliad."
        )
    offered = all(control in told for control in CONTROLS)
    if wanted and not offered:
        raise ValueError(
            f"{url} does not continue chunks; start it with --chunking guided (or trained), or "
            "leave chunking out."
        )
    return offered and wanted is not False


def flat(message: Mapping[str, Any]) -> dict[str, Any]:
    """Values by the last parts of their keys, by which servers recognise them."""
    found: dict[str, Any] = {}
    for key, value in message.items():
        found.update(flat(value) if isinstance(value, Mapping) else {last_part(key): value})
    return found


def last_part(key: str) -> str:
    """`front` of `observation/front` and of `observation.images.front`."""
    return key.replace("/", ".").rpartition(".")[2]


def _told(kind: Any) -> Mapping[str, Any]:
    return kind if isinstance(kind, Mapping) else {}


def _is_picture(value: Any) -> bool:
    return (
        isinstance(value, np.ndarray)
        and value.dtype == np.uint8
        and value.ndim == 3
        and 3 in (value.shape[0], value.shape[2])
    )


def _kind(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    return f"{type(value).__name__} {value!r:.40}"
