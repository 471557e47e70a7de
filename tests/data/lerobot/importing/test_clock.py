"""Topics on one clock: the last message at or before each tick, and gaps by their times."""

import numpy as np
import pytest

from data.lerobot.importing.clock import ROUNDING, SECOND, align


def at(*seconds):
    return np.array([round(s * SECOND) for s in seconds], np.int64)


def test_each_tick_has_the_last_message_so_far_as_counted_one_by_one():
    rng = np.random.default_rng(0)
    times = {n: np.sort(rng.integers(0, 5 * SECOND, 60)) for n in "abc"}
    (found,) = align(times, 7, 10, "refuse")
    assert found.ticks[0] == max(t[0] for t in times.values())
    assert found.ticks[-1] <= max(t[-1] for t in times.values()) <= found.ticks[-1] + SECOND // 7
    for topic, stamps in times.items():
        until = found.ticks + ROUNDING
        expected = [max(k for k, t in enumerate(stamps) if t <= tick) for tick in until]
        assert found.messages[topic].tolist() == expected


def test_ticks_do_not_drift():
    stamps = np.arange(100_000, dtype=np.int64) * SECOND // 30
    (found,) = align({"a": stamps}, 30, 1, "refuse")
    assert np.array_equal(found.messages["a"], np.arange(100_000))


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ({"a": at(), "b": at(0)}, "a has no message"),
        (
            {"a": at(0, 0.5, 0.2)},
            "a goes back in time, from 0.50 s after its first message to 0.2",
        ),
        ({"a": at(0, 1, 2), "b": at(1.6, 2)}, "b is silent from 0.00 s to 1.60 s, longer than 1 s"),
        ({"a": at(0, 1, 2, 3), "b": at(0, 1, 3)}, "b is silent from 1.00 s to 3.00 s"),
        ({"a": at(0, 1, 2), "b": at(0, 0.5)}, "b is silent from 0.50 s to 2.00 s"),
    ],
)
def test_what_cannot_be_aligned_is_named(times, message):
    with pytest.raises(ValueError, match=message):
        align(times, 10, 1, "refuse")


def test_gaps_are_cut_between_the_messages_around_them():
    times = {"a": at(*np.arange(0, 6, 0.5)), "b": at(0, 1, 2, 4, 5)}
    first, second = align(times, 2, 1, "cut")
    assert (first.ticks / SECOND).tolist() == [0, 0.5, 1, 1.5, 2]
    assert (second.ticks / SECOND).tolist() == [4, 4.5, 5, 5.5]
    assert second.messages["b"].tolist() == [3, 3, 4, 4]
    assert (first.left_out, second.left_out) == (0, 2)
    only = align({"a": times["a"], "b": at(0, 1)}, 2, 1, "cut")
    assert [(part.ticks / SECOND).tolist() for part in only] == [[0, 0.5, 1]]


def test_a_clock_that_was_not_set_takes_no_memory():
    times = {"a": at(0, 1.7e9, 1.7e9 + 0.1), "b": at(1.7e9, 1.7e9 + 0.1)}
    with pytest.raises(ValueError, match=r"a is silent from 0\.00 s to 1700000000\.00 s"):
        align(times, 1000, 1, "refuse")
    (found,) = align({"a": at(0, 0.1, 1.7e9, 1.7e9 + 0.1)} | {"b": at(1.7e9)}, 10, 1, "cut")
    assert found.ticks.tolist() == at(1.7e9, 1.7e9 + 0.1).tolist()
