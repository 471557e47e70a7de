import numpy as np
import pytest

from data import open_dataset
from data.former_store import build_store
from data.split import split_episodes
from tests.data.conftest import make_episode, write


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Ten different episodes of three tasks, and doubles of three of them."""
    path = tmp_path_factory.mktemp("doubles")
    episodes = [make_episode(number, 4) for number in (*range(10), 2, 5, 2)]
    return build_store(open_dataset(write(path / "d", episodes)), path / "s", 8, "raw")


def test_every_task_holds_some_out_and_keeps_some(store):
    train, held_out = split_episodes(store, 0.25)
    assert np.array_equal(np.sort(np.concatenate([train, held_out])), np.arange(13))
    for part in (train, held_out):
        assert set(store.tasks[part]) == {0, 1, 2}


@pytest.mark.parametrize("seed", range(6))
def test_doubles_stay_on_one_side(store, seed):
    _, held_out = split_episodes(store, 0.4, seed)
    for double, original in ((10, 2), (11, 5), (12, 2)):
        assert (double in held_out) == (original in held_out)


def test_the_split_depends_on_the_seed_alone(store):
    splits = [split_episodes(store, 0.4, seed)[1].tolist() for seed in (0, 0, 1, 2, 3)]
    assert splits[0] == splits[1]
    assert len({tuple(split) for split in splits}) > 1


@pytest.mark.parametrize("fraction", [0, 1, -0.1])
def test_a_fraction_outside_of_0_to_1_is_refused(store, fraction):
    with pytest.raises(ValueError, match="held-out fraction"):
        split_episodes(store, fraction)


def test_a_single_episode_cannot_be_held_out(tmp_path):
    write(tmp_path / "d", [make_episode(0, 4)])
    single = build_store(open_dataset(tmp_path / "d"), tmp_path / "s", 8, "raw")
    with pytest.raises(ValueError, match="none can be held out"):
        split_episodes(single, 0.5)
