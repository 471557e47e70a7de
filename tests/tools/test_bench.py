"""The packing benchmark compares the same samples in both forms."""

import jax
import numpy as np
import pytest

from models import Pi
from tools.bench.data.packing import compared, mixture, packed, padded
from tools.recipes.presets import TINY


def test_both_forms_hold_the_same_samples_and_packed_rows_are_fuller():
    samples = mixture(256)
    full, sparse = packed(samples), padded(samples)
    ids = [np.sort(np.asarray(b.sample_id)[np.asarray(b.weight) > 0]) for b in (full, sparse)]
    np.testing.assert_array_equal(*ids)
    fill, sparse_fill = ((b.prefix_segment > 0).mean() for b in (full, sparse))
    assert fill > 0.9 > 0.75 > sparse_fill


@pytest.mark.slow
def test_both_forms_have_the_same_loss():
    model, samples = Pi(TINY.model), mixture(8)
    params, key = jax.jit(model.init)(jax.random.key(0)), jax.random.key(1)
    loss = jax.jit(lambda batch: model.loss(params, batch, key))
    (a, n), (b, m) = loss(packed(samples)), loss(padded(samples))
    np.testing.assert_allclose(a, b, rtol=1e-5)
    assert n == m


@pytest.mark.slow
def test_of_places_saved_is_the_ratio_of_times_over_that_of_places():
    samples = mixture(32)
    made = {"packed": packed(samples), "padded": padded(samples)}
    found = compared(TINY.model, TINY.optimizer, made, 1)
    places = found["places"]["padded"] / found["places"]["packed"]
    assert places > 1.2
    assert found["of_places_saved"] == pytest.approx(found["ratio"] / places)
    assert found["ratio"] == pytest.approx(found["seconds"]["padded"] / found["seconds"]["packed"])
