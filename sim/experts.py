"""Scripted experts: what to do next, seen from the physics alone.

Each is a pure function of the present state with no memory, so it recovers from whatever noise or
another policy did before, and its actions are the labels of demonstrations: goals that stay put
until the next phase, not the controller's small steps.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sim.physics import BLOCK, blocks
from sim.tabletop import Tabletop, TabletopState
from sim.tasks import DIRECTIONS, HOVER

_TRAVEL = 0.08
"""Height of the tip, metres, at which it passes over blocks."""
_GRASP = 0.012
"""Height of the tip at which the fingers hold a block on the table."""


def expert(env: Tabletop, state: TabletopState) -> Float[Array, "n 4"]:
    """The next action of every environment: where the tip should go (metres) and the gripper."""
    return _ACT[env.kind](state)


@jax.jit
def _reach(state: TabletopState) -> Float[Array, "n 4"]:
    block = _block(state, state.goal)
    return _action(block[:, 0], block[:, 1], block[:, 2] + HOVER, 0.0)


@jax.jit
def _lift(state: TabletopState) -> Float[Array, "n 4"]:
    tip, block = state.physics.position[:, :3], _block(state, state.goal)
    away = jnp.linalg.norm(tip[:, :2] - block[:, :2], axis=-1)
    above = tip[:, 2] - (block[:, 2] - BLOCK)
    here = (away < 0.012) | ((away < 0.02) & (above < 0.04))
    around = here & (above < _GRASP + 0.012)
    held = around & (state.physics.setpoint[:, 3] > 0.9)
    z = jnp.where(held, 0.14, jnp.where(here, _GRASP, _TRAVEL))
    return _action(block[:, 0], block[:, 1], z, jnp.where(around, 1.0, 0.0))


@jax.jit
def _push(state: TabletopState) -> Float[Array, "n 4"]:
    colour, direction = jnp.divmod(state.goal, len(DIRECTIONS))
    sign = jnp.array(tuple(DIRECTIONS.values()))[direction]
    tip, block = state.physics.position[:, :3], _block(state, colour)
    ahead, aside = sign * (block[:, 0] - tip[:, 0]), jnp.abs(block[:, 1] - tip[:, 1])
    behind = (ahead > 0.045) & (ahead < 0.08) & (aside < 0.012)
    pushing = (tip[:, 2] < 0.03) & (ahead > 0.02) & (aside < 0.02)
    x = block[:, 0] + sign * jnp.where(pushing, 0.0, -0.06)
    z = jnp.where(behind | pushing, _GRASP, _TRAVEL)
    # A block that slipped aside follows the tip: only half of the way, or it would run away.
    y = (block[:, 1] + _chosen(state.start, colour)[:, 1]) / 2
    return _action(x, y, z, 1.0)


_ACT = {"reach": _reach, "lift": _lift, "push": _push}


def _block(state: TabletopState, colour: Int[Array, "n"]) -> Float[Array, "n 3"]:
    return _chosen(blocks(state.physics.position)[..., :3], colour)


def _chosen(places: Float[Array, "n 3 d"], colour: Int[Array, "n"]) -> Float[Array, "n d"]:
    return jnp.take_along_axis(places, colour[:, None, None], axis=1)[:, 0]


def _action(*parts: Float[Array, "n"] | float) -> Float[Array, "n 4"]:
    return jnp.stack(jnp.broadcast_arrays(*map(partial(jnp.asarray, dtype=jnp.float32), parts)), -1)
