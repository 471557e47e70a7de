"""A population that is killed and goes on: its members descend to a target, each as fast as its
learning rate lets it."""

import json
import os
import shutil
import signal
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from models.checkpoints import digests, own
from parallel import checkpoint
from parallel.monitor.goodput import read_account, total
from parallel.monitor.metrics import read_metrics
from parallel.runs.run_lock import LOCK_NAME
from rl.host.loop import Stopped
from rl.population.population import (
    FACTOR,
    FILE_NAME,
    PopulationConfig,
    check_population,
    read_generations,
    write_generations,
)
from sim.acting import NotFinite
from tests.helpers.parallel.opened import Run
from tests.helpers.rl.generations import CLIP, CONFIG, RATE, generation
from tests.helpers.rl.opened import evolve

TWO = PopulationConfig(2)
TARGET = np.array([1.0, -2.0, 0.5], np.float32)
BEGIN = {"w": jnp.zeros(3)}


class Descent:
    """`rl.run.Placement`: gradient descent with momentum."""

    environment: ClassVar = {"name": "slope"}

    def __init__(self, config, at=lambda step: None):
        self.rate, self.at = config.learner.optimizer.learning_rate, at
        self.w, self.moment, self.step = jnp.zeros(3), jnp.zeros(3), 0

    def run(self, on_step, told, until):
        while self.step < until and not told():
            self.at(self.step)
            self.moment = 0.5 * self.moment + 2 * (self.w - TARGET)
            self.w = self.w - self.rate * self.moment
            self.step += 1
            on_step({"loss": float(distance(self.w))})

    def state(self):
        return {"ema": {"w": self.w}, "rl": {"moment": self.moment}}

    def record(self):
        return {"step": self.step}

    def restore(self, state, record):
        self.w, self.moment = state["ema"]["w"], state["rl"]["moment"]
        self.step = record["step"]


def distance(w):
    return np.abs(np.asarray(w) - TARGET).max()


def score(step, params, directories, told):
    if told():
        raise Stopped
    if not np.isfinite(params["w"]).all():
        raise NotFinite("actions")
    return float(1 / (1 + distance(params["w"])))


def breed(out, population=TWO, config=CONFIG, at=lambda step: None, evaluate=score, **options):
    return evolve(
        lambda chosen, directory: nullcontext(Descent(chosen, at)),
        BEGIN,
        Run(out, {"of": "a test"}, {}),
        config,
        population,
        Console(quiet=True),
        evaluate=evaluate,
        **options,
    )


@pytest.mark.parametrize(
    ("population", "why"),
    [
        (PopulationConfig(1), "population is 1; expected at least 2 members"),
        (PopulationConfig(-3), "population is -3"),
        (PopulationConfig(2, turn=0), "turn is 0 and eval_every 2; .* at least 1 step"),
        (PopulationConfig(2, tuned=()), r"tuned is \[\]; expected at least one"),
        (PopulationConfig(2, tuned=(CLIP, CLIP)), "none twice"),
        (PopulationConfig(2, tuned=("objective.name",)), "'objective.name', which is 'ppo'; name"),
        (PopulationConfig(2, tuned=("learner.epochs",)), "'learner.epochs', which is 1; name"),
        (PopulationConfig(2, tuned=("learner_steps",)), "'learner_steps', which is 6"),
        (PopulationConfig(2, tuned=("objective.clop",)), "'objective.clop', which is not a field"),
        (PopulationConfig(2, tuned=("learner",)), "'learner', which is LearnerConfig"),
        (PopulationConfig(2, tuned=("rollout.deadline",)), "name a field of learner, objective"),
        (PopulationConfig(2, tuned=("objective.entropy_weight",)), "0.0, and no factor changes"),
    ],
)
def test_a_population_that_makes_no_sense_is_refused_before_anything_is_written(
    population, why, tmp_path
):
    with pytest.raises(ValueError, match=why):
        check_population(population, CONFIG)
    with pytest.raises(ValueError, match=why):
        breed(tmp_path / "out", population=population)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A population's folder, and what was on disk at many a moment before."""
    out, moments = tmp_path_factory.mktemp("whole"), {}

    def moment(name):
        if name not in moments:
            moments[name] = tmp_path_factory.mktemp("moment") / "out"
            with suppress(shutil.Error):  # the writer's thread goes on
                copying(out, moments[name])

    def evaluate(step, params, directories, told):
        moment(f"evaluating {[d.name for d in directories]} after {step}")
        return score(step, params, directories, told)

    copying, copy, renaming = shutil.copytree, checkpoint.copy, Path.rename
    within = []

    def copied(path, directory, *keep):
        within.append(directory.relative_to(out))
        copy(path, directory, *keep)
        within.clear()

    def copytree(path, to, **options):
        copying(path, to)
        (to / digests.NAME).unlink()
        moment(f"copying to {within[0]}")
        shutil.rmtree(to)
        copying(path, to)

    def rename(path, to):
        if within:
            moment(f"renaming {path.name} in {within[0]}")
        return renaming(path, to)

    def move(path, to):
        if Path(to) != out / FILE_NAME:
            return os.replace(path, to)
        count = len(read_generations(out))
        moment(f"before record {count}")
        os.replace(path, to)
        moment(f"after record {count}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("parallel.checkpoint.copy", copied)
        patch.setattr("parallel.checkpoint.shutil", with_(shutil, copytree=copytree))
        patch.setattr("parallel.runs.atomic.os", with_(os, replace=move))
        patch.setattr(Path, "rename", rename)
        evolved = breed(out, at=lambda step: moment(f"in a turn at {step}"), evaluate=evaluate)
    assert evolved.finished
    return out, evolved, moments


def with_(module, **changed):
    return SimpleNamespace(**vars(module) | changed)


def arrays(folder):
    """All that a checkpoint holds, to the bit."""
    state, _ = jax.tree.flatten_with_path(checkpoint.restore(folder, own.metadata(folder)))
    found = {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in state}
    return found | {"position": own.read_json(folder, "position")}


def steps_of(folder):
    """Metrics of its steps, without those of saves."""
    return [row for row in read_metrics(folder) if "loss" in row]


def left(out):
    """All that a population leaves, but for when."""
    folders = [out, *sorted((out / "members").iterdir())]
    found = {str(f.relative_to(out)): arrays(own.find(f)) for f in folders}
    numbers = [own.read_json(f, "config")["rl"] for f in folders]
    losses = [[row["loss"] for row in steps_of(f)] for f in folders[1:]]
    return (out / FILE_NAME).read_text(), found, numbers, losses


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment",
    [
        "evaluating ['0', '1'] after 0",
        "after record 0",
        "in a turn at 3",
        "evaluating ['1'] after 4",
        "before record 2",
        "after record 2",
        "copying to members/1/checkpoints",
        "renaming .4.saving in members/1/checkpoints",
        "renaming 3 in members/1/checkpoints",
        "renaming .4.saving in checkpoints",
        "renaming 2 in checkpoints",
        "in a turn at 5",
        "after record 3",
    ],
)
def test_killed_at_any_moment_it_goes_on_to_the_same_end(moment, whole, tmp_path):
    out, _, moments = whole
    at = shutil.copytree(moments[moment], tmp_path / "out")
    assert breed(at, resume=True).finished
    assert left(at) == left(out)


def test_who_copies_has_all_that_the_other_had_to_the_bit_and_other_numbers(whole):
    out, evolved, moments = whole
    found = evolved.generations[2]
    assert found.parents == (0, 0)
    for k in (0, 1):
        assert own.steps(moments["in a turn at 4"] / f"members/{k}/checkpoints")[-1] == 4
    parent, child = (moments["in a turn at 4"] / f"members/{k}/checkpoints/4" for k in (0, 1))
    assert arrays(child) == arrays(parent)
    assert any("moment" in name for name in arrays(child))
    before = moments["before record 2"] / "members/1/checkpoints/4"
    assert arrays(before) != arrays(parent)
    for name, value in found.hyperparameters[0].items():
        factor = found.hyperparameters[1][name] / value
        assert min(abs(factor - FACTOR), abs(factor - 1 / FACTOR)) < 1e-5
    numbers = own.read_json(out / "members/1", "config")["rl"]
    assert numbers["objective"]["clip"] == found.hyperparameters[1][CLIP]


def test_the_folder_of_a_population_holds_the_best_member(whole):
    out, evolved, _ = whole
    last = evolved.generations[-1]
    assert last.success[evolved.best] == max(last.success)
    assert arrays(own.find(out)) == arrays(own.find(out / "members" / str(evolved.best)))
    assert own.steps(out / "checkpoints") == [CONFIG.learner_steps]
    assert read_generations(out) == list(evolved.generations)
    for k in (0, 1):
        assert [row["step"] for row in steps_of(out / "members" / str(k))] == list(range(6))


def test_a_signal_ends_it_with_the_last_whole_step_and_it_goes_on(whole, tmp_path):
    def struck(step):
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    stopped = breed(tmp_path, at=struck)
    assert (stopped.finished, stopped.step, stopped.exit_code) == (False, 2, 75)
    assert own.steps(tmp_path / "members/0/checkpoints")[-1] == 4
    assert breed(tmp_path, resume=True).finished
    assert left(tmp_path) == left(whole[0])


def test_a_signal_between_turns_ends_the_evaluation(tmp_path):
    def struck(step, *rest):
        os.kill(os.getpid(), signal.SIGTERM)
        return score(step, *rest)

    assert not breed(tmp_path, evaluate=struck).finished
    assert not (tmp_path / FILE_NAME).exists()
    assert breed(tmp_path, resume=True, config=replace(CONFIG, learner_steps=2)).finished


@pytest.mark.slow
@pytest.mark.parametrize("hopeless", [1e3, 1e-9])
def test_a_hopeless_learning_rate_is_got_rid_of(hopeless, tmp_path):
    """The one is not finite any more after some steps, the other stays where it begins."""
    config = replace(CONFIG, learner_steps=54, eval_every=18, save_every=0)
    first = generation(hopeless, 0.02)
    breed_from(tmp_path, first, config)
    mended = []
    evolved = breed(tmp_path, config=config, resume=True, rebuild=lambda: mended.append(True))
    assert evolved.generations[1].parents == (1, 1)
    assert evolved.generations[1].success[0] == (
        None if hopeless > 1 else pytest.approx(1 / 3, abs=0.01)
    )
    assert bool(mended) == (hopeless > 1)
    rates = [one[RATE] for one in evolved.generations[-1].hyperparameters]
    assert all(0.01 < rate < 0.04 for rate in rates)
    assert min(evolved.generations[-1].success) > 0.5


def breed_from(out, first, config):
    """A population that has been evaluated once."""
    with suppress(Interrupted):
        breed(out, config=config, evaluate=interrupted)
    write_generations(out, [first])


class Interrupted(Exception):
    pass


def interrupted(*_):
    raise Interrupted


def test_a_folder_with_a_population_is_refused_without_resume_and_one_without_is_with_it(
    whole, tmp_path
):
    with pytest.raises(
        ValueError, match="holds a run already, saved at step 6; continue with --res"
    ):
        breed(whole[0])
    breed_from(tmp_path, generation(1.0, 2.0), CONFIG)
    with pytest.raises(ValueError, match="holds a population already, of 0 generations; continue"):
        breed(tmp_path)
    with pytest.raises(FileNotFoundError, match="holds no run to resume"):
        breed(tmp_path / "none", resume=True)


def test_a_finished_population_goes_on_when_it_is_given_more_steps(tmp_path):
    assert breed(tmp_path, config=replace(CONFIG, learner_steps=2)).finished
    evolved = breed(tmp_path, config=replace(CONFIG, learner_steps=4), resume=True)
    assert [generation.step for generation in evolved.generations] == [0, 2, 4]
    assert own.steps(tmp_path / "checkpoints") == [4]


def test_the_record_is_one_line_of_json_a_generation(whole):
    lines = [json.loads(line) for line in (whole[0] / FILE_NAME).read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 2, 4, 6]
    assert set(lines[0]) == {"step", "success", "parents", "hyperparameters"}


@pytest.mark.parametrize("lost", ["checkpoints", "members/1/checkpoints"])
def test_a_population_whose_checkpoints_are_away_is_refused(lost, whole, tmp_path):
    out = shutil.copytree(whole[2]["in a turn at 5"], tmp_path / "out")
    (out / lost).rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match=f"{lost} is missing, but .* was saved at step 4"):
        breed(out, resume=True)
    (tmp_path / "elsewhere").rename(out / lost)
    assert breed(out, resume=True).finished
    assert left(out) == left(whole[0])


def test_a_damaged_generation_is_set_aside_but_not_the_last(whole, tmp_path):
    out = shutil.copytree(whole[2]["in a turn at 5"], tmp_path / "out")
    path = out / FILE_NAME
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 3
    for damage in (b'{"step": 4}\n', lines[2][:-9]):
        path.write_bytes(b"".join([*lines[:2], damage]))
        with pytest.raises(
            ValueError, match=r"population\.jsonl, line 3: damaged, but the run needs the last "
        ):
            breed(out, resume=True)
    path.write_bytes(b"".join([lines[0], b"\0\0\0\n", lines[2]]))
    assert breed(out, resume=True).finished
    assert [generation.step for generation in read_generations(out)] == [0, 4, 6]
    assert (out / f"{FILE_NAME}.damaged").read_bytes() == b"".join(
        [lines[0], b"\0\0\0\n", lines[2]]
    )
    assert left(out)[1:] == left(whole[0])[1:]


@pytest.mark.parametrize("at", [1, 3, 5])
def test_a_population_whose_disk_is_lost_goes_on_from_its_mirror_to_the_same_end(
    at, whole, tmp_path
):
    """In the first turns nothing is there yet that a population could go on from."""

    def struck(step):
        if step == at:
            os.kill(os.getpid(), signal.SIGTERM)

    out, mirror = tmp_path / "out", tmp_path / "mirror"
    assert not breed(out, at=struck, mirror=str(mirror)).finished
    shutil.rmtree(out)
    if at == 1:
        with pytest.raises(ValueError, match="members/0 holds a run already, saved at step 2; co"):
            breed(out, mirror=str(mirror), resume=True)
        return
    assert breed(out, mirror=str(mirror), resume=True).finished
    assert left(out)[:3] == left(whole[0])[:3]
    for folder in ("", "members/0", "members/1"):
        assert arrays(own.find(mirror / folder)) == arrays(own.find(out / folder))
    assert (mirror / FILE_NAME).read_text() == (out / FILE_NAME).read_text()


def test_the_best_checkpoints_of_a_population_and_of_its_members_stay(tmp_path):
    """The policy is best after two steps."""

    def evaluate(step, params, directories, told):
        return {0: 0.1, 2: 0.9}.get(step, 0.5 - step / 100)

    evolved = breed(
        tmp_path, config=replace(CONFIG, keep=1, keep_best="success"), evaluate=evaluate
    )
    assert own.steps(tmp_path / "checkpoints") == [2, 6]
    best = tmp_path / "members" / str(evolved.best) / "checkpoints"
    assert own.steps(best) == [2, 6]


def test_a_population_accounts_for_the_time_of_all_its_members(tmp_path):
    breed(tmp_path)
    accounts = [read_account(tmp_path / "members" / k) for k in "01"]
    whole = total(accounts)
    assert (whole.steps, whole.lost_steps) == (12, 0)
    assert whole.seconds["stopped"] == 0 < accounts[0].seconds["stopped"]
    assert whole.seconds["evaluation"] == sum(one.seconds["evaluation"] for one in accounts) > 0


def test_members_are_locked_with_their_population(tmp_path):
    seen = []

    def evaluate(step, params, directories, told):
        seen.extend((folder / LOCK_NAME).exists() for folder in (tmp_path, *directories))
        return score(step, params, directories, told)

    breed(tmp_path, evaluate=evaluate)
    assert len(seen) > 6
    assert all(seen)
    assert not list(tmp_path.rglob(LOCK_NAME))
