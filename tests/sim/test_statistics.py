"""Intervals and tests give published values."""

import pytest
from scipy.stats import binomtest

from sim.statistics import Paired, Rate, wilson


# Published values: Newcombe, Statistics in Medicine 17 (1998), table I, method 3.
@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_matches_published_intervals(successes, trials, low, high):
    assert wilson(successes, trials) == pytest.approx((low, high), abs=5e-5)
    mirrored = wilson(trials - successes, trials)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=5e-5)


def test_rate_reads_as_a_sentence_would_say_it():
    assert str(Rate(125, 128)) == "97.7 % (125/128, 95 % CI 93.3–99.2 %)"
    assert Rate(4, 4).interval[1] == 1.0
    with pytest.raises(ValueError, match="got 0 of 0"):
        Rate(0, 0)


def test_the_p_value_is_the_exact_binomials():
    assert Paired(5, 8, 2, 0).p_value == pytest.approx(2 * (1 + 10 + 45) / 1024)
    assert Paired(5, 2, 8, 0).p_value == Paired(5, 8, 2, 0).p_value
    assert Paired(7, 0, 0, 1).p_value == Paired(1, 3, 3, 1).p_value == 1
    for first, second in ((1, 0), (4, 4), (5, 4), (12, 31), (300, 240)):
        theirs = binomtest(first, first + second, 0.5).pvalue
        assert Paired(9, first, second, 9).p_value == pytest.approx(theirs, rel=1e-12)


# Newcombe, Statistics in Medicine 17 (1998) 2635, table III, method 10; Altman et al., Statistics
# with Confidence (2000), table 6.2; Fagerland et al., Statistics in Medicine 33 (2014) 2850.
@pytest.mark.parametrize(
    ("counts", "low", "high", "digits"),
    [
        ((36, 12, 2, 0), 0.0569, 0.3404, 4),
        ((14, 5, 0, 22), 0.011, 0.226, 3),
        ((1, 1, 7, 12), -0.507, -0.026, 3),
    ],
)
def test_the_interval_of_a_difference_matches_published_ones(counts, low, high, digits):
    assert Paired(*counts).interval == pytest.approx((low, high), abs=0.51 * 10**-digits)


def test_an_interval_mirrors_its_policies_and_stays_within_bounds():
    both, won, lost, neither = 20, 9, 3, 8
    low, high = Paired(both, won, lost, neither).interval
    mirrored = Paired(both, lost, won, neither).interval
    assert mirrored == pytest.approx((-high, -low))
    for counts in ((4, 0, 0, 0), (0, 5, 0, 0), (0, 0, 0, 6), (1, 0, 0, 1)):
        low, high = Paired(*counts).interval
        assert -1 <= low <= Paired(*counts).difference <= high <= 1


def test_pairs_are_counted_by_who_won():
    pairs = [(True, True), (True, False), (True, False), (False, True), (False, False)]
    paired = Paired.of(pairs)
    assert paired == Paired(1, 2, 1, 1)
    assert (paired.trials, paired.difference) == (5, pytest.approx(0.2))
    assert "+20.0 points" in str(paired)
    assert "2 starts won, 1 lost; exact McNemar p = 1" in str(paired)
    assert paired.to_json()["p_value"] == 1
    with pytest.raises(ValueError, match="one pair"):
        Paired.of([])
