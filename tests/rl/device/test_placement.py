"""A run that acts and learns on the device, from its beginning and from a checkpoint."""

from contextlib import nullcontext
from dataclasses import replace

import jax
import numpy as np
import pytest
from rich.console import Console

from models.checkpoints import own
from parallel import checkpoint
from parallel.monitor.metrics import read_metrics
from rl.config import ColocatedConfig, FlowConfig, LearnerConfig, RlConfig, RolloutConfig
from rl.device.colocated import Colocated
from rl.device.placement import OnDevice
from rl.learner import Diverged
from tests.helpers.models.tiny_policy import tiny_policy
from tests.helpers.parallel.opened import Run
from tests.helpers.rl.opened import improve
from tests.helpers.rl.point import SUITE as POINT
from tests.helpers.sim.point_world import PointWorld

pytestmark = pytest.mark.slow

CONFIG = RlConfig(
    learner_steps=4,
    placement="colocated",
    flow=FlowConfig(euler_steps=2),
    rollout=RolloutConfig(replan_steps=3),
    learner=LearnerConfig(micro=8),
    colocated=ColocatedConfig(envs=8, unroll=2),
    save_every=2,
)


def test_a_resumed_run_learns_what_the_whole_one_did(tmp_path):
    place = OnDevice(tiny_policy(), POINT, ("point",), CONFIG)
    begun = jax.device_get(place.state()["ema"])
    beginning = jax.tree.map(np.array, place.state()), place.record()

    def run(out, steps, resume=False):
        made = Run(out, {}, {})
        config = replace(CONFIG, learner_steps=steps)
        return improve(lambda: nullcontext(place), made, config, Console(quiet=True), resume=resume)

    assert run(tmp_path / "whole", 4).finished
    place.restore(*beginning)
    assert run(tmp_path / "parts", 2).finished
    place.restore(*beginning)
    assert run(tmp_path / "parts", 4, resume=True).finished
    whole, parts = (learnt(tmp_path / name) for name in ("whole", "parts"))
    assert [row["step"] for row in whole] == [0, 1, 2, 3]
    assert parts == whole
    one, other = (own.restore_params(tmp_path / name) for name in ("whole", "parts"))
    assert jax.tree.all(jax.tree.map(np.array_equal, one, other))
    assert jax.tree.structure(one) == jax.tree.structure(begun)
    assert not jax.tree.all(jax.tree.map(np.array_equal, one, begun))
    place.restore(*beginning)


def test_an_update_that_is_not_finite_is_not_made_and_ends_the_run(tmp_path, monkeypatch):
    place = OnDevice(tiny_policy(), POINT, ("point",), CONFIG)
    act = Colocated.act

    def spoilt(self, params, envs, version):
        heads = jax.tree.map(lambda x: x * np.nan, params["value"])
        return act(self, params | {"value": heads} if version == 1 else params, envs, version)

    monkeypatch.setattr(Colocated, "act", spoilt)
    config, made = replace(CONFIG, save_every=1), Run(tmp_path, {}, {})
    with pytest.raises(Diverged, match="Step 1 has loss nan and gradient norm nan"):
        improve(lambda: nullcontext(place), made, config, Console(quiet=True))
    assert checkpoint.steps(tmp_path / "checkpoints") == [1]
    assert [row["step"] for row in learnt(tmp_path)] == [0]
    kept, saved = place.state()["ema"], own.restore_params(tmp_path)
    assert jax.tree.all(jax.tree.map(np.array_equal, kept, saved))


def learnt(out):
    timed = ("step_seconds", "env_steps_per_second", "decisions_per_second")
    steps = [row for row in read_metrics(out) if "loss" in row]
    return [{k: v for k, v in row.items() if k not in timed} for row in steps]


def test_what_is_not_on_a_device_is_refused():
    with pytest.raises(ValueError, match="takes tasks that are simulated on the device"):
        OnDevice(tiny_policy(), replace(POINT, environment=None), ("point",), CONFIG)


def test_seeds_that_a_suite_is_evaluated_on_are_not_learnt_from():
    with pytest.raises(ValueError, match=r"is evaluated on seeds from 5, but .*'colocated' learns"):
        OnDevice(tiny_policy(), replace(POINT, first_seed=5), ("point",), CONFIG)


def test_an_environment_that_cannot_be_traced_is_refused():
    opaque = replace(POINT, environment=lambda task, size: PointWorld())
    with pytest.raises(ValueError, match="has no pure_reset, pure_observe, pure_pictures, pure_st"):
        OnDevice(tiny_policy(), opaque, ("point",), CONFIG)
