"""Where rays meet primitive solids, in frames in which each solid is as simple as it can be: a cube
and a cylinder of half edges one, a ball of radius one, a capsule of radius one.

All are convex, so that a ray is inside from `near` to `far`, and misses where near >= far (the slab
method, Kay & Kajiya 1986, and quadratics). Sizes are MuJoCo's.
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
    """A solid in its own frame, sizes in metres as MuJoCo has them.

    `size` of a plane is its half edges (0 is endless; its normal is z, seen from above only), of a
    box its half edges, of a sphere its radius, of an ellipsoid its radii, of a cylinder and of a
    capsule the radius and half the length along z without the capsule's ends.

    Raises:
      ValueError: no such kind, or its sizes are too few, too many or not positive.
    """

    kind: Kind
    size: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.kind not in _NUMBERS:
            raise ValueError(
                f"Geom kind '{self.kind}' cannot be cast, expected one of {list(get_args(Kind))}."
            )
        least = 0.0 if self.kind == "plane" else 1e-9
        if len(self.size) != _NUMBERS[self.kind] or min(self.size) < least:
            raise ValueError(
                f"Geom size {self.size} of a {self.kind}, expected {_NUMBERS[self.kind]} positive "
                "numbers in metres."
            )

    @property
    def scale(self) -> tuple[float, float, float]:
        """Metres that are one unit of each axis of the frame in which rays meet it."""
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
        """How many faces are told apart: a box's and a plane's, a cylinder's side and two ends."""
        return {"box": 6, "cylinder": 3}.get(self.kind, 1)

    @property
    def curved(self) -> bool:
        """Whether face 0 is lit differently from point to point."""
        return self.kind not in ("plane", "box")


def geoms_of(model: mujoco.MjModel, ids: tuple[int, ...] | None = None) -> tuple[Geom, ...]:
    """The model's geoms, or those of some ids in that order, as `Geom`s.

    Raises:
      ValueError: one of them is a mesh, a height field or another that has no closed form.
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


class Span(NamedTuple):
    """A ray is inside a solid between the two multiples of its direction; `face` is entered."""

    near: Float[Array, "*r"]
    far: Float[Array, "*r"]
    face: Int[Array, "*r"] | int


def span(geom: Geom, start: Any, towards: Any) -> Span:
    """Where rays from `start` along `towards`, both in units of `geom.scale` in the geom's frame,
    run within it. Either may be numbers that all rays share. Faces: 2·axis is a box's upper end of
    the axis, 2·axis + 1 the lower; 0 a cylinder's side, 1 and 2 its upper and lower end."""
    return _SPANS[geom.kind](geom, start, towards)


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


def _plane(geom: Geom, start: Any, towards: Any) -> Span:
    near = -start[2] / jnp.minimum(towards[2], -1e-9)
    hit: Bool[Array, "*r"] = towards[2] < 0
    for axis, half in enumerate(geom.size):
        if half:
            hit &= jnp.abs(start[axis] + near * towards[axis]) <= half
    return Span(near, jnp.where(hit, jnp.inf, -jnp.inf), 0)


def _box(geom: Geom, start: Any, towards: Any) -> Span:
    near: Any = -jnp.inf
    far: Any = jnp.inf
    face: Any = 0
    for axis in range(3):
        inverse = 1 / _nonzero(towards[axis])
        middle, reach = -start[axis] * inverse, jnp.abs(inverse)
        face = jnp.where(middle - reach > near, 2 * axis + (towards[axis] > 0), face)
        near, far = jnp.maximum(near, middle - reach), jnp.minimum(far, middle + reach)
    return Span(near, far, face)


def _ball(geom: Geom, start: Any, towards: Any) -> Span:
    return Span(*_roots(start, towards), 0)


def _cylinder(geom: Geom, start: Any, towards: Any) -> Span:
    near, far = _roots(start[:2], towards[:2])
    inverse = 1 / _nonzero(towards[2])
    middle, reach = -start[2] * inverse, jnp.abs(inverse)
    face = jnp.where(middle - reach > near, 1 + (towards[2] > 0), 0)
    return Span(jnp.maximum(near, middle - reach), jnp.minimum(far, middle + reach), face)


def _capsule(geom: Geom, start: Any, towards: Any) -> Span:
    """The side's roots where they lie between the ends, else those of the end's ball; a ray that
    misses the endless side misses all."""
    half = geom.size[1] / geom.size[0]
    sides = _roots(start[:2], towards[:2])

    def root(which: int) -> Float[Array, "*r"]:
        side = sides[which]
        z = start[2] + side * towards[2]
        end = _roots((*start[:2], start[2] - jnp.where(z > 0, half, -half)), towards)[which]
        return jnp.where((jnp.abs(z) < half) | (sides[0] >= sides[1]), side, end)

    return Span(root(0), root(1), 0)


def _roots(start: Any, towards: Any) -> tuple[Float[Array, "*r"], Float[Array, "*r"]]:
    """Where |start + t·towards| = 1; (inf, -inf) if nowhere."""
    square = sum(d * d for d in towards)
    inverse = 1 / jnp.maximum(square, 1e-9)
    middle = -sum(p * d for p, d in zip(start, towards, strict=True)) * inverse
    # The closest point's distance, not the discriminant, which would cancel for a far small ball.
    closest = sum((p + middle * d) ** 2 for p, d in zip(start, towards, strict=True))
    reach = jnp.sqrt(jnp.maximum(1 - closest, 0) * inverse)
    hit = closest < 1
    return jnp.where(hit, middle - reach, jnp.inf), jnp.where(hit, middle + reach, -jnp.inf)


def _nonzero(value: Float[Array, "*r"]) -> Float[Array, "*r"]:
    return jnp.where(jnp.abs(value) < 1e-9, 1e-9, value)


_SPANS: dict[str, Callable[[Geom, Any, Any], Span]] = {
    "plane": _plane,
    "box": _box,
    "sphere": _ball,
    "ellipsoid": _ball,
    "cylinder": _cylinder,
    "capsule": _capsule,
}
