"""A scripted expert for LIBERO's tasks of one object that is picked up and put on or into another.

It reads the simulator's own state: a bowl is taken by its rim, from one side wherever that will do,
anything else across its narrowest side, by the nearest grasp; both free of obstacles and in reach.
Every action is a feedback on where the hand and the object are then, so that a disturbed expert
finds back.
"""

from collections.abc import Callable, Generator, Iterator
from itertools import count
from typing import Any, NamedTuple

import numpy as np

OPEN, CLOSED = -1.0, 1.0
LARGEST = np.array([1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 1.0])
"""Greatest actions: of position 5 cm, of rotation half of the controller's 0.5 rad."""

_METRES, _RADIANS = 0.05, 0.5
"""Goals that an action of 1 sets, from where the hand is."""
_GAIN, _TURN_GAIN = 2.0, 1.5
_REACH = 0.73
"""Greatest distance of a hand that points down from the robot's base; at 0.77 m the elbow is
straight."""
_RIM = 0.005, 0.018
"""Grip on a rim: inwards from its middle radius and below its top, metres."""
_FROM = np.radians(160)
"""Side of a bowl to grip it from, seen from above: nearly the robot's. Where the nearest side is
taken, it is now one and now the other, and a policy that learns both closes its hand in between."""
_SIDE = 0.03
"""Grip on a body: below its top, metres."""
_WIDEST = 0.074
"""Thickness that the open fingers can take, metres."""
_PLANE, _MESH = 0, 7
"""MuJoCo's mjtGeom."""
_ROBOT = ("robot0", "gripper0", "mount0")


class Box(NamedTuple):
    """An oriented box around a geom."""

    centre: np.ndarray
    axes: np.ndarray
    """Directions of its edges, in columns [3, 3]."""
    half: np.ndarray
    """Half lengths of its edges [3], metres."""


class Grasp(NamedTuple):
    """A place to grip an object, the hand pointing down."""

    point: np.ndarray
    """Point between the fingertips, in the object's frame [3]."""
    axis: np.ndarray
    """Horizontal direction along which the fingers close, in the world [3]."""


def rotation_vector(rotation: np.ndarray) -> np.ndarray:
    """Axis times angle (radians) of a rotation matrix by less than half a turn."""
    skew = rotation - rotation.T
    sine = np.array([skew[2, 1], skew[0, 2], skew[1, 0]]) / 2
    length = np.linalg.norm(sine)
    angle = np.arctan2(length, (np.trace(rotation) - 1) / 2)
    return sine * (angle / length) if length > 1e-9 else np.zeros(3)


def pointing_down(axis: np.ndarray) -> np.ndarray:
    """Orientation of a hand that points down with its fingers along a horizontal direction."""
    down = np.array([0.0, 0.0, -1.0])
    return np.stack([axis, np.cross(down, axis), down], axis=1)


def inside(points: np.ndarray, boxes: list[Box], margin: float) -> int:
    """Number of the points [n, 3] that lie in boxes grown by a margin."""
    hit = np.zeros(len(points), bool)
    for box in boxes:
        hit |= (np.abs((points - box.centre) @ box.axes) < box.half + margin).all(1)
    return int(hit.sum())


def highest(boxes: list[Box], a: np.ndarray, b: np.ndarray, radius: float) -> float:
    """Height of the highest point of boxes within a radius of the way from a to b, seen from
    above; minus infinity if there is none."""
    if not boxes:
        return -np.inf
    points = np.concatenate([box.centre + (_GRID * box.half) @ box.axes.T for box in boxes])
    way = b[:2] - a[:2]
    along = np.clip((points[:, :2] - a[:2]) @ way / max(way @ way, 1e-9), 0, 1)
    near = np.linalg.norm(points[:, :2] - a[:2] - along[:, None] * way, axis=1) < radius
    return points[near, 2].max(initial=-np.inf)


def rim_grasps(points: np.ndarray, rotation: np.ndarray) -> list[tuple[Grasp, float]]:
    """Grasps round the rim of a bowl, by points of it in its own frame and its orientation, each
    with a cost: of the slope of the wall, 0 where it is vertical and 1 where it lies, and of the
    angle (radians) from the side that is preferred."""
    rim = points[points[:, 2] > points[:, 2].max() - 0.006]
    centre = (rim.min(0) + rim.max(0)) / 2
    radius = np.ptp(rim, axis=0)[:2].mean() / 2 - _RIM[0]
    made = []
    for angle in np.radians(np.arange(0, 360, 10)):
        outwards = rotation.T @ [np.cos(angle), np.sin(angle), 0.0]
        outwards[2] = 0.0
        outwards /= np.linalg.norm(outwards)
        point = centre + outwards * radius - [0.0, 0.0, _RIM[1]]
        axis = np.array([np.cos(angle), np.sin(angle), 0.0])
        slope = abs((rotation @ outwards)[2])
        away = abs((angle - _FROM + np.pi) % (2 * np.pi) - np.pi)
        made.append((Grasp(point, axis), float(15.0 * slope + 3.0 * away)))
    return made


def side_grasps(points: np.ndarray, rotation: np.ndarray) -> list[tuple[Grasp, float]]:
    """Grasps across an upright object that fit between the fingers, each with a cost of its
    thickness."""
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
            point[2] = max(top - _SIDE, low + 0.012)
            made.append((Grasp(rotation.T @ point, axis), 5.0 * float(np.ptp(along))))
    return made


def nearest_turn(axis: np.ndarray, now: np.ndarray) -> tuple[np.ndarray, float]:
    """The direction or its opposite, which are one to the fingers, whichever is nearer to the
    present one; and how far the hand turns to it (radians)."""
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
        root = np.arange(self.model.nbody)
        for body in range(1, self.model.nbody):  # parents come before their children
            if body not in self.roots.values():
                root[body] = root[self.model.body_parentid[body]]
        of_geom = root[self.model.geom_bodyid]
        collides = (self.model.geom_contype | self.model.geom_conaffinity) > 0
        collides &= self.model.geom_type != _PLANE
        self.geoms = {
            name: np.flatnonzero(collides & (of_geom == body)) for name, body in self.roots.items()
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
        """Tells an object that has not come to rest."""
        return bool(np.linalg.norm(self.data.cvel[self.roots[name]]) > 0.03)

    def points(self, name: str) -> np.ndarray:
        """Vertices and corners [n, 3] of what collides of an object."""
        return np.concatenate([self._points(int(geom)) for geom in self.geoms[name]])

    def boxes(self, *without: str) -> list[Box]:
        """Boxes round the geoms of all objects and furniture but these."""
        others = [geoms for name, geoms in self.geoms.items() if name not in without]
        return [self._box(int(geom)) for geom in np.concatenate(others)] if others else []

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


class Expert:
    """Actions of an episode, one after another.

    Args:
      env: LIBERO's environment at the episode's start; its goal is to have one thing on or in
        another.
    """

    def __init__(self, env: Any) -> None:
        self.scene = Scene(env)
        _, self.target, place = env.env.parsed_problem["goal_state"][0]
        self.bowl = "bowl" in self.target
        self.into = place not in self.scene.roots
        """Into a container, over which the object is let go; otherwise it is set down."""
        self.place = self._over_site(place) if self.into else self._on_top_of(place)
        self.axis = np.array([0.0, 1.0, 0.0])
        self.actions = self._episode()

    def action(self) -> np.ndarray:
        """The next action [7]: position, rotation, gripper."""
        return next(self.actions)

    def _episode(self) -> Iterator[np.ndarray]:
        now = self.scene.hand()[1][:, 0]
        self.axis, _ = nearest_turn(now, now)
        for attempt in count():
            for _ in range(8):
                if self.scene.moves(self.target):
                    yield self._towards(self.scene.hand()[0], OPEN)
            grasps = self._grasps()
            if not grasps:
                yield self._towards(self.scene.hand()[0], OPEN)
                continue
            grasp = grasps[3 * attempt % len(grasps)]
            self.axis = grasp.axis
            yield from self._approach(grasp)
            yield from self._descend(grasp)
            before = self.scene.pose(self.target)[0][2]
            yield from self._close_and_lift()
            if self.scene.pose(self.target)[0][2] > before + 0.03:
                held = yield from self._carry()
                if held and not self.into:
                    yield from self._lower()
            yield from self._release()

    def _grasps(self) -> list[Grasp]:
        """Possible grasps, the best first."""
        position, rotation = self.scene.pose(self.target)
        points = (self.scene.points(self.target) - position) @ rotation
        found = (rim_grasps if self.bowl else side_grasps)(points, rotation)
        hand, turned = self.scene.hand()
        obstacles, place = self.scene.boxes(self.target), self.place()
        costs, grasps = [], []
        for grasp, worse in found:
            at = position + rotation @ grasp.point
            axis, turn = nearest_turn(grasp.axis, turned[:, 0])
            frame = np.array([axis, [-axis[1], axis[0], 0.0], [0.0, 0.0, 1.0]])
            ends = np.stack([at, place + at - position])[:, :2] - self.scene.base[:2]
            beyond = max(np.linalg.norm(ends, axis=1).max() - _REACH, 0.0)
            costs.append(
                0.3 * inside(at + _HAND @ frame, obstacles, 0.004)
                + turn
                + np.linalg.norm((at - hand)[:2])
                + 40.0 * beyond
                + worse
            )
            grasps.append(Grasp(grasp.point, axis))
        return [grasps[i] for i in np.argsort(costs, kind="stable")]

    def _approach(self, grasp: Grasp) -> Iterator[np.ndarray]:
        """Sideways at a safe height, then down to 5 cm above."""
        at = self._grip(grasp)
        safe = max(highest(self.scene.boxes(), self.scene.hand()[0], at, 0.06) + 0.03, at[2] + 0.07)
        for _ in range(90):
            hand, turned = self.scene.hand()
            at = self._grip(grasp)
            away = float(np.linalg.norm((at - hand)[:2]))
            askew = np.linalg.norm(rotation_vector(pointing_down(self.axis) @ turned.T))
            if away < 0.012 and askew < 0.12 and hand[2] < at[2] + 0.09:
                return
            height = at[2] + 0.05
            if away > 0.03:
                height = max(safe, min(hand[2], at[2] + 0.07 + away))
            yield self._towards(np.array([*at[:2], height]), OPEN)

    def _descend(self, grasp: Grasp) -> Iterator[np.ndarray]:
        """Down to the grasp, or as far as the hand gets."""
        before, stuck = self.scene.hand()[0] + 1.0, 0
        for _ in range(40):
            hand, _ = self.scene.hand()
            error = self._grip(grasp) - hand
            stuck = stuck + 1 if np.linalg.norm(hand - before) < 0.001 else 0
            if stuck > 4 or (abs(error[2]) < 0.006 and np.linalg.norm(error[:2]) < 0.01):
                return
            before = hand
            yield self._towards(hand + error, OPEN, 0.8)

    def _close_and_lift(self) -> Iterator[np.ndarray]:
        hold = self.scene.hand()[0]
        for _ in range(10):
            yield self._towards(hold, CLOSED)
        for _ in range(25):
            if self.scene.hand()[0][2] > hold[2] + 0.06:
                return
            yield self._towards(hold + _up(0.08), CLOSED)

    def _carry(self) -> Generator[np.ndarray, None, bool]:
        """Over the place, above what is on the way; returns whether the object is still held."""
        others, place = self.scene.boxes(self.target), self.place()
        hangs = self.scene.points(self.target)[:, 2].min() - self.scene.hand()[0][2]
        clear = highest(others, self.scene.pose(self.target)[0], place, 0.06) + 0.03
        height = max(clear, place[2] + 0.04) - hangs
        below = self.scene.hand()[0][2] - self.scene.pose(self.target)[0][2]
        for _ in range(90):
            hand, at = self.scene.hand()[0], self.scene.pose(self.target)[0]
            error = (place - at)[:2]
            away = float(np.linalg.norm(error))
            if hand[2] - at[2] > below + 0.05:
                return False
            if away < 0.008 and hand[2] < height + 0.03:
                return True
            ahead = at[:2] + error * min(1.0, 0.06 / max(away, 1e-6))
            low = hand[2] + hangs - 0.01
            if hand[2] < height - 0.02 and highest(others, at, ahead, 0.05) > low:
                error = np.zeros(2)
            yield self._towards(np.array([*hand[:2] + error, height]), CLOSED)
        return True

    def _lower(self) -> Iterator[np.ndarray]:
        place = self.place()
        for _ in range(40):
            hand, at = self.scene.hand()[0], self.scene.pose(self.target)[0]
            drop = self.scene.points(self.target)[:, 2].min() - place[2]
            if drop < 0.006:
                return
            yield self._towards(np.array([*(hand + place - at)[:2], hand[2] - drop]), CLOSED, 0.5)

    def _release(self) -> Iterator[np.ndarray]:
        hold = self.scene.hand()[0]
        for step in range(18):
            yield self._towards(hold + _up(0.0 if step < 6 else 0.08), OPEN)

    def _grip(self, grasp: Grasp) -> np.ndarray:
        position, rotation = self.scene.pose(self.target)
        return position + rotation @ grasp.point

    def _towards(self, goal: np.ndarray, gripper: float, fastest: float = 1.0) -> np.ndarray:
        """Action that moves the hand to a position while it turns to the grasp's axis."""
        hand, turned = self.scene.hand()
        move = (goal - hand) * (_GAIN / _METRES)
        move *= fastest / max(np.abs(move).max(), fastest)
        turn = rotation_vector(pointing_down(self.axis) @ turned.T) * (_TURN_GAIN / _RADIANS)
        return np.clip(np.concatenate([move, turn, [gripper]]), -LARGEST, LARGEST)

    def _on_top_of(self, name: str) -> Callable[[], np.ndarray]:
        return lambda: self.scene.pose(name)[0] + _up(0.008)

    def _over_site(self, name: str) -> Callable[[], np.ndarray]:
        site = self.scene.model.site(name).id
        return lambda: self.scene.data.site_xpos[site] + _up(0.06)


def _up(height: float) -> np.ndarray:
    return np.array([0.0, 0.0, height])


def _block(low: tuple[float, ...], high: tuple[float, ...], spacing: float) -> np.ndarray:
    edges = zip(low, high, strict=True)
    lines = [np.linspace(a, b, 1 + max(1, int(np.ceil((b - a) / spacing)))) for a, b in edges]
    return np.stack(np.meshgrid(*lines, indexing="ij"), -1).reshape(-1, 3)


_HAND = np.concatenate(
    [
        _block((-0.05, -0.011, -0.011), (-0.036, 0.011, 0.06), 0.008),
        _block((0.036, -0.011, -0.011), (0.05, 0.011, 0.06), 0.008),
        _block((-0.105, -0.033, 0.033), (0.105, 0.033, 0.20), 0.016),
    ]
)
"""Points of the open hand, fingers and palm: along the fingers' axis, across it, and up."""
_CORNERS = _block((-1, -1, -1), (1, 1, 1), 2.0)
_GRID = _block((-1, -1, -1), (1, 1, 1), 0.34)
