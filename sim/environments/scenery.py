"""Scenes that the tabletop's cameras see, and the bounds of their variation between episodes.

All randomness derives from the episode's seed and number, so a scene holds only those and the poses
of its bodies. Domain randomisation follows Tobin et al. (2017): colours, light, cameras and objects
that are irrelevant to the task.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8, UInt32

from sim.environments.bodies import Bodies
from sim.environments.grouped import episode_key
from sim.rendering.raycast import Camera, Geom, Look, Poses, Views, look_at, pictures

FRONT = Camera((0.0, -0.42, 0.62), (0.0, 0.06, 0.02), 32.0)
WRIST = Camera((0.0, -0.09, 0.02), (0.0, 0.01, -0.06), 60.0, on=0)
"""Camera that is mounted on the palm."""
CAMERAS = {"observation.images.front": FRONT, "observation.images.wrist": WRIST}
MOST_DISTRACTORS = 3

_LIGHT, _AMBIENT = np.array((-0.35, -0.5, 0.79), np.float32), 0.45
_PALM, _FINGER, _TABLE = (0.30, 0.30, 0.33), (0.16, 0.16, 0.18), (0.80, 0.77, 0.72)
_CABINET, _HANDLE, _INSIDE = (0.55, 0.42, 0.30), (0.25, 0.25, 0.27), (0.20, 0.16, 0.13)
_COLOURED = ((0.90, 0.16, 0.12), (0.12, 0.72, 0.20), (0.13, 0.28, 0.95))
_DISTRACTORS = ((0.85, 0.75, 0.10), (0.55, 0.20, 0.65), (0.10, 0.65, 0.70))
_STRIPE, _STRIPES, _PITCH = (1.0, 0.025, 0.0005), 8, 0.1
"""Half edges of a stripe on the table, the number of stripes, and metres from one to the next."""


@dataclass(frozen=True)
class Randomisation:
    """Variation between episodes besides the task itself; none by default.

    Raises:
      ValueError: a number is out of its range.
    """

    distractors: int = 0
    """Blocks of other colours on the table, at most three."""
    colours: float = 0.0
    """Largest change of each channel of every colour (0 to 1); at most 0.3, as larger changes would
    make a prompt's colours ambiguous."""
    camera: float = 0.0
    """Largest displacement of a camera per axis, metres; a quarter of that for the wrist's camera;
    at most 0.1."""
    light: float = 0.0
    """Largest deviation of the light (1 is 45°) and of the shadows' darkness; at most 0.5."""
    shadows: bool = False
    """True if bodies cast shadows."""
    texture: float = 0.0
    """Largest change of each channel (0 to 1) of the table's colour, and of the colour of stripes
    on it at any angle; at most 0.4. At 0 there are no stripes."""

    def __post_init__(self) -> None:
        ranges = {"distractors": MOST_DISTRACTORS, "colours": 0.3, "camera": 0.1, "light": 0.5}
        ranges["texture"] = 0.4
        for name, most in ranges.items():
            if not 0 <= getattr(self, name) <= most:
                raise ValueError(
                    f"Randomisation.{name} is {getattr(self, name)}, expected 0 … {most}."
                )


VARIED = Randomisation(distractors=2, colours=0.1, camera=0.02, light=0.3, shadows=True)
"""Randomisation of the suite `tabletop_varied`."""


@dataclass(frozen=True)
class Change:
    """A change for judging policies: a description, and the fields of a `Randomisation` that it
    sets."""

    about: str
    sets: Mapping[str, Any]

    def of(self, random: Randomisation) -> Randomisation:
        """The variation with the change."""
        return replace(random, **self.sets)


CHANGES = {
    "camera": Change(
        "each camera about 5 cm (up to 9) from its place and turned by about 3° (up to 9); a "
        "quarter as far on the wrist",
        {"camera": 0.05},
    ),
    "light": Change(
        "light turned by about 22° (up to 55), darker or lighter shade, and bodies cast shadows",
        {"light": 0.5, "shadows": True},
    ),
    "texture": Change(
        "a table of another colour, with stripes of a further one", {"texture": 0.25}
    ),
    "distractors": Change(
        "three smaller blocks of colours that no prompt names", {"distractors": MOST_DISTRACTORS}
    ),
}
"""Changes of the tabletop that leave the goals and the task's own bodies unchanged."""


class Scene(NamedTuple):
    """Everything that pictures show."""

    poses: Float[Array, "*n b 7"]
    """Order: see `sim.environments.bodies.Bodies`."""
    seed: UInt32[Array, "*n"]
    episode: Int[Array, "*n"]


def draw(
    scene: Scene,
    bodies: Bodies,
    cameras: tuple[str, ...],
    random: Randomisation,
    size: int,
    samples: int,
) -> UInt8[Array, "n c size size 3"]:
    """Pictures of N scenes from the named cameras, with samples² rays per pixel; to trace."""
    stripes = _STRIPES if random.texture else 0
    boxes = [*bodies.sizes.tolist(), *[_STRIPE] * stripes]
    geoms = (*(Geom("box", tuple(size)) for size in boxes), Geom("plane", (0, 0)))
    keys = jax.vmap(episode_key)(scene.seed, scene.episode)
    frames = Poses.of(scene.poses)
    if stripes:
        frames = frames.join(Poses.of(jax.vmap(_stripes)(keys)))
    frames = frames.join(Poses.of(np.array([(0, 0, 0, 1.0, 0, 0, 0)])))
    seen = jax.vmap(lambda key, palm: _views(key, palm, cameras, random.camera))(
        keys, scene.poses[:, 0, :3]
    )
    look = jax.vmap(lambda key: _look(key, _colours(bodies), random))(keys)
    return pictures(geoms, frames, seen, look, size, samples, random.shadows)


def _views(key: Array, palm: Float[Array, "3"], cameras: tuple[str, ...], jitter: float) -> Views:
    seen = [CAMERAS[name] for name in cameras]
    moving = np.array([camera.on is not None for camera in seen])[:, None]
    position = np.array([camera.position for camera in seen], np.float32) + moving * palm
    target = np.array([camera.target for camera in seen], np.float32) + moving * palm
    if jitter:
        reach = jitter * np.where(moving, 0.25, 1.0)
        draws = 2 * jax.random.uniform(jax.random.fold_in(key, 2), (2, len(CAMERAS), 3)) - 1
        draws = draws[:, np.array([list(CAMERAS).index(name) for name in cameras])]
        position, target = position + reach * draws[0], target + reach * draws[1] / 2
    return Views(look_at(position, target), np.array([c.fovy for c in seen], np.float32))


def _look(key: Array, colours: Float[np.ndarray, "g 3"], random: Randomisation) -> Look:
    def draws(number: int, *shape: int) -> Float[Array, "..."]:
        return 2 * jax.random.uniform(jax.random.fold_in(key, number), shape) - 1

    light, ambient = jnp.asarray(_LIGHT), jnp.float32(_AMBIENT)
    painted = jnp.asarray(colours)
    if random.light:
        light = light + random.light * draws(3, 3)
        light = light / jnp.linalg.norm(light)
        ambient = ambient + random.light / 2 * draws(4)
    if random.colours:
        changes = draws(5, len(colours) + MOST_DISTRACTORS, 3)
        painted = jnp.clip(
            painted + random.colours * changes[np.array(_rows(len(colours), random))], 0, 1
        )
    if random.texture:
        stripe, table = jnp.clip(painted[-1] + random.texture * draws(7, 2, 3), 0, 1)
        stripes = jnp.broadcast_to(stripe, (_STRIPES, 3))
        painted = jnp.concatenate((painted[:-1], stripes, table[None]))
    return Look(painted, light, ambient)


def _rows(colours: int, random: Randomisation) -> list[int]:
    """Rows of the draws that change `colours` colours. The last colour, the table's, has the same
    row whatever lies on the table."""
    table = colours - 1 - random.distractors + VARIED.distractors
    others = [row for row in range(colours + MOST_DISTRACTORS) if row != table]
    return [*others[: colours - 1], table]


def _stripes(key: Array) -> Float[Array, "s 7"]:
    """Poses of the table's stripes: side by side, all rotated by the same angle."""
    angle = jnp.pi * jax.random.uniform(jax.random.fold_in(key, 6))
    apart = _PITCH * (jnp.arange(_STRIPES) - (_STRIPES - 1) / 2)
    zero = jnp.zeros(_STRIPES)
    turn = (zero + jnp.cos(angle / 2), zero, zero, zero + jnp.sin(angle / 2))
    return jnp.stack((-apart * jnp.sin(angle), apart * jnp.cos(angle), zero, *turn), 1)


def _colours(bodies: Bodies) -> Float[np.ndarray, "g 3"]:
    """Colours of the boxes and, last, the table."""
    drawn = (_CABINET, *_COLOURED, *[_HANDLE] * 3, *[_INSIDE] * 3) if bodies.drawers else _COLOURED
    others = _DISTRACTORS[: bodies.distractors]
    return np.array((_PALM, _FINGER, _FINGER, *drawn, *others, _TABLE), np.float32)
