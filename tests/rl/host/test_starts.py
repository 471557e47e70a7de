"""Starts of learning are never those of evaluation."""

from dataclasses import replace

import pytest

from rl.host.starts import training_seeds
from sim.protocol import EVAL_SEEDS
from sim.suite import Suite
from sim.suites import load_suite

FIXED = Suite("fixed", ("a",), 50, open=None, first_seed=0)


@pytest.mark.parametrize("first", [1, 500, load_suite("tabletop-lift").first_seed])
def test_seeds_before_those_of_evaluation_are_learnt_from(first):
    assert training_seeds(replace(FIXED, first_seed=first), evaluated=20) == range(first)


def test_a_suite_judged_by_later_seeds_leaves_those_of_its_original_alone():
    validation = replace(load_suite("tabletop-lift"), first_seed=1_500_000_000)
    assert training_seeds(validation, evaluated=20) == range(EVAL_SEEDS.start)


@pytest.mark.parametrize("evaluated", [20, 50])
def test_published_starts_are_never_learnt_from_where_others_can_be_drawn(evaluated):
    libero = replace(FIXED, recorded_from=1000, fixed=50)
    assert training_seeds(libero, evaluated) == range(1000, EVAL_SEEDS.start)
    validation = replace(libero, first_seed=900_000_000)
    assert training_seeds(validation, evaluated) == range(1000, 900_000_000)


def test_a_suite_that_has_but_a_few_starts_keeps_the_first_for_evaluation():
    assert training_seeds(FIXED, evaluated=20) == range(20, 50)
    with pytest.raises(ValueError, match="50 starts a task and eval_episodes takes 50 of them"):
        training_seeds(FIXED, evaluated=50)
