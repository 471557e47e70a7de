"""Our signatures are checked while the tests run, see `tests/shapes.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from models.inputs.packed_batch import Sample
from models.layers.layers import rotary
from models.layers.quantized import Quantized

X, POSITION = jnp.zeros((2, 3, 1, 4)), jnp.zeros((2, 3), jnp.int32)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.vmap], ids=["called", "jit", "vmap"])
def test_a_signature_refuses_a_shape_or_dtype_that_it_does_not_name(wrap):
    function = wrap(rotary)
    assert function(X, POSITION).shape == X.shape
    for wrong in (POSITION[:, :2], POSITION[..., None], POSITION.astype(float)):
        with pytest.raises(TypeCheckError, match="'position'"):
            function(X, wrong)


def test_numpys_arrays_are_checked_as_jaxs():
    assert rotary(np.asarray(X), np.asarray(POSITION)).shape == X.shape
    with pytest.raises(TypeCheckError, match="'position'"):
        rotary(np.asarray(X), np.asarray(POSITION)[:, :2])


def test_a_dataclass_is_checked_when_it_is_made_unless_it_is_a_pytree():
    chunk = np.zeros((4, 7))
    given = {"images": (), "text": np.zeros(1, int), "state": np.zeros(3), "actions": chunk}
    assert Sample(**given, action_mask=chunk > 0).actions is chunk
    with pytest.raises(TypeCheckError, match="'action_mask'"):
        Sample(**given, action_mask=chunk[1:] > 0)
    kernel = Quantized(jnp.zeros((2, 2)), jnp.ones((1, 1)))
    assert jax.tree.map(lambda leaf: leaf.shape, kernel).scale == (1, 1)


@pytest.mark.usefixtures("unchecked")
def test_a_test_may_break_a_signature_on_purpose():
    with pytest.raises(TypeError, match="broadcast"):
        rotary(X, POSITION[:, :2])
