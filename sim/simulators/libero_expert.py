"""A scripted expert for LIBERO's tasks of putting an object on or into another, opening a drawer,
and turning a knob.

It reads the simulator's own state and takes the cheapest grasp that is free of obstacles and in
reach. Every action is feedback on the current positions of the hand and the object, so that the
expert recovers from disturbances.
"""

from collections.abc import Callable, Generator, Iterator
from functools import partial
from itertools import count
from typing import Any

import numpy as np
from libero_grasps import Grasp, rim_grasps, side_grasps
from libero_scene import (
    UP,
    Scene,
    block,
    highest,
    inside,
    nearest_turn,
    orientation,
    rotation_vector,
)

OPEN, CLOSED = -1.0, 1.0
LARGEST = np.array([1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 1.0])
"""Largest actions: 5 cm for position, and half of the controller's 0.5 rad for rotation."""

_METRES, _RADIANS = 0.05, 0.5
"""Distance and angle of the goal that an action of 1 sets, relative to the hand."""
_GAIN, _TURN_GAIN = 2.0, 1.5
_REACH = 0.73
"""Largest distance from the robot's base of a hand that points down, metres; at 0.77 m the elbow is
straight."""
_HANDLE = np.radians(12)
"""Angle by which a hand that pulls a handle points down: an upright hand would hit the handle
above, a level one the table."""
_BOWL, _PLATE = np.radians(160), np.radians(185)
"""Sides to grip from, seen from above: nearly the robot's side. If the nearest side were taken, it
would alternate between two, and a policy that learns both would close its hand in between."""
_LEAN = np.radians(35)
"""Angle from the vertical of a hand that takes a bowl from below an open drawer."""


class Expert:
    """Actions of an episode, one after another.

    Args:
      env: LIBERO's environment at the episode's start, whose goal is a single predicate.
    """

    def __init__(self, env: Any) -> None:
        self.scene = Scene(env)
        self.goal, self.target, *place = env.env.parsed_problem["goal_state"][0]
        self.drawer = next(
            (name for name in (self.target, *place) if name in self.scene.drawers), None
        )
        self.into = False
        """True for a container, over which the object is released; otherwise it is set down."""
        if place:
            self.into, self.place = self._destination(*place)
        now = self.scene.hand()[1][:, 0]
        self.turned = orientation(nearest_turn(now, now)[0])
        self.actions = self._episode()

    def action(self) -> np.ndarray:
        """The next action [7]: position, rotation, gripper."""
        return next(self.actions)

    def _destination(self, place: str) -> tuple[bool, Callable[[], np.ndarray]]:
        """True if the object is released over its place, and a function that gives the target: on
        or in another object, in a drawer or a basket, or on a surface, near its middle and as low
        as possible."""
        if place in self.scene.roots:
            into = "bowl" in place
            return into, lambda: self.scene.pose(place)[0] + (0.10 if into else 0.008) * UP
        site = self.scene.data.site(place)
        if place == self.drawer:
            return False, lambda: site.xpos - 0.015 * UP
        if self.goal == "in":
            return True, lambda: site.xpos + 0.06 * UP
        normal = site.xmat.reshape(3, 3) @ UP  # along a tilted rack's slope
        return False, lambda: site.xpos + 0.05 * normal - 0.06 * UP

    def _episode(self) -> Iterator[np.ndarray]:
        while self.drawer is not None and not self.scene.is_open(self.drawer):
            yield from self._pull(self.drawer)
        while self.goal == "turnon":
            yield from self._turn(self.target)
        for attempt in count():
            for _ in range(8):
                if self.scene.moves(self.target):
                    yield self._towards(self.scene.hand()[0], OPEN)
            grasps = self._grasps()
            if not grasps:
                yield self._towards(self.scene.hand()[0], OPEN)
                continue
            grasp = grasps[3 * attempt % len(grasps)]
            self.turned = orientation(grasp.axis, grasp.back)
            yield from self._approach(grasp)
            yield from self._reach(partial(self._grip, grasp), 0.01, 0.8)
            before = self.scene.pose(self.target)[0][2]
            if "plate" in self.target:
                yield from self._slide()
            else:
                yield from self._close_and_lift(grasp)
            if self.scene.pose(self.target)[0][2] > before + 0.03:
                held = yield from self._carry()
                if held and not self.into:
                    yield from self._lower()
            yield from self._release()

    def _pull(self, drawer: str) -> Iterator[np.ndarray]:
        """Grips a drawer's handle from in front and pulls until the drawer is open."""
        out = self.scene.out(drawer)
        back = np.cos(_HANDLE) * out + np.sin(_HANDLE) * UP
        ways = [orientation(up, back) for up in (UP, -UP)]
        now = self.scene.hand()[1]
        self.turned = max(ways, key=lambda way: float(np.trace(way.T @ now)))
        handle = partial(self.scene.handle, drawer)
        yield from self._take(handle, 0.12 * back)
        for _ in range(60):
            lost = np.linalg.norm(handle() - self.scene.hand()[0]) > 0.03
            if lost or self.scene.is_open(drawer, 0.005):
                break
            yield self._towards(handle() + 0.05 * out, CLOSED)
        yield from self._release(back)

    def _turn(self, name: str) -> Iterator[np.ndarray]:
        """Grips a knob across its ridge and turns it by a quarter."""
        at, ridge = self.scene.knob(name)
        narrow = min(side_grasps(ridge - at, np.eye(3)), key=lambda found: found[1])[0].axis
        axis = nearest_turn(narrow, self.scene.hand()[1][:, 0])[0]
        self.turned = orientation(axis)
        yield from self._take(lambda: at, 0.08 * UP)
        for step in range(30):
            angle = min(0.05 * step, np.pi / 2)
            self.turned = orientation(np.cos(angle) * axis + np.sin(angle) * np.cross(UP, axis))
            yield self._towards(at, CLOSED)
        yield from self._release()

    def _take(self, at: Callable[[], np.ndarray], before: np.ndarray) -> Iterator[np.ndarray]:
        """Closes the fingers at a point that the hand reaches from another point beside it."""
        yield from self._reach(lambda: at() + before, 0.02)
        yield from self._reach(at, 0.01, 0.6)
        yield from self._close(at)

    def _slide(self) -> Iterator[np.ndarray]:
        """Slides a plate over the table by its rim: across, past the objects there, then along."""
        hold, at = self.scene.hand()[0], self.scene.pose(self.target)[0]
        goal = self.place() + np.clip(at - self.place(), -0.02, 0.02)
        yield from self._close(lambda: hold)
        for _ in range(90):
            hand, at = self.scene.hand()[0], self.scene.pose(self.target)[0]
            if np.linalg.norm((at - hand)[:2]) > 0.10:
                break
            along, across = (goal - at)[:2]
            way = np.array([along * (abs(across) < 0.05), across])
            yield self._towards(np.array([*hand[:2] + way, hold[2]]), CLOSED, 0.7)

    def _grasps(self) -> list[Grasp]:
        """Possible grasps, the best first."""
        position, rotation = self.scene.pose(self.target)
        points = (self.scene.points(self.target) - position) @ rotation
        if "plate" in self.target:
            found = rim_grasps(points, rotation, _PLATE)
        elif "bowl" in self.target:
            found = rim_grasps(points, rotation, _BOWL, _LEAN if self.drawer else 0.0)
        else:
            found = side_grasps(points, rotation)
        hand, turned = self.scene.hand()
        obstacles, place = self.scene.boxes(self.target), self.place()
        costs, grasps = [], []
        for grasp, worse in found:
            at = position + rotation @ grasp.point
            axis, turn = nearest_turn(grasp.axis, turned[:, 0])
            frame = orientation(axis, grasp.back).T * [[1.0], [1.0], [-1.0]]
            ends = np.stack([at, place + at - position])[:, :2] - self.scene.base[:2]
            beyond = max(np.linalg.norm(ends, axis=1).max() - _REACH, 0.0)
            costs.append(
                0.3 * inside(at + _HAND @ frame, obstacles, 0.004)
                + turn
                + np.linalg.norm((at - hand)[:2])
                + 40.0 * beyond
                + worse
            )
            grasps.append(grasp._replace(axis=axis))
        return [grasps[i] for i in np.argsort(costs, kind="stable")]

    def _approach(self, grasp: Grasp) -> Iterator[np.ndarray]:
        """Moves sideways at a safe height, then to 5 cm before the grasp."""
        at = self._grip(grasp)
        safe = max(highest(self.scene.boxes(), self.scene.hand()[0], at, 0.06) + 0.03, at[2] + 0.07)
        for _ in range(90):
            hand = self.scene.hand()[0]
            at = self._grip(grasp) + 0.05 * grasp.back
            away = float(np.linalg.norm((at - hand)[:2]))
            askew = np.linalg.norm(self._askew())
            if away < 0.012 and askew < 0.12 and hand[2] < at[2] + 0.04:
                return
            height = at[2]
            if away > 0.03:
                height = max(safe, min(hand[2], at[2] + 0.02 + away))
            yield self._towards(np.array([*at[:2], height]), OPEN)

    def _reach(
        self, at: Callable[[], np.ndarray], near: float, fastest: float = 1.0
    ) -> Iterator[np.ndarray]:
        """Moves with an open hand to a point, or as far as the hand gets."""
        before, stuck = np.full(3, np.inf), 0
        for _ in range(40):
            hand = self.scene.hand()[0]
            error = (at() - hand) / [1.0, 1.0, 0.6]
            askew = np.linalg.norm(self._askew())
            stuck = stuck + 1 if np.linalg.norm(hand - before) < 0.001 else 0
            if stuck > 4 or (np.linalg.norm(error) < near and askew < 0.15):
                return
            before = hand
            yield self._towards(at(), OPEN, fastest)

    def _close(self, at: Callable[[], np.ndarray]) -> Iterator[np.ndarray]:
        for _ in range(10):
            yield self._towards(at(), CLOSED)

    def _close_and_lift(self, grasp: Grasp) -> Iterator[np.ndarray]:
        hold = self.scene.hand()[0]
        yield from self._close(lambda: hold)
        aside = (grasp.back - UP * grasp.back[2]) * 0.16
        if aside.any():  # from below the drawer
            for _ in range(15):
                yield self._towards(hold + aside, CLOSED)
        hold = self.scene.hand()[0]
        for _ in range(25):
            if self.scene.hand()[0][2] > hold[2] + 0.06:
                return
            yield self._towards(hold + 0.08 * UP, CLOSED)

    def _carry(self) -> Generator[np.ndarray, None, bool]:
        """Moves over the place, above obstacles; returns whether the object is still held."""
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
        """Moves down until the object is there or rests on something."""
        place, before, stuck = self.place(), 1e9, 0
        for _ in range(40):
            hand, at = self.scene.hand()[0], self.scene.pose(self.target)[0]
            drop = self.scene.points(self.target)[:, 2].min() - place[2]
            stuck = stuck + 1 if before - drop < 0.001 else 0
            if drop < 0.006 or stuck > 3:
                return
            before = drop
            yield self._towards(np.array([*(hand + place - at)[:2], hand[2] - drop]), CLOSED, 0.5)

    def _release(self, back: np.ndarray = UP) -> Iterator[np.ndarray]:
        hold = self.scene.hand()[0]
        for step in range(18):
            yield self._towards(hold + (0.0 if step < 6 else 0.08) * back, OPEN)

    def _grip(self, grasp: Grasp) -> np.ndarray:
        position, rotation = self.scene.pose(self.target)
        return position + rotation @ grasp.point

    def _askew(self) -> np.ndarray:
        """Rotation that the hand still has to make, axis times angle (radians)."""
        return rotation_vector(self.turned @ self.scene.hand()[1].T)

    def _towards(self, goal: np.ndarray, gripper: float, fastest: float = 1.0) -> np.ndarray:
        """Action that moves the hand to a position while it rotates to the grasp's axis."""
        move = (goal - self.scene.hand()[0]) * (_GAIN / _METRES)
        move *= fastest / max(np.abs(move).max(), fastest)
        turn = self._askew() * (_TURN_GAIN / _RADIANS)
        return np.clip(np.concatenate([move, turn, [gripper]]), -LARGEST, LARGEST)


_HAND = np.concatenate(
    [
        block((-0.05, -0.011, -0.011), (-0.036, 0.011, 0.06), 0.008),
        block((0.036, -0.011, -0.011), (0.05, 0.011, 0.06), 0.008),
        block((-0.105, -0.033, 0.033), (0.105, 0.033, 0.20), 0.016),
    ]
)
"""Points of the open hand, fingers and palm: along the fingers' axis, across it, and up."""
