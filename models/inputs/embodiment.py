"""A robot as a policy knows it: cameras, scales of state and actions, and what actions are measured
from. It is part of a `Processor`, so it is JSON and is stored in the checkpoint.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from models.files.bounds import check_name
from models.inputs.adapters import ADAPTERS, UnitConversion
from models.inputs.parts import InputPart
from models.inputs.raw import RawKeys

Scaling = Literal["quantile", "z-score", "min-max"]
"""Statistics that become a `Normalizer`: the range from the 1st to the 99th percentile, mean and
standard deviation, or the whole range."""

MODEL_UNITS = "model units"
"""Name of a robot whose policy came without statistics."""
_PADDED = 1e-5
"""Numbers up to which a dim is taken for padding: zeros, whose deviation openpi adds 1e-6 to."""
_SMALLEST_SCALE, _LARGEST_SCALE = 1e-12, 1e12
"""A dimension that never changes is scaled by 1e-4 (ours), 5e-7 (openpi) or 5e-9 (LeRobot)."""


@dataclass(frozen=True)
class Normalizer:
    """x ↦ (x − offset) / scale, per dimension; z-scores and quantile ranges are both of this
    form.

    Raises:
      ValueError: an offset is not finite or beyond ±1e12, a scale is not within 1e-12 to 1e12, or
        their numbers differ.
    """

    offset: tuple[float, ...]
    scale: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.scale):
            raise ValueError(
                f"A normalizer has {len(self.offset)} offsets but {len(self.scale)} scales; "
                f"expected one of each for every dimension."
            )
        for d, (offset, scale) in enumerate(zip(self.offset, self.scale, strict=True)):
            if not abs(offset) <= _LARGEST_SCALE:
                raise ValueError(
                    f"offset[{d}] is {offset}; expected a finite number up to "
                    f"±{_LARGEST_SCALE:g}, so compute the statistics again."
                )
            if not _SMALLEST_SCALE <= scale <= _LARGEST_SCALE:
                raise ValueError(
                    f"scale[{d}] is {scale}; expected a number from {_SMALLEST_SCALE:g} to "
                    f"{_LARGEST_SCALE:g}, so compute the statistics again."
                )

    @classmethod
    def identity(cls, dims: int) -> "Normalizer":
        """A normalizer that leaves `dims` dims unchanged."""
        return cls((0.0,) * dims, (1.0,) * dims)

    def cut(self, dims: int) -> "Normalizer":
        """The scales without those beyond `dims` that only pad them, as openpi's files do up to the
        model's width; unchanged if others are beyond."""
        offset, scale = np.asarray(self.offset[dims:]), np.asarray(self.scale[dims:])
        still = (np.abs(offset) < _PADDED) & ((scale < _PADDED) | (np.abs(scale - 1) < _PADDED))
        return Normalizer(self.offset[:dims], self.scale[:dims]) if still.all() else self

    def __call__(self, x: Float[np.ndarray, "*b d"]) -> Float[np.ndarray, "*b d"]:
        return ((x - np.asarray(self.offset)) / np.asarray(self.scale)).astype(np.float32)

    def inverse(self, x: Float[np.ndarray, "*b d"]) -> Float[np.ndarray, "*b d"]:
        return (x * np.asarray(self.scale) + np.asarray(self.offset)).astype(np.float32)


@dataclass(frozen=True)
class RobotUnits(InputPart):
    """A family's own conversion of a robot's numbers to the model's, where no scale of each dim
    expresses it: a dataclass made as `class Mine(RobotUnits, kind="mine")`. `steps`: of a chunk
    that are the robot's; the model's others are neither learned nor acted."""

    steps: int

    @property
    @abstractmethod
    def relative(self) -> bool:
        """True if actions are measured from the state."""

    @abstractmethod
    def read(self, state: Float[np.ndarray, "*b s"]) -> Float[np.ndarray, "*b m"]:
        """The state as the model reads it."""

    @abstractmethod
    def learned(
        self, actions: Float[np.ndarray, "*b h a"], state: Float[np.ndarray, "*b s"]
    ) -> Float[np.ndarray, "*b steps a"]:
        """Chunks of the robot's actions as the model learns them."""

    @abstractmethod
    def acted(
        self, chunk: Float[np.ndarray, "*b h _m"], state: Float[np.ndarray, "*b s"]
    ) -> Float[np.ndarray, "*b _steps a"]:
        """The model's chunks, of all its dims, as the robot acts them."""


@dataclass(frozen=True)
class Embodiment:
    """A robot as a dataset describes it: camera names in the order the model sees them, and its
    scales.

    `relative` gives, for each action dim, the state dim from which the model measures it at the
    time of the observation, or -1 if the action is absolute; if empty, all are. The scales of
    actions are those of the differences. (openpi's DeltaActions is `relative[d]` = d where its mask
    is true.)

    `own`: what converts its numbers in place of all scales, which then only count its dims.
    `absent`: cameras that may be missing. `adapter`: conversion between the robot's units and those
    that are scaled, one of `models.inputs.adapters.ADAPTERS`, or "". `keys`: names that the robot's
    own clients use in an observation.

    Raises:
      ValueError: `relative` does not name a state dim for each action dim, there are no action
        dims, a name is a path, cannot be printed or appears twice, `absent` names no camera, or
        there is no such adapter.
    """

    name: str
    cameras: tuple[str, ...]
    state: Normalizer
    actions: Normalizer
    relative: tuple[int, ...] = ()
    absent: tuple[str, ...] = ()
    adapter: str = ""
    keys: RawKeys | None = None
    own: RobotUnits | None = None

    def __post_init__(self) -> None:
        check_name("An embodiment", self.name, nested=True)
        for camera in self.cameras:
            check_name(f"A camera of embodiment '{self.name}'", camera)
        if len(set(self.cameras)) < len(self.cameras):
            raise ValueError(
                f"Embodiment '{self.name}' has cameras {list(self.cameras)}; name each only once."
            )
        states, dims = len(self.state.offset), len(self.actions.offset)
        if not dims:
            raise ValueError(f"Embodiment '{self.name}' has no action dims; it needs at least one.")
        wrong = [d for d in self.relative if not -1 <= d < states]
        if self.relative and (wrong or len(self.relative) != dims):
            raise ValueError(
                f"Embodiment '{self.name}': relative is {list(self.relative)}; give for each of "
                f"{dims} action dims a state dim below {states}, or -1."
            )

        for camera in self.absent:
            if camera not in self.cameras:
                raise ValueError(
                    f"Embodiment '{self.name}': absent names '{camera}', which is not one of its "
                    f"cameras, {list(self.cameras)}."
                )
        if self.adapter and self.adapter not in ADAPTERS:
            raise ValueError(
                f"Embodiment '{self.name}': adapter is '{self.adapter}'; expected one of "
                f"{list(ADAPTERS)}."
            )
        if self.adapter and (states, dims) != ADAPTERS[self.adapter].dims:
            raise ValueError(
                f"Embodiment '{self.name}' has {states} state and {dims} action dims; the adapter "
                f"'{self.adapter}' is for {ADAPTERS[self.adapter].dims}."
            )

    @classmethod
    def in_model_units(cls, cameras: tuple[str, ...], states: int, actions: int) -> "Embodiment":
        """A robot without scales: its state and actions are numbers as the model has them."""
        units = Normalizer.identity(states), Normalizer.identity(actions)
        return cls(MODEL_UNITS, cameras, *units)

    @property
    def units(self) -> UnitConversion | None:
        """Conversion of the robot's units, if it has one."""
        return ADAPTERS[self.adapter] if self.adapter else None

    @property
    def measured(self) -> bool:
        """True if its actions are measured from its state."""
        return bool(self.relative) if self.own is None else self.own.relative

    def read(self, state: Float[np.ndarray, "*b _s"]) -> Float[np.ndarray, "*b m"]:
        """The robot's state as the model reads it."""
        if self.own is not None:
            return self.own.read(state)
        return self.state(self.converted(state))

    def learned(
        self, actions: Float[np.ndarray, "*b h _a"], state: Float[np.ndarray, "*b _s"]
    ) -> Float[np.ndarray, "*b _steps _a"]:
        """Chunks of the robot's actions as the model learns them."""
        if self.own is not None:
            return self.own.learned(actions, state)
        if self.units is not None:
            actions = self.units.learned(actions)
        return self.actions(actions - self.origin(state) if self.relative else actions)

    def acted(
        self, chunk: Float[np.ndarray, "*b h _a"], state: Float[np.ndarray, "*b _s"] | None
    ) -> Float[np.ndarray, "*b _steps _a"]:
        """The model's chunks as the robot acts them.

        Raises:
          ValueError: they are measured from the state, and none is given.
        """
        if self.measured and state is None:
            raise ValueError(
                f"Embodiment '{self.name}' has actions relative to the robot's state; give the "
                "state of the observation too."
            )
        if self.own is not None:
            return self.own.acted(
                chunk, np.zeros((*chunk.shape[:-2], 0)) if state is None else state
            )
        chunk = self.actions.inverse(chunk)
        if self.relative and state is not None:
            chunk = chunk + self.origin(state)
        return chunk if self.units is None else self.units.acted(chunk)

    def converted(self, state: Any) -> Any:
        """The robot's state [..., s] in the units that are scaled, as an array of the same
        library."""
        return state if self.units is None else self.units.state(state)

    def origin(self, state: Float[np.ndarray, "*b _s"]) -> Float[np.ndarray, "*b 1 _a"]:
        """Origin of a chunk's relative actions for the robot's state, in the units that are scaled;
        0 where absolute."""
        from_state = np.asarray(self.relative)
        state = self.converted(np.asarray(state, np.float64))
        return np.where(from_state >= 0, state[..., from_state], 0)[..., None, :]
