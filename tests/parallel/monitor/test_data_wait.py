import re

import pytest

from parallel.monitor import data_wait
from parallel.monitor.data_wait import DataWait

STORAGE = {"load_cpu_seconds": 1.0, "load_decode_seconds": 0.9, "load_wait_seconds": 3.0}
DECODING = {"load_cpu_seconds": 1.0, "load_decode_seconds": 0.9, "load_wait_seconds": 0.2}
PREPARING = {"load_cpu_seconds": 1.0, "load_decode_seconds": 0.1, "load_wait_seconds": 0.2}


def lines(steps, wait, facts, watch=None):
    watch = DataWait() if watch is None else watch
    said = [watch.after(1.0, {"data_wait": wait, **facts}) for _ in range(steps)]
    return [line for line in said if line is not None]


@pytest.mark.parametrize(
    ("facts", "remedy"),
    [
        (STORAGE, "mostly waits for storage"),
        (DECODING, "90% of the loader's CPU time goes into decoding images"),
        (PREPARING, r"for it\. Raise --data\.workers\.$"),
        ({}, r"for it\. Raise --data\.workers\.$"),
    ],
)
def test_a_run_that_waits_for_data_is_told_once_what_helps(facts, remedy):
    (said,) = lines(120, 0.3, facts)
    assert "the last 50 steps waited 15.0 of 50.0 s for it." in said
    assert re.search(remedy, said)


def test_nothing_is_said_while_data_keeps_up_or_of_too_few_steps():
    assert lines(200, 0.19, DECODING) == []
    assert lines(49, 1.0, DECODING) == []


def test_only_the_last_steps_count_and_the_line_comes_again_after_ten_minutes(monkeypatch):
    now, watch = 1000.0, DataWait()
    monkeypatch.setattr(data_wait.time, "perf_counter", lambda: now)
    assert lines(500, 0.0, DECODING, watch) == []
    assert len(lines(60, 0.5, DECODING, watch)) == 1
    now += 599
    assert lines(60, 0.5, DECODING, watch) == []
    now += 1
    assert len(lines(60, 0.5, DECODING, watch)) == 1
