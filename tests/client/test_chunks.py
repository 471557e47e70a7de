"""Chunks laid out by tick, against a map of ticks written out by hand."""

import numpy as np
import pytest

from chiliad_client.chunks import ActionPlan, Chunk, Delays, chunk_fault, continuation


def chunk(start, number, steps=6, observed=None):
    """Actions that tell whose they are: (number, tick)."""
    ticks = start + np.arange(steps)
    actions = np.stack([np.full(steps, number), ticks], 1).astype(np.float32)
    return Chunk(start, start if observed is None else observed, actions)


def test_an_action_is_of_its_own_tick_and_of_no_other():
    plan = ActionPlan().merged(chunk(10, 1), 10, "latest")
    assert [plan.at(tick) is None for tick in (9, 10, 15, 16)] == [True, False, False, True]
    assert plan.at(12).action.tolist() == [1, 12]
    assert plan.at(12).observed == 10


@pytest.mark.parametrize("overlap", ["frozen", "latest", "average"])
def test_merging_is_what_a_map_of_ticks_says(overlap):
    rng = np.random.default_rng(0)
    plan, wanted, now = ActionPlan(), {}, 0
    for number in range(200):
        now += int(rng.integers(0, 5))
        new = chunk(now - int(rng.integers(0, 8)), number, int(rng.integers(1, 10)))
        frozen_until = now + int(rng.integers(-2, 6))
        plan = plan.merged(new, now, overlap, frozen_until)
        if new.end > now:
            merged = {}
            for tick in range(now, new.end):
                own = (new.actions[tick - new.start].astype(float), new.observed, 1)
                old = wanted.get(tick)
                if old is not None and overlap == "frozen" and tick < frozen_until:
                    own = old
                if old is not None and overlap == "average":
                    count = old[2] + 1
                    own = ((old[0] * old[2] + own[0]) / count, new.observed, count)
                merged[tick] = own
            wanted = merged
        for tick in range(now - 10, now + 20):
            found = plan.at(tick)
            assert (found is None) == (tick not in wanted), tick
            if found is not None:
                np.testing.assert_allclose(found.action, wanted[tick][0], atol=1e-9)
                assert found.observed == wanted[tick][1]


def test_a_chunk_that_is_over_changes_nothing_and_one_of_the_future_is_refused():
    plan = ActionPlan().merged(chunk(0, 1), 0, "latest")
    assert plan.merged(chunk(-20, 2), 3, "latest") is plan
    with pytest.raises(ValueError, match="begins at tick 4, after tick 3"):
        plan.merged(chunk(4, 2), 3, "latest")


def test_the_expected_delay_is_the_largest_of_the_latest_ten():
    delays = Delays()
    assert delays.expected == 1
    for delay in [7, *range(1, 6), *[2] * 5]:
        delays = delays.and_then(delay)
    assert delays.expected == 5
    assert len(delays.latest) == 10


def test_no_more_is_committed_than_is_left_of_the_chunk_or_the_server_takes():
    last = chunk(10, 1, steps=8)
    assert continuation(last, 13, 4) == (3, 4)
    assert continuation(last, 16, 4) == (6, 2)
    assert continuation(last, 13, 4, most=2) == (3, 2)
    assert continuation(last, 18, 4) is None
    assert continuation(last, 9, 4) is None
    assert continuation(None, 13, 4) is None


@pytest.mark.parametrize(
    ("actions", "why"),
    [
        (None, "NoneType"),
        (np.zeros((3, 2), int), "int64"),
        (np.zeros(2), "not floats"),
        (np.zeros((3, 3)), r"\[3, 3\], not \[steps, 2\]"),
        (np.zeros((0, 2)), r"\[0, 2\]"),
        (np.zeros((10_001, 2)), "10001 steps, more than 10000"),
        (np.full((3, 2), np.nan), "NaN"),
    ],
)
def test_what_is_no_chunk_is_named(actions, why):
    with pytest.raises(AssertionError, match=why):
        assert not chunk_fault(actions, 2), chunk_fault(actions, 2)
    assert chunk_fault(np.zeros((3, 2), np.float32), 2) is None
