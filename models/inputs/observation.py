"""Observation of a robot at one moment, as everything that acts takes it, and how callers write it
down: under the robot's own names, those of its clients, a dataset's, or openpi's.

Clients and datasets spell one name in many ways (`observation/image`, `observation.images.front`,
nested maps), so only the last parts of a key count: `observation/front`, `{"images": {"front": …}}`
and `front` are one camera. Every value may have a leading batch axis or none.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int, Num, UInt8

from models.inputs.camera_names import GROUPS, plain_name
from models.inputs.embodiment import Embodiment
from models.inputs.packed_batch import Sample
from models.inputs.processor import Processor

PROMPT = "prompt"
CONTROLS = ("executed", "committed")
"""Steps of the previous chunk that may come beside an observation: executed before it, and to be
executed until the answer."""
_TOKENS, _TOKEN_MASK = "tokenized_prompt", "tokenized_prompt_mask"
_PADDING = "_padding_mask"
"""End of the name of a camera's mask, as LeRobot's policies read it."""
_UNREAD = {
    *("action", "actions", "token_ar_mask", "token_loss_mask"),
    *("timestamp", "frame_index", "episode_index", "index", "task_index"),
}
"""Names that come with an observation in a batch of openpi's or a frame of LeRobot's."""


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


class Observations(NamedTuple):
    """Result of reading a message: one observation for each row, and the sizes of the batch axes
    by name, empty for a single observation without one."""

    rows: list[RobotObservation]
    axes: Mapping[str, int]


@dataclass(frozen=True)
class Inputs:
    """Names under which observations of a robot come.

    `cameras`: {name: the policy's camera}; the policy's other cameras are masked, and so are those
    of `optional` names that do not come. `further`: other names for cameras. `state`: names for the
    parts of the state, which are concatenated; empty if the policy reads none. `state_dims`: dims
    of all parts together. `unread`: names that may come and are not read. `prompts`: names for the
    prompt. `default`: stands for an empty or absent prompt; if it is "", neither is accepted, and
    if it is None, an empty prompt is read as it is. `vocabulary`: rows of the model's embedding; 0
    for a model without language, which needs no prompt.
    """

    cameras: Mapping[str, str]
    state: tuple[str, ...]
    state_dims: int
    optional: frozenset[str] = frozenset()
    unread: tuple[str, ...] = ()
    prompts: tuple[str, ...] = (PROMPT, "task")
    default: str | None = None
    vocabulary: int = 1
    further: Mapping[str, str] = field(default_factory=dict)

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
        spoken = self.vocabulary and not self.default
        words = {"dtype": "str"} | ({} if spoken else {"optional": True})
        return {**images, **state, PROMPT: words}

    def read(
        self, message: Mapping[str, Any], rows: Mapping[str, int] | None = None
    ) -> Observations:
        """The observations in a message: pictures uint8, or floats from 0 to 1, [(b,) h, w, 3] or
        [(b,) 3, h, w]; optionally "image_mask" {camera: bool or [b]}, or CAMERA_padding_mask for
        one; the state's numbers [(b,) n]; and a prompt, as text (or one for each row) or as
        "tokenized_prompt" [(b,) t] (with "tokenized_prompt_mask", else zeros at its end are
        padding).

        Args:
          rows: batch sizes, by name, of what else has a batch axis.

        Raises:
          ValueError: something is absent, unknown, given twice, or of another dtype or shape.
        """
        message = dict(message)
        masks = message.pop("image_mask", {})
        if not isinstance(masks, Mapping):
            raise ValueError(f"image_mask is {kind_of(masks)}; expected a map by camera.")
        masks, given = self._flat(masks), self._flat(message)
        for name in [name for name in given if name.endswith(_PADDING)]:
            masks[name.removesuffix(_PADDING)] = given.pop(name)
        names = {**self.further, **self.cameras}
        # in one piece, though it may come in parts
        whole = bool(self.state) and "state" in given and "state" not in self.state
        state = ("state",) if whole else self.state
        words = [name for name in (*self.prompts, _TOKENS) if name in given]
        self._check_names(given, masks, names, state, words)
        images: dict[str, np.ndarray] = {}
        for name in filter(given.__contains__, names):
            if names[name] in images:
                raise ValueError(f"The observation has camera '{names[name]}' twice.")
            images[names[name]] = _picture(name, given[name])
        shown = {names[name]: np.asarray(mask, bool) for name, mask in masks.items()}
        shown = {camera: mask for camera, mask in shown.items() if camera in images}
        for camera, mask in shown.items():
            if mask.shape not in ((), images[camera].shape[:-3]):
                raise ValueError(
                    f"image_mask '{camera}' has shape {list(mask.shape)}, which does not fit its "
                    f"image {list(images[camera].shape)}."
                )
        felt = self._state({name: given[name] for name in state if name in given})
        prompt = self._prompt(words, given)
        axes = {f"image {camera}": len(x) for camera, x in images.items() if x.ndim == 4}
        axes |= {"state": len(felt)} if felt is not None and felt.ndim == 2 else {}
        axes |= {"the prompt": len(prompt)} if isinstance(prompt, list) else {}
        axes |= rows or {}
        if len(set(axes.values())) > 1:
            raise ValueError(f"The observation's batch sizes differ: {axes}.")

        def row(i: int) -> RobotObservation:
            on = {camera: bool(mask[i] if mask.ndim else mask) for camera, mask in shown.items()}
            return RobotObservation(
                {c: x[i] if x.ndim == 4 else x for c, x in images.items() if on.get(c, True)},
                prompt[i] if isinstance(prompt, list) else prompt,
                felt[i] if felt is not None and felt.ndim == 2 else felt,
            )

        return Observations([row(i) for i in range(next(iter(axes.values()), 1))], axes)

    def _flat(self, message: Mapping[str, Any], before: str = "") -> dict[str, Any]:
        """Values by name: a whole name of a camera, or else the plain one."""
        flat: dict[str, Any] = {}
        for key, value in message.items():
            path = f"{before}{key}"
            nested = isinstance(value, Mapping) and (value or key in GROUPS)
            inner = self._flat(value, f"{path}/") if nested else {self._name(path): value}
            twice = sorted(flat.keys() & inner.keys())
            if twice:
                raise ValueError(f"The observation has '{twice[0]!s:.80}' twice.")
            flat |= inner
        return flat

    def _name(self, path: str) -> str:
        parts = path.split("/")
        while len(parts) > 1 and parts[0] in GROUPS:
            parts = parts[1:]
        whole = "/".join(parts)
        return whole if whole in self.further else plain_name(whole)

    def _check_names(
        self,
        given: Mapping[str, Any],
        masks: Mapping[str, Any],
        names: Mapping[str, str],
        state: tuple[str, ...],
        words: Sequence[str],
    ) -> None:
        shown = {names[name] for name in given if name in names}
        missing = [
            name
            for name, camera in self.cameras.items()
            if camera not in shown and name not in self.optional
        ]
        missing += [name for name in state if name not in given and _TOKENS not in given]
        missing += [PROMPT] if self.vocabulary and not (words or self.default) else []
        known = {*names, *state, *self.prompts, _TOKENS, _TOKEN_MASK, *self.unread, *_UNREAD}
        unknown = [name for name in given if name not in known]
        unknown += [name for name in masks if name not in names]
        if missing or unknown:
            wrong = [f"lacks {missing}"] if missing else []
            wrong += [f"has unknown entries {unknown!s:.200}"] if unknown else []
            raise ValueError(
                f"The observation {' and '.join(wrong)}; expected the entries "
                f"{sorted(self.expected)}."
            )
        if len(words) > 1:
            raise ValueError(f"The observation has the prompt twice, as {list(words)}; give one.")

    def _state(self, parts: Mapping[str, Any]) -> Float[np.ndarray, "*b s"] | None:
        if not parts:
            return None
        state = np.concatenate([_numbers(name, value) for name, value in parts.items()], -1)
        if state.shape[-1] != self.state_dims:
            raise ValueError(
                f"The state ({' + '.join(parts)}) has {state.shape[-1]} dims; this policy reads "
                f"{self.state_dims}."
            )
        return state

    def _prompt(self, words: Sequence[str], given: Mapping[str, Any]) -> Any:
        """A prompt for all rows, or a list with one for each: text or token ids."""
        if words == [_TOKENS]:
            return _token_ids(given[_TOKENS], given.get(_TOKEN_MASK), self.vocabulary)
        said = _text(given[words[0]]) if words else ""
        return [self._said(one) for one in said] if isinstance(said, list) else self._said(said)

    def _said(self, prompt: str) -> str:
        if prompt or self.default is None:
            return prompt
        if not self.default:
            raise ValueError(f"The observation's '{PROMPT}' is empty; describe the task in words.")
        return self.default


def inputs_of(robot: Embodiment, reads_state: bool, vocabulary: int = 1) -> Inputs:
    """Inputs under the keys of the clients of a released policy's authors, or else under the
    robot's own names; in any case also under its cameras' whole and plain names and `state`.

    Args:
      reads_state: whether the policy or its action units need the state.
      vocabulary: see `Inputs`.
    """
    plain = {camera: plain_name(camera) for camera in robot.cameras}
    reserved = {"state", *Inputs.prompts, *CONTROLS}
    clear = [n for n in plain.values() if list(plain.values()).count(n) == 1 and n not in reserved]
    named = {name if name in clear else camera: camera for camera, name in plain.items()}
    further = {**named, **{camera: camera for camera in robot.cameras}}
    dims = len(robot.state.offset) if reads_state else 0
    keys = robot.keys
    inputs = Inputs(named, ("state",), dims, vocabulary=vocabulary, further=further)
    if keys is not None:
        inputs = replace(
            inputs,
            cameras={plain_name(key): camera for key, camera in keys.images},
            state=tuple(map(plain_name, keys.state)),
            unread=tuple(map(plain_name, keys.ignored)),
            prompts=tuple(dict.fromkeys((*inputs.prompts, plain_name(keys.prompt)))),
            default=keys.default if vocabulary else None,
        )
    optional = frozenset(name for name, c in inputs.cameras.items() if c in robot.absent)
    inputs = replace(inputs, optional=optional)
    if reads_state:
        return inputs
    return replace(inputs, state=(), unread=("state", *inputs.state, *inputs.unread))


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
        if not isinstance(one.prompt, str | np.ndarray):
            raise ValueError(f"The prompt is {kind_of(one.prompt)}; expected text.")
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


def _picture(name: str, value: Any) -> UInt8[np.ndarray, "*b h w 3"]:
    try:
        picture = np.asarray(value)
    except ValueError:  # rows of several lengths
        picture = np.zeros(0, object)
    if picture.ndim in (3, 4) and picture.shape[-1] != 3 and picture.shape[-3] == 3:
        picture = np.moveaxis(picture, -3, -1)
    told = kind_of(value)
    if picture.dtype.kind == "f" and picture.size:
        low, high = picture.min(), picture.max()
        told += f" from {low:g} to {high:g}"
        if low >= 0 and high <= 1:
            picture = (255 * picture).astype(np.uint8)
    shaped = picture.ndim in (3, 4) and picture.shape[-1] == 3 and 0 not in picture.shape[-3:]
    if picture.dtype != np.uint8 or not shaped:
        raise ValueError(
            f"Image '{name}' is {told}; expected uint8 [height, width, 3] in RGB, or floats from 0 "
            "to 1."
        )
    return picture


def _numbers(name: str, value: Any) -> Float[np.ndarray, "*b n"]:
    try:
        numbers = np.atleast_1d(np.asarray(value))
    except ValueError:  # rows of several lengths
        numbers = np.zeros(0, object)
    if numbers.dtype.kind not in "iuf" or numbers.ndim > 2:
        raise ValueError(f"State '{name}' is {kind_of(value)}; expected numbers [n].")
    with np.errstate(over="ignore"):
        numbers = numbers.astype(np.float32)
    if not np.isfinite(numbers).all():
        raise ValueError(f"State '{name}' holds NaN or infinity.")
    return numbers


def _text(value: Any) -> str | list[str]:
    """The text, or a text for each row."""
    prompt: Any = value
    if isinstance(value, np.ndarray) and value.dtype.kind in "USO":
        prompt = value.tolist()
    several = isinstance(prompt, list | tuple)
    texts = [x.decode() if isinstance(x, bytes) else x for x in (prompt if several else [prompt])]
    if not all(isinstance(x, str) for x in texts):
        raise ValueError(f"The prompt is {kind_of(value)}; expected text.")
    return texts if several else texts[0]


def _token_ids(value: Any, mask: Any, vocabulary: int) -> Any:
    """Token ids [t] for all rows, or a list with those of each."""
    try:
        single = np.ndim(value[0]) == 0
        tokens = [np.asarray(row, np.int32) for row in ([value] if single else value)]
        if mask is None:
            tokens = [np.trim_zeros(row, "b") for row in tokens]
        else:
            valid = [np.asarray(row, bool) for row in ([mask] if single else mask)]
            tokens = [row[keep] for row, keep in zip(tokens, valid, strict=True)]
    except (TypeError, ValueError, IndexError, KeyError, OverflowError):
        raise ValueError(
            f"{_TOKENS} is {kind_of(value)} with mask {kind_of(mask)}; expected token ids [t] or "
            "[b, t] and a mask of that shape, if any."
        ) from None
    for row in tokens:
        wrong = row[(row < 0) | (row >= vocabulary)]
        if wrong.size:
            raise ValueError(
                f"{_TOKENS} holds {wrong[0]}; expected token ids from 0 to {vocabulary - 1}."
            )
    return tokens[0] if single else tokens


def kind_of(value: Any) -> str:
    """A value's dtype and shape, or its type and beginning, for messages."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    return f"{type(value).__name__} {value!r:.40}"
