"""Starts of learning: never those of evaluation, and of tasks that still teach something."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from rl.host.starts import Curriculum, draw_start, share_out, training_seeds
from rl.records import TaskOutcome
from sim.protocol import EVAL_SEEDS
from sim.suite import Suite
from sim.suites import load_suite

FIXED = Suite("fixed", ("a",), 50, open=None, first_seed=0, recorded_from=1000, fixed=50)
LIFT = load_suite("tabletop-lift")


@pytest.mark.parametrize("first", [1, 500, LIFT.first_seed])
def test_seeds_before_those_of_evaluation_are_learnt_from(first):
    assert training_seeds(replace(LIFT, first_seed=first)) == range(first)


def test_a_suite_judged_by_later_seeds_leaves_those_of_its_original_alone():
    assert training_seeds(replace(LIFT, first_seed=1_500_000_000)) == range(EVAL_SEEDS.start)


def test_published_starts_are_never_learnt_from():
    assert training_seeds(FIXED) == range(1000, EVAL_SEEDS.start)
    assert training_seeds(replace(FIXED, first_seed=900_000_000)) == range(1000, 900_000_000)


def test_a_suite_without_other_starts_is_refused():
    late = replace(LIFT, recorded_from=1_200_000_000)
    with pytest.raises(ValueError, match=r"no starts to learn from.* choose a recorded_from below"):
        training_seeds(late)


def test_starts_derive_from_seed_ticket_and_attempt_and_stay_within_the_seeds():
    drawn = [draw_start(7, i, "a", range(100, 150)) for i in range(200)]
    assert drawn == [draw_start(7, i, "a", range(100, 150)) for i in range(200)]
    assert {start.seed for start in drawn} <= set(range(100, 150))
    assert len(set(drawn)) > 40
    for seed, attempt in ((8, 0), (7, 1)):
        other = [draw_start(seed, i, "a", range(100, 150), attempt) for i in range(200)]
        assert sum(a == b for a, b in zip(drawn, other, strict=True)) < 20


@pytest.mark.parametrize("weights", [[1, 1, 1], [1, 0.25, 0], [5, 1, 1e-9]])
def test_each_task_gets_its_share_of_every_step_to_within_one_ticket(weights):
    share = np.asarray(weights) / np.sum(weights)
    counts = [np.bincount(share_out(3, step, 7, share), minlength=3) for step in range(400)]
    assert np.abs(np.asarray(counts) - 7 * share).max() < 1
    assert np.abs(np.mean(counts, 0) - 7 * share).max() < 0.1
    firsts = Counter(int(share_out(3, step, 7, share)[0]) for step in range(400))
    assert np.abs(np.asarray([firsts[k] for k in range(3)]) / 400 - share).max() < 0.1


STALENESS = 1


def followed(signal=True):
    """A curriculum of three tasks, see `learn`."""
    options = {"tickets": 8, "staleness": STALENESS, "signal": signal}
    return Curriculum(5, ("a", "b", "c"), range(1000), **options)


def starts_of(curriculum, step):
    return [curriculum.start(8 * step + i) for i in range(8)]


def learn(curriculum, step):
    """Counts a step, and returns its groups by task: "b" always has signal, "a" never, "c" half of
    the time."""
    groups = Counter(start.task for start in starts_of(curriculum, step))
    share = {"a": 0.0, "b": 1.0, "c": 0.5}
    curriculum.note(
        {
            task: TaskOutcome(8 * count, 0, 0, 0.0, count, round(share[task] * count))
            for task, count in groups.items()
        }
    )
    return groups


def test_tasks_with_signal_get_more_tickets_and_none_is_given_up():
    curriculum, even = followed(), followed(signal=False)
    drawn = [learn(curriculum, step) for step in range(60)]
    late = sum(drawn[20:], Counter())
    assert late["b"] > 1.3 * late["c"] > 2 * late["a"] > 0
    assert {count for step in range(60) for count in learn(even, step).values()} == {2, 3}


def test_a_ticket_keeps_its_task_in_every_attempt():
    curriculum = followed()
    for ticket in range(8):
        starts = [curriculum.start(ticket, attempt) for attempt in range(4)]
        assert len({start.task for start in starts}) == 1
        assert len(set(starts)) == 4


def test_a_steps_starts_are_settled_before_the_first_of_them_may_begin():
    """Step s may begin once s - staleness steps are learnt from, the last perhaps not counted."""
    curriculum, early = followed(), {}
    for counted in range(12):
        step = counted + STALENESS + 1
        early[step] = starts_of(curriculum, step)
        for other in range(max(counted, STALENESS + 1), step):
            assert starts_of(curriculum, other) == early[other]
        learn(curriculum, counted)
    assert len({tuple(sorted(start.task for start in starts)) for starts in early.values()}) > 2


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_resumed_curriculum_draws_what_the_whole_one_does(steps):
    whole, other = followed(), followed()
    for step in range(steps):
        learn(whole, step)
    other.restore(json.loads(json.dumps(whole.state())), steps)
    for step in range(steps, 12):
        assert starts_of(other, step) == starts_of(whole, step)
        assert learn(other, step) == learn(whole, step)
    assert other.state() == whole.state()


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"tasks": ["a", "b"]}, r"tasks is \['a', 'b'\], but the run's are \['a', 'b', 'c'\]"),
        ({"counts": [[[0, 0]] * 3] * 2}, "counts is .* after each of 3 steps"),
        ({"counts": [[[0, -1]] * 3] * 3}, "two numbers of at least 0"),
        ({"counts": [[[0, float("nan")]] * 3] * 3}, "two numbers of at least 0"),
        ({"counts": [["x"]]}, "two numbers of at least 0"),
        ({"counts": None}, "two numbers of at least 0"),
    ],
)
def test_counts_that_no_curriculum_left_are_refused_by_their_field(changed, why):
    curriculum = followed()
    for step in range(4):
        learn(curriculum, step)
    with pytest.raises(ValueError, match=why):
        followed().restore(curriculum.state() | changed, 4)
    for name in ("tasks", "counts"):
        state = curriculum.state()
        del state[name]
        with pytest.raises(ValueError, match=f"{name} is missing"):
            followed().restore(state, 4)
