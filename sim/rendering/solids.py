"""Intersections of rays with primitive solids, in frames in which each solid is as simple as
possible: a cube and a cylinder of half edges one, a ball of radius one, a capsule of radius one.

All solids are convex, so a ray enters each at one point at most: slabs (Kay & Kajiya 1986) and
quadratics. Sizes are MuJoCo's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import jax.numpy as jnp
import mujoco
from jaxtyping import Array, Bool, Float, Int

Kind = Literal["plane", "box", "sphere", "ellipsoid", "cylinder", "capsule"]
Rays = tuple[Any, Any, Any]
"""Three coordinates of points or directions in a solid's own frame."""

_NUMBERS = {"plane": 2, "box": 3, "sphere": 1, "ellipsoid": 3, "cylinder": 2, "capsule": 2}


@dataclass(frozen=True)
class Geom:
    """A solid in its own frame, with sizes in metres as in MuJoCo.

    `size` of a plane is its half edges (0 is infinite; its normal is z, and it is visible only from
    above), of a box its half edges, of a sphere its radius, of an ellipsoid its radii, and of a
    cylinder or capsule the radius and half the length along z, without the capsule's ends.

    Raises:
      ValueError: there is no such kind, or its sizes are too few, too many or not positive.
    """

    kind: Kind
    size: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.kind not in _NUMBERS:
            raise ValueError(
                f"Geom kind '{self.kind}' cannot be rendered; expected one of "
                f"{list(get_args(Kind))}."
            )
        least = 0.0 if self.kind == "plane" else 1e-9
        if len(self.size) != _NUMBERS[self.kind] or min(self.size) < least:
            raise ValueError(
                f"Geom size is {self.size} for a {self.kind}; expected {_NUMBERS[self.kind]} "
                f"positive numbers in metres."
            )

    @property
    def scale(self) -> tuple[float, float, float]:
        """Metres per unit along each axis of the frame in which rays are intersected."""
        match self.kind:
            case "plane":
                return 1.0, 1.0, 1.0
            case "box" | "ellipsoid":
                return self.size[0], self.size[1], self.size[2]
            case "cylinder":
                return self.size[0], self.size[0], self.size[1]
        return (self.size[0],) * 3

    @property
    def faces(self) -> int:
        """Number of distinct faces: six of a box, the side and two ends of a cylinder, one of any
        other kind."""
        return {"box": 6, "cylinder": 3}.get(self.kind, 1)

    @property
    def curved(self) -> bool:
        """True if face 0 is lit differently from point to point."""
        return self.kind not in ("plane", "box")


def geoms_of(model: mujoco.MjModel, ids: tuple[int, ...] | None = None) -> tuple[Geom, ...]:
    """The model's geoms, or those with the given ids in that order, as `Geom`s.

    Raises:
      ValueError: a geom is a mesh, a height field or another kind without a closed form.
    """
    found = []
    for number in range(model.ngeom) if ids is None else ids:
        kind = mujoco.mjtGeom(model.geom_type[number]).name.removeprefix("mjGEOM_").lower()
        if kind not in _NUMBERS:
            raise ValueError(
                f"Geom {number} '{model.geom(number).name}' is a {kind}, expected one of "
                f"{list(_NUMBERS)}; leave it out or fit primitives to it."
            )
        found.append(Geom(kind, tuple(map(float, model.geom_size[number][: _NUMBERS[kind]]))))
    return tuple(found)


class Hit(NamedTuple):
    """Entry of a ray into a solid, in multiples of its direction, negative if behind its start."""

    distance: Float[Array, "*r"]
    face: Int[Array, "*r"] | int
    sure: Bool[Array, "*r"]
    """True where the ray enters; elsewhere the other fields are meaningless."""


def enter(geom: Geom, start: Any, towards: Any) -> Hit:
    """Entries of rays from `start` along `towards`, both in units of `geom.scale` in the geom's
    frame. Either may be numbers shared by all rays. Faces: 2·axis is a box's upper end of the axis,
    2·axis + 1 the lower; 0 a cylinder's side, 1 and 2 its upper and lower end."""
    return _ENTER[geom.kind](geom, start, towards)


def normal(geom: Geom, at: Rays) -> tuple[Any, Any, Any]:
    """Outward unit normals of the curved face at points in units of `geom.scale`."""
    x, y, z = at
    match geom.kind:
        case "cylinder":
            return x, y, 0.0
        case "capsule":
            half = geom.size[1] / geom.size[0]
            return x, y, z - jnp.clip(z, -half, half)
        case "ellipsoid":
            x, y, z = (value / radius for value, radius in zip(at, geom.size, strict=True))
            inverse = 1 / jnp.sqrt(x * x + y * y + z * z)
            return x * inverse, y * inverse, z * inverse
    return x, y, z


def _plane(geom: Geom, start: Any, towards: Any) -> Hit:
    distance = -start[2] / jnp.minimum(towards[2], -1e-9)
    sure = towards[2] < 0
    for axis, half in enumerate(geom.size):
        if half:
            sure &= jnp.abs(start[axis] + distance * towards[axis]) <= half
    return Hit(distance, 0, sure)


def _box(geom: Geom, start: Any, towards: Any) -> Hit:
    near: Any = -jnp.inf
    far: Any = jnp.inf
    face: Any = 0
    for axis in range(3):
        first, last = _slab(start[axis], towards[axis])
        face = jnp.where(first > near, 2 * axis + (towards[axis] > 0), face)
        near, far = jnp.maximum(near, first), jnp.minimum(far, last)
    return Hit(near, face, near < far)


def _ball(geom: Geom, start: Any, towards: Any) -> Hit:
    near, _, sure = _roots(start, towards)
    return Hit(near, 0, sure)


def _cylinder(geom: Geom, start: Any, towards: Any) -> Hit:
    near, far, sure = _roots(start[:2], towards[:2])
    first, last = _slab(start[2], towards[2])
    face = jnp.where(first > near, 1 + (towards[2] > 0), 0)
    near = jnp.maximum(near, first)
    return Hit(near, face, sure & (near < jnp.minimum(far, last)))


def _capsule(geom: Geom, start: Any, towards: Any) -> Hit:
    """Entry into the infinite side if that point is between the ends, else into the nearer end's
    ball; a ray that misses the side misses the whole capsule."""
    half = geom.size[1] / geom.size[0]
    side, _, sure = _roots(start[:2], towards[:2])
    z = start[2] + side * towards[2]
    between = jnp.abs(z) < half
    end, _, capped = _roots((*start[:2], start[2] - jnp.where(z > 0, half, -half)), towards)
    return Hit(jnp.where(between, side, end), 0, sure & (between | capped))


def _slab(start: Any, towards: Any) -> tuple[Float[Array, "*r"], Float[Array, "*r"]]:
    """Interval of t in which -1 <= start + t·towards <= 1."""
    inverse = 1 / jnp.where(jnp.abs(towards) < 1e-9, 1e-9, towards)
    middle, reach = -start * inverse, jnp.abs(inverse)
    return middle - reach, middle + reach


def _roots(
    start: Any, towards: Any
) -> tuple[Float[Array, "*r"], Float[Array, "*r"], Bool[Array, "*r"]]:
    """Solutions t of |start + t·towards| = 1, and whether there are any."""
    inverse = 1 / jnp.maximum(sum(d * d for d in towards), 1e-9)
    middle = -sum(p * d for p, d in zip(start, towards, strict=True)) * inverse
    # The closest point's distance; the discriminant would cancel for a small, distant ball.
    beyond = 1 - sum((p + middle * d) ** 2 for p, d in zip(start, towards, strict=True))
    reach = jnp.sqrt(jnp.maximum(beyond, 0) * inverse)
    return middle - reach, middle + reach, beyond > 0


_ENTER: dict[str, Callable[[Geom, Any, Any], Hit]] = {
    "plane": _plane,
    "box": _box,
    "sphere": _ball,
    "ellipsoid": _ball,
    "cylinder": _cylinder,
    "capsule": _capsule,
}
