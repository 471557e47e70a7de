"""A 7-joint arm with a two-finger gripper and three free blocks, as an MJCF of primitive geoms.

The kinematics, limits and gripper are those of the Franka Emika Panda as its manual gives them
(frankaemika.github.io/docs/control_parameters.html, modified Denavit-Hartenberg parameters); link
masses are those identified by Gaz et al. (RA-L 2019), and inertias those of the geoms. As a real
Panda's control box does, `gravcomp` and position actuators hold the arm, with the manual's torques.
"""

import math
from dataclasses import dataclass
from functools import cache

import mujoco
import numpy as np

from sim.environments.bodies import COLOURS
from sim.rendering.solids import Kind

TIMESTEP = 0.01
SUBSTEPS = 5
STEP = TIMESTEP * SUBSTEPS
"""Seconds of a control step."""

DH = (
    (0.0, 0.0, 0.333),
    (0.0, -math.pi / 2, 0.0),
    (0.0, math.pi / 2, 0.316),
    (0.0825, math.pi / 2, 0.0),
    (-0.0825, -math.pi / 2, 0.384),
    (0.0, math.pi / 2, 0.0),
    (0.088, math.pi / 2, 0.0),
)
"""a (metres), α (radians) and d (metres) of each joint, in Craig's convention: a link's frame is
the previous one rotated by α and translated by a along x, then rotated by the joint and translated
by d along z."""
FLANGE = 0.107
"""Distance from the last joint's frame to the hand, along z."""
HAND_YAW = -math.pi / 4
"""Rotation of the hand on the flange about z, radians."""
TIP = 0.1034
"""Distance from the flange to the middle between the finger pads: the tip, which the controls refer
to."""

LIMITS = np.array(
    (
        (-2.8973, 2.8973),
        (-1.7628, 1.7628),
        (-2.8973, 2.8973),
        (-3.0718, -0.0698),
        (-2.8973, 2.8973),
        (-0.0175, 3.7525),
        (-2.8973, 2.8973),
    )
)
"""Limits of the joints, radians."""
SPEEDS = np.array((2.175, 2.175, 2.175, 2.175, 2.61, 2.61, 2.61))
"""Largest speeds of the joints, radians a second."""
TORQUES = (87, 87, 87, 87, 12, 12, 12)
"""Largest torques of the joints, newton metres."""
HOME = np.array((0.0, -0.2754, 0.0, -2.5895, 0.0, 2.3142, 0.7854))
"""Joints at which the gripper points straight down, 42 cm ahead and 25 cm up, radians."""

BLOCK = 0.02
"""Half an edge of a block, metres."""
OPEN = 0.04
"""Distance of each finger from the middle when the gripper is open, metres."""
FINGER_SPEED = 0.05
"""Largest speed of each finger, metres a second."""
FINGER = (0.010, 0.007, 0.027)
"""Half edges of a finger, metres; the fingers close along y of the hand."""
FINGER_HEIGHT = 0.0584
"""Distance from the flange to the upper ends of the fingers."""

_MASSES = (4.971, 0.647, 3.229, 3.588, 1.226, 1.667, 0.736)
_HAND_MASS, _FINGER_MASS, _BLOCK_MASS = 0.73, 0.1, 0.05
_STIFFNESS = (1500, 1500, 1200, 1200, 400, 400, 400)
_DAMPING = (90, 90, 72, 72, 24, 24, 24)
_ARMATURE = (0.6, 0.6, 0.5, 0.5, 0.2, 0.2, 0.2)
"""Inertias like those of a geared motor's rotor seen through its gears. They also keep the
explicitly integrated damping stable: damping · TIMESTEP < 2 · armature in every posture of the
arm."""


@dataclass(frozen=True)
class Shape:
    """Visible part of the arm: a geom fixed to link 1 … 7, or to the base (0).

    `size` as in MJCF: half edges of a box, radius and half length (without a capsule's ends).
    """

    link: int
    kind: Kind
    size: tuple[float, ...]
    position: tuple[float, float, float]
    quaternion: tuple[float, float, float, float] = (1.0, 0.0, 0.0, 0.0)
    mass: float = 0.0
    dark: bool = False


def _capsule(
    link: int,
    radius: float,
    start: tuple[float, float, float],
    end: tuple[float, float, float],
    mass: float,
) -> Shape:
    span = np.subtract(end, start)
    length = float(np.linalg.norm(span))
    # The quaternion that rotates z to the span: halfway to it.
    quaternion = np.array((length + span[2], -span[1], span[0], 0.0))
    quaternion /= np.linalg.norm(quaternion)
    middle = np.add(start, end) / 2
    return Shape(link, "capsule", (radius, length / 2), tuple(middle), tuple(quaternion), mass)


HAND_TURN = (math.cos(HAND_YAW / 2), 0.0, 0.0, math.sin(HAND_YAW / 2))
HAND = Shape(7, "box", (0.022, 0.1, 0.029), (0.0, 0.0, FLANGE + 0.029), HAND_TURN, _HAND_MASS)
SHAPES = (
    Shape(0, "cylinder", (0.085, 0.07), (-0.02, 0.0, 0.07), dark=True),
    _capsule(1, 0.062, (0.0, 0.0, -0.17), (0.0, 0.0, -0.06), _MASSES[0]),
    Shape(2, "cylinder", (0.066, 0.075), (0.0, 0.0, 0.0), dark=True),
    _capsule(2, 0.058, (0.0, -0.04, 0.0), (0.0, -0.15, 0.0), _MASSES[1]),
    _capsule(3, 0.056, (0.0, 0.0, -0.10), (0.06, 0.0, -0.02), _MASSES[2]),
    Shape(4, "cylinder", (0.058, 0.07), (0.0, 0.0, 0.0), dark=True),
    _capsule(4, 0.052, (-0.02, 0.02, 0.0), (-0.0825, 0.09, 0.0), _MASSES[3]),
    _capsule(5, 0.050, (0.0, 0.0, -0.25), (0.0, 0.04, -0.06), _MASSES[4]),
    _capsule(6, 0.050, (0.0, 0.0, 0.0), (0.088, 0.0, 0.0), _MASSES[5]),
    Shape(7, "cylinder", (0.045, 0.055), (0.0, 0.0, 0.052), mass=_MASSES[6], dark=True),
    HAND,
)


@cache
def model() -> mujoco.MjModel:
    """The scene, compiled by MuJoCo. `qpos` is the seven joints, both fingers, and the position and
    quaternion of each block; `ctrl` is the joints' and the fingers' targets. The site "tip" is the
    middle between the pads, with z along the fingers and y along their motion."""
    return mujoco.MjModel.from_xml_string(_xml())


def _xml() -> str:
    def text(values: tuple[float, ...]) -> str:
        return " ".join(f"{v:.9g}" for v in values)

    def shapes(link: int) -> str:
        return "".join(
            f'<geom type="{s.kind}" size="{text(s.size)}" pos="{text(s.position)}"'
            f' quat="{text(s.quaternion)}" mass="{s.mass}"/>'
            for s in SHAPES
            if s.link == link
        )

    def finger(name: str, side: int) -> str:
        place = (0.0, side * FINGER[1], FINGER[2])
        end = (0.0, side * FINGER[1], 2 * FINGER[2] - FINGER[1])
        return f"""
          <body name="{name}" pos="0 0 {FLANGE + FINGER_HEIGHT}" quat="{text(HAND_TURN)}"
                gravcomp="1">
            <joint name="{name}" type="slide" axis="0 {side} 0" range="0 {OPEN}" damping="20"
                   armature="0.2"/>
            <geom name="{name}" type="box" pos="{text(place)}" size="{text(FINGER)}"
                  mass="{_FINGER_MASS}"/>
            <geom name="{name}_end" type="sphere" pos="{text(end)}" size="{FINGER[1]}" mass="0"/>
          </body>"""

    hand = f"""
        <site name="tip" pos="0 0 {FLANGE + TIP}" quat="{text(HAND_TURN)}"/>
        {finger("left", 1)}{finger("right", -1)}"""
    arm = hand
    for i, (a, alpha, d) in reversed(tuple(enumerate(DH))):
        place = (a, -math.sin(alpha) * d, math.cos(alpha) * d)
        turn = (math.cos(alpha / 2), math.sin(alpha / 2), 0.0, 0.0)
        arm = f"""
        <body name="link{i + 1}" pos="{text(place)}" quat="{text(turn)}" gravcomp="1">
          <joint name="joint{i + 1}" axis="0 0 1" range="{text(tuple(LIMITS[i]))}"
                 damping="{_DAMPING[i]}" armature="{_ARMATURE[i]}"/>
          {shapes(i + 1)}{arm}
        </body>"""

    blocks = "".join(
        f"""<body name="{c}"><freejoint/>
        <geom name="{c}" type="box" size="{text((BLOCK,) * 3)}" mass="{_BLOCK_MASS}"/></body>"""
        for c in COLOURS
    )
    servos = "".join(
        f'<position joint="joint{i + 1}" kp="{kp}" forcerange="-{force} {force}"/>'
        for i, (kp, force) in enumerate(zip(_STIFFNESS, TORQUES, strict=True))
    ) + "".join(f'<position joint="{f}" kp="600"/>' for f in ("left", "right"))
    pairs = "".join(
        f'<pair geom1="table" geom2="{c}" condim="3" friction="1 1"/>'
        + "".join(
            f'<pair geom1="{f}" geom2="{c}" condim="3" friction="1.5 1.5"/>'
            for f in ("left", "right")
        )
        for c in COLOURS
    ) + "".join(f'<pair geom1="table" geom2="{f}_end" condim="1"/>' for f in ("left", "right"))
    return f"""
    <mujoco>
      <compiler angle="radian"/>
      <option timestep="{TIMESTEP}" iterations="1" ls_iterations="5" solver="Newton">
        <flag eulerdamp="disable"/>
      </option>
      <custom><numeric name="max_geom_pairs" data="2"/></custom>
      <default><geom contype="0" conaffinity="0"/></default>
      <worldbody>
        <geom name="table" type="plane" size="2 2 0.1"/>
        {shapes(0)}{arm}{blocks}
      </worldbody>
      <actuator>{servos}</actuator>
      <contact>{pairs}</contact>
    </mujoco>"""
