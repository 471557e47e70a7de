"""Geometry of LIBERO's expert, and what its hand does, without LIBERO."""

import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

import sim

sys.path.append(str(Path(sim.__file__).parent / "simulators"))  # where simulators' processes start

from libero_expert import LARGEST, Expert
from libero_grasps import rim_grasps, side_grasps
from libero_scene import (
    UP,
    Box,
    highest,
    inside,
    nearest_turn,
    orientation,
    rotation_vector,
)

sys.path.pop()  # a simulator's file must not pass for its suite's package

CRATE = Box(np.array([0.5, 0.0, 0.1]), np.eye(3), np.array([0.1, 0.2, 0.1]))
SIDE = np.radians(160)


def turned(axis: list[float], angle: float) -> np.ndarray:
    x, y, z = np.asarray(axis) / np.linalg.norm(axis)
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    return np.eye(3) + np.sin(angle) * cross + (1 - np.cos(angle)) * cross @ cross


def bowl() -> np.ndarray:
    """Points of a bowl, 5 cm high, whose rim has a radius of 5.4 cm."""
    angles = np.linspace(0, 2 * np.pi, 72, endpoint=False)
    circle = np.stack([np.cos(angles), np.sin(angles), np.zeros(72)], 1)
    return np.concatenate([0.03 * circle, 0.054 * circle + [0, 0, 0.05]])


@pytest.mark.parametrize("angle", [0.0, 1e-4, 0.3, 3.0])
def test_a_rotation_vector_is_axis_times_angle(angle):
    axis = np.array([1.0, -2.0, 0.5])
    expected = axis / np.linalg.norm(axis) * angle
    np.testing.assert_allclose(rotation_vector(turned([1, -2, 0.5], angle)), expected, atol=1e-9)


def test_a_hand_that_points_down_is_a_rotation_with_its_fingers_along_the_axis():
    hand = orientation(np.array([0.6, 0.8, 0.0]))
    np.testing.assert_allclose(hand @ hand.T, np.eye(3), atol=1e-12)
    assert np.linalg.det(hand) == pytest.approx(1.0)
    np.testing.assert_allclose(hand[:, 0], [0.6, 0.8, 0.0])
    np.testing.assert_allclose(hand[:, 2], [0.0, 0.0, -1.0])


def test_a_hand_that_leans_closes_its_fingers_as_nearly_along_the_axis_as_it_can():
    back = np.array([0.6, 0.0, 0.8])
    hand = orientation(np.array([1.0, 0.0, 0.0]), back)
    np.testing.assert_allclose(hand @ hand.T, np.eye(3), atol=1e-12)
    assert np.linalg.det(hand) == pytest.approx(1.0)
    np.testing.assert_allclose(hand[:, 0], [0.8, 0.0, -0.6], atol=1e-12)
    np.testing.assert_allclose(hand[:, 2], -back)


def test_the_hand_turns_by_a_quarter_at_most():
    now = np.array([0.0, 1.0, 0.0])
    axis, turn = nearest_turn(np.array([0.1, -1.0, 0.0]), now)
    assert turn == pytest.approx(np.arctan(0.1))
    assert axis @ now > 0.99


def test_points_are_inside_boxes_as_they_are_turned():
    points = np.array([[0.5, 0.0, 0.1], [0.5, 0.19, 0.1], [0.5, 0.205, 0.1]])
    assert inside(points, [CRATE], 0.0) == 2
    assert inside(points, [CRATE], 0.01) == 3
    assert inside(points, [CRATE._replace(axes=turned([0, 0, 1], np.pi / 2))], 0.0) == 1
    assert inside(points, [], 0.0) == 0


def test_what_stands_beside_the_way_is_not_in_it():
    a, b = np.array([0.0, 0.0, 0.3]), np.array([1.0, 0.0, 0.3])
    assert highest([CRATE], a, b, 0.05) == pytest.approx(0.2)
    aside = np.array([0.0, 0.5, 0.0])
    assert highest([CRATE], a + aside, b + aside, 0.05) == -np.inf
    assert highest([], a, b, 0.05) == -np.inf


def test_a_bowl_is_gripped_at_its_rim_with_the_fingers_across_the_wall():
    grasps = rim_grasps(bowl(), np.eye(3), SIDE)
    assert len(grasps) == 36
    for grasp, _ in grasps:
        assert np.linalg.norm(grasp.point[:2]) == pytest.approx(0.049, abs=1e-3)
        assert grasp.point[2] == pytest.approx(0.032, abs=1e-6)
        assert abs(grasp.point[:2] @ grasp.axis[:2]) == pytest.approx(0.049, abs=1e-3)


def test_an_upright_bowl_is_gripped_from_the_side_that_is_preferred_however_it_is_turned():
    for turn in (0.0, 1.0, 3.0):
        rotation = turned([0, 0, 1], turn)
        grasps = rim_grasps(bowl(), rotation, SIDE)
        best = rotation @ min(grasps, key=lambda found: found[1])[0].point
        assert np.degrees(np.arctan2(best[1], best[0])) == pytest.approx(160, abs=1e-6)
        costs = [cost for _, cost in sorted(grasps, key=lambda found: found[1])]
        assert costs[0] == pytest.approx(0.0, abs=1e-9)
        assert np.diff(costs[::2]).min() > 0.1


def test_a_hand_leans_away_from_the_bowl_that_it_grips():
    for grasp, _ in rim_grasps(bowl(), np.eye(3), SIDE, lean=0.5):
        assert grasp.back @ UP == pytest.approx(np.cos(0.5))
        outwards = grasp.point * [1.0, 1.0, 0.0] / np.linalg.norm(grasp.point[:2])
        assert grasp.back @ outwards == pytest.approx(np.sin(0.5))


def test_a_flat_plates_rim_is_gripped_above_the_table():
    plate = bowl() * [1.2, 1.2, 0.4]
    for grasp, _ in rim_grasps(plate, np.eye(3), SIDE):
        assert grasp.point[2] == pytest.approx(0.012)


def test_a_tilted_bowls_wall_is_steep_only_along_the_axis_of_its_tilt():
    grasps = rim_grasps(bowl(), turned([1, 0, 0], np.radians(50)), SIDE)
    best = min(grasps, key=lambda found: found[1])[0]
    assert abs(best.axis[0]) == pytest.approx(1.0)
    upright = rim_grasps(bowl(), np.eye(3), SIDE)
    steeper = [cost - other for (_, cost), (_, other) in zip(grasps, upright, strict=True)]
    assert max(steeper) == pytest.approx(15 * np.sin(np.radians(50)), rel=0.02)
    assert min(steeper) == pytest.approx(0.0, abs=1e-6)


def test_a_carton_is_gripped_across_its_narrow_side_if_that_fits():
    corners = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (0, 1)])
    grasps = side_grasps(corners * [0.02, 0.06, 0.1], np.eye(3))
    best, cost = min(grasps, key=lambda found: found[1])
    assert abs(best.axis[0]) == pytest.approx(1.0)
    assert cost == pytest.approx(5 * 0.04)
    np.testing.assert_allclose(best.point, [0.0, 0.0, 0.07], atol=1e-12)
    assert not side_grasps(corners * [0.06, 0.06, 0.1], np.eye(3))


def test_a_carton_is_carried_over_the_basket_by_a_hand_that_does_as_it_is_told():
    """A hand and a carton that move at once; the carton goes along while the gripper is closed."""
    scene = Puppet()
    expert = Expert.__new__(Expert)
    expert.scene, expert.goal, expert.target = scene, "in", "carton"
    expert.drawer, expert.into, expert.turned = None, True, scene.turn
    basket = np.array([0.2, 0.25, 0.06])
    expert.place = lambda: basket
    expert.actions = expert._episode()
    for action in islice(expert.actions, 120):
        assert (np.abs(action) <= LARGEST).all()
        scene.act(action)
        if action[6] < 0 and scene.carried:
            break
    assert scene.carried
    assert np.linalg.norm((scene.carton - basket)[:2]) < 0.01


def test_a_drawer_is_pulled_open_by_its_handle_and_let_go():
    scene = Cabinet()
    expert = Expert.__new__(Expert)
    expert.scene = scene
    expert.turned = orientation(np.array([0.0, 1.0, 0.0]))
    for action in expert._pull("drawer"):
        assert (np.abs(action) <= LARGEST).all()
        scene.act(action)
    assert scene.is_open("drawer")
    assert scene.at[1] > scene.handle("drawer")[1] + 0.05
    assert not scene.carried


class Puppet:
    """A scene without physics, with a crate between carton and basket."""

    def __init__(self) -> None:
        self.at, self.turn = np.array([-0.2, 0.0, 0.4]), orientation(np.array([0.0, 1.0, 0.0]))
        self.carton, self.carried = np.array([0.1, -0.1, 0.0]), False
        self.base = np.array([-0.4, 0.0, 0.0])
        self.roots = {"carton": 1}

    def act(self, action: np.ndarray) -> None:
        move = action[:3] * 0.013
        near = np.linalg.norm(self.at - self.carton - [0, 0, 0.07]) < 0.02
        if action[6] > 0 and (near or self.carried):
            self.carried = True
            self.carton = self.carton + move
            assert inside(self.carton[None], self.boxes("carton"), 0.0) == 0
        self.at = self.at + move
        angle = np.linalg.norm(action[3:6])
        if angle > 1e-9:
            self.turn = turned(list(action[3:6] / angle), 0.15 * angle) @ self.turn

    def hand(self) -> tuple[np.ndarray, np.ndarray]:
        return self.at, self.turn

    def pose(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        return self.carton, np.eye(3)

    def moves(self, name: str) -> bool:
        return False

    def points(self, name: str) -> np.ndarray:
        corners = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (0, 1)])
        return self.carton + corners * [0.02, 0.05, 0.1]

    def boxes(self, *without: str) -> list[Box]:
        return [Box(np.array([0.15, 0.08, 0.1]), np.eye(3), np.array([0.1, 0.03, 0.1]))]


class Cabinet(Puppet):
    """A drawer whose handle goes along with closed fingers that are around it."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = 0.0

    def act(self, action: np.ndarray) -> None:
        near = np.linalg.norm(self.at - self.handle("drawer")) < 0.015
        self.carried = bool(action[6] > 0 and (near or self.carried))
        if self.carried:
            self.opened = float(np.clip(self.opened + action[1] * 0.013, 0.0, 0.16))
        super().act(np.array([*action[:6], -1.0]))

    def out(self, name: str) -> np.ndarray:
        return np.array([0.0, 1.0, 0.0])

    def handle(self, name: str) -> np.ndarray:
        return np.array([0.05, self.opened - 0.1, 0.15])

    def is_open(self, name: str, more: float = 0.0) -> bool:
        return self.opened > 0.14 + more
