import numpy as np
import pytest

from data.packing.permutation import fold
from data.packing.systematic import points, whole_weights


def drawn(masses: list[int], strata: int, epochs: range, seed: int = 0) -> np.ndarray:
    """Number of points of these epochs on each stretch of a line."""
    stratum = np.tile(np.arange(strata), len(epochs))
    epoch = np.repeat(np.array(epochs), strata)
    whole = np.full_like(stratum, sum(masses))
    key = np.full(len(stratum), fold(seed), np.uint64)
    found = points(stratum, epoch, np.full_like(stratum, strata), whole, key)
    ends = np.cumsum(masses)
    assert found.min() >= 0
    return np.bincount(np.searchsorted(ends, found, "right"), minlength=len(masses))


@pytest.mark.parametrize("power", range(8))
@pytest.mark.parametrize("first", [0, 1, 5, 10**6])
def test_over_2_to_the_k_epochs_each_is_drawn_as_often_as_expected_rounded(power, first):
    rng = np.random.default_rng(power)
    for seed in range(5):
        masses = rng.integers(1, 1000, 60).tolist()
        strata = sum(masses) // max(masses)
        epochs = range(first << power, first + 1 << power)
        expected = np.array(masses) * strata * len(epochs) / sum(masses)
        counts = drawn(masses, strata, epochs, seed)
        assert np.all((counts == np.floor(expected)) | (counts == np.ceil(expected)))


def test_after_any_number_of_epochs_each_is_drawn_about_as_often_as_expected():
    masses = np.random.default_rng(0).integers(1, 1000, 60).tolist()
    strata = sum(masses) // max(masses)
    for epochs in range(1, 200):
        expected = np.array(masses) * strata * epochs / sum(masses)
        assert np.abs(drawn(masses, strata, range(epochs)) - expected).max() < 2.5


def test_alike_each_is_drawn_once_an_epoch_where_it_stands():
    stratum = np.arange(97)
    for mass in (1, 3, (1 << 52) + 1):
        whole, strata = np.full(97, 97 * mass), np.full(97, 97)
        for epoch in (0, 1, 77, 10**12):
            key = np.full(97, fold(epoch), np.uint64)
            found = points(stratum, np.full(97, epoch), strata, whole, key)
            assert np.array_equal(found // mass, stratum)


def test_points_are_those_of_exact_arithmetic_on_the_longest_lines():
    whole, strata = (1 << 60) - 12345, (1 << 31) - 99
    stratum = np.array([0, 1, 12345678, strata - 1])
    key = np.full(4, 0xFEDCBA98 << 32, np.uint64)
    for epoch in (0, 1, 6, 2**32 + 6):
        found = points(
            stratum, np.full(4, epoch), np.full(4, strata), np.full(4, whole), key
        ).tolist()
        place = int(f"{epoch % 2**32:032b}"[::-1], 2) ^ 0xFEDCBA98
        assert found == [((s << 32) + place) * whole // (strata << 32) for s in stratum.tolist()]


@pytest.mark.parametrize(
    ("weights", "whole"),
    [
        ([2.0, 2.0, 2.0], [1, 1, 1]),
        ([1e-9, 2e-9, 5e-10], [2, 4, 1]),
        ([1e300, 2e300], [1, 2]),
        ([0.75, 3.0], [1, 4]),
    ],
)
def test_weights_become_whole_numbers_in_the_same_proportions(weights, whole):
    assert whole_weights(np.array(weights), np.full(len(weights), 10)).tolist() == whole


def test_weights_keep_their_proportions_and_none_that_is_positive_becomes_zero():
    weights = np.array([0.1, 0.3, 1 / 3, 1e-200])
    whole = whole_weights(weights, np.array([1, 5, 7, 10**7]))
    np.testing.assert_allclose(whole[:3] / whole[0], weights[:3] / weights[0], rtol=1e-9)
    assert whole[3] == 1
    assert int((whole * [1, 5, 7, 10**7]).sum()) < 1 << 60
