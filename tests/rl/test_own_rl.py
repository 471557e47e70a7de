"""Objectives, advantages and rewards from a user's file, as docs/rl.md shows them: they learn in
both placements, and those that compute the same as built-in ones learn the same to the bit."""

import re
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import load_policy
from models.config import from_json, to_json
from rl.advantages import ADVANTAGES, ValuedEpisode
from rl.checks import check_named
from rl.config import ColocatedConfig, FlowConfig, ObjectiveConfig, RlConfig, RolloutConfig
from rl.device.placement import OnDevice
from rl.host.experience import micro_batches
from rl.host.placement import OnHost
from rl.objectives import advantage_of, objective
from rl.rewards import reward_of
from tests.helpers.models.tiny_policy import tiny_policy
from tests.helpers.rl.gaussian import packed, ticket
from tests.helpers.rl.point import SUITE
from tests.helpers.rl.points import HOST, POINTS, open_slots, save_policy

DEVICE = RlConfig(
    learner_steps=4,
    placement="colocated",
    flow=FlowConfig(euler_steps=2),
    rollout=RolloutConfig(replan_steps=3),
    colocated=ColocatedConfig(envs=8, unroll=2),
)
GUIDE = Path(__file__).parents[2] / "docs/rl.md"
COPIES = """
from rl.advantages import ADVANTAGES
from rl.objectives import ppo as soft

one_step = ADVANTAGES["gae"]

def both(suite, reached):
    return reached
"""
WRONG = """
def soft(whole, step, stale, advantage, config):
    return whole

one_step = "gae"

def both(suite, reached):
    return reached.sum()
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A function that writes a user's file."""

    def write(code):
        file = tmp_path_factory.mktemp("own") / "mine.py"
        file.write_text(code)
        return file

    return write


@pytest.fixture(scope="module")
def guide(file):
    (code,) = re.findall(r"```python\n(# mine\.py.*?)```", GUIDE.read_text(), re.DOTALL)
    return file(code)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return load_policy(
        save_policy(tmp_path_factory.mktemp("policy")), euler_steps=HOST.flow.euler_steps
    )


@pytest.fixture(scope="module", params=["host", "colocated"])
def learn(request, policy):
    """A function that learns two steps with an objective and a reward, and returns the losses."""

    def run(objective, reward):
        config = HOST if request.param == "host" else DEVICE
        rollout = replace(config.rollout, reward=reward)
        config = replace(config, objective=objective, rollout=rollout)
        rows = []
        with ExitStack() as stack:
            if request.param == "host":
                one = jax.devices()[:1]
                patch = stack.enter_context(pytest.MonkeyPatch.context())
                patch.setattr("rl.host.placement.split_devices", lambda acting: (one, one))
                slots = stack.enter_context(closing(open_slots(("points",), 1, 32)))
                place = OnHost(policy, POINTS, ("points",), [slots], config)
            else:
                place = OnDevice(tiny_policy(), SUITE, ("point",), config)
            place.run(rows.append, lambda: False, 2)
        return [(row["loss"], row["value_loss"]) for row in rows]

    return run


@pytest.fixture(scope="module")
def built_in(learn):
    return learn(ObjectiveConfig(), "success")


def named(file):
    return ObjectiveConfig(name=f"{file}:soft", advantage=f"{file}:one_step")


@pytest.mark.slow
def test_copies_of_the_built_in_ones_learn_the_same_to_the_bit(learn, built_in, file):
    copies = file(COPIES)
    assert learn(named(copies), f"{copies}:both") == built_in


@pytest.mark.slow
def test_the_guides_own_ones_learn_something_else(learn, built_in, guide):
    found = learn(named(guide), f"{guide}:both")
    assert np.isfinite(found).all()
    assert not np.isclose(found, built_in, rtol=1e-3).any()


def test_the_guides_advantage_is_gae_that_looks_one_step_ahead(guide):
    one_step, config = advantage_of(named(guide)), ObjectiveConfig(gae_lambda=0.0)
    rng = np.random.default_rng(0)
    episodes = [ValuedEpisode(*rng.normal(size=(2, n)), final=0.3) for n in (1, 4)]
    gae = ADVANTAGES["gae"]
    pairs = zip(one_step.episodes(episodes, config), gae.episodes(episodes, config), strict=True)
    for found, wanted in pairs:
        np.testing.assert_allclose(found, wanted, rtol=1e-12)
    chunks = rng.normal(size=(3, 5, 2)).astype(np.float32)
    ended = rng.random((5, 2)) < 0.3
    found = one_step.on_device(*chunks, ended, config)
    wanted = gae.on_device(*chunks, ended, config)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_what_returns_something_else_is_refused_by_its_option(file):
    wrong = file(WRONG)
    with pytest.raises(ValueError, match=r"one_step', which is str; it must be an rl\.advantages"):
        advantage_of(named(wrong))
    steps = np.zeros(3, np.float32)
    with pytest.raises(ValueError, match=r"rollout.reward is .*both', .* the shape \(\) for steps"):
        reward_of(f"{wrong}:both")(steps, steps)
    drawn, each = jnp.zeros((2, 3, 1)), jnp.zeros(2)
    rest = drawn, drawn, each, drawn == 0, each, jnp.zeros(2, int)
    with pytest.raises(ValueError, match=r"objective.name is .*soft', whose function returns"):
        objective(named(wrong), *rest)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("objective.name", lambda name: {"objective": ObjectiveConfig(name=name)}),
        ("objective.advantage", lambda name: {"objective": ObjectiveConfig(advantage=name)}),
        ("rollout.reward", lambda name: {"rollout": RolloutConfig(reward=name)}),
    ],
)
def test_a_name_that_is_nowhere_is_refused_before_anything_runs(field, change, file):
    with pytest.raises(ValueError, match=f"{field} is 'best'; choose one of .*, or give path/to"):
        change("best")
    mine = file("")
    with pytest.raises(ValueError, match=r"mine\.py has no 'best'"):
        check_named(RlConfig(**change(f"{mine}:best")))
    with pytest.raises(FileNotFoundError, match=r"nowhere\.py: no such file"):
        check_named(RlConfig(**change("nowhere.py:best")))


def test_a_config_that_names_a_file_does_not_run_it(file):
    """A saved config may come from anyone."""
    mine = file("raise SystemExit")
    rollout = RolloutConfig(reward=f"{mine}:both")
    config = RlConfig(objective=named(mine), rollout=rollout)
    assert from_json(RlConfig, to_json(config)) == config
    with pytest.raises(SystemExit):
        check_named(config)


def test_an_advantage_that_is_not_for_a_device_is_refused_there(file):
    mine = file("from rl.advantages import Advantage\nmine = Advantage(lambda episodes, c: [])")
    objective = ObjectiveConfig(advantage=f"{mine}:mine")
    check_named(RlConfig(objective=objective))
    with pytest.raises(ValueError, match="an Advantage of yours with on_device"):
        check_named(RlConfig(placement="colocated", objective=objective))


def test_advantages_of_another_number_than_decisions_are_refused(file):
    mine = file("from rl.advantages import Advantage\nmine = Advantage(lambda episodes, c: [])")
    config = ObjectiveConfig(advantage=f"{mine}:mine")
    with pytest.raises(ValueError, match="does not return an advantage and a target for each"):
        list(micro_batches([ticket(0)], packed, config, 8))
