"""Intervals between saves and goodput: known closed forms, and a simulation that agrees."""

import math
from statistics import mean, stdev

import pytest

from parallel.planning.reliability import (
    LLAMA3_FAILURES,
    Recovery,
    daly,
    goodput,
    mean_time_between_failures,
    simulate,
    young,
)

HOUR = 3600.0


def test_llama3s_rate_gives_the_reference_mean_time():
    assert pytest.approx(1.97e-5, rel=0.005) == LLAMA3_FAILURES
    assert mean_time_between_failures(1024, 1.97e-5) == pytest.approx(49.5 * HOUR, rel=0.002)
    assert mean_time_between_failures(10_240) == mean_time_between_failures(1024) / 10


def test_young_at_1024_gpus_saves_every_22_minutes():
    mtbf = 49.5 * HOUR
    interval = young(5, mtbf)
    assert interval / 60 == pytest.approx(22.2, abs=0.1)
    assert goodput(interval, Recovery(5, 600), mtbf) == pytest.approx(0.989, abs=0.0005)
    assert goodput(young(60, mtbf), Recovery(60, 600), mtbf) == pytest.approx(0.971, abs=0.001)


def test_dalys_interval_is_the_best_of_all():
    recovery, mtbf = Recovery(60, 600), 4 * HOUR
    best = max(range(60, 4 * 3600, 5), key=lambda t: goodput(t, recovery, mtbf))
    assert daly(recovery.save, mtbf) == pytest.approx(best, rel=0.01)
    at_daly, at_young = (goodput(f(60, mtbf), recovery, mtbf) for f in (daly, young))
    assert at_daly >= at_young


def test_daly_is_young_where_saves_are_cheap():
    assert daly(1e-3, HOUR) == pytest.approx(young(1e-3, HOUR), rel=1e-3)
    assert daly(3 * HOUR, HOUR) == HOUR


@pytest.mark.parametrize(("save", "restart", "mtbf"), [(5, 600, 49.5), (60, 600, 5), (30, 1800, 2)])
def test_the_simulation_agrees_with_the_formula(save, restart, mtbf):
    recovery, mtbf = Recovery(save, restart), mtbf * HOUR
    interval = daly(save, mtbf)
    runs = [simulate(2000 * HOUR, interval, recovery, mtbf, seed).goodput for seed in range(24)]
    error = stdev(runs) / math.sqrt(len(runs))
    assert mean(runs) == pytest.approx(goodput(interval, recovery, mtbf), abs=4 * error + 1e-4)


def test_a_run_without_failures_pays_its_saves_alone():
    outcome = simulate(1000.0, 100.0, Recovery(2, 600), 1e15)
    assert (outcome.failures, outcome.lost, outcome.restarting) == (0, 0, 0)
    assert outcome.saving == 9 * 2
    assert outcome.goodput == 1000 / 1018


def test_the_same_seed_gives_the_same_run():
    runs = [simulate(100 * HOUR, 600, Recovery(), HOUR, seed) for seed in (3, 3, 4)]
    assert runs[0] == runs[1] != runs[2]
    assert runs[0].failures > 50


def test_goodput_falls_with_devices_and_with_the_cost_of_recovery():
    def best(devices, recovery):
        mtbf = mean_time_between_failures(devices)
        return goodput(daly(recovery.save, mtbf), recovery, mtbf)

    over = [best(n, Recovery()) for n in (8, 256, 1024, 10_240)]
    assert over == sorted(over, reverse=True)
    assert (
        best(1024, Recovery(5, 600))
        > best(1024, Recovery(60, 600))
        > best(1024, Recovery(60, 3600))
    )


def test_a_run_that_never_gets_through_has_no_goodput():
    assert goodput(1e9, Recovery(), 1.0) == 0.0


@pytest.mark.parametrize(("save", "restart"), [(0.0, 600.0), (-5.0, 600.0), (5.0, -1.0)])
def test_a_recovery_that_takes_no_time_is_refused(save, restart):
    with pytest.raises(ValueError, match="--save-seconds"):
        Recovery(save, restart)


def test_a_rate_of_zero_is_refused():
    with pytest.raises(ValueError, match="must be above 0"):
        mean_time_between_failures(1024, 0)
