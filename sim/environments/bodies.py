"""Bodies on the tabletop: a gripper on three slides with two fingers, and three blocks or a cabinet
with three drawers, optionally with distractors; their MJCF, and their boxes for a camera.

Contacts are an explicit list of pairs, without blocks among themselves unless a scene needs them;
only the nearest are solved, and Newton's method takes one iteration. On CPUs, this is ten times
faster than MuJoCo's defaults.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

COLOURS = ("red", "green", "blue")
SUBSTEPS = 5
TIMESTEP = 0.01
BLOCK = 0.02
"""Half an edge of a block, metres."""
DISTRACTOR = 0.015
"""Half an edge of a distractor, metres."""
OPEN = 0.038
"""Distance of each finger's inner face from the middle when the gripper is open, metres."""
DRAWER_PITCH = 0.12
"""Distance between neighbouring drawers' middles, metres; the middle one is at x = 0."""
DRAWER_TRAVEL = 0.1
"""Largest opening of a drawer, metres."""

_PALM, _FINGER = (0.05, 0.01, 0.008), (0.005, 0.015, 0.025)
_PALM_HEIGHT = 2 * _FINGER[2] + _PALM[2]
_CABINET, _CABINET_AT = (0.19, 0.06, 0.035), (0.0, 0.215, 0.035)
_DRAWER, _HANDLE = (0.05, 0.06, 0.025), (0.012, 0.02, 0.012)
_DRAWER_Y, _HANDLE_Y, _DRAWER_Z = 0.21, 0.13, 0.03
"""Middles of the closed drawers."""
_INSIDE, _INSIDE_Z = (0.045, 0.055, 0.001), 0.055


@dataclass(frozen=True)
class Bodies:
    """Selection of the bodies in addition to the gripper.

    A position is `nq` numbers: the tip (x, y, z), both fingers, the openings of the drawers from
    left to right or the position and quaternion of each block, then position and quaternion of each
    distractor.
    """

    drawers: bool = False
    """A cabinet with three drawers stands where the blocks would lie."""
    stacking: bool = False
    """Blocks touch each other."""
    distractors: int = 0
    """Number of smaller blocks of other colours, which no prompt names."""

    @property
    def nq(self) -> int:
        """Length of a position."""
        return 5 + (3 if self.drawers else 21) + 7 * self.distractors

    @property
    def nv(self) -> int:
        """Degrees of freedom."""
        return 5 + (3 if self.drawers else 18) + 6 * self.distractors

    @property
    def sizes(self) -> Float[np.ndarray, "b 3"]:
        """Half edges of the boxes, in the order of `poses`."""
        cabinet = (_CABINET, *[_DRAWER] * 3, *[_HANDLE] * 3, *[_INSIDE] * 3)
        things = cabinet if self.drawers else [(BLOCK,) * 3] * 3
        boxes = (_PALM, _FINGER, _FINGER, *things, *[(DISTRACTOR,) * 3] * self.distractors)
        return np.array(boxes, np.float32)

    def position(
        self,
        tip: Float[Array, "3"],
        start: Float[Array, "3 2"],
        yaw: Float[Array, "3"],
        distractors: Float[Array, "d 3"],
    ) -> Float[Array, "nq"]:
        """Position with the open gripper at `tip`, blocks at (x, y) rotated by `yaw` or drawers at
        (x, opening), and distractors at (x, y, yaw); metres and radians."""
        if self.drawers:
            things = jnp.zeros(3).at[_slots(start)].set(start[:, 1])
        else:
            things = lying(jnp.concatenate((start, yaw[:, None]), 1), BLOCK)
        return jnp.concatenate((tip, jnp.full(2, OPEN), things, lying(distractors, DISTRACTOR)))

    def poses(
        self, position: Float[Array, "*n nq"], start: Float[Array, "*n 3 2"]
    ) -> Float[Array, "*n b 7"]:
        """Centre and quaternion of the palm, left finger and right finger, then of the blocks, or
        of the cabinet, the drawers, their handles and their dark insides, by colour, and then of
        the distractors."""
        left, right = position[..., 3], position[..., 4]
        across = jnp.stack((0 * left, -left - _FINGER[0], right + _FINGER[0]), -1)
        up = jnp.array((_PALM_HEIGHT, _FINGER[2], _FINGER[2]))
        gripper = position[..., None, :3] + jnp.stack((across, 0 * across, 0 * across + up), -1)
        parts = [_upright(gripper)]
        if self.drawers:
            out, x = drawers(position, start), start[..., 0]
            cabinet = jnp.broadcast_to(jnp.array(_CABINET_AT), (*x.shape[:-1], 1, 3))
            parts.append(_upright(cabinet))
            for y, z in ((_DRAWER_Y, _DRAWER_Z), (_HANDLE_Y, _DRAWER_Z), (_DRAWER_Y, _INSIDE_Z)):
                parts.append(_upright(jnp.stack((x, y - out, 0 * x + z), -1)))
        free = position[..., 8 if self.drawers else 5 :]
        parts.append(free.reshape(*free.shape[:-1], free.shape[-1] // 7, 7))
        return jnp.concatenate(parts, -2)

    def mjcf(self) -> str:
        """The model for MuJoCo."""
        drawn = _drawers() if self.drawers else "".join(_free(c, BLOCK, 0.05) for c in COLOURS)
        things = [f"handle{i}" for i in range(3)] if self.drawers else list(COLOURS)
        others = [f"distractor{i}" for i in range(self.distractors)]
        lying = others if self.drawers else [*COLOURS, *others]
        pairs = [_pair("table", thing, 1.0) for thing in lying]
        pairs += [_pair(f, thing, 1.5) for thing in things + others for f in ("left", "right")]
        if self.stacking:
            pairs += [_pair(COLOURS[i], COLOURS[j], 1.0) for i, j in ((0, 1), (0, 2), (1, 2))]
        return f"""
        <mujoco>
          <option timestep="{TIMESTEP}" iterations="1" ls_iterations="5" solver="Newton">
            <flag eulerdamp="disable"/>
          </option>
          <custom><numeric name="max_geom_pairs" data="{3 if self.stacking else 2}"/></custom>
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
              {_slide("x", "1 0 0", "arm")}
              {_slide("y", "0 1 0", "arm")}
              {_slide("z", "0 0 1", "arm")}
              <geom name="palm" type="box" pos="0 0 {_PALM_HEIGHT}" size="{_text(_PALM)}"
                mass="0.1"/>
              {_finger("left", -1)}{_finger("right", 1)}
            </body>
            {drawn}
            {"".join(_free(name, DISTRACTOR, 0.02) for name in others)}
          </worldbody>
          <actuator>
            {"".join(f'<position class="arm" joint="{joint}"/>' for joint in "xyz")}
            <position class="finger" joint="left"/><position class="finger" joint="right"/>
          </actuator>
          <contact>{"".join(pairs)}</contact>
        </mujoco>"""


def blocks(position: Float[Array, "*n nq"]) -> Float[Array, "*n 3 7"]:
    """Position and quaternion of each block."""
    return position[..., 5:26].reshape(*position.shape[:-1], 3, 7)


def drawers(position: Float[Array, "*n nq"], start: Float[Array, "*n 3 2"]) -> Float[Array, "*n 3"]:
    """Opening of the drawer of each colour, metres; `start` determines which drawer that is."""
    return jnp.take_along_axis(position[..., 5:8], _slots(start), -1)


def handles(
    position: Float[Array, "*n nq"], start: Float[Array, "*n 3 2"]
) -> Float[Array, "*n 3 2"]:
    """Middle (x, y) of each colour's handle."""
    return jnp.stack((start[..., 0], _HANDLE_Y - drawers(position, start)), -1)


def lying(places: Float[Array, "k 3"], half: float) -> Float[Array, " 7*k"]:
    """Positions and quaternions of blocks of this half edge that lie at (x, y, yaw), end to end."""
    yaw = places[:, 2] / 2
    zero = jnp.zeros_like(yaw)
    turned = (jnp.cos(yaw), zero, zero, jnp.sin(yaw))
    return jnp.stack((*places[:, :2].T, zero + half, *turned), 1).ravel()


def _slots(start: Float[Array, "*n 3 2"]) -> Int[Array, "*n 3"]:
    """Index of each colour's drawer, counted from the left."""
    return jnp.round(start[..., 0] / DRAWER_PITCH).astype(jnp.int32) + 1


def _upright(centre: Float[Array, "*n 3"]) -> Float[Array, "*n 7"]:
    turn = jnp.broadcast_to(jnp.array((1.0, 0, 0, 0)), (*centre.shape[:-1], 4))
    return jnp.concatenate((centre, turn), -1)


def _text(numbers: tuple[float, ...]) -> str:
    return " ".join(map(str, numbers))


def _slide(name: str, axis: str, kind: str) -> str:
    return f'<joint name="{name}" type="slide" axis="{axis}" class="{kind}"/>'


def _finger(name: str, side: int) -> str:
    place = f"{side * _FINGER[0]} 0 {_FINGER[2]}"
    return f"""
        <body name="{name}" gravcomp="1">{_slide(name, f"{side} 0 0", "finger")}
          <geom name="{name}" type="box" pos="{place}" size="{_text(_FINGER)}" mass="0.05"/>
        </body>"""


def _free(name: str, half: float, mass: float) -> str:
    return f"""
        <body name="{name}"><freejoint/>
          <geom name="{name}" type="box" size="{_text((half,) * 3)}" mass="{mass}"/></body>"""


def _drawers() -> str:
    each = (
        f"""
        <body name="drawer{i}" pos="{(i - 1) * DRAWER_PITCH} 0 {_DRAWER_Z}">
          <joint type="slide" axis="0 -1 0" range="0 {DRAWER_TRAVEL}" damping="4" armature="0.02"/>
          <geom name="drawer{i}" type="box" pos="0 {_DRAWER_Y} 0" size="{_text(_DRAWER)}"
            mass="0.2"/>
          <geom name="handle{i}" type="box" pos="0 {_HANDLE_Y} 0" size="{_text(_HANDLE)}"
            mass="0.02"/>
        </body>"""
        for i in range(3)
    )
    return f"""
        <geom name="cabinet" type="box" pos="{_text(_CABINET_AT)}" size="{_text(_CABINET)}"/>
        {"".join(each)}"""


def _pair(one: str, other: str, friction: float) -> str:
    return f"""
        <pair geom1="{one}" geom2="{other}" condim="3" friction="{friction} {friction}"/>"""
