"""Conversions between a robot's units and those that a released policy was trained in, by name.

They compute with the library of their arrays, so a traced program can contain them. ALOHA's are
openpi's (`aloha_policy.py`): some joints turn the other way, and its grippers report a linear
position where the policy knows the angle of the motor.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from jaxtyping import Float

Convert = Callable[[Any], Any]


@dataclass(frozen=True)
class UnitConversion:
    """Conversions for a robot of `dims` (state, actions). `state`: its state to the policy's.
    `acted`: the policy's actions to the robot's. `learned`: actions of the robot to the
    policy's."""

    dims: tuple[int, int]
    state: Convert
    acted: Convert
    learned: Convert


_SIGNS = np.array([1, -1, -1, 1, 1, 1, 1, 1, -1, -1, 1, 1, 1, 1])
_IS_GRIPPER = np.isin(np.arange(14), (6, 13))
_LINEAR = (0.01844, 0.05800)
"""Position of a puppet's gripper, closed and open, metres (ALOHA)."""
_ANGLE = (0.5476, 1.6296)
"""Angle of its motor at the encoder's counts 2405 and 3110 of 4096, from 2048, radians."""
_ARM, _HORN = 0.036, 0.022
"""Lengths between a gripper and its motor, metres (Interbotix)."""
_JOINT = (-0.6213, 1.4910)
"""Angle of a puppet's gripper joint, closed and open, radians (ALOHA)."""


def _aloha_state(state: Float[Any, "*b 14"]) -> Float[Any, "*b 14"]:
    where, turned = state.__array_namespace__().where, state * _SIGNS
    position = where(_IS_GRIPPER, turned * (_LINEAR[1] - _LINEAR[0]) + _LINEAR[0], _HORN)
    sine = (_HORN**2 + position**2 - _ARM**2) / (2 * _HORN * position)
    angle = state.__array_namespace__().arcsin(sine.clip(-1.0, 1.0))
    return where(_IS_GRIPPER, (angle - _ANGLE[0]) / (_ANGLE[1] - _ANGLE[0]), turned)


def _aloha_acted(actions: Float[Any, "*b 14"]) -> Float[Any, "*b 14"]:
    turned = actions * _SIGNS
    joint = (turned + (_ANGLE[0] - _JOINT[0])) / (_JOINT[1] - _JOINT[0])
    return actions.__array_namespace__().where(_IS_GRIPPER, joint, turned)


def _aloha_learned(actions: Float[Any, "*b 14"]) -> Float[Any, "*b 14"]:
    turned = actions * _SIGNS
    angle = turned * (_JOINT[1] - _JOINT[0]) + (_JOINT[0] - _ANGLE[0])
    return actions.__array_namespace__().where(_IS_GRIPPER, angle, turned)


ADAPTERS: Mapping[str, UnitConversion] = MappingProxyType(
    {"aloha": UnitConversion((14, 14), _aloha_state, _aloha_acted, _aloha_learned)}
)
"""Adapters by name."""
