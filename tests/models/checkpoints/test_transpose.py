"""A copy by tiles is a copy."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from models.checkpoints.transpose import copy_into


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(), (5,), (130, 70), (3, 65, 129), (1, 200, 1, 66)])
def test_a_copy_by_tiles_is_a_copy(shape, dtype):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    for order in itertools.permutations(range(x.ndim)):
        turned = x.transpose(order)
        out = np.zeros(turned.shape, dtype)
        copy_into(out, turned)
        np.testing.assert_array_equal(out, turned.astype(dtype))
    spread = np.zeros((2, *shape), dtype)
    copy_into(spread, np.broadcast_to(x, spread.shape))
    np.testing.assert_array_equal(spread[1], x.astype(dtype))
