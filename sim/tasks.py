"""What the tabletop robot can be told: reach, lift or push a block of one colour.

A task is where its blocks lie, which goals it has and how they are worded, and when each is
achieved. Blocks lie in bands far enough apart that the gripper can work at one without touching
another.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from sim.physics import COLOURS, Physics, blocks

HOVER = 0.065
"""How far above a block's centre the tip is to come to reach it, metres."""
DIRECTIONS = {"left": -1.0, "right": 1.0}
"""Sign of x, as the camera sees it."""

Start = Float[Array, "3 2"]
"""Where the blocks lay at the episode's start."""


@dataclass(frozen=True)
class Task:
    """A goal is achieved where `achieved(physics, start)` [goals] says so."""

    goals: tuple[str, ...]
    prompts: tuple[tuple[str, ...], ...]
    max_steps: int
    place: Callable[[Float[Array, "7"]], Float[Array, "3 2"]]
    """Where the blocks lie, from draws in [0, 1)."""
    achieved: Callable[[Physics, Start], Bool[Array, "g"]]


def _in_columns(draws: Float[Array, "7"]) -> Float[Array, "3 2"]:
    """Side by side, so that the fingers, which close along x, find room."""
    x = _shuffled((-0.12, 0.0, 0.12), draws[0]) + 0.04 * (draws[1:4] - 0.5)
    return jnp.stack((x, -0.10 + 0.24 * draws[4:]), 1)


def _in_rows(draws: Float[Array, "7"]) -> Float[Array, "3 2"]:
    """One behind another, so that a block can slide along x."""
    y = _shuffled((-0.08, 0.02, 0.12), draws[0]) + 0.03 * (draws[1:4] - 0.5)
    return jnp.stack((-0.07 + 0.14 * draws[4:], y), 1)


def _shuffled(bands: tuple[float, ...], draw: Float[Array, ""]) -> Float[Array, "3"]:
    orders = jnp.array(list(permutations(bands)))
    return orders[jnp.int32(draw * len(orders))]


def _reached(physics: Physics, start: Start) -> Bool[Array, "3"]:
    """The tip has come to rest within 3 cm of the point above the block, not just passed it."""
    above = blocks(physics.position)[:, :3] + jnp.array((0.0, 0.0, HOVER))
    resting = jnp.linalg.norm(physics.velocity[:3]) < 0.15
    return resting & (jnp.linalg.norm(physics.position[:3] - above, axis=-1) < 0.03)


def _lifted(physics: Physics, start: Start) -> Bool[Array, "3"]:
    """The block's centre is above 6 cm."""
    return blocks(physics.position)[:, 2] > 0.06


def _pushed(physics: Physics, start: Start) -> Bool[Array, "6"]:
    """The block went 5 cm in the direction, less than 3 cm sideways, and no other moved 2 cm."""
    moved = blocks(physics.position)[:, :2] - start
    still = jnp.linalg.norm(moved, axis=-1) < 0.02
    alone = still[jnp.array(((1, 2), (0, 2), (0, 1)))].all(1)
    along = moved[:, :1] * jnp.array(tuple(DIRECTIONS.values())) > 0.05
    return (along & (alone & (jnp.abs(moved[:, 1]) < 0.03))[:, None]).ravel()


def _worded(*wordings: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(w.format(colour=c) for w in wordings) for c in COLOURS)


TASKS = {
    "reach": Task(
        goals=COLOURS,
        prompts=_worded(
            "reach the {colour} block",
            "go to the {colour} cube",
            "move over the {colour} block",
            "hover above the {colour} one",
            "point at the {colour} cube",
        ),
        max_steps=16,
        place=_in_columns,
        achieved=_reached,
    ),
    "lift": Task(
        goals=COLOURS,
        prompts=_worded(
            "lift the {colour} block",
            "pick up the {colour} cube",
            "raise the {colour} one",
            "grasp the {colour} block and lift it",
            "take the {colour} cube off the table",
        ),
        max_steps=36,
        place=_in_columns,
        achieved=_lifted,
    ),
    "push": Task(
        goals=tuple(f"{c} {d}" for c in COLOURS for d in DIRECTIONS),
        prompts=tuple(
            tuple(
                w.format(colour=c, direction=d)
                for w in (
                    "push the {colour} block to the {direction}",
                    "move the {colour} cube {direction}",
                    "slide the {colour} block {direction}",
                    "shove the {colour} one to the {direction}",
                )
            )
            for c in COLOURS
            for d in DIRECTIONS
        ),
        max_steps=40,
        place=_in_rows,
        achieved=_pushed,
    ),
}
