"""Starts of learning are never those of evaluation."""

from dataclasses import replace

import pytest

from rl.host.starts import training_seeds
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
