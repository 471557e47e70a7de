"""Flow times are those at which openpi evaluates its velocity, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.flow import flow


@pytest.mark.parametrize("steps", [1, 3, 4, 10, 100])
def test_flow_times_are_counted_down_in_f32_as_by_a_while_loop(steps):
    step = -1.0 / steps

    def count(carry):
        i, time, found = carry
        return i + 1, time + step, found.at[i].set(time)

    start = (0, 1.0, jnp.zeros(steps, jnp.float32))
    *_, found = jax.jit(jax.lax.while_loop, static_argnums=(0, 1))(
        lambda carry: carry[1] >= -step / 2, count, start
    )
    times = flow.times(steps)
    assert times.dtype == np.float32
    np.testing.assert_array_equal(times, found)
    np.testing.assert_allclose(times, 1 - np.arange(steps) / steps, rtol=0, atol=1e-6)
