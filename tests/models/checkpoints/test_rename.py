"""Axis patterns, and what is said when a checkpoint and a model differ."""

import pytest

from models.checkpoints.rename import Rule, Table, match, our_shapes, parse

TABLE = Table(
    (
        Rule("k", "kv", "l [0] g w d -> l w g d"),
        Rule("v", "kv", "l [1] g w d -> l w g d"),
        Rule("q", "layers.{l}.q.weight", "(n d) w -> l w n d"),
        Rule("odd", "blocks.{2*l+1}.weight", "o i -> l i o"),
        Rule("embed", "embed", "v w -> v w", aliases=("head",)),
        Rule("lora", "lora", "a b -> a b"),
    ),
    ignored=(r"^pooling\.",),
)
OURS = {"k": (2, 4, 1, 3), "v": (2, 4, 1, 3), "q": (2, 4, 5, 3), "odd": (2, 4, 6), "embed": (9, 4)}
THEIRS = {
    "kv": (2, 2, 1, 4, 3),
    "layers.0.q.weight": (15, 4),
    "layers.1.q.weight": (15, 4),
    "blocks.1.weight": (6, 4),
    "blocks.3.weight": (6, 4),
    "head": (9, 4),
    "pooling.weight": (3,),
}


def test_every_parameter_finds_its_arrays_layer_by_layer():
    leaves = match(TABLE, THEIRS, OURS, "it")
    assert leaves["q"].names == ("layers.0.q.weight", "layers.1.q.weight")
    assert leaves["odd"].names == ("blocks.1.weight", "blocks.3.weight")
    assert leaves["q"].sizes == {"n": 5, "d": 3, "w": 4, "l": 2}
    assert leaves["embed"].names == ("head",)


def test_a_copy_under_the_other_name_is_no_surplus():
    assert match(TABLE, THEIRS | {"embed": (9, 4)}, OURS, "it")["embed"].names == ("embed",)


def test_one_error_lists_every_missing_unknown_and_misshapen_array():
    theirs = dict(THEIRS)
    del theirs["head"], theirs["layers.1.q.weight"]
    theirs |= {"kv": (2, 2, 1, 5, 3), "extra.0.bias": (7,), "extra.1.bias": (7,)}
    with pytest.raises(ValueError, match=r"^it does not hold") as error:
        match(TABLE, theirs, OURS | {"film": (8,)}, "it")
    text = str(error.value)
    for told in (
        "embed (our embed [9, 4])",
        "layers.1.q.weight (our q [2, 4, 5, 3])",
        "film [8] (this format has no name for it)",
        "unknown to this model: extra.0.bias [7] (and 1 more like it)",
        "kv is [2, 2, 1, 5, 3] where our k [2, 4, 1, 3] needs [2, 2, 1, 4, 3]",
        "where our v [2, 4, 1, 3] needs [2, 2, 1, 4, 3]",
    ):
        assert told in text
    assert "pooling" not in text
    assert "lora" not in text


def test_layers_beyond_the_models_are_unknown_to_it():
    with pytest.raises(ValueError, match=r"unknown to this model: layers\.2\.q\.weight"):
        match(TABLE, THEIRS | {"layers.2.q.weight": (15, 4)}, OURS, "it")


def test_an_array_with_more_components_than_parameters_is_misshapen():
    with pytest.raises(ValueError, match=r"kv is \[2, 3, 1, 4, 3\]"):
        match(TABLE, THEIRS | {"kv": (2, 3, 1, 4, 3)}, OURS, "it")


def test_our_shapes_follow_from_theirs_where_merged_axes_are_known():
    assert our_shapes(TABLE, THEIRS, {"d": 3}) == OURS
    assert "q" not in our_shapes(TABLE, THEIRS)


def test_equally_long_axes_are_told_by_their_product():
    pattern = parse("w c=3 p p' -> (p p' c) w")
    assert pattern.solve(None, (147, 20)) == {"c": 3, "p": 7, "p'": 7, "w": 20}
    assert pattern.solve(None, (150, 20)) is None


@pytest.mark.parametrize(
    "axes", ["a b -> a", "a b", "a a -> a a", "a -> [0] a", "[0] [1] a -> a", "a -> a b"]
)
def test_a_pattern_that_loses_or_invents_an_axis_is_refused(axes):
    with pytest.raises(ValueError, match="Axis pattern"):
        parse(axes)
