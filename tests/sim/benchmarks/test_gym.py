"""Gymnasium environments behind `Slots`."""

import subprocess
from pathlib import Path

import numpy as np
import pytest

from sim.benchmarks.gym import INSTALL, _words, suite
from sim.processes.interpreters import interpreter
from sim.processes.processes import Processes
from sim.protocol import Outcome, Slots, Start
from sim.suites import load_suite


@pytest.fixture(scope="module")
def python():
    try:
        return interpreter("gym", "gymnasium", INSTALL)
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture
def ours(python, monkeypatch):
    """Puts `registered` on the import path."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


def acted(slots: Slots, start: Start, actions: np.ndarray, film: bool = False) -> list[Outcome]:
    """All that comes of a start and one chunk."""
    slots.begin(0, start)
    outcomes = slots.poll()
    slots.send(0, actions, film)
    outcomes += slots.poll()
    assert [outcome.error for outcome in outcomes] == [None, None]
    return outcomes


@pytest.mark.slow
def test_what_gymnasium_ships_is_seen_as_drawn_and_acted_in_its_units(python):
    pendulum = load_suite("gym:Pendulum-v1")
    assert pendulum.tasks == ("Pendulum-v1",)
    with pendulum.open(pendulum.tasks, 1, 48) as slots:
        assert slots.spec.prompts == (("pendulum",),)
        assert slots.spec.cameras == ("observation.images.render",)
        assert slots.spec.max_steps == 200
        start = Start("Pendulum-v1", pendulum.first_seed)
        first, last = acted(slots, start, np.full((250, 1), 9.0), film=True)
        again, _ = acted(slots, start, np.zeros((1, 1)))
    assert first.observation.images.shape == (1, 48, 48, 3)
    assert first.observation.images.std() > 5
    assert np.array_equal(first.observation.images, again.observation.images)
    np.testing.assert_array_equal(first.observation.state, again.observation.state)
    np.testing.assert_allclose(np.hypot(*first.observation.state[:2]), 1, rtol=1e-5)
    assert last.film.shape == (200, 160, 160, 3)
    assert len(last.reward) == 200
    assert last.truncated
    assert not last.success


def test_a_discrete_action_is_the_greatest_number_and_a_fallen_pole_no_success(python):
    cartpole = suite("CartPole-v1", prompts=("keep the pole up", "balance"))
    with cartpole.open(cartpole.tasks, 1, 16) as slots:
        assert slots.spec.prompts == (("keep the pole up", "balance"),)
        assert len(slots.spec.action_names) == 2
        right, left = (
            acted(slots, Start("CartPole-v1", 0), np.tile(scores, (40, 1)))[1]
            for scores in ([0.1, 0.9], [-0.5, -3.0])
        )
    assert right.terminated
    assert not right.success
    assert right.reward.sum() == len(right.reward) > 5
    assert right.observation.state[1] > 0 > left.observation.state[1]


def test_reaching_the_registered_return_is_success(python):
    swinging = suite("MountainCarContinuous-v0")
    with swinging.open(swinging.tasks, 1, 16) as slots:
        slots.begin(0, Start("MountainCarContinuous-v0", 0))
        [outcome] = slots.poll()
        while not outcome.ended:
            slots.send(0, np.sign(outcome.observation.state[1:])[None])
            [outcome] = slots.poll()
    assert outcome.terminated
    assert outcome.success


def test_pictures_and_numbers_of_nested_dictionaries_are_found(ours):
    seen = suite("registered:Seen-v0", prompts=("push",))
    with seen.open(seen.tasks, 1, 16) as slots:
        assert slots.spec.cameras == (
            "observation.images.pixels.top",
            "observation.images.pixels.wrist",
        )
        numbers = [f"agent_pos_{i}" for i in range(4)]
        assert slots.spec.state_names == (*numbers, "floor_0")
        first, last = acted(slots, Start("registered:Seen-v0", 3), np.full((4, 2), 5.0))
        assert last.success
        assert not last.terminated
    top, wrist = first.observation.images
    assert (top[4:12] == 100).all()
    assert not top[:4].any()
    assert not top[12:].any()
    assert (wrist[..., 0] == 200 * np.kron(np.eye(8), np.ones((2, 2)))).all()
    assert first.observation.state[4] == 2


def test_keys_that_have_dots_name_their_parts(ours):
    seen = suite("registered:Dotted-v0")
    with seen.open(seen.tasks, 1, 8) as slots:
        assert slots.spec.cameras == ("observation.images.observation.images.top",)
        assert slots.spec.state_names == ("observation.a.b_0", "observation.a.b_1")
        first, last = acted(slots, Start("registered:Dotted-v0", 3), np.zeros((1, 2)))
    for outcome in (first, last):
        assert (outcome.observation.images == 7).all()
        assert outcome.observation.state.tolist() == [0.25, 0.5]


@pytest.mark.parametrize(("name", "reaches"), [("Dotted-v0", True), ("Hard-v0", False)])
def test_a_return_is_judged_after_the_last_step_where_no_number_of_steps_is_registered(
    ours, name, reaches
):
    seen = suite(f"registered:{name}")
    with seen.open(seen.tasks, 1, 8) as slots:
        assert slots.spec.max_steps == 1000
        last = acted(slots, Start(f"registered:{name}", 3), np.zeros((1200, 2)))[1]
    assert len(last.reward) == 1000
    assert last.truncated
    assert last.success == reaches


def test_what_cannot_be_observed_or_made_is_named(ours):
    for environment, says in (
        ("registered:Unseen-v0", "expected images"),
        ("NoSuch-v0", "NoSuch"),
    ):
        wrong = suite(environment)
        with pytest.raises(ValueError, match=f"(?s)CHILIAD_GYM_PYTHON.*{says}"):
            wrong.open(wrong.tasks, 1, 16)


def test_pictures_are_averaged_over_areas(python):
    options = {"tasks": ["CartPole-v1"], "size": 8, "prompts": ["balance"]}
    simulator = Path(__file__).parents[3] / "sim" / "simulators" / "gym.py"
    with Processes(simulator, 2, python=python, options=options) as slots:
        both = []
        for slot in range(2):
            slots.begin(slot, Start("CartPole-v1", 0))
            both += slots.poll()
    small = both[0].observation.images[0]
    assert np.array_equal(small, both[1].observation.images[0])
    assert len(np.unique(small[1:7])) > 4  # greys of an edge, not black and white


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ("CartPole-v1", "cart pole"),
        ("gym_pusht:gym_pusht/PushT-v0", "push t"),
        ("ALE/Breakout-v5", "breakout"),
    ],
)
def test_an_id_is_worded(environment, words):
    assert _words(environment) == words


@pytest.mark.slow
def test_pusht_is_seen_as_lerobots_dataset_has_it(python):
    known = subprocess.run([python, "-c", "import gym_pusht"], capture_output=True)
    if known.returncode:
        pytest.skip("gym-pusht is not installed")
    pusht = load_suite("pusht")
    with pusht.open(pusht.tasks, 1, 96) as slots:
        assert slots.spec.cameras == ("observation.image",)
        assert slots.spec.prompts == (("Push the T-shaped block onto the T-shaped target.",),)
        assert (slots.spec.fps, slots.spec.max_steps) == (10, 300)
        assert (len(slots.spec.state_names), len(slots.spec.action_names)) == (2, 2)
        start = Start(pusht.tasks[0], pusht.first_seed)
        first, last = acted(slots, start, np.full((300, 2), 256.0))
    assert first.observation.images.shape == (1, 96, 96, 3)
    assert (first.observation.state > 20).all(), "pixels of the board"
    np.testing.assert_allclose(last.observation.state, 256, atol=40)
    assert len(last.reward) == 300
    assert last.truncated
    assert not last.success
