"""Pictures of boxes on a table, cast ray by ray in JAX, so that observations never leave the
compiled program.

The boxes are folded in one at a time behind an `optimization_barrier` and frames go through
`lax.map`: left to itself XLA recomputes every box at each use, and a batch falls out of the cache,
which costs a factor of ten on a CPU. Several rays a pixel are averaged, so that an edge's place
shows to less than a pixel.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

TABLE = -1
"""What a ray hits that meets no box; every ray of the camera meets the table."""
_LIGHT = np.array((-0.35, -0.5, 0.79), np.float32)
_AMBIENT = 0.45


@dataclass(frozen=True)
class Camera:
    """A pinhole camera with square pictures; `fovy` in degrees."""

    position: tuple[float, float, float]
    target: tuple[float, float, float]
    fovy: float

    def rays(self, size: int, samples: int = 1) -> Float[np.ndarray, "p r 3"]:
        """Unit directions of samples² rays for each of the size² pixels, row by row from the top
        left, first axis the samples."""
        forward = np.subtract(self.target, self.position)
        forward = forward / np.linalg.norm(forward)
        right = np.cross(forward, (0.0, 0.0, 1.0))
        right /= np.linalg.norm(right)
        up = np.cross(right, forward)
        n = size * samples
        at = ((np.arange(n) + 0.5) / n * 2 - 1) * math.tan(math.radians(self.fovy) / 2)
        rays = forward + at[:, None] * right - at[:, None, None] * up
        rays /= np.linalg.norm(rays, axis=-1, keepdims=True)
        rays = rays.reshape(size, samples, size, samples, 3).transpose(1, 3, 0, 2, 4)
        return rays.reshape(samples**2, size**2, 3).astype(np.float32)


class Hits(NamedTuple):
    """The nearest surface along each ray."""

    distance: Float[Array, "*r"]
    body: Int[Array, "*r"]
    """Index of the box, or `TABLE`."""
    light: Float[Array, "*r"]
    """How brightly the surface is lit, 0 to 1."""


def cast(
    poses: Float[Array, "b 7"],
    sizes: Float[np.ndarray, "b 3"],
    origin: Float[np.ndarray, "3"],
    rays: Float[np.ndarray, "*r 3"],
) -> Hits:
    """Casts rays at boxes with the given centres, quaternions and half edges, on the table z = 0.

    Rays must point downwards.
    """
    hits = Hits(
        jnp.asarray(-origin[2] / rays[..., 2]),
        jnp.full(rays.shape[:-1], TABLE, jnp.int8),
        jnp.full(rays.shape[:-1], _lit(_LIGHT[2])),
    )
    for body, half in enumerate(sizes):
        turn = _rotation(poses[body, 3:])
        start, towards = (origin - poses[body, :3]) @ turn, rays @ turn
        inverse = 1 / jnp.where(jnp.abs(towards) < 1e-9, 1e-9, towards)
        enter = -start * inverse - half * jnp.abs(inverse)
        leave = (half - start * jnp.sign(inverse)) * jnp.abs(inverse)
        near, far = enter.max(-1), leave.min(-1)
        shine = _lit(-jnp.sign(towards) * (_LIGHT @ turn))
        light = jnp.where(
            enter[..., 0] == near,
            shine[..., 0],
            jnp.where(enter[..., 1] == near, shine[..., 1], shine[..., 2]),
        )
        hit = (near < far) & (near > 0) & (near < hits.distance)
        hits = Hits(
            jnp.where(hit, near, hits.distance),
            jnp.where(hit, jnp.int8(body), hits.body),
            jnp.where(hit, light, hits.light),
        )
        hits = jax.lax.optimization_barrier(hits)
    return hits


def picture(
    poses: Float[Array, "b 7"],
    sizes: Float[np.ndarray, "b 3"],
    colours: Float[np.ndarray, "b+1 3"],
    camera: Camera,
    size: int,
    samples: int,
) -> UInt8[Array, "size size 3"]:
    """One shaded picture from samples² rays a pixel; colours (0 to 1) are the boxes' and, last, the
    table's."""
    origin = np.asarray(camera.position, np.float32)
    hits = cast(poses, sizes, origin, camera.rays(size, samples))
    shaded = jnp.asarray(colours, jnp.float32)[hits.body] * hits.light[..., None]
    return jnp.round(255 * shaded.mean(0)).astype(jnp.uint8).reshape(size, size, 3)


def _lit(facing: Float[Array, "..."]) -> Float[Array, "..."]:
    return _AMBIENT + (1 - _AMBIENT) * jnp.maximum(facing, 0)


def _rotation(quaternion: Float[Array, "4"]) -> Float[Array, "3 3"]:
    """The matrix whose columns are the box's axes."""
    w, x, y, z = quaternion / jnp.linalg.norm(quaternion)
    return jnp.array(
        (
            (1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)),
            (2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)),
            (2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)),
        )
    )
