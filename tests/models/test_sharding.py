import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from models.sharding import shardings
from parallel.mesh import MeshConfig, make_mesh
from parallel.step import abstract_state, init_state
from tests.helpers.parallel.toy import OPTIMIZER, RULES, Denoiser

SHAPES = {"a": {"kernel": jnp.zeros((4, 6)), "bias": jnp.zeros(6)}, "layers": [jnp.zeros(2)]}


def test_each_parameter_takes_the_spec_of_its_rule():
    rules = ((r"kernel$", P(None, "fsdp")), (r"bias$", P()), (r"^layers/0$", P("fsdp")))
    placed = shardings(SHAPES, rules, make_mesh(MeshConfig(fsdp=2)))
    specs = jax.tree.map(lambda s: s.spec, placed)
    assert specs == {"a": {"kernel": P(None, "fsdp"), "bias": P()}, "layers": [P("fsdp")]}


def test_unmatched_and_doubly_matched_parameters_are_all_listed():
    rules = ((r"kernel$", P()), (r"^a/", P()))
    with pytest.raises(ValueError, match="exactly one sharding rule") as error:
        shardings(SHAPES, rules, make_mesh())
    assert "a/kernel matches kernel$, ^a/" in str(error.value)
    assert "layers/0 matches no rule" in str(error.value)
    assert "a/bias" not in str(error.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (P("fsdp"), r"Dimension 0 of parameter a/kernel, shape \(4, 6\).*axis fsdp of size 8"),
        (P(None, None, "fsdp"), "a/kernel has 3 dimensions"),
        (P("model"), "a/kernel names mesh axis 'model'"),
    ],
)
def test_a_spec_that_does_not_fit_names_parameter_and_axis(spec, message):
    rules = ((r"kernel$", spec), (r"bias$|layers", P()))
    with pytest.raises(ValueError, match=message):
        shardings(SHAPES, rules, make_mesh(MeshConfig(data=1, fsdp=8)))


def test_moments_and_average_are_born_in_the_sharding_of_their_parameter():
    mesh = make_mesh(MeshConfig(fsdp=2))
    abstract = abstract_state(Denoiser(), OPTIMIZER, RULES, mesh)
    state = init_state(Denoiser(), OPTIMIZER, abstract, 0)
    split = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, x in jax.tree_util.tree_leaves_with_path(state)
        if x.addressable_shards[0].data.size * 2 == x.size
    ]
    assert len(split) == 2 * 4  # two kernels in params, ema, mu, nu
    assert all(name.endswith("kernel") for name in split)
