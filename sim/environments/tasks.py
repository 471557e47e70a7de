"""Tasks of the tabletop robot: reach, lift or push a block of one colour, stack it on another, open
or close a drawer.

A task defines the objects on the table and their positions, its goals and their wordings, and when
each goal is achieved. Blocks lie in bands far enough apart that the gripper can work at one without
touching another, and distractors lie off the paths of all experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import permutations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from sim.environments.bodies import (
    BLOCK,
    COLOURS,
    DRAWER_PITCH,
    DRAWER_TRAVEL,
    Bodies,
    blocks,
    drawers,
)
from sim.environments.physics import Physics

HOVER = 0.065
"""Height of the tip above a block's centre that counts as reaching it, metres."""
DIRECTIONS = {"left": -1.0, "right": 1.0}
"""Sign of x, as the camera sees it."""
PAIRS = tuple(permutations(range(3), 2))
"""Pairs of colours: a block, and the block to stack it on."""

Start = Float[Array, "3 2"]
"""Each colour's start: position of the block, or x and opening of the drawer, metres."""


@dataclass(frozen=True)
class Task:
    """A task of the tabletop; `achieved(physics, start)` [goals] is true for achieved goals."""

    goals: tuple[str, ...]
    prompts: tuple[tuple[str, ...], ...]
    paraphrases: tuple[tuple[str, ...], ...]
    """Wordings of each goal that no recording has, to judge policies by."""
    max_steps: int
    place: Callable[[Float[Array, "7"]], Start]
    """Initial positions, from draws in [0, 1)."""
    aside: Callable[[Start, Float[Array, "3 3"]], Float[Array, "3 3"]]
    """Positions (x, y, yaw) of distractors, at most three, from draws in [0, 1)."""
    achieved: Callable[[Physics, Start], Bool[Array, " g"]]
    bodies: Bodies = field(default_factory=Bodies)


def shuffled(bands: tuple[float, ...], draw: Float[Array, ""]) -> Float[Array, "3"]:
    """The bands in one of their orders, for a draw in [0, 1)."""
    orders = jnp.array(list(permutations(bands)))
    return orders[jnp.int32(draw * len(orders))]


def _in_columns(draws: Float[Array, "7"]) -> Float[Array, "3 2"]:
    """Positions side by side, so that the fingers, which close along x, have room."""
    x = shuffled((-0.12, 0.0, 0.12), draws[0]) + 0.04 * (draws[1:4] - 0.5)
    return jnp.stack((x, -0.10 + 0.24 * draws[4:]), 1)


def _in_rows(draws: Float[Array, "7"]) -> Float[Array, "3 2"]:
    """Positions one behind another, so that a block can slide along x."""
    y = shuffled((-0.08, 0.02, 0.12), draws[0]) + 0.03 * (draws[1:4] - 0.5)
    return jnp.stack((-0.07 + 0.14 * draws[4:], y), 1)


def _drawn(draws: Float[Array, "7"]) -> Start:
    """Drawers in any order, each about half open, so that it can be opened or closed."""
    x = shuffled((-DRAWER_PITCH, 0.0, DRAWER_PITCH), draws[0])
    return jnp.stack((x, 0.03 + 0.04 * draws[1:4]), 1)


def _before_or_behind(start: Start, draws: Float[Array, "3 3"]) -> Float[Array, "3 3"]:
    """Positions in the blocks' columns, at least 7.5 cm from each block."""
    y, room = start[:, 1], 0.075
    low, high = jnp.where(y > 0.02, -0.12, y + room), jnp.where(y > 0.02, y - room, 0.16)
    return _turned(
        start[:, 0] + 0.03 * (draws[:, 0] - 0.5), low + (high - low) * draws[:, 1], draws
    )


def _at_row_ends(start: Start, draws: Float[Array, "3 3"]) -> Float[Array, "3 3"]:
    """Positions left or right of the blocks' rows, farther out than a block is pushed."""
    side = jnp.where(draws[:, 0] < 0.5, -1.0, 1.0)
    return _turned(side * (0.18 + 0.01 * draws[:, 1]), start[:, 1], draws)


def _in_front(start: Start, draws: Float[Array, "3 3"]) -> Float[Array, "3 3"]:
    """Positions in front of the drawers, out of their way."""
    return _turned(start[:, 0] + 0.04 * (draws[:, 0] - 0.5), -0.12 + 0.07 * draws[:, 1], draws)


def _turned(
    x: Float[Array, "3"], y: Float[Array, "3"], draws: Float[Array, "3 3"]
) -> Float[Array, "3 3"]:
    return jnp.stack((x, y, jnp.pi / 2 * draws[:, 2]), 1)


def _reached(physics: Physics, start: Start) -> Bool[Array, "3"]:
    """The tip has come to rest within 3 cm of the point above the block, not just passed it."""
    above = blocks(physics.position)[:, :3] + jnp.array((0.0, 0.0, HOVER))
    resting = jnp.linalg.norm(physics.velocity[:3]) < 0.15
    return resting & (jnp.linalg.norm(physics.position[:3] - above, axis=-1) < 0.03)


def _lifted(physics: Physics, start: Start) -> Bool[Array, "3"]:
    """The block's centre is above 6 cm."""
    return blocks(physics.position)[:, 2] > 0.06


def _pushed(physics: Physics, start: Start) -> Bool[Array, "6"]:
    """The block moved 5 cm in the direction, under 3 cm sideways, and no other block 2 cm."""
    moved = blocks(physics.position)[:, :2] - start
    still = jnp.linalg.norm(moved, axis=-1) < 0.02
    alone = still[jnp.array(((1, 2), (0, 2), (0, 1)))].all(1)
    along = moved[:, :1] * jnp.array(tuple(DIRECTIONS.values())) > 0.05
    return (along & (alone & (jnp.abs(moved[:, 1]) < 0.03))[:, None]).ravel()


def _stacked(physics: Physics, start: Start) -> Bool[Array, "6"]:
    """The block stands on the other block, at rest, and no finger holds it."""
    place = blocks(physics.position)[:, :3]
    upper, lower = (jnp.array(side) for side in zip(*PAIRS, strict=True))
    apart = place[upper] - place[lower]
    above = jnp.linalg.norm(apart[:, :2], axis=-1) < BLOCK
    above &= jnp.abs(apart[:, 2] - 2 * BLOCK) < 0.008
    speed = jnp.linalg.norm(physics.velocity[5:23].reshape(3, 6)[upper, :3], axis=-1)
    left = physics.position[2] > place[upper, 2] + BLOCK
    open_wide = physics.position[3:5].min() > 0.03
    return above & (speed < 0.03) & (left | open_wide)


def _slid(physics: Physics, start: Start) -> Bool[Array, "6"]:
    """The drawer is open by 9 cm of its 10 cm, or by less than 1 cm."""
    out = drawers(physics.position, start)
    return jnp.stack((out > 0.9 * DRAWER_TRAVEL, out < 0.1 * DRAWER_TRAVEL), 1).ravel()


def _filled(goals: Sequence[dict[str, str]], *wordings: str) -> tuple[tuple[str, ...], ...]:
    """The wordings of each goal, with its names filled in."""
    return tuple(tuple(wording.format(**names) for wording in wordings) for names in goals)


_COLOURED = [{"colour": c} for c in COLOURS]
_worded = partial(_filled, _COLOURED)
_directed = partial(_filled, [{**c, "direction": d} for c in _COLOURED for d in DIRECTIONS])
_paired = partial(_filled, [{"upper": COLOURS[a], "lower": COLOURS[b]} for a, b in PAIRS])


def _opened_or_closed(*verbs: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    return tuple(_filled([names], *verb)[0] for names in _COLOURED for verb in verbs)


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
        paraphrases=_worded(
            "approach the {colour} block",
            "bring the gripper over the {colour} cube",
            "stop right above the {colour} block",
        ),
        max_steps=16,
        place=_in_columns,
        aside=_before_or_behind,
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
        paraphrases=_worded(
            "get the {colour} block up in the air",
            "hoist the {colour} cube",
            "hold the {colour} block above the table",
        ),
        max_steps=36,
        place=_in_columns,
        aside=_before_or_behind,
        achieved=_lifted,
    ),
    "push": Task(
        goals=tuple(f"{c} {d}" for c in COLOURS for d in DIRECTIONS),
        prompts=_directed(
            "push the {colour} block to the {direction}",
            "move the {colour} cube {direction}",
            "slide the {colour} block {direction}",
            "shove the {colour} one to the {direction}",
        ),
        paraphrases=_directed(
            "nudge the {colour} block {direction}",
            "shift the {colour} cube over to the {direction}",
            "make the {colour} block go {direction}",
        ),
        max_steps=40,
        place=_in_rows,
        aside=_at_row_ends,
        achieved=_pushed,
    ),
    "stack": Task(
        goals=tuple(f"{COLOURS[a]} on {COLOURS[b]}" for a, b in PAIRS),
        prompts=_paired(
            "stack the {upper} block on the {lower} block",
            "put the {upper} cube on top of the {lower} one",
            "place the {upper} block on the {lower} cube",
            "set the {upper} one down on the {lower} block",
        ),
        paraphrases=_paired(
            "build a tower with the {upper} block on the {lower} block",
            "pile the {upper} cube onto the {lower} cube",
            "let the {upper} block rest on the {lower} one",
        ),
        max_steps=64,
        place=_in_columns,
        aside=_before_or_behind,
        achieved=_stacked,
        bodies=Bodies(stacking=True),
    ),
    "drawer": Task(
        goals=tuple(f"{verb} {c}" for c in COLOURS for verb in ("open", "close")),
        prompts=_opened_or_closed(
            (
                "open the {colour} drawer",
                "pull the {colour} drawer open",
                "slide the {colour} drawer open",
                "draw the {colour} one open",
            ),
            (
                "close the {colour} drawer",
                "push the {colour} drawer to close it",
                "slide the {colour} drawer in to close it",
                "close the {colour} one",
            ),
        ),
        paraphrases=_opened_or_closed(
            (
                "get the {colour} drawer open",
                "pull out the {colour} drawer",
                "tug the {colour} drawer towards you",
            ),
            (
                "shut the {colour} drawer",
                "push the {colour} drawer back in",
                "press the {colour} drawer shut",
            ),
        ),
        max_steps=40,
        place=_drawn,
        aside=_in_front,
        achieved=_slid,
        bodies=Bodies(drawers=True),
    ),
}
