"""Ray-cast pictures of primitive solids in JAX, so that observations never leave the compiled
program: every camera of every environment in one batched call.

    geoms = (Geom("box", (0.02, 0.02, 0.02)), Geom("plane", (0.0, 0.0)))     # or geoms_of(model)
    frames = Poses.of(poses)                      # poses [n g 7]; with MJX: Poses(geom_xpos,
                                                  # geom_xmat), or cam_xpos, cam_xmat for a camera
    cameras = (Camera((0, -0.4, 0.6), (0, 0, 0), 32.0),
               Camera((0, 0.1, 0.1), (0, 0, 0), 60.0, on=0))
    seen = views(cameras, frames)                 # [n c]; a camera `on` a body moves with it
    look = Look(colours)                          # [g 3], or [n g 3] where environments differ
    images = pictures(geoms, frames, seen, look, size=48, samples=2, shadows=True)  # [n c h w 3]
    labels = segmentation(geoms, frames, seen, size=128)                            # [n c h w]

`frames`, `seen` and each field of `look` may lack the leading n, and are then the same in all
environments; n comes from the arguments that have it (1 if none has). To place a camera differently
in each environment, give `Views(look_at(positions, targets), fovy)` [n c]. Call under `jax.jit`,
with the geoms, size, samples and shadows static.

The distance along a ray and the face that it meets are one integer, so that the nearest of all
faces is a plain minimum in one fused loop. With separate results, XLA computed every box again for
each of them; for the same reason, light and colours are separate loops. Geoms are transformed into
the camera's frame, not rays into the geoms' frames, so that rays are constants of the program
wherever the cameras are. Several rays per pixel are averaged, so that the position of an edge shows
to less than a pixel.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int16, UInt8

from sim.rendering.cameras import Camera, Poses, Views, einsum, look_at, unit, views
from sim.rendering.solids import Geom, Rays, enter, geoms_of, normal

__all__ = [
    "Camera",
    "Geom",
    "Look",
    "Poses",
    "Views",
    "depths",
    "geoms_of",
    "look_at",
    "pictures",
    "segmentation",
    "views",
]

_LIGHT = np.array((-0.35, -0.5, 0.79), np.float32)
_CLEAR = 1e-4
"""Metres by which a point may lie within a neighbouring solid, from rounding, and still be shaded
by it."""


class Look(NamedTuple):
    """Colours 0 to 1, and one distant light. A face perpendicular to the light shows its full
    colour; a face in shadow shows the fraction `ambient` of it."""

    colours: Float[Array | np.ndarray, "*n g 3"]
    light: Float[Array | np.ndarray, "*n 3"] = _LIGHT
    """Direction towards the light, of any length except 0."""
    ambient: Float[Array | np.ndarray, "*n"] = np.array(0.45, np.float32)
    sky: Float[Array | np.ndarray, "*n 3"] = np.array((0.62, 0.72, 0.82), np.float32)
    """Colour where there is no geom."""


def pictures(
    geoms: Sequence[Geom],
    frames: Poses,
    views: Views,
    look: Look,
    size: int | tuple[int, int],
    samples: int = 2,
    shadows: bool = False,
) -> UInt8[Array, "n c h w 3"]:
    """Shaded pictures of `size` (height, width) pixels from samples² rays per pixel. `shadows`
    sends one more ray to the light from each point where a ray meets a face. Planes cast no
    shadows, as they lie below everything else.

    Raises:
      ValueError: there is not one frame, or not one colour, for each geom.
    """
    faces = _Faces.of(geoms)
    scenes, paints, cameras = _arranged(faces, size, frames, views, look)
    x, y = _grid(size, samples)
    nearest = _each(partial(_nearest, faces, x, y), scenes)
    if shadows or any(geom.curved for geom in geoms):
        direct = _each(partial(_direct, faces, x, y, shadows), nearest, scenes, paints.sun)
        colours = _each(partial(_shaded, faces), nearest, paints.dark, paints.light, direct)
    else:
        colours = _each(partial(_shaded, faces), nearest, paints.dark + paints.light)
    return colours.reshape(-1, cameras, *_shape(size), 3)


def segmentation(
    geoms: Sequence[Geom], frames: Poses, views: Views, size: int | tuple[int, int]
) -> Int16[Array, "n c h w"]:
    """Index of the first geom that the ray through each pixel's centre meets, -1 if none."""
    owners = [number for number, geom in enumerate(geoms) for _ in range(geom.faces)]
    table = jnp.array([*owners, -1], jnp.int16)
    faces = _Faces.of(geoms)
    nearest = _keys(faces, size, frames, views)
    return table[nearest & faces.mask]


def depths(
    geoms: Sequence[Geom], frames: Poses, views: Views, size: int | tuple[int, int]
) -> Float[Array, "n c h w"]:
    """Metres along the camera's axis to the first geom that the ray through each pixel's centre
    meets, infinite if none. Relative accuracy is 1e-5 with fewer than 64 faces, twice that with
    fewer than 128, and so on."""
    faces = _Faces.of(geoms)
    return faces.distance(_keys(faces, size, frames, views))


@dataclass(frozen=True)
class _Faces:
    """Consecutive numbers for the faces of all geoms; the last number is the sky's."""

    geoms: tuple[Geom, ...]
    firsts: tuple[int, ...]
    sky: int

    @classmethod
    def of(cls, geoms: Sequence[Geom]) -> "_Faces":
        *firsts, sky = np.cumsum([0, *(geom.faces for geom in geoms)]).tolist()
        return cls(tuple(geoms), tuple(firsts), sky)

    @property
    def mask(self) -> int:
        """The lowest bits of a distance, which hold the face's number."""
        return (1 << self.sky.bit_length()) - 1

    def key(self, distance: Any, face: Int[Array, "*r"] | int) -> Int[Array, "*r"]:
        """Distance and face as one integer, which is ordered like the distance, since positive
        floats are ordered like their bits."""
        return jax.lax.bitcast_convert_type(distance, jnp.int32) & ~self.mask | face

    def distance(self, key: Int[Array, "*r"]) -> Float[Array, "*r"]:
        return jax.lax.bitcast_convert_type(key & ~self.mask, jnp.float32)


class _Scene(NamedTuple):
    """One camera's position and rays in each geom's frame and units."""

    start: Float[Array, "g 3"]
    turn: Float[Array, "g 3 3"]
    """Maps a picture's (x, y, 1), with x and y within -1 … 1, to its ray, scaled so that distances
    are along the camera's axis."""

    def rays(self, geom: int, x: Any, y: Any) -> Rays:
        a, b, c = self.turn[geom].T
        return tuple(a[i] * x + b[i] * y + c[i] for i in range(3))


class _Paint(NamedTuple):
    """Colours 0 to 255 of all faces and the sky."""

    dark: Float[Array, "f 3"]
    """Colours in shadow."""
    light: Float[Array, "f 3"]
    """Colour added by light: for flat faces, wherever the light falls on them; for curved ones,
    where it falls perpendicularly."""
    sun: Float[Array, "g 3"]
    """Direction to the light in each geom's frame."""


def _scene(faces: _Faces, aspect: float, frames: Poses, camera: Poses, fovy: Any) -> _Scene:
    scale = np.array([geom.scale for geom in faces.geoms], np.float32)
    slope = jnp.tan(jnp.radians(fovy) / 2)
    lens = camera.rotation * jnp.stack((aspect * slope, slope, -jnp.ones_like(slope)))
    start = einsum("gji,gj->gi", frames.rotation, camera.position - frames.position)
    turn = einsum("gji,jk->gik", frames.rotation, lens)
    return _Scene(start / scale, turn / scale[:, :, None])


def _paint(faces: _Faces, frames: Poses, look: Look) -> _Paint:
    sun = einsum("gji,j->gi", frames.rotation, unit(look.light))
    squarely: list[Any] = []
    for geom, (x, y, z) in zip(faces.geoms, sun, strict=True):
        ends = {"box": (x, -x, y, -y, z, -z), "plane": (z,), "cylinder": (1 + 0 * z, z, -z)}
        squarely += ends.get(geom.kind, (1 + 0 * z,))
    counts = np.array([geom.faces for geom in faces.geoms])
    colours = 255 * jnp.repeat(look.colours, counts, axis=0, total_repeat_length=faces.sky)
    dark = jnp.concatenate((look.ambient * colours, 255 * look.sky[None]))
    light = (1 - look.ambient) * colours * jnp.maximum(jnp.stack(squarely), 0)[:, None]
    return _Paint(dark, jnp.concatenate((light, jnp.zeros((1, 3)))), sun)


def _nearest(faces: _Faces, x: Any, y: Any, scene: _Scene) -> Int[Array, "*r"]:
    """The key of the first face that each ray meets."""
    nearest = jnp.full(x.shape, faces.key(jnp.float32(jnp.inf), faces.sky))
    for number, (geom, first) in enumerate(zip(faces.geoms, faces.firsts, strict=True)):
        distance, face, sure = enter(geom, scene.start[number], scene.rays(number, x, y))
        nearer = jnp.minimum(nearest, faces.key(distance, first + face))
        nearest = jnp.where(sure & (distance > 0), nearer, nearest)
    return nearest


def _direct(
    faces: _Faces, x: Any, y: Any, shadows: bool, nearest: Any, scene: _Scene, sun: Any
) -> Float[Array, "*r"]:
    """Share of the light on the point that each ray meets; for flat faces, all or nothing."""
    distance, face = faces.distance(nearest), nearest & faces.mask
    direct = jnp.ones(face.shape)
    shaded = jnp.zeros(face.shape, bool)
    for number, (geom, first) in enumerate(zip(faces.geoms, faces.firsts, strict=True)):
        rays = scene.rays(number, x, y)
        at = tuple(scene.start[number][i] + distance * rays[i] for i in range(3))
        if geom.curved:
            towards = sum(n * s for n, s in zip(normal(geom, at), sun[number], strict=True))
            direct = jnp.where(face == first, jnp.maximum(towards, 0), direct)
        if shadows and geom.kind != "plane":
            entered, _, sure = enter(geom, at, sun[number] / np.array(geom.scale, np.float32))
            shaded |= sure & (entered > -_CLEAR)
    return jnp.where(shaded, 0, direct)


def _shaded(
    faces: _Faces,
    nearest: Int[Array, "r p"],
    dark: Float[Array, "f 3"],
    light: Float[Array, "f 3"] | None = None,
    direct: Float[Array, "r p"] | None = None,
) -> UInt8[Array, "p 3"]:
    """Mean over a pixel's rays of the faces' colours and the colour added by direct light. A face's
    three channels are looked up as one integer, 10 bits each."""
    face = nearest & faces.mask
    shifts = np.array((0, 10, 20), np.int32)

    def look_up(colours: Float[Array, "f 3"]) -> list[Float[Array, "r p"]]:
        levels = jnp.round(4 * jnp.clip(colours, 0, 255)).astype(jnp.int32)
        packed = (levels << shifts).sum(-1)[face]
        return [((packed >> shift) & 1023).astype(jnp.float32) for shift in shifts]

    channels = look_up(dark)
    if light is not None and direct is not None:
        channels = [d + a * direct for d, a in zip(channels, look_up(light), strict=True)]
    means = [jnp.round(channel.mean(0) / 4).astype(jnp.uint8) for channel in channels]
    return jnp.stack(means, -1)


def _arranged(
    faces: _Faces, size: int | tuple[int, int], frames: Poses, views: Views, look: Look
) -> tuple[_Scene, _Paint, int]:
    """Scenes and paints of each camera of each environment, all cameras of one environment before
    those of the next, and the number of cameras per environment."""
    count = len(faces.geoms)
    for what, got in (("frames", frames.position.shape[-2]), ("colours", look.colours.shape[-2])):
        if got != count:
            raise ValueError(f"{got} {what} for {count} geoms, expected one for each.")
    leaves, tree = jax.tree.flatten((frames, views, look))
    ranks = (2, 3, 2, 3, 1, 2, 1, 0, 1)  # number of the leaves' own axes, in order
    leads = [jnp.shape(x)[: jnp.ndim(x) - rank] for x, rank in zip(leaves, ranks, strict=True)]
    (n,) = np.broadcast_shapes((1,), *leads)
    whole = [
        jnp.broadcast_to(x, (n, *jnp.shape(x)[len(lead) :]))
        for x, lead in zip(leaves, leads, strict=True)
    ]
    frames, views, look = jax.tree.unflatten(tree, whole)
    height, width = _shape(size)
    scene = partial(_scene, faces, width / height)
    scenes = jax.vmap(jax.vmap(scene, (None, 0, 0)))(frames, views.frames, views.fovy)
    paints = jax.vmap(partial(_paint, faces))(frames, look)
    c = views.fovy.shape[1]
    scenes = jax.tree.map(lambda x: x.reshape(n * c, *x.shape[2:]), scenes)
    return scenes, jax.tree.map(lambda x: jnp.repeat(x, c, axis=0), paints), c


def _keys(
    faces: _Faces, size: int | tuple[int, int], frames: Poses, views: Views
) -> Int[Array, "n c h w"]:
    """The key of the first face seen through each pixel's centre."""
    look = Look(np.zeros((len(faces.geoms), 3), np.float32))
    scenes, _, cameras = _arranged(faces, size, frames, views, look)
    keys = _each(partial(_nearest, faces, *_grid(size, 1)), scenes)
    return keys.reshape(-1, cameras, *_shape(size))


def _each(function: Callable[..., Array], *frames: Any) -> Array:
    """Maps over the frames: on a CPU one after the other, which keeps its loops long and their
    operands in the cache, elsewhere all at once. Consumers do not compute the result again."""
    if jax.default_backend() == "cpu":
        return jax.lax.map(lambda frame: function(*frame), frames)
    return jax.lax.optimization_barrier(jax.vmap(function)(*frames))


def _grid(size: int | tuple[int, int], samples: int) -> tuple[Array, Array]:
    """x to the right and y up, -1 to 1, of samples² rays for each pixel, row by row from the top
    left, [samples², pixels]."""
    across, up = (
        ((np.arange(n * samples) + 0.5) / (n * samples) * 2 - 1) for n in reversed(_shape(size))
    )
    height, width = _shape(size)
    both = np.stack(np.meshgrid(across, -up)).astype(np.float32)
    both = both.reshape(2, height, samples, width, samples).transpose(0, 2, 4, 1, 3)
    x, y = both.reshape(2, samples**2, height * width)
    return jnp.asarray(x), jnp.asarray(y)


def _shape(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size
