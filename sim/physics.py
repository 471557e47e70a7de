"""The tabletop's bodies in MJX: a gripper on three slides with two fingers, and three free blocks.

Contacts are an explicit list of pairs (fingers and blocks, blocks and table), of which only those
of the nearest block are solved, and Newton takes one iteration: on CPUs that is ten times faster
than MuJoCo's defaults. The model and its compiled step are shared by every task of a process.
"""

from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from typing import NamedTuple

import jax
import jax.numpy as jnp
import mujoco
from jaxtyping import Array, Float

with redirect_stdout(StringIO()):  # MJX prints that it does without Warp, which is optional
    from mujoco import mjx

COLOURS = ("red", "green", "blue")
SUBSTEPS = 5
TIMESTEP = 0.01
BLOCK = 0.02
"""Half an edge of a block, metres."""
OPEN = 0.038
"""How far each finger's inner face is from the middle when the gripper is open, metres."""
LOW, HIGH = (-0.2, -0.18, 0.006), (0.2, 0.22, 0.25)
"""Where the tip may be sent, metres."""
SPEED = (0.025, 0.025, 0.025, 0.5)
"""How far the set point moves at most in one control step: metres, and part of the closing."""

_PALM, _FINGER = (0.05, 0.01, 0.008), (0.005, 0.015, 0.025)
_PALM_HEIGHT = 2 * _FINGER[2] + _PALM[2]
SIZES = (_PALM, _FINGER, _FINGER, (BLOCK,) * 3, (BLOCK,) * 3, (BLOCK,) * 3)
"""Half edges of the boxes of a scene, in the order of `poses`."""


class Physics(NamedTuple):
    """What MJX carries from step to step, and the position that the controller holds.

    `position` is the tip (x, y, z), both fingers, and each block's place and quaternion.
    """

    position: Float[Array, "*n 26"]
    velocity: Float[Array, "*n 23"]
    acceleration: Float[Array, "*n 23"]
    """The solver's starting point."""
    setpoint: Float[Array, "*n 4"]
    """Tip x, y, z in metres and gripper, 0 open to 1 closed."""


def at_rest(tip: Float[Array, "3"], blocks: Float[Array, "3 3"]) -> Physics:
    """The open gripper at `tip` and a block at each (x, y, yaw in radians), nothing moving."""
    yaw = blocks[:, 2] / 2
    zero = jnp.zeros_like(yaw)
    place = jnp.stack((*blocks[:, :2].T, zero + BLOCK, jnp.cos(yaw), zero, zero, jnp.sin(yaw)), 1)
    position = jnp.concatenate((tip, jnp.full(2, OPEN), place.ravel()))
    still = jnp.zeros(23)
    return Physics(position, still, still, jnp.append(tip, 0.0))


def blocks(position: Float[Array, "*n 26"]) -> Float[Array, "*n 3 7"]:
    """Place and quaternion of each block."""
    return position[..., 5:].reshape(*position.shape[:-1], 3, 7)


def poses(position: Float[Array, "*n 26"]) -> Float[Array, "*n 6 7"]:
    """Centre and quaternion of palm, left finger, right finger and the three blocks."""
    tip, left, right = position[..., :3], position[..., 3], position[..., 4]
    across = jnp.stack((0 * left, -left - _FINGER[0], right + _FINGER[0]), -1)
    up = jnp.array((_PALM_HEIGHT, _FINGER[2], _FINGER[2]))
    centre = tip[..., None, :] + jnp.stack((across, 0 * across, 0 * across + up), -1)
    upright = jnp.broadcast_to(jnp.array((1.0, 0, 0, 0)), (*centre.shape[:-1], 4))
    return jnp.concatenate((jnp.concatenate((centre, upright), -1), blocks(position)), -2)


@cache
def model() -> mujoco.MjModel:
    """The scene, compiled by MuJoCo."""
    return mujoco.MjModel.from_xml_string(_xml())


@cache
def compiled_step():  # type: ignore[no-untyped-def]
    """The jitted control step `(Physics [N], actions [N, 4]) -> Physics [N]`.

    An action is where the tip should be and how far the gripper should close; the set point moves
    there at most by `SPEED`.
    """
    options = {"xla_backend_optimization_level": 1} if jax.default_backend() == "cpu" else None
    return jax.jit(jax.vmap(_step), compiler_options=options)


def _step(physics: Physics, action: Float[Array, "4"]) -> Physics:
    low, high, speed = jnp.array((*LOW, 0.0)), jnp.array((*HIGH, 1.0)), jnp.array(SPEED)
    goal = jnp.clip(action, low, high)
    setpoint = physics.setpoint + jnp.clip(goal - physics.setpoint, -speed, speed)
    finger = OPEN * (1 - setpoint[3])
    static, blank = _mjx()
    data = blank.replace(
        qpos=physics.position,
        qvel=physics.velocity,
        qacc_warmstart=physics.acceleration,
        ctrl=jnp.concatenate((setpoint[:3], jnp.stack((finger, finger)))),
    )
    data = jax.lax.fori_loop(0, SUBSTEPS, lambda _, d: mjx.step(static, d), data)
    return Physics(data.qpos, data.qvel, data.qacc_warmstart, setpoint)


@cache
def _mjx() -> tuple[mjx.Model, mjx.Data]:
    with jax.ensure_compile_time_eval():
        static = mjx.put_model(model(), impl="jax")
        return static, mjx.make_data(static)


def _xml() -> str:
    def size(half: tuple[float, ...]) -> str:
        return " ".join(map(str, half))

    def slide(name: str, axis: str, kind: str) -> str:
        return f'<joint name="{name}" type="slide" axis="{axis}" class="{kind}"/>'

    def finger(name: str, side: int) -> str:
        place = f"{side * _FINGER[0]} 0 {_FINGER[2]}"
        return f"""
            <body name="{name}" gravcomp="1">{slide(name, f"{side} 0 0", "finger")}
              <geom name="{name}" type="box" pos="{place}" size="{size(_FINGER)}" mass="0.05"/>
            </body>"""

    def block(name: str) -> str:
        half = size((BLOCK,) * 3)
        return f"""
          <body name="{name}"><freejoint/>
            <geom name="{name}" type="box" size="{half}" mass="0.05"/></body>"""

    def pair(one: str, other: str, friction: float) -> str:
        return f"""
          <pair geom1="{one}" geom2="{other}" condim="3" friction="{friction} {friction}"/>"""

    pairs = [pair("table", c, 1.0) for c in COLOURS]
    pairs += [pair(f, c, 1.5) for c in COLOURS for f in ("left", "right")]
    return f"""
    <mujoco>
      <option timestep="{TIMESTEP}" iterations="1" ls_iterations="5" solver="Newton">
        <flag eulerdamp="disable"/>
      </option>
      <custom><numeric name="max_geom_pairs" data="2"/></custom>
      <default>
        <geom contype="0" conaffinity="0"/>
        <default class="arm"><joint damping="32" armature="0.2"/><position kp="600"/></default>
        <default class="finger">
          <joint damping="6" armature="0.05" range="0 0.04"/><position kp="150"/>
        </default>
      </default>
      <worldbody>
        <geom name="table" type="plane" size="1 1 0.1"/>
        <body name="palm" gravcomp="1">
          {slide("x", "1 0 0", "arm")}{slide("y", "0 1 0", "arm")}{slide("z", "0 0 1", "arm")}
          <geom name="palm" type="box" pos="0 0 {_PALM_HEIGHT}" size="{size(_PALM)}" mass="0.1"/>
          {finger("left", -1)}{finger("right", 1)}
        </body>
        {"".join(map(block, COLOURS))}
      </worldbody>
      <actuator>
        {"".join(f'<position class="arm" joint="{joint}"/>' for joint in "xyz")}
        <position class="finger" joint="left"/><position class="finger" joint="right"/>
      </actuator>
      <contact>{"".join(pairs)}</contact>
    </mujoco>"""
