"""Scripted experts, which compute the next action from the physics alone.

Each is a pure function of the present state with no memory, so it recovers from the effects of
noise or of another policy. Its actions are the labels of demonstrations: goals that stay constant
until the next phase, not the controller's small steps.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from sim.environments.bodies import BLOCK, blocks, handles
from sim.environments.tabletop import Tabletop, TabletopState
from sim.environments.tasks import DIRECTIONS, HOVER, PAIRS

_TRAVEL = 0.08
"""Height of the tip, metres, at which it passes over blocks."""
_GRASP = 0.012
"""Height of the tip at which the fingers hold a block on the table."""
_CARRY = 0.10
"""Height of the tip at which a held block passes over others."""
_HANDLE = 0.02
"""Height of the tip at which the fingers hold a drawer's handle."""


def expert(env: Tabletop, state: TabletopState) -> Float[Array, "n 4"]:
    """The next action of every environment: the target of the tip (metres) and the gripper."""
    return _ACT[env.kind](state)


@jax.jit
def _reach(state: TabletopState) -> Float[Array, "n 4"]:
    block = _block(state, state.goal)
    return _action(block[:, 0], block[:, 1], block[:, 2] + HOVER, 0.0)


@jax.jit
def _lift(state: TabletopState) -> Float[Array, "n 4"]:
    block = _block(state, state.goal)
    here, around, held = _grip(state, block)
    z = jnp.where(held, 0.14, jnp.where(here, _GRASP, _TRAVEL))
    return _action(block[:, 0], block[:, 1], z, jnp.where(around, 1.0, 0.0))


@jax.jit
def _stack(state: TabletopState) -> Float[Array, "n 4"]:
    upper, lower = jnp.array(PAIRS).T[:, state.goal]
    tip, block, base = state.physics.position[:, :3], _block(state, upper), _block(state, lower)
    here, around, held = _grip(state, block)
    apart = jnp.linalg.norm(block[:, :2] - base[:, :2], axis=-1)
    height = block[:, 2] - base[:, 2]
    placed = (apart < 0.8 * BLOCK) & (jnp.abs(height - 2 * BLOCK) < 0.004)
    over = held & (apart < 0.008)
    lifted = held & (height > 3.2 * BLOCK)
    carried = over | lifted
    # Target of the block, not of the tip, which may hold it off its middle.
    target = base[:, :2] + tip[:, :2] - block[:, :2]
    xy = jnp.where(carried[:, None], target, block[:, :2])
    z = jnp.where(here, _GRASP + block[:, 2] - BLOCK, block[:, 2] - BLOCK + _TRAVEL)
    z = jnp.where(held, _CARRY, z)
    z = jnp.where(over, base[:, 2] + BLOCK + _GRASP, z)
    xy, z = jnp.where(placed[:, None], tip[:, :2], xy), jnp.where(placed, _CARRY + 0.04, z)
    # Fingers still closing around the placed block open before they leave it.
    z = jnp.where(placed & (state.physics.setpoint[:, 3] > 0.1), tip[:, 2], z)
    return _action(xy[:, 0], xy[:, 1], z, jnp.where(around & ~placed, 1.0, 0.0))


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
    # A block that slipped sideways follows the tip: go only half the way, or it would run away.
    y = (block[:, 1] + _chosen(state.start, colour)[:, 1]) / 2
    return _action(x, y, z, 1.0)


@jax.jit
def _drawer(state: TabletopState) -> Float[Array, "n 4"]:
    colour, closing = jnp.divmod(state.goal, 2)
    tip = state.physics.position[:, :3]
    handle = _chosen(handles(state.physics.position, state.start), colour)
    away = jnp.linalg.norm(tip[:, :2] - handle, axis=-1)
    here = (away < 0.012) | ((away < 0.02) & (tip[:, 2] < _HANDLE + 0.02))
    around = here & (tip[:, 2] < _HANDLE + 0.01)
    held = around & (state.physics.setpoint[:, 3] > 0.9)
    y = jnp.where(held, jnp.where(closing == 1, 0.15, 0.01), handle[:, 1])
    z = jnp.where(here, _HANDLE, _TRAVEL)
    return _action(handle[:, 0], y, z, jnp.where(around, 1.0, 0.0))


def phases(task: str, goal: str, actions: Float[np.ndarray, "t 4"]) -> tuple[str, ...]:
    """Steps of a task in words, inferred only from its expert's actions: the height of the tip's
    target, and whether the gripper closes."""
    name, words = _PHASES[task], goal.split()
    return tuple(name(float(z), closed > 0.5, *words) for z, closed in actions[:, 2:])


_LOW, _HIGH = (_GRASP + _TRAVEL) / 2, 0.09


def _reach_phase(z: float, closed: bool, colour: str) -> str:
    return f"move over the {colour} block"


def _lift_phase(z: float, closed: bool, colour: str) -> str:
    if closed:
        return f"lift the {colour} block" if z > _HIGH else f"grasp the {colour} block"
    return f"{'lower to' if z < _LOW else 'move over'} the {colour} block"


def _push_phase(z: float, closed: bool, colour: str, direction: str) -> str:
    pushes = f"push the {colour} block to the {direction}"
    return pushes if z < _LOW else f"move beside the {colour} block"


def _stack_phase(z: float, closed: bool, colour: str, _: str, base: str) -> str:
    if z > _HIGH:
        over = f"carry the {colour} block over the {base} block"
        return over if closed else f"let go of the {colour} block"
    if closed and z >= _LOW:
        return f"set the {colour} block on the {base} block"
    return _lift_phase(z, closed, colour)


def _drawer_phase(z: float, closed: bool, verb: str, colour: str) -> str:
    if closed:
        return f"{verb} the {colour} drawer"
    return f"{'lower to' if z < _LOW else 'move over'} the handle of the {colour} drawer"


_PHASES: dict[str, Callable[..., str]] = {
    "reach": _reach_phase,
    "lift": _lift_phase,
    "push": _push_phase,
    "stack": _stack_phase,
    "drawer": _drawer_phase,
}
_ACT = {"reach": _reach, "lift": _lift, "push": _push, "stack": _stack, "drawer": _drawer}


def _grip(
    state: TabletopState, block: Float[Array, "n 3"]
) -> tuple[Bool[Array, " n"], Bool[Array, " n"], Bool[Array, " n"]]:
    """True where the tip is over the block, has it between the fingers, and has closed them."""
    tip = state.physics.position[:, :3]
    away = jnp.linalg.norm(tip[:, :2] - block[:, :2], axis=-1)
    above = tip[:, 2] - (block[:, 2] - BLOCK)
    here = (away < 0.012) | ((away < 0.02) & (above < 0.04))
    around = here & (above < _GRASP + 0.012)
    return here, around, around & (state.physics.setpoint[:, 3] > 0.9)


def _block(state: TabletopState, colour: Int[Array, " n"]) -> Float[Array, "n 3"]:
    return _chosen(blocks(state.physics.position)[..., :3], colour)


def _chosen(places: Float[Array, "n 3 d"], colour: Int[Array, " n"]) -> Float[Array, "n d"]:
    return jnp.take_along_axis(places, colour[:, None, None], axis=1)[:, 0]


def _action(*parts: Float[Array, " n"] | float) -> Float[Array, "n 4"]:
    return jnp.stack(jnp.broadcast_arrays(*map(partial(jnp.asarray, dtype=jnp.float32), parts)), -1)
