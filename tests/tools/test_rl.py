"""`tools.rl` from a checkpoint to checkpoints: what it leaves, refuses and goes on from."""

import json
import math
import os
import shutil
import signal
import threading
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import ClassVar

import jax
import numpy as np
import pytest
import tyro

from models import load_policy
from models.checkpoints import own
from models.config import to_json
from models.files.terminal import Console
from parallel.checkpoint import copy
from parallel.hosts.stop import StopSignals
from parallel.monitor.metrics import read_metrics
from rl.config import (
    ColocatedConfig,
    DisaggregatedConfig,
    FlowConfig,
    LearnerConfig,
    ObjectiveConfig,
    RlConfig,
    RolloutConfig,
)
from rl.host.experience import micro_batches
from rl.host.placement import OnHost
from rl.host.rollout import key_of
from rl.host.staleness import GroupMember
from rl.host.starts import draw_start
from rl.population.population import PopulationConfig, write_generations
from rl.records import Decision, Ticket, Trajectory
from tests.helpers.rl.points import HOST, POINTS, Eager, Noted, open_slots, save_policy
from tools import rl, rl_curves
from tools.convert_checkpoint import convert
from tools.recipes import rl_figures
from tools.recipes.closed_loop import read_closed_loop
from tools.recipes.rl_presets import RL_PRESETS

QUIET = Console(quiet=True)


@pytest.fixture(scope="module", autouse=True)
def points():
    with pytest.MonkeyPatch.context() as patch:
        for module in ("tools.recipes.rl", "tools.recipes.closed_loop"):
            patch.setattr(f"{module}.load_suite", lambda name: POINTS)
        one_device = jax.devices()[:1]
        patch.setattr("rl.host.placement.split_devices", lambda acting: (one_device, one_device))
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("supervised"))


@pytest.fixture(scope="module")
def finished(checkpoint, tmp_path_factory):
    out = tmp_path_factory.mktemp("rl")
    assert rl.run(rl.RlPaths(checkpoint, out), HOST, QUIET).finished
    return out


def changed_by(config, changed):
    """The config with other fields, or with some fields of a part changed."""
    parts = {
        name: replace(getattr(config, name), **value) if isinstance(value, dict) else value
        for name, value in changed.items()
    }
    return replace(config, **parts)


def learnt(out):
    return [{name: row.get(name) for name in ("loss", "lag", "success")} for row in rows(out)]


def rows(out):
    return [row for row in read_metrics(out) if "loss" in row]


@pytest.mark.slow
def test_runs_are_compared_in_one_figure(finished, tmp_path):
    tyro.cli(rl_curves.main, args=[str(finished), "--out", str(tmp_path / "c.svg")])
    drawn = (tmp_path / "c.svg").read_text()
    assert finished.name in drawn
    assert "minutes of acting and learning" in drawn
    with pytest.raises(ValueError, match=r"has no evaluation in closed_loop\.jsonl"):
        rl_figures.write_comparison([tmp_path], tmp_path / "d.svg")


@pytest.mark.slow
def test_a_run_leaves_metrics_curves_evaluations_and_a_policy_that_acts(finished, checkpoint):
    found = rows(finished)
    assert [row["step"] for row in found] == [0, 1, 2]
    assert all(row["lag"] == 0 and row["lag/0"] == row["decisions"] for row in found)
    assert all(row["ess"] == pytest.approx(1, abs=1e-3) for row in found)
    assert [line["step"] for line in read_closed_loop(finished)] == [0, 2, 3]
    assert (finished / "curves.svg").stat().st_size > 1000
    assert (finished / "curves.png").read_bytes()[1:4] == b"PNG"
    assert {"idle/environment", "grad_norm", "return", "clip_fraction"} <= set(found[0])
    assert json.loads((finished / "timeline.json").read_text())["traceEvents"]
    improved, begun = load_policy(finished), load_policy(checkpoint)
    assert (improved.euler_steps, begun.euler_steps) == (HOST.flow.euler_steps, 10), (
        "it acts as it was evaluated"
    )
    assert improved.processor == begun.processor
    assert jax.tree.structure(improved.params) == jax.tree.structure(begun.params)
    assert not jax.tree.all(jax.tree.map(np.array_equal, improved.params, begun.params))
    assert own.read_json(finished, "config")["rl"] == json.loads(json.dumps(to_json(HOST)))


@pytest.mark.slow
def test_a_policy_saved_in_16_bits_learns_in_32(checkpoint, tmp_path):
    policy = load_policy(checkpoint)
    half = replace(policy, params=jax.tree.map(lambda x: x.astype("bfloat16"), policy.params))
    convert(half, tmp_path / "half", "chiliad")
    assert rl.run(rl.RlPaths(tmp_path / "half", tmp_path / "rl"), HOST, QUIET).finished
    leaves = jax.tree.leaves(load_policy(tmp_path / "rl").params)
    assert {x.dtype for x in leaves} == {np.dtype("float32")}


@pytest.mark.slow
def test_held_out_starts_are_never_learnt_from(finished):
    learnt, evaluated = (Noted.seeds[name] for name in ("slots 0", "closed loop"))
    assert len(learnt) == HOST.learner_steps * HOST.rollout.groups
    assert max(learnt) < POINTS.first_seed
    assert evaluated == {500, 501}


@pytest.mark.slow
def test_a_run_is_mirrored_keeps_what_succeeded_most_and_says_where_its_time_went(
    checkpoint, tmp_path
):
    out, mirror, said = tmp_path / "out", tmp_path / "mirror", Console(record=True, file=StringIO())
    config = replace(HOST, learner_steps=4, eval_every=1, save_every=1, keep=1, keep_best="success")
    assert rl.run(rl.RlPaths(checkpoint, out, mirror=str(mirror)), config, said).finished
    success = {line["step"]: line["success"]["rate"] for line in read_closed_loop(out)}
    best = max(success.keys() - {0}, key=lambda step: (success[step], -step))
    assert {best, 4} <= set(own.steps(out / "checkpoints"))
    assert f"checkpoints/{best}: it succeeded from {success[best]:.1%}" in said.export_text(
        clear=False
    )
    assert "Goodput " in said.export_text()
    assert own.steps(mirror / "checkpoints")[-1] == 4
    for name in ("closed_loop.jsonl", "goodput.jsonl"):
        assert (mirror / name).read_text() == (out / name).read_text()
    shutil.rmtree(out)
    paths = rl.RlPaths(checkpoint, out, resume=True, mirror=str(mirror))
    assert rl.run(paths, replace(config, learner_steps=5, keep=2), QUIET).finished
    assert [row["step"] for row in rows(out)] == list(range(5))


class Apart(Noted):
    """Slots of one of several tasks, whose episodes differ in length; notes who began which."""

    tasks: ClassVar[dict[str, set[str]]] = {}

    def __init__(self, tasks, count, size):
        world = Eager()
        (world.name,) = tasks
        world.max_steps = 12 if world.name == "near" else 15
        super().__init__(world, count)

    def begin(self, slot, start):
        self.tasks.setdefault(threading.current_thread().name, set()).add(start.task)
        super().begin(slot, start)


APART = replace(POINTS, tasks=("near", "far", "new"), open=Apart)


@pytest.mark.slow
def test_tasks_that_cannot_share_slots_are_learnt_in_one_run_beside_one_held_out(
    checkpoint, tmp_path, monkeypatch
):
    for module in ("tools.recipes.rl", "tools.recipes.closed_loop"):
        monkeypatch.setattr(f"{module}.load_suite", lambda name: APART)
    rollout = {"groups": 4, "slots": 3, "curriculum": "signal", "redraws": 1}
    config = changed_by(HOST, {"rollout": rollout, "held_out_tasks": ("new",)})
    assert rl.run(rl.RlPaths(checkpoint, tmp_path), replace(config, learner_steps=2), QUIET)
    counted = own.read_json(tmp_path, "position")["curriculum"]
    assert counted["tasks"] == ["near", "far"]
    assert len(counted["counts"]) == 2
    assert rl.run(rl.RlPaths(checkpoint, tmp_path, resume=True), config, QUIET).finished
    assert len(own.read_json(tmp_path, "position")["curriculum"]["counts"]) == 2
    assert Apart.tasks["slots 0"] == {"near"}
    assert Apart.tasks["slots 1"] == {"far"}
    assert Apart.tasks["closed loop"] == {"near", "far", "new"}
    found = rows(tmp_path)
    assert [row["step"] for row in found] == [0, 1, 2]
    for row in found:
        assert row["groups"] == row["groups/near"] + row["groups/far"] == 4 + row["redrawn"] / 2
        assert min(row["groups/near"], row["groups/far"]) >= 1
        assert row["episodes"] == 8
        assert {"success/near", "success/far", "signal/near", "signal/far"} <= set(row)
    assert found[-1]["redrawn"] > 0, "a random policy often fails twice"
    for line in read_closed_loop(tmp_path):
        assert list(line["by_task"]) == ["near", "far", "new"]
        assert (line["success"]["trials"], line["held_out"]["trials"]) == (4, 2)
        assert line["held_out"]["tasks"] == ["new"]
        assert line["held_out"]["successes"] == line["by_task"]["new"]["successes"]
    assert "new, held out" in (tmp_path / "curves.svg").read_text()
    environment = own.read_json(tmp_path, "config")["environment"]
    assert {environment[task]["max_steps"] for task in ("near", "far")} == {12, 15}


@pytest.mark.slow
def test_without_staleness_one_slot_learns_what_a_synchronous_learner_does(finished, checkpoint):
    """Bit for bit: whole episodes one after the other, then one update of all of them."""
    slots = open_slots(("points",), 1, 32)
    at = OnHost(load_policy(checkpoint, euler_steps=2), POINTS, ("points",), [slots], HOST)
    learner, objective, micro = at._learner, HOST.objective, HOST.learner.micro
    for step in range(HOST.learner_steps):
        tickets = []
        for number in range(2 * step, 2 * step + 2):
            start = draw_start(HOST.seed, number, "points", range(500))
            places = [GroupMember(number, member, start) for member in range(2)]
            episodes = tuple(acted(slots, at._actor, learner, place) for place in places)
            tickets.append(Ticket(number, episodes))
        for part in micro_batches(tickets, at._pack, objective, micro):
            learner.add(part.experience, part.tickets)
        assert learner.update()["loss"] == rows(finished)[step]["loss"]
    state = {name: own.restore_params(finished, name) for name in ("params", "ema")}
    same = jax.tree.map(np.array_equal, learner.state.params["policy"], state["params"])
    assert jax.tree.all(same)
    assert jax.tree.all(jax.tree.map(np.array_equal, learner.state.ema["policy"], state["ema"]))


def acted(slots, actor, learner, place):
    """An episode from its beginning to its end."""
    slots.begin(0, place.start)
    (outcome,) = slots.poll()
    prompt = slots.spec.wording(outcome.goal, place.start.seed)
    decisions, steps, session = [], 0, actor.session()
    while not outcome.ended:
        request = actor.prepare(outcome.observation, prompt, key_of(place, steps), session)
        ((actions, drawn),) = actor.answer(learner.state.params, [request])
        slots.send(0, actions[: HOST.rollout.replan_steps])
        (outcome,) = slots.poll()
        mask = np.zeros_like(request.sample.action_mask)
        mask[: len(outcome.reward), :2] = True
        sample = replace(request.sample, action_mask=mask)
        decisions.append(Decision(sample, drawn, learner.version, outcome.reward))
        steps += len(outcome.reward)
    over, won = outcome.terminated, outcome.success
    return Trajectory(place.start, place.member, tuple(decisions), over, 0.0, won)


@pytest.mark.slow
def test_an_interrupted_run_saves_its_last_whole_step_and_goes_on_to_the_same(
    finished, checkpoint, tmp_path, monkeypatch
):
    """SIGTERM while the last step's first episode begins; the step before is traced."""
    noticed, told, begin = threading.Event(), StopSignals.should_stop, Noted.begin
    third = draw_start(HOST.seed, 4, "points", range(500))

    def notice(self):
        if found := told(self):
            noticed.set()
        return found

    def strike(self, slot, start):
        if start == third and threading.current_thread().name == "slots 0":
            os.kill(os.getpid(), signal.SIGTERM)
            assert noticed.wait(240)
        begin(self, slot, start)

    with monkeypatch.context() as patch:
        patch.setattr(StopSignals, "should_stop", notice)
        patch.setattr(Noted, "begin", strike)
        config = replace(HOST, save_every=0, eval_every=0, profile="1:2")
        stopped = rl.run(rl.RlPaths(checkpoint, tmp_path), config, QUIET)
    assert (stopped.finished, stopped.step) == (False, 2)
    assert own.steps(tmp_path / "checkpoints") == [2]
    (trace,) = (tmp_path / "profile" / "host-0").glob("plugins/profile/*/*.xplane.pb")
    assert trace.stat().st_size > 0
    assert rl.run(rl.RlPaths(checkpoint, tmp_path, resume=True), HOST, QUIET).finished
    assert learnt(tmp_path) == learnt(finished)
    one, other = (own.restore_params(path) for path in (tmp_path, finished))
    assert jax.tree.all(jax.tree.map(np.array_equal, one, other))


@pytest.mark.slow
def test_only_what_does_not_change_the_learning_may_change_when_it_goes_on(finished, checkpoint):
    paths = rl.RlPaths(checkpoint, finished, resume=True)
    rl.run(paths, replace(HOST, eval_every=1), QUIET)
    warmed = replace(HOST.learner.optimizer, warmup_steps=2)
    warmed = changed_by(HOST, {"learner": {"optimizer": warmed}})
    rl.run(replace(paths, warmup_given=False), warmed, QUIET)
    with pytest.raises(ValueError, match="warmup_steps is 0, but 2 was asked for"):
        rl.run(paths, warmed, QUIET)
    with pytest.raises(ValueError, match=r"config.json: rl.seed is 0, but 5 was asked for"):
        rl.run(paths, replace(HOST, seed=5), QUIET)


def test_steps_to_trace_that_the_run_does_not_make_are_refused(tmp_path):
    with pytest.raises(ValueError, match="profile is '2:4', but the run has 3 steps"):
        rl.run(
            rl.RlPaths(tmp_path / "policy", tmp_path / "out"), replace(HOST, profile="2:4"), QUIET
        )


@pytest.mark.slow
def test_a_run_goes_on_with_its_checkpoints_config_where_its_own_was_cut(
    finished, checkpoint, tmp_path
):
    out = shutil.copytree(finished, tmp_path / "out")
    (out / "closed_loop.jsonl").write_text(
        '{"step": 0, "success": {"ra\n' + (out / "closed_loop.jsonl").read_text()
    )
    paths = rl.RlPaths(checkpoint, out, resume=True)
    for cut in ('{"model": {"fam', ""):
        (out / "config.json").write_text(cut)
        with pytest.raises(ValueError, match=r"config.json: rl.seed is 0, but 5 was asked for"):
            rl.run(paths, replace(HOST, seed=5), QUIET)
    assert rl.run(paths, HOST, QUIET).finished
    assert (out / "config.json.damaged-2").exists()
    assert (out / "closed_loop.jsonl.damaged").exists()
    assert read_closed_loop(out) == read_closed_loop(finished)


@pytest.mark.slow
def test_an_early_run_with_other_euler_steps_than_it_acted_with_goes_on(
    finished, checkpoint, tmp_path
):
    """Its config has the model's own steps of before, and lacks options that came later."""
    out = shutil.copytree(finished, tmp_path / "out")
    saved = json.loads((out / "config.json").read_text())
    assert saved["model"]["euler_steps"] == HOST.flow.euler_steps
    saved["model"]["euler_steps"] = 10
    for name in ("keep", "keep_every", "keep_best"):
        del saved["rl"][name]
    (out / "goodput.jsonl").unlink()
    (out / "config.json").write_text(json.dumps(saved))
    assert rl.run(rl.RlPaths(checkpoint, out, resume=True), HOST, QUIET).finished
    assert (
        json.loads((out / "config.json").read_text())["model"]["euler_steps"]
        == HOST.flow.euler_steps
    )


@pytest.mark.slow
def test_a_run_is_not_resumed_in_another_environment_of_the_same_name(
    finished, checkpoint, tmp_path, monkeypatch
):
    """A suite whose file has changed, and slots that differ in one field of their spec."""
    out = shutil.copytree(finished, tmp_path / "out")
    paths, more = rl.RlPaths(checkpoint, out, resume=True), replace(HOST, learner_steps=4)

    def longer(tasks, count, size):
        slots = Noted(Eager(), count)
        slots.spec = replace(slots.spec, max_steps=99)
        return slots

    saved = own.read_json(out, "config")["environment"]
    assert (saved["suite"], saved["state_names"]) == ("points", ["x", "y"])
    for other, why in (
        (replace(POINTS, source="sha256:2"), "its source was '' and is 'sha256:2' now"),
        (replace(POINTS, open=longer), r"its max_steps was \d+ and is 99 now"),
    ):
        monkeypatch.setattr("tools.recipes.rl.load_suite", lambda name, other=other: other)
        with pytest.raises(ValueError, match=why):
            rl.run(paths, more, QUIET)
    assert own.steps(out / "checkpoints") == own.steps(finished / "checkpoints")


@pytest.mark.slow
def test_steps_may_grow_unless_the_schedule_ends_with_them(finished, checkpoint, tmp_path):
    out = shutil.copytree(finished, tmp_path / "out")
    falling = replace(HOST.learner.optimizer, schedule="linear")
    config = replace(HOST, learner=replace(HOST.learner, optimizer=falling))
    saved = json.loads((out / "config.json").read_text())
    saved["rl"]["learner"]["optimizer"]["schedule"] = "linear"
    (out / "config.json").write_text(json.dumps(saved))
    paths = rl.RlPaths(checkpoint, out, resume=True)
    with pytest.raises(
        ValueError, match=r"3 steps, but 5 .* its linear schedule falls .*learner\."
    ):
        rl.run(paths, replace(config, learner_steps=5), QUIET)


PAIR = replace(HOST, learner_steps=2, save_every=0)


@pytest.fixture(scope="module")
def evolved(checkpoint, tmp_path_factory):
    """A population of two, and how often simulators were opened for it."""
    out, opened = tmp_path_factory.mktemp("population"), []

    def counted(*asked):
        opened.append(asked)
        return open_slots(*asked)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tools.recipes.rl.load_suite", lambda name: replace(POINTS, open=counted))
        ended = rl.run(rl.RlPaths(checkpoint, out), PAIR, QUIET, PopulationConfig(2, turn=1))
    return out, ended, opened


@pytest.mark.slow
def test_a_population_shares_one_set_of_simulators_and_leaves_its_best_member(evolved, checkpoint):
    out, ended, opened = evolved
    assert ended.finished
    assert opened == [(("points",), 1, 32)]
    assert [generation.step for generation in ended.generations] == [0, 1, 2]
    for k in (0, 1):
        member = out / "members" / str(k)
        assert [row["step"] for row in rows(member)] == [0, 1]
        assert [line["step"] for line in read_closed_loop(member)] == [0, 1, 2]
        rates = [line["success"]["rate"] for line in read_closed_loop(member)]
        assert rates == [generation.success[k] for generation in ended.generations]
        assert (member / "curves.png").exists()
    best = out / "members" / str(ended.best)
    one, other = load_policy(out), load_policy(best)
    assert jax.tree.all(jax.tree.map(np.array_equal, one.params, other.params))
    assert one.processor == load_policy(checkpoint).processor
    assert (out / "population.svg").stat().st_size > 1000
    assert (out / "population.png").read_bytes()[1:4] == b"PNG"


@pytest.mark.slow
def test_a_population_killed_in_a_turn_goes_on_to_the_same_members(evolved, checkpoint, tmp_path):
    """Killed in the second turn of the second member, before it was saved."""
    whole, ended, _ = evolved
    out, first = shutil.copytree(whole, tmp_path / "out"), ended.generations[1]
    shutil.rmtree(out / "members/1/checkpoints/2")
    write_generations(out, ended.generations[:2])
    copy(out / "members" / str(first.best) / "checkpoints/1", out / "checkpoints")
    assert own.steps(out / "checkpoints") == [1]
    paths = rl.RlPaths(checkpoint, out, resume=True)
    assert rl.run(paths, PAIR, QUIET, PopulationConfig(2, turn=1)) == ended
    one, other = (folder / "members/1" for folder in (whole, out))
    assert learnt(one) == learnt(other)
    for name in ("params", "ema"):
        both = (own.restore_params(folder, name) for folder in (one, other))
        assert jax.tree.all(jax.tree.map(np.array_equal, *both))


@pytest.mark.slow
def test_a_population_goes_on_with_its_members_config_where_its_own_was_cut(
    evolved, checkpoint, tmp_path
):
    whole, ended, _ = evolved
    out = shutil.copytree(whole, tmp_path / "out")
    (out / "config.json").write_text('{"rl": ')
    member = out / "members/1/closed_loop.jsonl"
    member.write_bytes(b"\0\n" + member.read_bytes())
    copy(out / "members/1/checkpoints/2", out / "checkpoints")
    second = own.read_json(out, "config")["rl"]
    assert second != json.loads((whole / "config.json").read_text())["rl"], "other numbers"
    paths = rl.RlPaths(checkpoint, out, resume=True)
    with pytest.raises(ValueError, match=r"config.json: rl.seed is 0, but 5 was asked for"):
        rl.run(paths, replace(PAIR, seed=5), QUIET, PopulationConfig(2, turn=1))
    assert rl.run(paths, PAIR, QUIET, PopulationConfig(2, turn=1)) == ended
    assert read_closed_loop(out / "members/1") == read_closed_loop(whole / "members/1")


@pytest.mark.parametrize(
    ("population", "why"),
    [
        (PopulationConfig(-1), "population is -1; expected at least 2 members"),
        (PopulationConfig(0, turn=5), "population is 0; expected at least 2 members, or 0 and nei"),
        (PopulationConfig(2, tuned=("objective.ratio",)), "'objective.ratio', which is 'chunk'"),
    ],
)
def test_a_population_that_makes_no_sense_is_refused(population, why, checkpoint, tmp_path):
    with pytest.raises(ValueError, match=why):
        rl.run(rl.RlPaths(checkpoint, tmp_path / "out"), HOST, QUIET, population)
    assert not (tmp_path / "out").exists()


def test_a_population_is_refused_where_its_members_cannot_share_simulators(checkpoint, tmp_path):
    elsewhere = replace(HOST, placement="disaggregated")
    with pytest.raises(ValueError, match="members share simulators in this process"):
        rl.run(rl.RlPaths(checkpoint, tmp_path / "out"), elsewhere, QUIET, PopulationConfig(2))
    assert not (tmp_path / "out").exists()


def test_a_population_of_tasks_that_cannot_share_slots_or_are_held_out_is_refused(
    checkpoint, tmp_path, monkeypatch
):
    beside = replace(HOST, held_out_tasks=("new",))
    with pytest.raises(ValueError, match="held_out_tasks are evaluated beside one run"):
        rl.run(rl.RlPaths(checkpoint, tmp_path / "out"), beside, QUIET, PopulationConfig(2))
    monkeypatch.setattr("tools.recipes.rl.load_suite", lambda name: APART)
    with pytest.raises(ValueError, match=r"a population can learn only one .*--rollout.tasks near"):
        rl.run(rl.RlPaths(checkpoint, tmp_path / "out"), HOST, QUIET, PopulationConfig(2))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"rollout": {"slots": 2}}, "2 slots are too few for 3 tasks that cannot share slots"),
        ({"placement": "disaggregated"}, "simulators is 2, but 3 tasks cannot share slots; give"),
        (
            {"rollout": {"tasks": ("near", "new")}, "held_out_tasks": ("new",)},
            r"Task \['new'\] is in rollout.tasks and in held_out_tasks; choose one",
        ),
        ({"held_out_tasks": APART.tasks}, "held_out_tasks names all tasks of suite 'points'"),
        ({"held_out_tasks": ("old",)}, r"Suite 'points' has no task \['old'\]"),
    ],
)
def test_tasks_that_no_run_can_learn_together_are_refused_before_anything_is_written(
    changed, why, checkpoint, tmp_path, monkeypatch
):
    for module in ("tools.recipes.rl", "tools.recipes.closed_loop"):
        monkeypatch.setattr(f"{module}.load_suite", lambda name: APART)
    with pytest.raises(ValueError, match=why):
        rl.run(rl.RlPaths(checkpoint, tmp_path / "out"), changed_by(HOST, changed), QUIET)
    assert not (tmp_path / "out").exists()


def test_tasks_of_different_robots_are_not_learnt_together(checkpoint):
    slots = [Apart((task,), 1, 32) for task in ("near", "far")]
    slots[1].spec = replace(slots[1].spec, fps=5)
    with pytest.raises(ValueError, match="must be of one robot, but fps is 8 in near and 5 in far"):
        OnHost(load_policy(checkpoint), APART, ("near", "far"), slots, HOST)


@pytest.mark.slow
def test_a_population_goes_on_as_one_of_the_same_size(evolved, checkpoint):
    paths = rl.RlPaths(checkpoint, evolved[0], resume=True)
    with pytest.raises(ValueError, match=r"population.population is 2, but 3 was asked for"):
        rl.run(paths, PAIR, QUIET, PopulationConfig(3, turn=1))
    with pytest.raises(ValueError, match=r"population is {.*}, but None was asked for"):
        rl.run(paths, PAIR, QUIET)


def test_a_population_is_asked_for_by_its_size():
    where = ["--checkpoint", "a", "--out", "b", "--population", "4", "--turn", "25"]
    tuned = ["--tuned", "flow.level", "objective.clip"]
    assert rl.parse(where)[2] == PopulationConfig(4, turn=25)
    assert rl.parse([*where, *tuned])[2].tuned == ("flow.level", "objective.clip")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (
            {"rollout": {"group": 1}},
            "group is 1, but .* 'group' compares",
        ),
        (
            {"rollout": {"replan_steps": 5}},
            "replan_steps is 5, but .* chunks have 4 steps",
        ),
        (
            {"rollout": {"groups": 0}},
            "groups is 0; it must be at least",
        ),
        ({"rollout": replace(HOST.rollout, tasks=("lines",))}, r"'points' has no task \['lines'\]"),
        ({"placement": "disaggregated"}, "simulators is 2, but there are only 1 slots to share"),
        (
            {
                "placement": "colocated",
                "rollout": RolloutConfig(suite="points"),
                "objective": ObjectiveConfig(),
                "learner": LearnerConfig(),
            },
            r"takes tasks that are simulated on the device, .*'points'",
        ),
        ({"objective": {"name": "vtrace"}}, "'vtrace' needs values"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    changed, why, checkpoint, tmp_path
):
    with pytest.raises(ValueError, match=why):
        rl.run(rl.RlPaths(checkpoint, tmp_path / "out"), changed_by(HOST, changed), QUIET)
    assert not (tmp_path / "out").exists()


def test_a_policy_of_another_robot_is_refused_with_what_both_have(tmp_path):
    policy = save_policy(tmp_path / "other", cameras=("top", "wrist"))
    with pytest.raises(ValueError, match=r"cameras \['top', 'wrist'\].*points has cameras \['top'"):
        rl.run(rl.RlPaths(policy, tmp_path / "out"), HOST, QUIET)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", sorted(RL_PRESETS))
def test_presets_are_whole_and_taken_by_name_with_changes(name, tmp_path):
    where = ["--checkpoint", "a", "--out", "b"]
    paths, config, population, _ = rl.parse([*where, "--preset", name])
    assert paths == rl.RlPaths(Path("a"), Path("b"), preset=name)
    assert config == RL_PRESETS[name]
    assert population == rl.ALONE
    assert rl.parse([*where, f"--preset={name}", "--learner-steps", "2"])[1] == replace(
        config, learner_steps=2
    )


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"eval_every": -1}, "eval_every is -1; it must be at least 0"),
        ({"save_every": -1}, "save_every is -1; it must be at least 0"),
        ({"rollout": {"deadline": -1.0}}, "rollout.deadline is -1.0; it must be"),
        (
            {"objective": {"value_weight": -1.0}},
            "objective.value_weight is -1.0; it must be",
        ),
        ({"objective": {"gae_lambda": 1.5}}, "and gae_lambda 1.5; expected"),
        ({"seed": -1}, "seed is -1; it must be at least 0"),
        ({"rollout": {"redraws": -1}}, "rollout.redraws is -1; it must be at least 0"),
        (
            {"rollout": {"curriculum": "signal", "group": 1}},
            "rollout.curriculum is 'signal' .* but rollout.group is 1",
        ),
        ({"rollout": {"redraws": 2, "group": 1}}, "redraws is 2, but rollout.group is 1"),
        (
            {"rollout": {"deadline": math.inf}},
            "rollout.deadline is inf; it must be a finite number",
        ),
        (
            {"objective": {"entropy_weight": math.nan}},
            "objective.entropy_weight is nan; it must be a finite number",
        ),
        (
            {"objective": {"truncation": math.nan}},
            "truncation nan; expected .* at least 1",
        ),
        ({"flow": FlowConfig(level=0.0)}, "flow.level is 0, so .* would learn nothing"),
        ({"flow": FlowConfig(noise="cps", level=0.0)}, "flow.level is 0, so .* learn nothing"),
        (
            {"learner": {"optimizer": replace(HOST.learner.optimizer, name="schedule_free")}},
            "learner.optimizer.name is 'schedule_free', .* choose adamw or muon",
        ),
        (
            {"colocated": ColocatedConfig(envs=4096, unroll=5)},
            "'host', which ignores colocated.envs = 4096, colocated.unroll = 5",
        ),
        (
            {"disaggregated": DisaggregatedConfig(simulators=64)},
            "ignores disaggregated.simulators = 64",
        ),
        (
            {"placement": "disaggregated", "colocated": ColocatedConfig(envs=64)},
            "ignores colocated.envs = 64",
        ),
    ],
)
def test_settings_that_make_no_sense_or_count_for_nothing_are_refused(changed, why):
    with pytest.raises(ValueError, match=why):
        changed_by(HOST, changed)


@pytest.mark.parametrize("level", [math.nan, math.inf])
def test_noise_that_is_no_number_is_refused(level):
    with pytest.raises(ValueError, match=f"flow.level is {level}; expected"):
        FlowConfig(level=level)
    with pytest.raises(ValueError, match=f"are 0.1 and {level}; expected standard deviations"):
        FlowConfig(noise="learned", least=0.1, most=level)


def test_noise_that_is_learned_needs_no_level():
    assert replace(HOST, flow=FlowConfig(noise="learned", level=0.0)).flow.level == 0


def test_a_users_preset_is_read_from_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from rl.config import RlConfig\nMINE = RlConfig(learner_steps=5)\nOTHER = 3\n")
    where = ["--checkpoint", "a", "--out", "b"]
    assert rl.parse([*where, "--preset", f"{file}:MINE"])[1] == RlConfig(learner_steps=5)
    with pytest.raises(ValueError, match="has no RlConfig named 'OTHER'; found int"):
        rl.parse([*where, "--preset", f"{file}:OTHER"])


def test_the_command_line_refuses_in_one_sentence_and_says_how_to_go_on(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["rl", "--checkpoint", "a", "--out", "b", "--preset", "best"])
    with pytest.raises(SystemExit, match="error: Unknown preset 'best'; choose one of"):
        rl.main()

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.argv", ["rl", "--checkpoint", "a", "--out", "b"])
    monkeypatch.setattr(rl, "run", interrupted)
    with pytest.raises(SystemExit) as exit:
        rl.main()
    assert exit.value.code == 130
    assert "--resume continues from the last checkpoint" in capsys.readouterr().err
