"""Message that a client sends in one request, under its own names, read as the observation that
`Policy` takes and what the client says of its last chunk.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from models.inputs.camera_names import plain_name
from models.inputs.observation import CONTROLS, Inputs, RobotObservation, kind_of

_PROMPT_LENGTH = 2000
_SIDE = 8192
"""Largest edge in pixels; a picture with one row of millions costs more to shrink than any
camera's."""


class ClientMessage(NamedTuple):
    """A client's message, read: its observation, and those of `CONTROLS` that it has."""

    observation: RobotObservation
    executed: int | None
    committed: int | None


def read_message(inputs: Inputs, message: Mapping[str, Any]) -> ClientMessage:
    """A client's message.

    Raises:
      ValueError: as `Inputs.read`, or it holds several observations, one that is too large, or
        steps that are none.
    """
    given = dict(message)
    steps = [_steps(key, given.pop(key)) if key in given else None for key in CONTROLS]
    observations, axes = inputs.read(given)
    if axes:
        raise ValueError(
            f"The observation has a batch axis, {axes}; send one: images [height, width, 3], "
            "state [n] and one prompt."
        )
    observation = observations[0]
    for camera, image in observation.images.items():
        if max(image.shape) > _SIDE:
            raise ValueError(
                f"Image '{camera}' is {kind_of(image)}; sides have at most {_SIDE} pixels."
            )
    if not isinstance(observation.prompt, str) or len(observation.prompt) > _PROMPT_LENGTH:
        raise ValueError(
            f"The prompt has {len(observation.prompt)} characters or token ids; send text of at "
            f"most {_PROMPT_LENGTH} characters."
        )
    return ClientMessage(observation, *steps)


def client_inputs(inputs: Inputs, pairs: Sequence[str] = ()) -> Inputs:
    """Inputs that clients send, of a robot's own (`inputs_of`, `Policy.inputs`).

    Args:
      pairs: "client's key=camera" or "client's key=state"; without any, the robot's own. Names and
        default of the prompt are the robot's own in any case. Several keys of the state are
        concatenated in this order; what the policy does not read may be sent.

    Raises:
      ValueError: a pair names no camera of the robot, two keys mean the same, or cameras need pairs
        because the last parts of their names repeat or clash.
    """
    if not pairs:
        taken = {"state", *inputs.prompts, *CONTROLS}
        unclear = [x for x in inputs.cameras if x in taken or plain_name(x) != x]
        if unclear:
            raise ValueError(
                f"The cameras {unclear} cannot be called by the last parts of their names, which "
                "repeat or clash with another entry; name each with --inputs KEY=CAMERA."
            )
        return inputs
    known = {**inputs.further, **inputs.cameras}
    cameras: dict[str, str] = {}
    state: list[str] = []
    for pair in pairs:
        key, _, target = pair.partition("=")
        camera = known.get(target)
        if camera in cameras.values() or plain_name(key) in [*cameras, *state]:
            raise ValueError(f"'{pair}' repeats a key or a camera of {list(pairs)}.")
        if camera is not None:
            cameras[plain_name(key)] = camera
        elif target == "state":
            state.append(plain_name(key))
        else:
            raise ValueError(
                f"'{pair}' is not KEY=CAMERA or KEY=state; cameras are {sorted(inputs.cameras)}."
            )
    reads = bool(inputs.state)
    return replace(
        inputs,
        cameras=cameras,
        further={},
        optional=frozenset(),
        state=(tuple(state) or ("state",)) if reads else (),
        unread=() if reads else tuple(state),
    )


def _steps(key: str, value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"'{key}' is {kind_of(value)}; expected a whole number of steps.")
    return value
