"""A block read by its index is the block of the whole, however the axes are moved, merged and
stacked."""

import itertools

import numpy as np
import pytest

from models.checkpoints.layout import read_block, their_arrays
from models.checkpoints.rename import Rule, Table, match

CASES = {
    "a b -> b a": ((6, 4), lambda x: x.T),
    "1 n w -> n w": ((1, 6, 4), lambda x: x[0]),
    "p p' c=3 w -> (p p' c) w": ((4, 4, 3, 5), lambda x: x.reshape(48, 5)),
    "w c=3 p p' -> (p p' c) w": ((5, 3, 4, 4), lambda x: x.transpose(2, 3, 1, 0).reshape(48, 5)),
    "(n d) w -> w n d": ((12, 4), lambda x: x.reshape(4, 3, 4).transpose(2, 0, 1)),
    "l [1] g w d -> l w g d": ((4, 2, 3, 5, 6), lambda x: x[:, 1].transpose(0, 2, 1, 3)),
    "(a b c) d -> (c a) (d b)": (
        (24, 2),
        lambda x: x.reshape(2, 3, 4, 2).transpose(2, 0, 3, 1).reshape(8, 6),
    ),
}
OURS = {"(n d) w -> w n d": (4, 4, 3), "(a b c) d -> (c a) (d b)": (8, 6)}
SIZES = {"(a b c) d -> (c a) (d b)": "(a=2 b c) d -> (c a) (d b)"}


def fetcher(arrays):
    return lambda name, region: arrays[name][region]


@pytest.mark.parametrize("axes", CASES)
def test_a_block_is_the_block_of_the_whole(axes):
    shape, expected = CASES[axes]
    theirs = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    whole = expected(theirs)
    spelt = SIZES.get(axes, axes)
    rules = (Rule("x", "x", spelt), Rule("y", "x", spelt.replace("[1]", "[0]")))
    table = Table(rules if "[" in axes else rules[:1])
    leaf = match(table, {"x": shape}, {"x": whole.shape}, "it")["x"]
    fetch = fetcher({"x": theirs})
    cuts = [
        [slice(None), slice(0, n // 2), slice(n // 2, n), slice(1, n - 1), slice(n - 1, n)]
        for n in whole.shape
    ]
    for index in itertools.product(*cuts):
        for piece in (10**9, 8):
            block, finite = read_block(leaf, index, fetch, np.dtype(np.float32), piece)
            np.testing.assert_array_equal(block, whole[index])
            assert finite


def test_stacked_layers_are_read_only_where_the_index_wants_them():
    rng = np.random.default_rng(1)
    arrays = {f"b.{2 * i + 1}.w": rng.normal(size=(6, 4)).astype(np.float32) for i in range(3)}
    table = Table((Rule("x", "b.{2*l+1}.w", "(n d) w -> w l n d"),))
    shapes = {name: a.shape for name, a in arrays.items()}
    leaf = match(table, shapes, {"x": (4, 3, 2, 3)}, "it")["x"]
    whole = np.stack([a.reshape(2, 3, 4) for a in arrays.values()]).transpose(3, 0, 1, 2)
    read = []

    def fetch(name, region):
        read.append(arrays[name][region].size)
        return arrays[name][region]

    index = (slice(1, 2), slice(1, 3), slice(None), slice(None))
    block, _ = read_block(leaf, index, fetch, np.dtype(np.float32), 10**9)
    np.testing.assert_array_equal(block, whole[index])
    assert read == [6, 6]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_not_finite_is_seen_in_its_block_only(bad):
    x = np.zeros((4, 4), np.float32)
    x[3, 0] = bad
    leaf = match(Table((Rule("x", "x", "a b -> b a"),)), {"x": (4, 4)}, {"x": (4, 4)}, "it")["x"]

    def finite(rows):
        index = (slice(None), rows)
        return read_block(leaf, index, fetcher({"x": x}), np.dtype(np.float32), 16)[1]

    assert finite(slice(0, 3))
    assert not finite(slice(2, 4))


def test_their_arrays_are_rebuilt_from_ours():
    rng = np.random.default_rng(2)
    theirs = {
        "kv": rng.normal(size=(3, 2, 1, 4, 5)),
        "conv": rng.normal(size=(6, 3, 2, 2)),
        **{f"q.{i}": rng.normal(size=(6, 4)) for i in range(3)},
    }
    table = Table(
        (
            Rule("k", "kv", "l [0] g w d -> l w g d"),
            Rule("v", "kv", "l [1] g w d -> l w g d"),
            Rule("conv", "conv", "w c=3 p p' -> (p p' c) w"),
            Rule("q", "q.{l}", "(n d) w -> l w n d"),
        )
    )
    ours = {"k": (3, 4, 1, 5), "v": (3, 4, 1, 5), "conv": (12, 6), "q": (3, 4, 2, 3)}
    leaves = match(table, {name: a.shape for name, a in theirs.items()}, ours, "it")
    whole = {
        path: read_block(
            leaf, (slice(None),) * len(leaf.shape), fetcher(theirs), np.dtype(np.float64), 10**9
        )[0]
        for path, leaf in leaves.items()
    }
    outgoing = their_arrays(table, ours, "It")
    assert outgoing.keys() == theirs.keys()
    for name, array in outgoing.items():
        assert array.shape == theirs[name].shape
        np.testing.assert_array_equal(array.build(whole), theirs[name])


def test_parameters_that_a_format_cannot_hold_are_listed():
    table = Table((Rule("conv", "conv", "w c=3 p p' -> (p p' c) w"),))
    with pytest.raises(ValueError, match=r"these 2 of the model's 2.*conv \[13, 6\]; film \[4\]"):
        their_arrays(table, {"conv": (13, 6), "film": (4,)}, "It")


def test_an_array_is_not_written_without_one_of_its_components():
    table = Table((Rule("k", "kv", "[0] w -> w"), Rule("v", "kv", "[1] w -> w")))
    with pytest.raises(ValueError, match="k without the rest of kv"):
        their_arrays(table, {"k": (3,)}, "It")
