"""Pictures of boxes on a table, cast ray by ray in JAX, so that observations never leave the
compiled program.

How far a ray goes and which face it meets are one integer, so that the nearest of all faces is a
plain minimum: one fused loop, where separate results made XLA compute every box again for each.
Several rays a pixel are averaged, so that an edge's place shows to less than a pixel.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

_LIGHT = np.array((-0.35, -0.5, 0.79), np.float32)
_AMBIENT = 0.45
_FACE_BITS = 63


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


def cast(
    poses: Float[Array, "b 7"],
    sizes: Float[np.ndarray, "b 3"],
    origin: Float[np.ndarray, "3"],
    rays: Float[np.ndarray, "*r 3"],
) -> tuple[Float[Array, "*r"], Int[Array, "*r"]]:
    """Distance and face that each ray meets first, at most ten boxes lying on the table z = 0.

    Boxes have the given centres, quaternions and half edges; face 6·b + 2·axis is box b's upper end
    of the axis, the next one its lower end, and 6·(number of boxes) the table. Distances are good
    to 1e-5 of themselves. Rays must point downwards.
    """
    x, y, z = (jnp.asarray(rays[..., axis]) for axis in range(3))
    nearest = _key(-origin[2] / z, 6 * len(sizes))
    for body, half in enumerate(sizes):
        turn = _rotation(poses[body, 3:])
        start = (origin - poses[body, :3]) @ turn
        near, far, face = jnp.float32(0), jnp.float32(jnp.inf), jnp.int32(0)
        for axis in range(3):
            towards = x * turn[0, axis] + y * turn[1, axis] + z * turn[2, axis]
            inverse = 1 / jnp.where(jnp.abs(towards) < 1e-9, 1e-9, towards)
            middle, span = -start[axis] * inverse, half[axis] * jnp.abs(inverse)
            face = jnp.where(middle - span > near, 6 * body + 2 * axis + (towards > 0), face)
            near, far = jnp.maximum(near, middle - span), jnp.minimum(far, middle + span)
        hit = (near < far) & (near > 0)
        nearest = jnp.minimum(nearest, jnp.where(hit, _key(near, face), nearest))
    distance = jax.lax.bitcast_convert_type(nearest & ~_FACE_BITS, jnp.float32)
    return distance, nearest & _FACE_BITS


def pictures(
    poses: Float[Array, "n b 7"],
    sizes: Float[np.ndarray, "b 3"],
    colours: Float[np.ndarray, "b+1 3"],
    camera: Camera,
    size: int,
    samples: int,
) -> UInt8[Array, "n size size 3"]:
    """Shaded pictures from samples² rays a pixel; colours (0 to 1) are the boxes' and, last, the
    table's."""
    origin = np.asarray(camera.position, np.float32)
    rays = camera.rays(size, samples)

    def faces(pose: Float[Array, "b 7"]) -> UInt8[Array, "p r"]:
        return cast(pose, sizes, origin, rays)[1].astype(jnp.uint8)

    def shades(pose: Float[Array, "b 7"]) -> Float[Array, "6b+1 3"]:
        sun = jnp.stack([_LIGHT @ _rotation(quaternion) for quaternion in pose[:, 3:]])
        facing = jnp.append(jnp.stack((sun, -sun), -1), _LIGHT[2])
        light = _AMBIENT + (1 - _AMBIENT) * jnp.maximum(facing, 0)
        return 255 * jnp.repeat(colours, 6, axis=0)[: len(light)] * light[:, None]

    # One frame after another keeps a CPU's loop long and its operands in the cache.
    on_cpu = jax.default_backend() == "cpu"
    seen = jax.lax.map(faces, poses) if on_cpu else jax.vmap(faces)(poses)
    colour = jax.vmap(lambda shade, face: shade[face].mean(0))(jax.vmap(shades)(poses), seen)
    return jnp.round(colour).astype(jnp.uint8).reshape(-1, size, size, 3)


def _key(distance: Float[Array, "..."], face: Int[Array, "..."] | int) -> Int[Array, "..."]:
    """Orders as the distance does, since positive floats order as their bits."""
    return jax.lax.bitcast_convert_type(distance, jnp.int32) & ~_FACE_BITS | face


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
