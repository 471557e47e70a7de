"""State and actions as GR00T-N1.7 has them: part by part, clipped to ±1, relative actions scaled by
statistics of each step of a chunk, and relative poses of end effectors.

A pose is a translation and a rotation, as the first two rows of its matrix (arXiv 1812.07035) or as
a rotation vector. A relative one is that pose seen from the state's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float

from models.inputs.embodiment import RobotUnits

Rows = tuple[tuple[float, ...], ...]
Pose = Literal["", "rot6d", "rotvec"]


@dataclass(frozen=True)
class UnitPart:
    """Some dims of the state or of an action. `scale`: how its numbers become the model's: `low` to
    `high` ("range") to −1 to 1, by mean `low` and deviation `high` ("z-score"), or as sines and
    cosines; statistics are one row, or one for each step of a chunk. `origin`: first dim of the
    state from which it is measured, -1 if it is absolute. `pose`: what it is, if it is one."""

    name: str
    low: Rows
    high: Rows
    scale: Literal["range", "z-score", "sines"] = "range"
    origin: int = -1
    pose: Pose = ""

    @property
    def dims(self) -> int:
        """Dims in the robot's units."""
        return len(self.low[0])

    def scaled(self, x: Float[np.ndarray, "*b d"], near: bool) -> Float[np.ndarray, "*b m"]:
        """Numbers in the model's units; `near`: ranges of almost nothing count as nothing."""
        if self.scale == "sines":
            return np.concatenate([np.sin(x), np.cos(x)], axis=-1)
        low, high = np.asarray(self.low), np.asarray(self.high)
        if len(low) == 1:
            low, high = low[0], high[0]
        if self.scale == "z-score":
            return np.where(high != 0, (x - low) / np.where(high != 0, high, 1), x)
        moves = ~np.isclose(high, low) if near else high != low
        return np.where(moves, 2 * (x - low) / np.where(moves, high - low, 1) - 1, 0)

    def unscaled(self, x: Float[np.ndarray, "*b h d"]) -> Float[np.ndarray, "*b h d"]:
        """Numbers in the robot's units."""
        low, high = np.asarray(self.low), np.asarray(self.high)
        if self.scale == "z-score":
            return np.where(high != 0, x * high + low, x)
        return (np.clip(x, -1, 1) + 1) / 2 * (high - low) + low


@dataclass(frozen=True)
class GrootUnits(RobotUnits, kind="groot17_units"):
    """`clip`: states and learnt actions stay within ±1. `near`: see `UnitPart.scaled` (NVIDIA's;
    LeRobot compares exactly). `gripper`: the last dim of actions, 0 to 1, acts from 1 to −1, by
    its sign or as it is (LeRobot's for LIBERO). `dims`: of actions that the robot takes, the first
    ones.

    Raises:
      ValueError: a part is measured from dims that the state does not have, a relative pose has
        not as many dims as its kind, or an action has sines.
    """

    states: tuple[UnitPart, ...]
    actions: tuple[UnitPart, ...]
    dims: int
    clip: bool = True
    near: bool = True
    gripper: Literal["", "sign", "linear"] = ""

    def __post_init__(self) -> None:
        total = sum(part.dims for part in self.states)
        for part in self.actions:
            wanted = {"": part.dims, "rot6d": 9, "rotvec": 6}[part.pose]
            wrong = part.origin >= 0 and part.origin + part.dims > total
            if wrong or part.dims != wanted or part.scale == "sines":
                raise ValueError(
                    f"The action's part '{part.name}' has {part.dims} dims from {part.origin} of "
                    f"{total} state dims, pose '{part.pose}' and scale '{part.scale}', which do "
                    "not fit together."
                )

    @property
    def relative(self) -> bool:
        return any(part.origin >= 0 for part in self.actions)

    def read(self, state: Float[np.ndarray, "*b s"]) -> Float[np.ndarray, "*b m"]:
        found = []
        for part, x in _parts(self.states, state):
            scaled = part.scaled(x, self.near)
            found.append(scaled.clip(-1, 1) if self.clip and part.scale == "range" else scaled)
        return np.concatenate(found, axis=-1).astype(np.float32)

    def learned(
        self, actions: Float[np.ndarray, "*b h a"], state: Float[np.ndarray, "*b s"]
    ) -> Float[np.ndarray, "*b _steps a"]:
        found = []
        for part, x in _parts(self.actions, np.asarray(actions[..., : self.steps, :], float)):
            if part.origin >= 0:
                x = _seen_from(x, _reference(part, state), part.pose)
            scaled = part.scaled(x, self.near)
            found.append(scaled.clip(-1, 1) if self.clip else scaled)
        return np.concatenate(found, axis=-1)

    def acted(
        self, chunk: Float[np.ndarray, "*b h _m"], state: Float[np.ndarray, "*b s"]
    ) -> Float[np.ndarray, "*b _steps a"]:
        found = []
        for part, x in _parts(self.actions, np.asarray(chunk[..., : self.steps, :], float)):
            x = part.unscaled(x)
            found.append(x if part.origin < 0 else _put_at(x, _reference(part, state), part.pose))
        whole = np.concatenate(found, axis=-1)[..., : self.dims]
        if self.gripper:
            turned = 1 - 2 * whole[..., -1:]
            last = np.sign(turned) if self.gripper == "sign" else turned
            whole = np.concatenate([whole[..., :-1], last], axis=-1)
        return whole


def _parts(
    parts: Sequence[UnitPart], numbers: Float[np.ndarray, "*b d"]
) -> list[tuple[UnitPart, Float[np.ndarray, "*b _d"]]]:
    """Each part with its dims of `numbers`, as far as they go."""
    *cuts, end = np.cumsum([part.dims for part in parts]).tolist()
    split = np.split(numbers[..., :end], cuts, axis=-1)
    return [(part, x) for part, x in zip(parts, split, strict=True) if x.shape[-1] == part.dims]


def _reference(part: UnitPart, state: Float[np.ndarray, "*b s"]) -> Float[np.ndarray, "*b 1 d"]:
    at = np.asarray(state, float)[..., part.origin : part.origin + part.dims]
    return at[..., None, :]


def _seen_from(
    x: Float[np.ndarray, "*b h d"], reference: Float[np.ndarray, "*b 1 d"], pose: Pose
) -> Float[np.ndarray, "*b h d"]:
    """Actions measured from the state; poses in the frame of the state's."""
    if not pose:
        return x - reference
    back = np.swapaxes(_matrix(reference[..., 3:], pose), -1, -2)
    moved = (back @ (x - reference)[..., :3, None])[..., 0]
    return _pose(moved, back @ _matrix(x[..., 3:], pose), pose)


def _put_at(
    x: Float[np.ndarray, "*b h d"], reference: Float[np.ndarray, "*b 1 d"], pose: Pose
) -> Float[np.ndarray, "*b h d"]:
    """The inverse of `_seen_from`."""
    if not pose:
        return x + reference
    frame = _matrix(reference[..., 3:], pose)
    moved = (frame @ x[..., :3, None])[..., 0] + reference[..., :3]
    return _pose(moved, frame @ _matrix(x[..., 3:], pose), pose)


def _pose(
    moved: Float[np.ndarray, "*b 3"], matrix: Float[np.ndarray, "*b 3 3"], pose: Pose
) -> Float[np.ndarray, "*b d"]:
    if pose == "rot6d":
        turn = matrix[..., :2, :].reshape(*matrix.shape[:-2], 6)
    else:
        from scipy.spatial.transform import Rotation

        turn = Rotation.from_matrix(matrix.reshape(-1, 3, 3)).as_rotvec().reshape(moved.shape)
    return np.concatenate([moved, turn], axis=-1)


def _matrix(turn: Float[np.ndarray, "*b n"], pose: Pose) -> Float[np.ndarray, "*b 3 3"]:
    """Rotation matrix: by Gram-Schmidt from its first two rows, or from a rotation
    vector."""
    if pose == "rot6d":
        first = turn[..., :3] / np.linalg.norm(turn[..., :3], axis=-1, keepdims=True)
        second = turn[..., 3:] - (first * turn[..., 3:]).sum(-1, keepdims=True) * first
        second = second / np.linalg.norm(second, axis=-1, keepdims=True)
        return np.stack([first, second, np.cross(first, second)], axis=-2)
    from scipy.spatial.transform import Rotation  # only robots with such poses load it

    flat = Rotation.from_rotvec(turn.reshape(-1, 3)).as_matrix()
    return flat.reshape(*turn.shape[:-1], 3, 3)
