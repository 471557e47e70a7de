"""Conversion of the message that a client sends in one request, under its own names, into the
observation that `Policy` takes.

openpi's clients use different names (`observation/image`, `images/cam_high`, nested maps), so only
the last parts of a key count: `observation/front`, `observation.images.front`, `image/front` and
`front` are one camera.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from models.inputs.camera_names import plain_name
from models.inputs.embodiment import Embodiment
from models.inputs.observation import RobotObservation

_PROMPT, _PROMPT_LENGTH = "prompt", 2000
_SIDE = 8192
"""Largest edge in pixels; a picture with one row of millions costs more to shrink than any
camera's."""
CONTROLS = ("executed", "committed")
"""Steps of the previous chunk: executed before this observation, and to be executed until the
answer."""


class ClientMessage(NamedTuple):
    """A client's message, read: its observation, and those of `CONTROLS` that it has."""

    observation: RobotObservation
    executed: int | None
    committed: int | None


@dataclass(frozen=True)
class Inputs:
    """Inputs that a client sends. `cameras`: {the client's name: the policy's camera}; the policy's
    other cameras are masked, and so are cameras of `optional` names that are not sent. `state`: the
    client's names for the parts of the state, which are concatenated; empty if the policy reads no
    state. `state_dims`: dims of all parts together. `unread`: names that may be sent and are not
    read. `prompts`: names for the prompt, one of which is sent. `default`: stands for an empty or
    absent prompt; if it is "", neither is accepted, and if it is None, an empty prompt is read as
    it is."""

    cameras: Mapping[str, str]
    state: tuple[str, ...]
    state_dims: int
    optional: frozenset[str] = frozenset()
    unread: tuple[str, ...] = ()
    prompts: tuple[str, ...] = (_PROMPT,)
    default: str | None = None

    @property
    def expected(self) -> dict[str, dict[str, Any]]:
        """Dtype and shape by key, for error messages and metadata."""
        images = {
            f"observation/{name}": {"dtype": "uint8", "shape": ["height", "width", 3]}
            | ({"optional": True} if name in self.optional else {})
            for name in self.cameras
        }
        shape = [self.state_dims] if len(self.state) == 1 else ["n"]
        state = {f"observation/{name}": {"dtype": "float32", "shape": shape} for name in self.state}
        words = {"dtype": "str"} | ({"optional": True} if self.default else {})
        return {**images, **state, _PROMPT: words}

    def read(self, message: Mapping[str, Any]) -> ClientMessage:
        """The message's observation, its pictures by the policy's cameras and its state float32
        [s], or None if the policy reads none.

        Raises:
          ValueError: something is absent, unknown, given twice, or of another dtype or shape.
        """
        given = _flat(message)
        words = [name for name in self.prompts if name in given]
        needed = [*self.cameras, *self.state, *([] if words or self.default else [_PROMPT])]
        missing = [key for key in needed if key not in given and key not in self.optional]
        known = {*needed, *self.prompts, *CONTROLS, *self.unread}
        unknown = [key for key in given if key not in known]
        if missing or unknown:
            wrong = [f"lacks {missing}"] if missing else []
            wrong += [f"has unknown entries {unknown!s:.200}"] if unknown else []
            raise ValueError(
                f"The observation {' and '.join(wrong)}; expected the entries "
                f"{sorted(self.expected)}."
            )
        images = {
            camera: _image(key, given[key]) for key, camera in self.cameras.items() if key in given
        }
        prompt = self._prompt({name: given[name] for name in words})
        state = None
        if self.state:
            state = np.concatenate([_numbers(key, given[key]) for key in self.state])
            if len(state) != self.state_dims:
                raise ValueError(
                    f"The state ({' + '.join(self.state)}) has {len(state)} dims; "
                    f"this policy reads {self.state_dims}."
                )
        controls = (_steps(key, given[key]) if key in given else None for key in CONTROLS)
        return ClientMessage(RobotObservation(images, prompt, state), *controls)

    def _prompt(self, given: Mapping[str, Any]) -> str:
        if len(given) > 1:
            raise ValueError(f"The observation has the prompt twice, as {list(given)}.")
        prompt = _text(next(iter(given.values()), ""))
        if prompt or self.default is None:
            return prompt
        if not self.default:
            raise ValueError(f"The observation's '{_PROMPT}' is empty; describe the task in words.")
        return self.default


def inputs_of(robot: Embodiment, reads_state: bool, pairs: Sequence[str] = ()) -> Inputs:
    """Inputs that a client of this robot sends.

    Args:
      reads_state: whether the policy or its action units need the state.
      pairs: "client's key=camera" or "client's key=state"; without any, the keys of the clients of
        a released policy's authors, or else the robot's own names. Those clients' name for the
        prompt and their default prompt are used in any case. Several keys of the state are
        concatenated in this order; what the policy does not read may be sent.

    Raises:
      ValueError: a pair names no camera of the robot, or two keys mean the same.
    """
    known = {plain_name(camera): camera for camera in robot.cameras}
    dims = len(robot.state.offset) if reads_state else 0
    prompts: tuple[str, ...] = (_PROMPT,)
    default = None if robot.keys is None else robot.keys.default
    if robot.keys is not None:
        prompts = tuple(dict.fromkeys((_PROMPT, plain_name(robot.keys.prompt))))
    if not pairs and robot.keys is not None:
        shown = {plain_name(key): camera for key, camera in robot.keys.images}
        parts, besides = (
            tuple(map(plain_name, keys)) for keys in (robot.keys.state, robot.keys.ignored)
        )
        read = (parts, besides) if reads_state else ((), (*parts, *besides))
        return Inputs(shown, read[0], dims, _optional(shown, robot), read[1], prompts, default)
    if not pairs:
        if len(known) < len(robot.cameras) or known.keys() & {"state", "prompt", *CONTROLS}:
            raise ValueError(
                f"The cameras {list(robot.cameras)} cannot be called by the last parts of their "
                "names, which repeat or clash with another entry; name each with --inputs "
                "KEY=CAMERA."
            )
        return Inputs(known, ("state",) if reads_state else (), dims, _optional(known, robot))
    cameras: dict[str, str] = {}
    state: list[str] = []
    unread: list[str] = []
    for pair in pairs:
        key, _, target = pair.partition("=")
        camera = target if target in robot.cameras else known.get(target)
        if camera in cameras.values() or plain_name(key) in [*cameras, *state]:
            raise ValueError(f"'{pair}' repeats a key or a camera of {list(pairs)}.")
        if camera is not None:
            cameras[plain_name(key)] = camera
        elif target == "state":
            (state if reads_state else unread).append(plain_name(key))
        else:
            raise ValueError(
                f"'{pair}' is not KEY=CAMERA or KEY=state; cameras are {sorted(known)}."
            )
    felt = tuple(state) or (("state",) if reads_state else ())
    return Inputs(cameras, felt, dims, unread=tuple(unread), prompts=prompts, default=default)


def _optional(shown: Mapping[str, str], robot: Embodiment) -> frozenset[str]:
    return frozenset(key for key, camera in shown.items() if camera in robot.absent)


def _flat(message: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in message.items():
        path = f"{prefix}{key}"
        nested = isinstance(value, Mapping) and (value or plain_name(path) not in CONTROLS)
        inner = _flat(value, f"{path}/") if nested else {plain_name(path): value}
        twice = sorted(flat.keys() & inner.keys())
        if twice:
            raise ValueError(f"The observation has '{twice[0]!s:.80}' twice.")
        flat |= inner
    return flat


def _image(key: str, image: Any) -> np.ndarray:
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim != 3:
        raise ValueError(f"Image '{key}' is {_kind(image)}; expected uint8 [height, width, 3].")
    if image.shape[-1] != 3 and image.shape[0] == 3:
        image = image.transpose(1, 2, 0)
    if image.shape[-1] != 3:
        raise ValueError(f"Image '{key}' is {_kind(image)}; expected uint8 [height, width, 3].")
    if max(image.shape) > _SIDE:
        raise ValueError(f"Image '{key}' is {_kind(image)}; sides have at most {_SIDE} pixels.")
    return image


def _numbers(key: str, value: Any) -> np.ndarray:
    scalar = isinstance(value, int | float) and not isinstance(value, bool)
    flat = isinstance(value, list) and all(type(x) in (int, float) for x in value)
    array = isinstance(value, np.ndarray) and value.dtype.kind in "iuf" and value.ndim == 1
    if not (scalar or flat or array):
        raise ValueError(f"State '{key}' is {_kind(value)}; expected numbers [n].")
    with np.errstate(over="ignore"):
        numbers = np.atleast_1d(np.asarray(value, np.float64)).astype(np.float32)
    if not np.isfinite(numbers).all():
        raise ValueError(f"State '{key}' holds NaN or infinity.")
    return numbers


def _text(prompt: Any) -> str:
    if not isinstance(prompt, str):
        raise ValueError(f"The prompt is {_kind(prompt)}; expected text.")
    if len(prompt) > _PROMPT_LENGTH:
        raise ValueError(
            f"The prompt has {len(prompt)} characters; at most {_PROMPT_LENGTH} are allowed."
        )
    return prompt


def _steps(key: str, value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"'{key}' is {_kind(value)}; expected a whole number of steps.")
    return value


def _kind(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    return f"{type(value).__name__} {value!r:.40}"
