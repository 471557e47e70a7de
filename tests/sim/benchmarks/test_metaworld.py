"""Meta-World behind `Slots`: the package's own episodes, in any slot, at the package's speed."""

import json
import resource
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from sim.benchmarks.metaworld import FAMILIES, INSTALL, MT10, open_slots
from sim.processes.interpreters import interpreter
from sim.protocol import EVAL_SEEDS, TRAIN_SEEDS, Outcome, Slots, Start
from sim.simulators.metaworld_prompts import PARAPHRASES, PROMPTS
from sim.suites import load_suite

TASKS = FAMILIES["metaworld"][0]
FEW = ("reach-v3", "drawer-close-v3", "button-press-topdown-v3")


@pytest.fixture(scope="module")
def python():
    try:
        return interpreter("metaworld", "metaworld", INSTALL)
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def slots(python):
    with load_suite("metaworld").open(FEW, 2, 48) as slots:
        yield slots


def told(slots: Slots, slot: int) -> Outcome:
    [outcome] = slots.poll()
    assert outcome.error is None
    assert outcome.slot == slot
    return outcome


def begun(slots: Slots, slot: int, task: str, seed: int) -> Outcome:
    slots.begin(slot, Start(task, seed))
    return told(slots, slot)


def same(a: Outcome, b: Outcome) -> bool:
    seen = zip(a.observation, b.observation, strict=True)
    return np.array_equal(a.reward, b.reward) and all(np.array_equal(x, y) for x, y in seen)


def shown(slots: Slots, slot: int, start: Start, chunk: int) -> list[Outcome]:
    """The expert's whole episode."""
    outcomes = [begun(slots, slot, *start)]
    while not outcomes[-1].ended:
        slots.demonstrate(slot, chunk)
        outcomes.append(told(slots, slot))
    return outcomes


def test_the_suite_has_all_50_tasks_and_keeps_evaluation_apart(python):
    suite = load_suite("metaworld")
    assert len(suite.tasks) == len(set(suite.tasks)) == 50
    for seed in (suite.first_seed, suite.first_seed + suite.episodes - 1):
        assert seed in EVAL_SEEDS
        assert seed not in TRAIN_SEEDS
    asked = """
import json, metaworld
from metaworld import env_dict
print(json.dumps([list(metaworld.ALL_V3_ENVIRONMENTS), list(env_dict.MT10_V3)]))
"""
    theirs = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True)
    every, ten = json.loads(theirs.stdout)
    assert sorted(every) == sorted(suite.tasks)
    assert sorted(ten) == sorted(load_suite("metaworld_mt10").tasks) == sorted(MT10)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["push-v3", "pick-place-v3", "push-back-v3"])
def test_the_expert_grasps_with_a_hand_that_had_closed_on_nothing(python, task):
    with open_slots((task,), 1, 48, python=python, cameras=()) as slots:
        begun(slots, 0, task, TRAIN_SEEDS.start)
        slots.send(0, np.tile(np.float32([0, 0, 0, 1]), (30, 1)))
        outcome = told(slots, 0)
        assert not outcome.ended
        while not outcome.ended:
            slots.demonstrate(0, 50)
            outcome = told(slots, 0)
        assert outcome.success


def test_paraphrases_are_prompts_of_their_own_suite_and_of_no_recording(slots):
    suite = load_suite("metaworld")
    other = load_suite(str(suite.variants["paraphrase"]))
    assert (other.tasks, other.first_seed) == (suite.tasks, suite.first_seed)
    assert slots.spec.prompts == tuple(PROMPTS[task] for task in FEW)
    with other.open(FEW[:1], 1, 48) as reworded:
        assert reworded.spec.prompts == (PARAPHRASES[FEW[0]],)
        assert same(begun(reworded, 0, FEW[0], 7), begun(slots, 0, FEW[0], 7))
    known = {wording for wordings in PROMPTS.values() for wording in wordings}
    assert PARAPHRASES.keys() == PROMPTS.keys()
    assert not known & {wording for wordings in PARAPHRASES.values() for wording in wordings}


def test_a_policy_is_shown_upright_pictures_and_proprioception(slots):
    outcome = begun(slots, 0, FEW[1], 0)
    corner, wrist = outcome.observation.images
    assert corner.shape == wrist.shape == (48, 48, 3)
    assert corner[:8, -16:].std() < corner[-24:, 16:].std()  # the empty wall above, the table below
    assert np.array_equal(outcome.observation.state, begun(slots, 0, FEW[1], 1).observation.state)
    assert outcome.observation.state.shape == (4,)


def test_the_first_picture_shows_this_episodes_goal(slots):
    """The package draws the last episode's until something moves."""
    first = begun(slots, 0, "reach-v3", 1)
    begun(slots, 0, "reach-v3", 2)
    again = begun(slots, 0, "reach-v3", 1)
    other = begun(slots, 1, "reach-v3", 2)
    assert same(first, again)
    assert not np.array_equal(first.observation.images, other.observation.images)


@pytest.mark.slow
@pytest.mark.usefixtures("python")
def test_goals_are_larger_in_both_cameras_of_mt10_than_in_the_corner():
    def pixels(suite):
        """Pixels of each camera in which two starts differ."""
        with load_suite(suite).open(("reach-v3",), 1, 96) as slots:
            one, other = (begun(slots, 0, "reach-v3", seed).observation.images for seed in (1, 2))
        moved = np.abs(one.astype(int) - other).max(-1) > 60
        return dict(zip(slots.spec.cameras, moved.sum((1, 2)).tolist(), strict=True))

    few, many = pixels("metaworld"), pixels("metaworld_mt10")
    assert list(many) == ["observation.images.close", "observation.images.left"]
    assert min(many.values()) > 2 * few["observation.images.corner"] > 0


@pytest.mark.slow
def test_a_recording_may_draw_only_some_steps_which_are_those_of_one_that_draws_all(slots):
    start = Start("button-press-topdown-v3", 3)
    with load_suite("metaworld").cheaper(3, True).open((start.task,), 1, 48) as sparse:
        seen = [outcome.observation for outcome in shown(sparse, 0, start, 1)[:8]]
    every = [outcome.observation for outcome in shown(slots, 0, start, 1)[:8]]
    for step, (some, true) in enumerate(zip(seen, every, strict=True)):
        assert np.array_equal(some.images, every[step - step % 3].images)
        assert np.array_equal(some.state, true.state)
    assert not np.array_equal(every[3].images, every[5].images)


@pytest.mark.slow
def test_without_antialiasing_edges_alone_differ_and_little_once_pictures_are_smaller(python):
    start, pictures = Start("button-press-topdown-v3", 3), []
    for antialias in (True, False):
        suite = load_suite("metaworld").cheaper(1, antialias)
        with suite.open((start.task,), 1, 128) as slots:
            pictures.append(begun(slots, 0, *start).observation.images[0].astype(float))
    smooth, plain = pictures
    changed = (np.abs(smooth - plain).max(-1) > 8).mean()
    assert 0 < changed < 0.1
    smaller = [p.reshape(-1, 32, 4, 32, 4, 3).mean((2, 4)) for p in pictures]
    assert np.abs(smaller[0] - smaller[1]).mean() < 1


def test_the_same_start_is_the_same_episode_in_any_slot_after_any_other(slots):
    task = "button-press-topdown-v3"
    actions = np.random.default_rng(0).uniform(-1, 1, (20, 4)).astype(np.float32)

    def acted(slot: int, chunks: int) -> list[Outcome]:
        begun(slots, slot, task, 5)
        outcomes = []
        for chunk in np.split(actions, chunks):
            slots.send(slot, chunk)
            outcomes.append(told(slots, slot))
        return outcomes

    whole = acted(0, 1)[0]
    begun(slots, 1, "reach-v3", 9)
    slots.demonstrate(1, 7)
    told(slots, 1)
    cut = acted(1, 4)
    assert same(whole, cut[-1]._replace(reward=np.concatenate([c.reward for c in cut])))
    assert not same(begun(slots, 0, task, 6), begun(slots, 1, task, 5))


@pytest.mark.parametrize("task", FEW)
def test_the_expert_succeeds_and_ends_the_episode(slots, task):
    last = shown(slots, 0, Start(task, EVAL_SEEDS.start), 40)[-1]
    assert last.success
    assert last.terminated
    assert last.achieved is None, "it judges no other task's goal"
    assert np.abs(last.actions).max() <= 1


def test_success_need_not_end_an_episode_and_time_does(python):
    with open_slots(("reach-v3",), 1, 32, cameras=(), max_steps=90, until_success=False) as slots:
        first, *chunks = shown(slots, 0, Start("reach-v3", 0), 30)
        assert first.observation.images.shape == (0, 32, 32, 3)
        assert [len(chunk.reward) for chunk in chunks] == [30, 30, 30]
        assert any(chunk.success for chunk in chunks)
        assert chunks[-1].truncated
        assert not chunks[-1].terminated


def test_an_unknown_task_or_camera_is_refused(python):
    with pytest.raises(ValueError, match=r"no \['juggle-v3'\]"):
        open_slots(("juggle-v3",), 1, 32)
    with pytest.raises(ValueError, match=r"no \['corner9'\]"):
        open_slots(("reach-v3",), 1, 32, cameras=("corner9",))


@pytest.mark.drill
def test_the_guide_runs_as_it_stands(python, capsys):
    guide = (Path(__file__).parents[3] / "docs" / "simulators.md").read_text()
    exec(guide.split("```python\n")[1].split("```")[0], {})
    assert capsys.readouterr().out.startswith("100.0 % (12/12")


@pytest.mark.drill
def test_no_task_carries_anything_over_from_one_episode_to_the_next(python):
    actions = np.random.default_rng(0).uniform(-1, 1, (15, 4)).astype(np.float32)
    differing = []
    with open_slots(TASKS, 2, 32) as slots:
        for task in TASKS:
            begun(slots, 1, task, 7)
            slots.demonstrate(1, 40)
            told(slots, 1)
            firsts = [begun(slots, slot, task, 1) for slot in (0, 1)]
            for slot in (0, 1):
                slots.send(slot, actions)
            lasts: list[Outcome] = []
            while len(lasts) < 2:
                lasts += slots.poll()
            if not same(*firsts) or not same(*lasts):
                differing.append(task)
    assert not differing


@pytest.mark.drill
def test_experts_succeed_as_in_the_bare_package_and_as_fast(python, capsys):
    """All 50 tasks, 4 starts each, 8 steps a chunk. Speed is steps per second of CPU time, that of
    the parent and of starting included; two starts are measured at a time, in turn."""
    bare = Path(__file__).parent / "bare_metaworld.py"
    theirs, ours, cost = [], [], {"bare": 0.0, "ours": 0.0}
    for first in (EVAL_SEEDS.start, EVAL_SEEDS.start + 2):
        before = _cpu()
        command = [str(python), str(bare), str(first), "2", *TASKS]
        theirs += json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        cost["bare"] += _cpu() - before
        before = _cpu()
        with open_slots(TASKS, 1, 32, cameras=()) as slots:
            for task in TASKS:
                for seed in (first, first + 1):
                    episode = shown(slots, 0, Start(task, seed), 8)
                    length = sum(len(chunk.reward) for chunk in episode)
                    ours.append([task, seed, episode[-1].success, length])
        cost["ours"] += _cpu() - before
    assert ours == theirs
    success = np.mean([episode[2] for episode in ours])
    steps = sum(episode[3] for episode in ours)
    ratio = cost["bare"] / cost["ours"]
    missed = [episode[:2] for episode in ours if not episode[2]]
    with capsys.disabled():
        print(
            f"\nexperts {success:.3f} of {len(ours)}, missed {missed}; steps per CPU second: bare "
            f"{steps / cost['bare']:.0f}, ours {steps / cost['ours']:.0f}, ratio {ratio:.3f}"
        )
    assert success >= 0.95
    assert ratio >= 0.9


def _cpu() -> float:
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime + time.process_time()
