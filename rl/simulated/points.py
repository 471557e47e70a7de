"""A task that costs next to nothing to simulate and can be learnt: a point goes to the disc that
the prompt names, and only the picture shows where that is.

It is for trying a run whose environments only wait (`rl.simulated.synthetic`): episodes have a
success and real lengths, and observations and actions have the sizes that a policy expects.
"""

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, UInt8

from sim.protocol import Observation, Spec

GOALS = ("red", "green", "blue")
_COLOURS = np.array([[230, 60, 60], [60, 200, 80], [70, 90, 235], [40, 40, 40]], np.uint8)
_RADIUS = 0.2
_SEEN = 1.4
"""Half width of the picture's view, in both directions."""


class Point(NamedTuple):
    """An episode at a moment."""

    seed: int
    goal: int
    discs: Float[np.ndarray, "3 2"]
    """Their centres, 120° apart on the unit circle."""
    place: Float[np.ndarray, "2"]
    steps: int


@dataclass(frozen=True)
class Points:
    """The task, with its cameras, states and actions.

    `speed` is the largest distance of one step; the discs are at distance 1. All cameras show the
    same picture. Only the first two dimensions of states and actions are used.
    """

    cameras: tuple[str, ...] = ("observation.images.top",)
    picture: int = 32
    """Edge of the pictures, pixels."""
    state_dims: int = 2
    action_dims: int = 2
    speed: float = 0.15
    max_steps: int = 24

    @property
    def spec(self) -> Spec:
        """Spec with the one task "reach"."""
        return Spec(
            name="points",
            tasks=("reach",),
            cameras=self.cameras,
            picture=(self.picture, self.picture),
            state_names=_named("state", ("x", "y"), self.state_dims),
            action_names=_named("action", ("dx", "dy"), self.action_dims),
            fps=10,
            max_steps=self.max_steps,
            goals=GOALS,
            prompts=tuple((f"go to the {goal} disc", f"reach {goal}") for goal in GOALS),
            expert=True,
        )

    def begin(self, seed: int) -> Point:
        """An episode's beginning, in the middle."""
        goal, turned = np.random.default_rng([7, seed]).random(2)
        angle = (turned + np.arange(3) / 3) * 2 * np.pi
        discs = np.stack([np.cos(angle), np.sin(angle)], -1).astype(np.float32)
        return Point(seed, int(goal * len(GOALS)), discs, np.zeros(2, np.float32), 0)

    def act(self, point: Point, action: Float[np.ndarray, " a"]) -> Point:
        """One step; actions are clipped to -1 … 1."""
        place = point.place + self.speed * action[:2].clip(-1, 1)
        return point._replace(place=place.astype(np.float32), steps=point.steps + 1)

    def expert(self, point: Point) -> Float[np.ndarray, " a"]:
        """Full speed towards the goal."""
        offset = point.discs[point.goal] - point.place
        action = np.zeros(self.action_dims, np.float32)
        action[:2] = offset / max(float(np.linalg.norm(offset)), self.speed)
        return action

    def reached(self, point: Point) -> np.ndarray:
        """True for the discs that the point is on, [3] bool."""
        return np.hypot(*(point.discs - point.place).T) < _RADIUS

    def observe(self, point: Point) -> Observation:
        """Pictures [c h w 3] and the state [s]."""
        state = np.zeros(self.state_dims, np.float32)
        state[:2] = point.place
        image = self.draw(point, self.picture)
        return Observation(np.broadcast_to(image, (len(self.cameras), *image.shape)), state)

    def draw(self, point: Point, size: int) -> UInt8[np.ndarray, "h w 3"]:
        """Picture of the discs, with the point on top."""
        image = _scene(point.discs.tobytes(), size).copy()
        _paint(image, point.place, _RADIUS / 2, _COLOURS[-1])
        return image


@lru_cache(256)
def _scene(discs: bytes, size: int) -> UInt8[np.ndarray, "h w 3"]:
    """Picture of the discs alone, which do not move."""
    image = np.full((size, size, 3), 245, np.uint8)
    for centre, colour in zip(
        np.frombuffer(discs, np.float32).reshape(3, 2), _COLOURS[:3], strict=True
    ):
        _paint(image, centre, _RADIUS, colour)
    return image


def _paint(
    image: UInt8[np.ndarray, "n n 3"],
    centre: Float[np.ndarray, "2"],
    radius: float,
    colour: UInt8[np.ndarray, "3"],
) -> None:
    x, y = (_axis(len(image))[:, None] - centre).T ** 2
    image[y[:, None] + x < radius**2] = colour


@cache
def _axis(size: int) -> Float[np.ndarray, " n"]:
    return (((np.arange(size) + 0.5) / size * 2 - 1) * _SEEN).astype(np.float32)


def _named(what: str, first: tuple[str, ...], count: int) -> tuple[str, ...]:
    if count < len(first):
        raise ValueError(f"{what}_dims is {count}, expected at least {len(first)}: {first}.")
    return (*first, *(f"{what}_{i}" for i in range(len(first), count)))
