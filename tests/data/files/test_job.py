"""Jobs in this process: results in the order of the units, errors of the first that fails."""

import time

import pytest

from data.files.job import alone, cores, in_threads, run_job, running, using_cores


def slow_first(unit, done):
    time.sleep(0.05 if unit == 0 else 0)
    done(unit)
    return unit**2


@pytest.mark.parametrize("run", [alone, in_threads(3), in_threads(3, shared=True)])
def test_results_come_in_the_order_of_the_units(run):
    amounts = []
    with running(run):
        assert list(run_job(slow_first, range(6), amounts.append)) == [0, 1, 4, 9, 16, 25]
    assert sorted(amounts) == [*range(6)]


def test_a_job_runs_where_the_block_says_and_else_where_it_says_itself():
    def other(work, units, done):
        return iter(["elsewhere"])

    def own(work, units, done):
        return iter(["own"])

    with running(other), running(None):
        assert list(run_job(slow_first, [1], here=own)) == ["elsewhere"]
    assert list(run_job(slow_first, [1], here=own)) == ["own"]


def failing(unit, done):
    if unit:
        raise ValueError(f"unit {unit}")
    return unit


def test_an_error_of_a_unit_is_the_jobs():
    with running(in_threads(2)), pytest.raises(ValueError, match="unit 1"):
        list(run_job(failing, range(4)))


def test_cores_are_said_for_a_block():
    with using_cores(3):
        assert cores() == 3
    assert cores() >= 1
