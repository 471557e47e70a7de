"""Succession in a population: who copies whom after a generation, and with which numbers."""

from dataclasses import replace

import numpy as np
import pytest

from rl.config import FlowConfig, ObjectiveConfig
from rl.population.population import (
    FACTOR,
    PopulationConfig,
    configured,
    explored,
    first_generation,
    hyperparameters,
    next_generation,
    ranked,
)
from tests.helpers.rl.generations import CLIP, CONFIG, RATE, generation


def test_of_given_scores_the_worst_quarter_copies_the_best_and_the_rest_stay():
    scores = (0.5, 0.9, 0.1, 0.4, 0.8, 0.3, 0.7, 0.2)
    last = generation(*np.linspace(0.01, 0.08, 8).tolist())
    found = next_generation(CONFIG, last, 2, scores)
    assert {k: p for k, p in enumerate(found.parents) if k != p}.keys() == {2, 7}
    assert {found.parents[2], found.parents[7]} <= {1, 4}
    stay = [k for k in range(8) if k not in (2, 7)]
    assert all(found.hyperparameters[k] == last.hyperparameters[k] for k in stay)
    assert (found.success, found.best) == (scores, 1)
    drawn = {next_generation(replace(CONFIG, seed=s), last, 2, scores).parents[2] for s in range(9)}
    assert drawn == {1, 4}, "parents are drawn from all of the best quarter"


@pytest.mark.parametrize(
    ("scores", "parents"),
    [
        ((0.2, 0.1), (0, 0)),
        ((0.1, 0.2), (1, 1)),
        ((0.5, 0.5), (0, 0)),
        ((0.5, 0.5, 0.5), (0, 1, 0)),
        ((0.0, None, 0.1, None), (0, 2, 2, 2)),
    ],
)
def test_of_equals_the_first_counts_as_better_and_who_failed_is_replaced(scores, parents):
    assert (
        next_generation(CONFIG, generation(*range(1, 9)[: len(scores)]), 2, scores).parents
        == parents
    )


def test_nobody_copies_after_the_last_step_and_nobody_is_left_where_all_failed():
    assert next_generation(CONFIG, generation(1.0, 2.0), 6, (0.1, 0.2)).parents == (0, 1)
    with pytest.raises(
        ValueError, match=r"No member's policy gives finite actions .* after step 2"
    ):
        next_generation(CONFIG, generation(1.0, 2.0), 2, (None, None))
    assert ranked((0.0, None, 0.3)) == [2, 0, 1]


def test_exploring_scales_each_number_by_a_factor_and_never_to_the_same_as_another():
    begun, found = {RATE: 0.02, CLIP: 0.2}, []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        found.append(explored(CONFIG, begun, rng))
    for name, value in begun.items():
        factors = {round(one[name] / value, 4) for one in found}
        assert factors == {round(FACTOR, 4), round(1 / FACTOR, 4)}
    taken = []
    for _ in range(6):
        taken.append(explored(CONFIG, begun, np.random.default_rng(1), [begun, *taken]))
    assert len({tuple(one.items()) for one in taken}) == 6


@pytest.mark.parametrize(
    ("section", "name", "least", "most"),
    [
        ({"objective": ObjectiveConfig(clip=0.95)}, "objective.clip", 0.5, 1.0),
        ({"objective": ObjectiveConfig(truncation=1.0)}, "objective.truncation", 1.0, 1.3),
        ({"objective": ObjectiveConfig(discount=0.99)}, "objective.discount", 0.987, 0.993),
        ({"flow": FlowConfig(noise="cps", level=0.99)}, "flow.level", 0.5, 1.0),
    ],
)
def test_exploring_stays_where_the_config_is_valid(section, name, least, most):
    config = replace(CONFIG, **section)
    tuned = hyperparameters(config, [name])
    for seed in range(20):
        value = explored(config, tuned, np.random.default_rng(seed))[name]
        assert least <= value <= most
        assert value != tuned[name]
        configured(config, {name: value})


def test_members_begin_with_the_configs_numbers_and_with_others_up_to_three_times_apart():
    first = first_generation(CONFIG, PopulationConfig(12), 0.4)
    assert first.hyperparameters[0] == {RATE: 0.02, CLIP: 0.2}
    assert len({tuple(one.items()) for one in first.hyperparameters}) == 12
    rates = [one[RATE] / 0.02 for one in first.hyperparameters]
    assert 1 / 3 <= min(rates) < 0.6
    assert 1.7 < max(rates) <= 3
    assert first == first_generation(CONFIG, PopulationConfig(12), 0.4)
    assert first.parents == tuple(range(12))
