"""Shares that change with the steps: counted over steps, and at any step without those before."""

import pickle
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from data.frames import Runs
from data.packing.curriculum import (
    Schedule,
    Stage,
    largest_weight,
    mean_shares,
    stages,
    told_weight,
    weight_at,
    wrong_weight,
)
from data.packing.order import PlanSource
from data.packing.plan import Plan
from tests.helpers.data.layouts import assert_within, layout

LAYOUT = layout(512, 12, 10, 320, 36, 1)
ROWS = 32
FADING = ((20, 1.0), (60, 0.0))
RISING = ((0, 0.0), (40, 2.0), (80, 0.5), (90, 0.5))


def source(name, weight, episodes=60, cameras=1):
    rng = np.random.default_rng(episodes)
    runs = Runs(
        np.arange(episodes),
        np.zeros(episodes, np.int64),
        rng.integers(1, 40, episodes),
        np.arange(episodes),
    )
    text = rng.integers(5, 61, (episodes, 1))
    return PlanSource(name, weight, runs, np.full(episodes, cameras), text)


def sources(*weights):
    return [source(f"set {n}", weight, 60 - 10 * n, 1 + n % 2) for n, weight in enumerate(weights)]


def plan(*weights, **options):
    return Plan(sources(*weights), LAYOUT, ROWS, window=1024, **options)


def counts(planned, steps, number=3):
    return np.array([np.bincount(planned.draws(s).source, minlength=number) for s in steps])


@pytest.mark.parametrize(
    ("step", "weight"), [(0, 1), (20, 1), (21, 0.975), (40, 0.5), (59, 0.025), (60, 0), (10**9, 0)]
)
def test_weights_are_linear_between_points_and_constant_outside(step, weight):
    assert weight_at(FADING, step) == Fraction(str(weight))
    assert weight_at(3.5, step) == Fraction(7, 2)


def test_shares_follow_the_weights_within_a_few_samples_over_any_stretch_of_steps():
    weights = (FADING, RISING, 0.7)
    planned = plan(*weights)
    drawn = counts(planned, range(130))
    wanted = np.array([[float(weight_at(w, s)) for w in weights] for s in range(130)])
    wanted = wanted / wanted.sum(axis=1, keepdims=True) * drawn.sum(axis=1, keepdims=True)
    off = np.append(np.zeros((1, 3)), np.cumsum(drawn - wanted, axis=0), axis=0)
    stretches = [np.abs(off[n:] - off[:-n]).max() for n in (10, 20, 50, 130)]
    total = drawn.sum(axis=1).mean()
    assert max(stretches) < total, "less than the samples of one step"
    assert np.abs(off[60:] - off[:-60]).max() / (60 * total) < 0.01


def test_a_source_is_never_drawn_while_it_weighs_nothing():
    planned = plan(FADING, ((0, 0.0), (60, 0.0), (61, 1.0)), 0.7)
    assert not counts(planned, range(60, 400))[:, 0].any()
    assert not counts(planned, range(61))[:, 1].any()
    assert counts(planned, range(20))[:, 0].all()


def test_before_the_first_change_the_plan_is_that_of_constant_weights():
    constant, changing = plan(1.0, 0.7), plan(FADING, 0.7)
    for step in (0, 7, 19, 20):
        for one, other in zip(constant.draws(step)[:5], changing.draws(step)[:5], strict=True):
            assert np.array_equal(one, other)
    assert changing.rows(21) != constant.rows(21)
    assert plan(((0, 1.0), (50, 1.0)), 0.7).rows(70) == constant.rows(70)


@pytest.mark.slow
def test_any_step_is_reached_without_those_before_on_any_number_of_hosts():
    options = (FADING, RISING, 0.7)
    ordered = [plan(*options).rows(step) for step in range(0, 100, 9)]
    again = pickle.loads(pickle.dumps(plan(*options)))
    for number in (11, 3, 0, 7, 5):
        assert again.rows(9 * number) == ordered[number]
        hosts = [plan(*options).draws(9 * number, low, low + 8) for low in range(0, ROWS, 8)]
        whole = [draw.id for row in ordered[number] for draw in row]
        assert np.concatenate([host.id for host in hosts]).tolist() == whole
        shared = plan(*options, ranks=8)
        assert sorted(shared.rows(9 * number)) == sorted(ordered[number])
        assert shared.excess(9 * number) < 0.1
    assert len(plan(*options).rows(10**12)) == ROWS


def test_no_draw_has_another_ones_number_and_no_row_is_left_out():
    planned = plan(FADING, RISING, 0.7)
    ids = np.concatenate([planned.draws(step).id for step in range(130)])
    assert len(np.unique(ids)) == len(ids)
    for number in range(len(planned._mixtures)):
        own = np.sort(ids[ids % len(planned._mixtures) == number])
        window = 1024 * len(planned._mixtures)
        complete = own[own < own.max() // window * window]
        assert np.array_equal(np.diff(complete), np.full(len(complete) - 1, len(planned._mixtures)))


def test_where_one_source_gives_way_to_another_each_goes_through_its_samples_in_turn():
    planned = plan(((10, 1.0), (50, 0.0)), ((10, 0.0), (50, 1.0)))
    for number in (0, 1):
        drawn = Counter()
        for step in range(70):
            rows = planned.draws(step)
            own = rows.source == number
            drawn.update(zip(rows.episode[own].tolist(), rows.frame[own].tolist(), strict=True))
        size = int(planned.sources[number].runs.length.sum())
        expected = drawn.total() / size
        assert {*drawn.values()} <= {*range(int(expected) - 1, int(expected) + 3)}


@pytest.mark.parametrize("samples", [1, 10])
def test_rows_keep_every_budget_while_weights_change(samples):
    lay = replace(LAYOUT, samples=samples)
    planned = Plan(sources(FADING, RISING, 0.7), lay, ROWS, window=256)
    for step in range(0, 100, 7):
        rows = planned.draws(step)
        images, text = planned.kinds[:, rows.kind]
        assert rows.number == ROWS
        assert np.all(images == 1 + rows.source % 2)
        row = np.repeat(np.arange(rows.number), np.diff(rows.offsets))
        assert_within(lay, row, images, text)


def test_the_digest_names_the_points():
    weights = (1.0, FADING, ((20, 1.0), (61, 0.0)), ((21, 1.0), (60, 0.0)), ((20, 1.0), (60, 0.1)))
    assert len({plan(weight, 0.7).digest for weight in weights}) == len(weights)


def test_rows_of_a_schedule_sum_up_and_are_never_taken_back():
    told = tuple(stages([FADING, RISING, 0.7]))
    schedule = Schedule(
        told,
        tuple(range(len(told))),
        tuple(Fraction(1024, 300 + 7 * n) for n in range(len(told))),
        ROWS,
    )
    taken = np.array([schedule.before(step) for step in range(200)])
    assert np.array_equal(taken.sum(axis=1), ROWS * np.arange(200))
    assert np.diff(taken, axis=0).min() >= 0
    assert np.diff(taken, axis=0)[told[-1].step :, -1].tolist() == [ROWS] * (199 - told[-1].step)


def test_stages_are_where_any_weight_is_told():
    found = stages([((5, 1.0), (15, 0.0)), ((10, 2.0),), 1.0])
    assert found[1] == Stage(10, (Fraction(1, 2), Fraction(2), Fraction(1)))
    assert [stage.step for stage in found] == [5, 10, 15]
    assert stages([1.0, 2.0]) == [Stage(0, (Fraction(1), Fraction(2)))]


def test_typical_and_largest_weights():
    assert mean_shares([0.7, 0.3]) == [0.7, 0.3]
    assert mean_shares([((0, 1.0), (9, 0.0)), 1.0]) == [0.25, 0.75]
    assert (largest_weight(RISING), largest_weight(0.3)) == (2, 0.3)
    assert told_weight(RISING[:2]) == "0 at 0, 2 at 40"


@pytest.mark.parametrize(
    ("weight", "remedy"),
    [
        (0.0, "give a positive number"),
        (float("nan"), "give a positive number"),
        ((), "with increasing steps"),
        (((5, 1.0), (5, 2.0)), "with increasing steps"),
        (((5, 1.0), (4, 2.0)), "with increasing steps"),
        (((-1, 1.0),), "with increasing steps, from 0 on"),
        (((0, 1.0), (4, -2.0)), "weights of 0 or more, at least one above 0"),
        (((0, 0.0), (4, 0.0)), "weights of 0 or more, at least one above 0"),
        (((0, 1.0), (4, float("nan"))), "weights of 0 or more, at least one above 0"),
    ],
)
def test_a_weight_that_cannot_be_is_refused_with_its_remedy(weight, remedy):
    assert remedy in wrong_weight(weight)
    with pytest.raises(ValueError, match=rf"'set 0' has weight .*; .*{remedy}.*leave the source"):
        plan(weight, 0.7)


def test_a_step_at_which_all_weigh_nothing_is_refused():
    with pytest.raises(ValueError, match="All datasets have weight 0 at step 60; give one of them"):
        plan(FADING, FADING)
    with pytest.raises(ValueError, match="weight 0 at step 0"):
        plan(RISING, ((0, 0.0), (10, 1.0)))
