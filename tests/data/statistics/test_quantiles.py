import numpy as np
import pytest

from data.statistics.quantiles import OrderStatistics, interpolate, ranks

QUANTILES = [0.0, 0.01, 0.1, 1 / 3, 0.5, 0.9, 0.99, 1.0]
KINDS = ["f2", "f4", "f8", "i1", "i4", "i8", "u1", "u2", "u4", "u8"]


def select(values, wanted, blocks=7):
    order = OrderStatistics(values.min(axis=1), values.max(axis=1), wanted)
    passes = 0
    while not order.found:
        for block in np.array_split(values, blocks, axis=1):
            order.add(block)
        order.narrow()
        passes += 1
    return order.values, passes


def numbers(kind, count):
    """Ordinary numbers, many ties, and the whole range of the type."""
    draw, dtype = np.random.default_rng(count), np.dtype(kind)
    ties = draw.choice([0, 1, 3, 100], count)
    if dtype.kind == "f":
        wild = draw.integers(0, 256, count * dtype.itemsize, np.uint8).view(dtype)
        rows = [draw.normal(size=count), ties, np.where(np.isfinite(wild), wild, 0)]
    else:
        info = np.iinfo(dtype)
        wild = draw.integers(info.min, info.max, count, dtype, endpoint=True)
        rows = [draw.integers(0, 100, count), ties, wild]
    return np.stack([row.astype(dtype) for row in rows])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2, 3, 1001])
def test_selected_values_are_those_at_their_place_when_sorted(kind, count):
    values = numbers(kind, count)
    wanted = sorted({0, count // 3, count // 2, count - 1})
    found, passes = select(values, wanted)
    assert found.dtype == values.dtype
    assert np.array_equal(found, np.sort(values, axis=1)[:, wanted])
    assert passes <= np.dtype(kind).itemsize / 2 + 0.5


@pytest.mark.parametrize("kind", ["f4", "f8", "i8", "u1"])
@pytest.mark.parametrize("count", [1, 2, 5, 999, 1000])
def test_quantiles_are_those_of_numpy_to_the_last_bit(kind, count):
    values = numbers(kind, count)[:2]
    found, _ = select(values, ranks(count, QUANTILES))
    exact = np.quantile(values.astype(np.float64), QUANTILES, axis=1)
    assert np.array_equal(interpolate(found, count, QUANTILES), exact)


def test_zeros_of_both_signs_count_as_one_value():
    values = np.array([[0.0, -0.0, 0.0, -0.0, 1e-45, -1e-45]], np.float32)
    for first in (values, values[:, ::-1]):
        found, _ = select(first, range(6), blocks=2)
        assert np.array_equal(found, np.sort(values))
        assert np.signbit(found).tolist() == [[True, False, False, False, False, False]]


def test_blocks_counted_elsewhere_give_the_same():
    values, wanted = numbers("f4", 1000), [0, 10, 500, 999]
    order = OrderStatistics(values.min(axis=1), values.max(axis=1), wanted)
    while not order.found:
        for block in np.array_split(values, 3, axis=1):
            other = order.fresh()
            other.add(block)
            order.take(other.counted)
        order.narrow()
    assert np.array_equal(order.values, select(values, wanted)[0])


def test_a_constant_needs_no_pass():
    found, passes = select(np.full((2, 50), -3.5), [0, 49])
    assert passes == 0
    assert (found == -3.5).all()


def test_float32_takes_two_passes():
    assert select(numbers("f4", 1000), [10])[1] == 2
