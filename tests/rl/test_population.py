"""Who copies whom and with which numbers, and a population that is killed and goes on: its members
descend to a target, each as fast as its learning rate lets it."""

import json
import os
import shutil
import signal
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from models.checkpoints import digests, own
from parallel import checkpoint
from parallel.metrics import read_metrics
from parallel.optimizer import OptimizerConfig
from parallel.trainer import Run
from rl.config import FlowConfig, LearnerConfig, ObjectiveConfig, RlConfig
from rl.evolution import evolve
from rl.host import Stopped
from rl.population import (
    FACTOR,
    FILE_NAME,
    Generation,
    PopulationConfig,
    check_population,
    configured,
    explored,
    first_generation,
    hyperparameters,
    next_generation,
    ranked,
    read_generations,
    write_generations,
)
from sim.acting import NotFinite

RATE, CLIP = "learner.optimizer.learning_rate", "objective.clip"
CONFIG = RlConfig(
    steps=6,
    learner=LearnerConfig(optimizer=OptimizerConfig(learning_rate=0.02, warmup_steps=0)),
    eval_every=2,
    save_every=3,
)
TWO = PopulationConfig(2)
TARGET = np.array([1.0, -2.0, 0.5], np.float32)
BEGIN = {"w": jnp.zeros(3)}


def generation(*rates, step=0, success=None):
    tuned = tuple({RATE: rate, CLIP: 0.2} for rate in rates)
    return Generation(step, success or (0.0,) * len(rates), tuple(range(len(rates))), tuned)


def test_of_given_scores_the_worst_quarter_copies_the_best_and_the_rest_stay():
    scores = (0.5, 0.9, 0.1, 0.4, 0.8, 0.3, 0.7, 0.2)
    last = generation(*np.linspace(0.01, 0.08, 8).tolist())
    found = next_generation(CONFIG, last, 2, scores)
    assert {k: p for k, p in enumerate(found.parents) if k != p}.keys() == {2, 7}
    assert {found.parents[2], found.parents[7]} <= {1, 4}
    stay = [k for k in range(8) if k not in (2, 7)]
    assert all(found.hyperparameters[k] == last.hyperparameters[k] for k in stay)
    assert (found.success, found.best) == (scores, 1)
    drawn = {next_generation(replace(CONFIG, seed=s), last, 2, scores).parents[2] for s in range(9)}
    assert drawn == {1, 4}, "parents are drawn from all of the best quarter"


@pytest.mark.parametrize(
    ("scores", "parents"),
    [
        ((0.2, 0.1), (0, 0)),
        ((0.1, 0.2), (1, 1)),
        ((0.5, 0.5), (0, 0)),
        ((0.5, 0.5, 0.5), (0, 1, 0)),
        ((0.0, None, 0.1, None), (0, 2, 2, 2)),
    ],
)
def test_of_equals_the_first_counts_as_better_and_who_failed_is_replaced(scores, parents):
    assert (
        next_generation(CONFIG, generation(*range(1, 9)[: len(scores)]), 2, scores).parents
        == parents
    )


def test_nobody_copies_after_the_last_step_and_nobody_is_left_where_all_failed():
    assert next_generation(CONFIG, generation(1.0, 2.0), 6, (0.1, 0.2)).parents == (0, 1)
    with pytest.raises(
        ValueError, match=r"No member's policy gives finite actions .* after step 2"
    ):
        next_generation(CONFIG, generation(1.0, 2.0), 2, (None, None))
    assert ranked((0.0, None, 0.3)) == [2, 0, 1]


def test_exploring_scales_each_number_by_a_factor_and_never_to_the_same_as_another():
    begun, found = {RATE: 0.02, CLIP: 0.2}, []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        found.append(explored(CONFIG, begun, rng))
    for name, value in begun.items():
        factors = {round(one[name] / value, 4) for one in found}
        assert factors == {round(FACTOR, 4), round(1 / FACTOR, 4)}
    taken = []
    for _ in range(6):
        taken.append(explored(CONFIG, begun, np.random.default_rng(1), [begun, *taken]))
    assert len({tuple(one.items()) for one in taken}) == 6


@pytest.mark.parametrize(
    ("section", "name", "least", "most"),
    [
        ({"objective": ObjectiveConfig(clip=0.95)}, "objective.clip", 0.5, 1.0),
        ({"objective": ObjectiveConfig(truncation=1.0)}, "objective.truncation", 1.0, 1.3),
        ({"objective": ObjectiveConfig(discount=0.99)}, "objective.discount", 0.987, 0.993),
        ({"flow": FlowConfig(noise="cps", level=0.99)}, "flow.level", 0.5, 1.0),
    ],
)
def test_exploring_stays_where_the_config_is_valid(section, name, least, most):
    config = replace(CONFIG, **section)
    tuned = hyperparameters(config, [name])
    for seed in range(20):
        value = explored(config, tuned, np.random.default_rng(seed))[name]
        assert least <= value <= most
        assert value != tuned[name]
        configured(config, {name: value})


def test_members_begin_with_the_configs_numbers_and_with_others_up_to_three_times_apart():
    first = first_generation(CONFIG, PopulationConfig(12), 0.4)
    assert first.hyperparameters[0] == {RATE: 0.02, CLIP: 0.2}
    assert len({tuple(one.items()) for one in first.hyperparameters}) == 12
    rates = [one[RATE] / 0.02 for one in first.hyperparameters]
    assert 1 / 3 <= min(rates) < 0.6
    assert 1.7 < max(rates) <= 3
    assert first == first_generation(CONFIG, PopulationConfig(12), 0.4)
    assert first.parents == tuple(range(12))


@pytest.mark.parametrize(
    ("population", "why"),
    [
        (PopulationConfig(1), "population is 1; expected at least 2 members"),
        (PopulationConfig(-3), "population is -3"),
        (PopulationConfig(2, turn=0), "turn is 0 and eval_every 2; .* at least 1 step"),
        (PopulationConfig(2, tuned=()), r"tuned is \[\]; expected at least one"),
        (PopulationConfig(2, tuned=(CLIP, CLIP)), "each once"),
        (PopulationConfig(2, tuned=("objective.name",)), "'objective.name', which is 'ppo'; name"),
        (PopulationConfig(2, tuned=("learner.epochs",)), "'learner.epochs', which is 1; name"),
        (PopulationConfig(2, tuned=("steps",)), "'steps', which is 6"),
        (PopulationConfig(2, tuned=("objective.clop",)), "'objective.clop', which is no field"),
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


class Descent:
    """`rl.run.Placement`: gradient descent with momentum."""

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

    def copied(path, directory):
        within.append(directory.relative_to(out))
        copy(path, directory)
        within.clear()

    def copytree(path, to):
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
        count = len(read_generations(out))
        moment(f"before record {count}")
        os.replace(path, to)
        moment(f"after record {count}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("parallel.checkpoint.copy", copied)
        patch.setattr("parallel.checkpoint.shutil", with_(shutil, copytree=copytree))
        patch.setattr("rl.population.os", with_(os, replace=move))
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


def left(out):
    """All that a population leaves, but for when."""
    folders = [out, *sorted((out / "members").iterdir())]
    found = {str(f.relative_to(out)): arrays(own.find(f)) for f in folders}
    numbers = [own.read_json(f, "config")["rl"] for f in folders]
    losses = [[row["loss"] for row in read_metrics(f)] for f in folders[1:]]
    return (out / FILE_NAME).read_text(), found, numbers, losses


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
    assert own.steps(out / "checkpoints") == [CONFIG.steps]
    assert read_generations(out) == list(evolved.generations)
    for k in (0, 1):
        assert [row["step"] for row in read_metrics(out / "members" / str(k))] == list(range(6))


def test_a_signal_ends_it_with_the_last_whole_step_and_it_goes_on(whole, tmp_path):
    def struck(step):
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    stopped = breed(tmp_path, at=struck)
    assert (stopped.finished, stopped.step) == (False, 2)
    assert own.steps(tmp_path / "members/0/checkpoints")[-1] == 4
    assert breed(tmp_path, resume=True).finished
    assert left(tmp_path) == left(whole[0])


def test_a_signal_between_turns_ends_the_evaluation(tmp_path):
    def struck(step, *rest):
        os.kill(os.getpid(), signal.SIGTERM)
        return score(step, *rest)

    assert not breed(tmp_path, evaluate=struck).finished
    assert not (tmp_path / FILE_NAME).exists()
    assert breed(tmp_path, resume=True, config=replace(CONFIG, steps=2)).finished


@pytest.mark.parametrize("hopeless", [1e3, 1e-9])
def test_a_hopeless_learning_rate_is_got_rid_of(hopeless, tmp_path):
    """The one is not finite any more after some steps, the other stays where it begins."""
    config = replace(CONFIG, steps=54, eval_every=18, save_every=0)
    first = generation(hopeless, 0.02)
    breed_from(tmp_path, first, config)
    mended = []
    evolved = breed(tmp_path, config=config, resume=True, mend=lambda: mended.append(True))
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
    with pytest.raises(ValueError, match="holds a run already, saved at step 6; go on with --res"):
        breed(whole[0])
    breed_from(tmp_path, generation(1.0, 2.0), CONFIG)
    with pytest.raises(ValueError, match="holds a population already, of 0 generations; go on wi"):
        breed(tmp_path)
    with pytest.raises(FileNotFoundError, match="holds no run to resume"):
        breed(tmp_path / "none", resume=True)


def test_a_finished_population_goes_on_when_it_is_given_more_steps(tmp_path):
    assert breed(tmp_path, config=replace(CONFIG, steps=2)).finished
    evolved = breed(tmp_path, config=replace(CONFIG, steps=4), resume=True)
    assert [generation.step for generation in evolved.generations] == [0, 2, 4]
    assert own.steps(tmp_path / "checkpoints") == [4]


def test_the_record_is_one_line_of_json_a_generation(whole):
    lines = [json.loads(line) for line in (whole[0] / FILE_NAME).read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 2, 4, 6]
    assert set(lines[0]) == {"step", "success", "parents", "hyperparameters"}
