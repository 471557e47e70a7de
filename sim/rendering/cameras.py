"""Poses of geoms and cameras: frames, cameras that stand still or move with a body, and poses of
cameras that differ between environments. `sim.rendering.raycast` shows how they are used."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

einsum = partial(jnp.einsum, precision="highest")
"""Matrix products of poses at full precision; GPUs would round them to 10 bits."""


class Poses(NamedTuple):
    """Poses of objects: origins in metres, and matrices whose columns are the axes."""

    position: Float[Array | np.ndarray, "*n g 3"]
    rotation: Float[Array | np.ndarray, "*n g 3 3"]

    @classmethod
    def of(cls, poses: Float[Array | np.ndarray, "*n g 7"]) -> "Poses":
        """Frames from positions and quaternions (w, x, y, z) of any length except 0."""
        poses = jnp.asarray(poses)
        return cls(poses[..., :3], _rotation(poses[..., 3:]))

    def join(self, other: "Poses") -> "Poses":
        """These poses followed by `other`, for as many environments; poses without n are shared by
        all environments."""
        n = np.broadcast_shapes(self.position.shape[:-2], other.position.shape[:-2])

        def both(rank: int, *parts: Any) -> Array:
            whole = [jnp.broadcast_to(x, (*n, *x.shape[-rank:])) for x in parts]
            return jnp.concatenate(whole, -rank)

        return Poses(both(2, self.position, other.position), both(3, self.rotation, other.rotation))


class Views(NamedTuple):
    """Cameras, which look along their -z axis, with x to the right and y up; `fovy` in degrees."""

    frames: Poses
    fovy: Float[Array | np.ndarray, "*n c"]


@dataclass(frozen=True)
class Camera:
    """A pinhole camera; `fovy` is the vertical field of view in degrees.

    Position, target and up are in the world frame, or in the frame of body `on` of those given to
    `views`.

    Raises:
      ValueError: it looks along `up`.
    """

    position: tuple[float, float, float]
    target: tuple[float, float, float]
    fovy: float
    on: int | None = None
    up: tuple[float, float, float] = (0.0, 0.0, 1.0)
    """Direction that is up in the picture."""

    def __post_init__(self) -> None:
        if np.linalg.norm(np.cross(np.subtract(self.target, self.position), self.up)) < 1e-6:
            raise ValueError(
                f"A camera at {self.position} looks at {self.target}, along its up {self.up}; "
                "choose another `up`, such as (0, 1, 0)."
            )


def look_at(
    position: Float[Array | np.ndarray, "*#n 3"],
    target: Float[Array | np.ndarray, "*#n 3"],
    up: tuple[float, float, float] = (0.0, 0.0, 1.0),
) -> Poses:
    """Frames of cameras at positions that look at targets; no direction of view may lie along
    `up`."""
    position = jnp.asarray(position, jnp.float32)
    back = unit(position - jnp.asarray(target, jnp.float32))
    right = unit(jnp.cross(jnp.asarray(up, jnp.float32), back))
    axes = jnp.stack((right, jnp.cross(back, right), back), -1)
    return Poses(jnp.broadcast_to(position, back.shape), axes)


def views(cameras: Sequence[Camera], bodies: Poses | None = None) -> Views:
    """Poses of the cameras, [c] if none is on a body, else [*n c] with the bodies' [*n b].

    Raises:
      ValueError: a camera is on a body that is not given.
    """
    parts = []
    for camera in cameras:
        frame = look_at(np.array(camera.position, float), np.array(camera.target, float), camera.up)
        if camera.on is not None:
            count = 0 if bodies is None else bodies.position.shape[-2]
            if bodies is None or not 0 <= camera.on < count:
                raise ValueError(
                    f"A camera is on body {camera.on}, but `views` was given {count} bodies; "
                    "expected one of these."
                )
            turn = bodies.rotation[..., camera.on, :, :]
            place = bodies.position[..., camera.on, :]
            frame = Poses(
                place + einsum("...ij,j->...i", turn, frame.position),
                einsum("...ij,jk->...ik", turn, frame.rotation),
            )
        parts.append(Poses(frame.position[..., None, :], frame.rotation[..., None, :, :]))
    frames = parts[0]
    for part in parts[1:]:
        frames = frames.join(part)
    return Views(frames, np.array([camera.fovy for camera in cameras], np.float32))


def unit(vector: Float[Array | np.ndarray, "*n 3"]) -> Float[Array, "*n 3"]:
    """Scales to length 1."""
    vector = jnp.asarray(vector, jnp.float32)
    return vector / jnp.linalg.norm(vector, axis=-1, keepdims=True)


def _rotation(quaternion: Float[Array, "*n 4"]) -> Float[Array, "*n 3 3"]:
    """The matrix whose columns are the axes."""
    w, x, y, z = jnp.moveaxis(
        quaternion / jnp.linalg.norm(quaternion, axis=-1, keepdims=True), -1, 0
    )
    rows = (
        (1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)),
        (2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)),
        (2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)),
    )
    return jnp.stack([jnp.stack(row, -1) for row in rows], -2)
