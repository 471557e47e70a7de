"""Starts of learning are never those of evaluation."""

from dataclasses import replace

import pytest

from rl.host.starts import training_seeds
from sim.suite import Suite
from sim.suites import load_suite

FIXED = Suite("fixed", ("a",), 50, open=None, first_seed=0)


@pytest.mark.parametrize("first", [1, 500, load_suite("tabletop-lift").first_seed])
def test_seeds_before_those_of_evaluation_are_learnt_from(first):
    assert training_seeds(replace(FIXED, first_seed=first), evaluated=20) == range(first)


def test_a_suite_with_a_few_starts_keeps_the_first_for_evaluation():
    assert training_seeds(FIXED, evaluated=20) == range(20, 50)
    with pytest.raises(ValueError, match="50 starts a task and eval_episodes takes 50 of them"):
        training_seeds(FIXED, evaluated=50)
