from types import SimpleNamespace

import numpy as np
import pytest

from data.frames import Runs
from data.mixture.split import split_episodes


def frames(tasks, doubles=()):
    """Episodes of one frame with these tasks; (a, b) of `doubles`: a repeats the earlier b."""
    number = np.arange(len(tasks))
    first = number.copy()
    for double, original in doubles:
        first[double] = original
    ones = np.ones_like(number)
    runs = Runs(number, 0 * ones, ones, np.array(tasks))
    return SimpleNamespace(name="test", duplicate_of=first, lengths=ones, runs=runs)


DOUBLES = ((10, 2), (11, 5), (12, 2))
THREE_TASKS = frames([number % 3 for number in (*range(10), 2, 5, 1)], DOUBLES)


def test_every_task_holds_some_out_and_keeps_some():
    train, held_out = split_episodes(THREE_TASKS, 0.25)
    assert np.array_equal(np.sort(np.concatenate([train, held_out])), np.arange(13))
    for part in (train, held_out):
        assert set(THREE_TASKS.runs.task[part]) == {0, 1, 2}


@pytest.mark.parametrize("seed", range(6))
def test_doubles_stay_on_one_side(seed):
    """This includes the twelfth, which is the third's double under another task."""
    _, held_out = split_episodes(THREE_TASKS, 0.4, seed)
    for double, original in DOUBLES:
        assert (double in held_out) == (original in held_out)


def test_the_split_depends_on_the_seed_alone():
    splits = [split_episodes(THREE_TASKS, 0.4, seed)[1].tolist() for seed in (0, 0, 1, 2, 3)]
    assert splits[0] == splits[1]
    assert len({tuple(split) for split in splits}) > 1


def test_the_task_of_an_episode_is_that_of_its_first_frame():
    """Episodes 0 to 2 begin with task 0 and go on with 1; 3 to 5 with task 1 alone."""
    episode = np.array([0, 0, 1, 1, 2, 2, 3, 4, 5])
    task = np.array([0, 1, 0, 1, 0, 1, 1, 1, 1])
    six = frames([0] * 6)
    six.runs = Runs(episode, np.array([0, 1] * 3 + [0] * 3), np.ones(9, np.int64), task)
    _, held_out = split_episodes(six, 0.3)
    assert np.count_nonzero(held_out < 3) == 1
    assert np.count_nonzero(held_out >= 3) == 1


@pytest.mark.parametrize("of_each", [1, 2, 3])
def test_many_small_tasks_hold_out_a_fraction_of_all(of_each):
    tasks = np.concatenate([np.repeat(np.arange(2000), of_each), np.full(500, 2000)])
    _, held_out = split_episodes(frames(tasks), 0.1)
    small = np.count_nonzero(tasks[held_out] < 2000)
    assert small == 200 * of_each
    assert len(held_out) - small == 50


def test_a_few_small_tasks_are_all_held_out_of():
    tasks = np.concatenate([np.repeat(np.arange(20), 2), np.full(200, 20)])
    _, held_out = split_episodes(frames(tasks), 0.1)
    assert np.bincount(tasks[held_out]).tolist() == [1] * 20 + [20]


def test_a_single_episode_of_a_task_is_trained_on():
    tasks = [0] * 10 + [1]
    for seed in range(8):
        assert 10 in split_episodes(frames(tasks), 0.3, seed)[0]


def test_a_million_episodes_are_split():
    tasks = np.random.default_rng(0).integers(0, 60_000, 1_000_000)
    train, held_out = split_episodes(frames(tasks), 0.02)
    assert len(train) + len(held_out) == 1_000_000
    assert len(held_out) == pytest.approx(20_000, rel=0.1)


@pytest.mark.parametrize("fraction", [0, 1, -0.1])
def test_a_fraction_outside_of_0_to_1_is_refused(fraction):
    with pytest.raises(ValueError, match="held-out fraction"):
        split_episodes(THREE_TASKS, fraction)


def test_a_single_episode_and_its_double_cannot_be_held_out():
    with pytest.raises(ValueError, match="test: has no two different episodes"):
        split_episodes(frames([0, 0], [(1, 0)]), 0.5)
