"""Geometry of a running LIBERO environment: positions of the hand, objects and obstacles, boxes
round the geoms that collide, and directions to which a hand can be rotated."""

from typing import Any, NamedTuple

import numpy as np

UP = np.array([0.0, 0.0, 1.0])
_PLANE, _MESH = 0, 7
"""MuJoCo's mjtGeom."""
_SLIDE = 2
"""MuJoCo's mjtJoint."""
_OPENED = 0.14
"""Displacement from which LIBERO counts a drawer as open, metres."""


class Box(NamedTuple):
    """An oriented box around a geom."""

    centre: np.ndarray
    axes: np.ndarray
    """Directions of its edges, in columns [3, 3]."""
    half: np.ndarray
    """Half lengths of its edges [3], metres."""


def rotation_vector(rotation: np.ndarray) -> np.ndarray:
    """Axis times angle (radians) of a rotation matrix by less than half a turn."""
    skew = rotation - rotation.T
    sine = np.array([skew[2, 1], skew[0, 2], skew[1, 0]]) / 2
    length = np.linalg.norm(sine)
    angle = np.arctan2(length, (np.trace(rotation) - 1) / 2)
    return sine * (angle / length) if length > 1e-9 else np.zeros(3)


def orientation(axis: np.ndarray, back: np.ndarray = UP) -> np.ndarray:
    """Orientation of a hand whose fingers close along `axis`, as nearly as `back`, the direction
    from the fingertips to the palm, allows; by default the hand points down."""
    axis = axis - (axis @ back) * back
    axis = axis / np.linalg.norm(axis)
    return np.stack([axis, np.cross(-back, axis), -back], axis=1)


def inside(points: np.ndarray, boxes: list[Box], margin: float) -> int:
    """Number of points [n, 3] that lie in boxes enlarged by a margin."""
    hit = np.zeros(len(points), bool)
    for box in boxes:
        hit |= (np.abs((points - box.centre) @ box.axes) < box.half + margin).all(1)
    return int(hit.sum())


def highest(boxes: list[Box], a: np.ndarray, b: np.ndarray, radius: float) -> float:
    """Height of the highest point of boxes within a radius of the path from a to b, seen from
    above; minus infinity if there is none."""
    if not boxes:
        return -np.inf
    points = np.concatenate([box.centre + (_GRID * box.half) @ box.axes.T for box in boxes])
    way = b[:2] - a[:2]
    along = np.clip((points[:, :2] - a[:2]) @ way / max(way @ way, 1e-9), 0, 1)
    near = np.linalg.norm(points[:, :2] - a[:2] - along[:, None] * way, axis=1) < radius
    return points[near, 2].max(initial=-np.inf)


def nearest_turn(axis: np.ndarray, now: np.ndarray) -> tuple[np.ndarray, float]:
    """The direction or its opposite, which are the same to the fingers, whichever is nearer to the
    present one; and the angle (radians) by which the hand rotates to it."""
    turn = np.arctan2(axis[1], axis[0]) - np.arctan2(now[1], now[0])
    turn = (turn + np.pi / 2) % np.pi - np.pi / 2
    angle = np.arctan2(now[1], now[0]) + turn
    return np.array([np.cos(angle), np.sin(angle), 0.0]), abs(float(turn))


class Scene:
    """Positions of hand, objects and obstacles in a running LIBERO environment."""

    def __init__(self, env: Any) -> None:
        self.model, self.data = env.sim.model._model, env.sim.data._data
        self.roots: dict[str, int] = env.env.obj_body_id
        self.site = self.model.site("gripper0_grip_site").id
        self.base = self.data.body("robot0_base").xpos.copy()
        bodies = {
            self.model.jnt_bodyid[i]: i for i in np.flatnonzero(self.model.jnt_type == _SLIDE)
        }
        self.drawers = {
            self.model.site(site).name: int(bodies[body])
            for site, body in enumerate(self.model.site_bodyid)
            if body in bodies
        }
        root = np.arange(self.model.nbody)
        for body in range(1, self.model.nbody):  # parents come before their children
            if body not in self.roots.values():
                root[body] = root[self.model.body_parentid[body]]
        of_geom = root[self.model.geom_bodyid]
        self.collides = (self.model.geom_contype | self.model.geom_conaffinity) > 0
        self.collides &= self.model.geom_type != _PLANE
        self.geoms = {
            name: np.flatnonzero(self.collides & (of_geom == body))
            for name, body in self.roots.items()
        }

    def hand(self) -> tuple[np.ndarray, np.ndarray]:
        """Point between the fingertips and the hand's orientation."""
        rotation = self.data.site_xmat[self.site].reshape(3, 3).copy()
        return self.data.site_xpos[self.site].copy(), rotation

    def pose(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Position and orientation of an object."""
        body = self.roots[name]
        return self.data.xpos[body].copy(), self.data.xmat[body].reshape(3, 3).copy()

    def moves(self, name: str) -> bool:
        """True if an object has not come to rest."""
        return bool(np.linalg.norm(self.data.cvel[self.roots[name]]) > 0.03)

    def points(self, name: str) -> np.ndarray:
        """Vertices and corners [n, 3] of the geoms of an object that collide."""
        return np.concatenate([self._points(int(geom)) for geom in self.geoms[name]])

    def out(self, drawer: str) -> np.ndarray:
        """Direction in which a drawer opens [3]."""
        return -self.data.xaxis[self.drawers[drawer]]

    def is_open(self, drawer: str, more: float = 0.0) -> bool:
        """True if a drawer is open, as LIBERO counts it, by `more` metres beyond that."""
        place = self.data.qpos[self.model.jnt_qposadr[self.drawers[drawer]]]
        return bool(place < -_OPENED - more)

    def handle(self, drawer: str) -> np.ndarray:
        """Middle of a drawer's handle [3], which is the part that sticks out most."""
        parts, out = self._parts(self.drawers[drawer]), self.out(drawer)
        return max((self._box(geom).centre for geom in parts), key=lambda at: float(at @ out))

    def knob(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Middle of the ridge of a furniture's knob [3], and points of the ridge [n, 3]."""
        joint = int(self.model.body_jntadr[self.model.body(f"{name}_button").id])
        points = np.concatenate([self._points(geom) for geom in self._parts(joint)])
        top = points[:, 2].max()
        middle = np.array([*self.data.xanchor[joint][:2], top - 0.015])
        return middle, points[points[:, 2] > top - 0.02]

    def boxes(self, *without: str) -> list[Box]:
        """Boxes round the geoms of all objects and furniture except `without`."""
        others = [geoms for name, geoms in self.geoms.items() if name not in without]
        return [self._box(int(geom)) for geom in np.concatenate(others)] if others else []

    def _parts(self, joint: int) -> list[int]:
        """Colliding geoms of the body that a joint moves."""
        of_body = self.model.geom_bodyid == self.model.jnt_bodyid[joint]
        return np.flatnonzero(of_body & self.collides).tolist()

    def _box(self, geom: int) -> Box:
        axes = self.data.geom_xmat[geom].reshape(3, 3).copy()
        centre, half = np.split(self.model.geom_aabb[geom], 2)
        return Box(self.data.geom_xpos[geom] + axes @ centre, axes, half.copy())

    def _points(self, geom: int) -> np.ndarray:
        if self.model.geom_type[geom] != _MESH:
            box = self._box(geom)
            return box.centre + (_CORNERS * box.half) @ box.axes.T
        mesh = self.model.geom_dataid[geom]
        first, number = self.model.mesh_vertadr[mesh], self.model.mesh_vertnum[mesh]
        vertices = self.model.mesh_vert[first : first + number]
        return self.data.geom_xpos[geom] + vertices @ self.data.geom_xmat[geom].reshape(3, 3).T


def block(low: tuple[float, ...], high: tuple[float, ...], spacing: float) -> np.ndarray:
    edges = zip(low, high, strict=True)
    lines = [np.linspace(a, b, 1 + max(1, int(np.ceil((b - a) / spacing)))) for a, b in edges]
    return np.stack(np.meshgrid(*lines, indexing="ij"), -1).reshape(-1, 3)


_CORNERS = block((-1, -1, -1), (1, 1, 1), 2.0)
_GRID = block((-1, -1, -1), (1, 1, 1), 0.34)
