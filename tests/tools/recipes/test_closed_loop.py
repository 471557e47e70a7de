"""Evaluation while training: what is evaluated is what a checkpoint of the step holds, the trainer
does not wait for it, and its errors and ends are the run's."""

import threading
from dataclasses import replace

import jax
import pytest

from models import load_policy
from models.files.terminal import Console
from models.flow import flow
from parallel.mesh import make_mesh
from sim.environments.device_slots import DeviceSlots
from sim.suite import Suite
from tests.helpers.sim.point_world import PointWorld, expert
from tests.helpers.tools.small_run import SMALL
from tools.recipes import training
from tools.recipes.closed_loop import ClosedLoop, read_closed_loop, set_damaged_evaluations_aside
from tools.recipes.conditions import conditions, evaluate_all
from tools.recipes.presets import ClosedLoopConfig
from tools.recipes.recording import RecordConfig, record_dataset

QUIET = Console(quiet=True)


def slots(tasks, count, size):
    world = PointWorld()
    (world.name,) = tasks
    return DeviceSlots(world, count, expert)


POINTS = Suite("points", ("near", "far"), 4, slots, first_seed=500, together=False, slots=4)


@pytest.fixture(scope="module", autouse=True)
def points():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "make_mesh", lambda config: make_mesh(config, jax.devices()[:1]))
        for module in ("tools.recipes.closed_loop", "tools.recipes.recording"):
            patch.setattr(f"{module}.load_suite", lambda name: POINTS)
        yield


@pytest.fixture(scope="module")
def config():
    trainer = replace(SMALL.trainer, train_steps=6, save_every=3, eval_every=3, keep=2)
    model = replace(SMALL.model, image_size=32, euler_steps=3)
    acting = ClosedLoopConfig("points", ("far",), episodes=4)
    return replace(SMALL, trainer=trainer, model=model, closed_loop=acting)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "points"
    record_dataset(RecordConfig(path, "points", episodes=6))
    return str(path)


@pytest.mark.slow
def test_every_evaluation_is_that_of_the_checkpoint_of_its_step(
    dataset, config, tmp_path, monkeypatch
):
    """With its Euler steps, as held-out metrics are."""
    sample, taken = flow.sample, []

    def noted(field, noise, steps, *more):
        taken.append((threading.current_thread().name, steps))
        return sample(field, noise, steps, *more)

    monkeypatch.setattr(flow, "sample", noted)
    assert training.run(training.Paths(dataset, tmp_path / "run"), config, QUIET).finished
    assert set(taken) == {("MainThread", 3), ("closed loop", 3)}
    lines = read_closed_loop(tmp_path / "run")
    assert [line["step"] for line in lines] == [3, 6]
    for line in lines:
        policy = load_policy(tmp_path / "run" / "checkpoints" / str(line["step"]))
        found = evaluate_all(POINTS, conditions(policy, ()), QUIET, tasks=("far",), episodes=4)
        assert line["success"] == found["trained"].success.to_json()
        assert set(line["by_task"]) == {"far"}


def test_a_damaged_line_of_an_evaluation_is_named_and_set_aside(tmp_path, capsys):
    path, good = tmp_path / "closed_loop.jsonl", '{"step": 3, "success": {"rate": 1, '
    good += '"low": 0.5, "high": 1}}\n'
    for damage in ("{}\n", '{"step": 3, "success": {"rate": null, "low": 0, "high": 1}}\n', "\0\n"):
        path.write_text(good + damage + good[:-9])
        with pytest.raises(ValueError, match=r"closed_loop\.jsonl, line 2: not a line of this log"):
            read_closed_loop(tmp_path)
        set_damaged_evaluations_aside(tmp_path, Console(width=300))
        assert "closed_loop.jsonl, line 2: damaged" in capsys.readouterr().out
        assert path.read_text().count("\n") == 1
        assert [line["step"] for line in read_closed_loop(tmp_path)] == [3]


@pytest.mark.slow
def test_the_trainer_never_waits_and_its_last_parameters_are_evaluated(
    dataset, config, tmp_path, monkeypatch, capsys
):
    """The first evaluation takes until the trainer is done."""
    trained, evaluate, made = threading.Event(), ClosedLoop._evaluate, training.train

    def late(self, params):
        assert trained.wait(240)
        return evaluate(self, params)

    def train_on(*arguments, **options):
        try:
            return made(*arguments, **options)
        finally:
            trained.set()

    monkeypatch.setattr(ClosedLoop, "_evaluate", late)
    monkeypatch.setattr(training, "train", train_on)
    often = replace(config, trainer=replace(config.trainer, eval_every=2))
    console = Console(width=200, force_terminal=False)
    assert training.run(training.Paths(dataset, tmp_path / "run"), often, console).finished
    said = capsys.readouterr().out
    assert "Step 4 was not evaluated in 'points', because the previous evaluation took" in said
    assert [line["step"] for line in read_closed_loop(tmp_path / "run")] == [2, 6]


@pytest.mark.slow
def test_what_an_evaluation_fails_of_ends_the_run(dataset, config, tmp_path, monkeypatch):
    def fail(self, params):
        raise ValueError("the simulator is broken")

    monkeypatch.setattr(ClosedLoop, "_evaluate", fail)
    with pytest.raises(ValueError, match="the simulator is broken"):
        training.run(training.Paths(dataset, tmp_path / "run"), config, QUIET)


def test_a_suite_of_another_robot_is_refused_before_training(dataset, config, tmp_path):
    class Other(PointWorld):
        action_names = ("dx", "dy", "dz")

    other = replace(POINTS, open=lambda tasks, count, size: DeviceSlots(Other(), count))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tools.recipes.closed_loop.load_suite", lambda name: other)
        with pytest.raises(ValueError, match="3 action dims"):
            training.run(training.Paths(dataset, tmp_path / "run"), config, QUIET)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_more_starts_than_a_suite_has_are_refused_before_training(dataset, config, tmp_path):
    """Seeds from `recorded_from` on are drawn, and as many as one likes."""
    fixed = replace(POINTS, first_seed=0, recorded_from=1000, fixed=3)
    assert replace(fixed, first_seed=5000).judged(4) == range(5000, 5004)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tools.recipes.closed_loop.load_suite", lambda name: fixed)
        with pytest.raises(ValueError, match="episodes is 4, but suite 'points' has 3 fixed"):
            training.run(training.Paths(dataset, tmp_path / "run"), config, QUIET)
    assert not (tmp_path / "run" / "checkpoints").exists()
