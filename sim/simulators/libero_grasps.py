"""Places to grip an object, computed from points on its surface: round its rim or across its
sides."""

from typing import NamedTuple

import numpy as np
from libero_scene import UP

_RIM = 0.005, 0.018
"""Grip on a rim: inwards from its middle radius and below its top, metres."""
_SIDE = 0.03
"""Grip on a body: below its top, metres."""
_LOWEST = 0.012
"""Grip on an object that lies on the table: above its bottom, metres."""
_WIDEST = 0.074
"""Thickness that the open fingers can take, metres."""


class Grasp(NamedTuple):
    """A place to grip an object."""

    point: np.ndarray
    """Point between the fingertips, in the object's frame [3]."""
    axis: np.ndarray
    """Horizontal direction along which the fingers close, in the world [3]."""
    back: np.ndarray = UP
    """Direction from the fingertips to the palm, in the world [3]: up for a hand that points
    down."""


def rim_grasps(
    points: np.ndarray, rotation: np.ndarray, side: float, lean: float = 0.0
) -> list[tuple[Grasp, float]]:
    """Grasps round the rim of a bowl, from its points in its own frame and its orientation. Each
    has a cost that grows with the slope of the wall, from 0 for a vertical to 1 for a horizontal
    wall, and with the angle (radians) from the preferred `side`. The hand leans outwards by `lean`
    radians."""
    rim = points[points[:, 2] > points[:, 2].max() - 0.006]
    centre = (rim.min(0) + rim.max(0)) / 2
    radius = np.ptp(rim, axis=0)[:2].mean() / 2 - _RIM[0]
    depth = min(_RIM[1], float(np.ptp(points[:, 2])) - _LOWEST)
    made = []
    for angle in np.radians(np.arange(0, 360, 10)):
        outwards = rotation.T @ [np.cos(angle), np.sin(angle), 0.0]
        outwards[2] = 0.0
        outwards /= np.linalg.norm(outwards)
        point = centre + outwards * radius - [0.0, 0.0, depth]
        axis = np.array([np.cos(angle), np.sin(angle), 0.0])
        slope = abs((rotation @ outwards)[2])
        away = abs((angle - side + np.pi) % (2 * np.pi) - np.pi)
        back = np.cos(lean) * UP + np.sin(lean) * axis
        made.append((Grasp(point, axis, back), float(15.0 * slope + 3.0 * away)))
    return made


def side_grasps(points: np.ndarray, rotation: np.ndarray) -> list[tuple[Grasp, float]]:
    """Grasps across an upright object that fit between the fingers, each with a cost that grows
    with the thickness there."""
    seen = points @ rotation.T
    top, low = seen[:, 2].max(), seen[:, 2].min()
    made = []
    for angle in np.radians(np.arange(0, 180, 10)):
        axis = np.array([np.cos(angle), np.sin(angle), 0.0])
        across = np.array([-axis[1], axis[0], 0.0])
        along, beside = seen @ axis, seen @ across
        if np.ptp(along) <= _WIDEST:
            middle = along.max() + along.min(), beside.max() + beside.min()
            point = (axis * middle[0] + across * middle[1]) / 2
            point[2] = max(top - _SIDE, low + _LOWEST)
            made.append((Grasp(rotation.T @ point, axis), 5.0 * float(np.ptp(along))))
    return made
