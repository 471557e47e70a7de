"""States that are not this robot's, or in other units: refused where they are far from the training
data, logged where they are unusual, and answered where a robot may well be."""

import logging
from dataclasses import replace

import numpy as np
import pytest

from models import Embodiment, Normalizer, Pi, Policy
from tests.helpers.models.processors import word_processor
from tests.helpers.tools.served import OBSERVATION, client, get, serving
from tools.recipes.presets import TINY
from tools.serving.engine import Engine
from tools.serving.metrics import Metrics
from tools.serving.state_range import distances, training_range

SCALE = Normalizer((0.0, 0.5, 1.0), (1.5, 0.2, 1e-6))
"""A joint, a gripper, and a dim that never moved."""
CAMERAS = ("observation.images.front", "observation.images.wrist")


ARM = Embodiment("arm", CAMERAS, SCALE, Normalizer((0.0,) * 2, (1.0,) * 2))


def make_engine(robot=ARM, **options):
    config = replace(TINY.model, state_dim=14, action_dim=14)
    shape = (config.image_size, config.state_dim, config.action_dim, config.horizon)
    processor = word_processor(
        *shape, "token", tuple(OBSERVATION["prompt"].split()), (robot,), text_limit=32
    )
    policy = Policy(Pi(config), None, processor)
    return Engine(policy, Metrics(), deadline=0, capacity=64, **options)


def read(engine, state, session=None):
    message = {**OBSERVATION, "observation/state": np.array(state)}
    return engine.read(message, session or engine.join(1))


@pytest.mark.parametrize(
    "state",
    [
        [1.5, 0.7, 1.0],
        [-6.0, 1.0, 1.0],
        [0.0, 0.5, 1.001],
        [0.0, 0.5, 0.0],
        [14.0, 2.0, 3.0],
    ],
)
def test_states_in_and_somewhat_beyond_the_training_data_pass(state):
    with make_engine() as engine:
        np.testing.assert_allclose(read(engine, state).state, state)


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ([1e30, 0.5, 1.0], r"dim 0 is 1e\+30.*-1.5..1.5; check its units"),
        ([0.0, -3e38, 1.0], r"dim 1 is -3e\+38.*0.3..0.7"),
        ([0.0, 500.0, 1.0], "dim 1 is 500"),
        ([0.0, 0.5, 1e6], r"dim 2 is 1e\+06.*0.999999..1;"),
    ],
)
def test_a_state_far_from_the_training_data_is_refused_by_dim_value_and_range(state, why):
    with make_engine() as engine, pytest.raises(ValueError, match=why):
        read(engine, state)


def test_the_bound_on_states_can_be_changed_and_turned_off():
    with make_engine(state_range=0) as engine:
        read(engine, [1e30, 0.5, 1.0])
    with make_engine(state_range=2) as engine, pytest.raises(ValueError, match="dim 0 is 4"):
        read(engine, [4.0, 0.5, 1.0])


def test_an_unusual_state_is_logged_once_for_a_client_and_counted(caplog):
    with make_engine() as engine, caplog.at_level(logging.WARNING):
        session = engine.join(7)
        for _ in range(3):
            read(engine, [30.0, 0.5, 1.0], session)
        text = engine.metrics.text()
    assert [record.getMessage() for record in caplog.records] == [
        "client 7: state dim 0 is 30, training data lie about -1.5..1.5"
    ]
    assert 'chiliad_state_distance_bucket{le="10.0"} 0.0' in text
    assert 'chiliad_state_distance_bucket{le="20.0"} 3.0' in text


def test_a_state_is_measured_in_the_units_that_its_adapter_makes_of_it():
    home = np.array([0, -0.96, 1.16, 0, -0.3, 0, 0.5] * 2)
    plain = Embodiment(
        "aloha", CAMERAS, Normalizer.identity(14), Normalizer.identity(14), adapter="aloha"
    )
    robot = replace(plain, state=Normalizer(tuple(plain.converted(home)), (0.2,) * 14))
    turned = np.where(np.isin(np.arange(14), (1, 2, 8, 9)), -home, home)
    with make_engine(robot, state_range=5) as engine:
        read(engine, home)
        with pytest.raises(
            ValueError, match=r"dim 2 is -1.16 \(1.16 in .* adapter 'aloha'\).*-1.36"
        ):
            read(engine, turned)


def test_distances_are_in_half_ranges_and_narrow_dims_count_as_wider():
    np.testing.assert_allclose(distances(SCALE, np.array([3.0, 0.7, 1.15])), [2, 1, 1])
    still = Normalizer((1.0,), (1e-12,))
    np.testing.assert_allclose(distances(still, np.array([1.01])), [1])
    assert training_range(SCALE, 1) == pytest.approx((0.3, 0.7))


def test_a_state_of_1e30_gets_no_chunk_from_a_server():
    with make_engine() as engine, serving(engine) as running, client(running.url) as robot:
        with pytest.raises(ValueError, match="check its units"):
            robot.infer({**OBSERVATION, "observation/state": np.full(3, 1e30)})
        assert 'outcome="bad_input"} 1.0' in get(f"{running.url}/metrics")[1]
