"""π0.5's model on packed rows: what packing, padding and several chunks may and may not change."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import PackedBatch, pack
from models.families.pi.model import SHARDING_RULES, Pi, PiConfig
from models.flow import flow
from models.layers.layers import Compute
from tests.helpers.models.cudnn import emulate
from tests.helpers.models.pi_samples import CONFIG, KEY, samples
from tests.helpers.models.random_parameters import random_parameters
from tests.helpers.models.velocity import velocity_of

MODEL = Pi(CONFIG)
PACKED = CONFIG.layout(prefix=64, samples=5, images=8)
ALONE = CONFIG.layout(prefix=24, samples=1, images=2)


@pytest.fixture(scope="module")
def params():
    """Random everywhere: π0.5 begins with closed gates, which would hide the expert's gradients."""
    return random_parameters(MODEL)


velocity = jax.jit(partial(velocity_of, MODEL))
NOISE = np.random.default_rng(7).normal(size=(1, 5, 4, 6)).astype(np.float32)


@jax.jit
def loss_and_gradient(params, batch: PackedBatch):
    return jax.value_and_grad(lambda p: MODEL.loss(p, batch, KEY)[0])(params)


def assert_close(a, b) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        scale = max(1.0, float(np.abs(x).max()))
        np.testing.assert_allclose(np.asarray(x) / scale, np.asarray(y) / scale, atol=1e-5)


def test_a_samples_loss_and_gradients_do_not_depend_on_what_it_is_packed_with(params):
    group = samples(1)
    alone = [loss_and_gradient(params, pack([[s]], ALONE)) for s in group]
    together = loss_and_gradient(params, pack([group], PACKED))
    assert_close(together, jax.tree.map(lambda *x: sum(map(np.asarray, x)), *alone))
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(together[1]["expert"]))
    first = group[0]
    for others in (samples(2, 3), samples(3, 2)):
        row = [others[0], first, *others[1:]]
        with_first = loss_and_gradient(params, pack([row], PACKED))
        without = loss_and_gradient(params, pack([others], PACKED))
        assert_close(with_first, jax.tree.map(np.add, without, alone[0]))


@pytest.mark.slow
def test_padding_changes_nothing(params):
    group = samples(4, 2)
    tight = loss_and_gradient(params, pack([group], PACKED))
    wide = CONFIG.layout(prefix=90, samples=7, images=11)
    assert_close(tight, loss_and_gradient(params, pack([group, []], wide)))


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["blocked", "cudnn"])
def test_attention_of_other_kernels_gives_the_loss_and_gradients_of_dense(
    params, monkeypatch, attention
):
    emulate(monkeypatch)
    batch = pack([samples(5), samples(6, 2)], PACKED)
    model = Pi(dataclasses.replace(CONFIG, compute=Compute("float32", attention)))
    other = jax.jit(jax.value_and_grad(lambda p: model.loss(p, batch, KEY)[0]))(params)
    assert_close(loss_and_gradient(params, batch), other)


def test_perturbing_one_sample_leaves_the_actions_of_the_others(params):
    group = samples(6)
    model = Pi(dataclasses.replace(CONFIG, euler_steps=3))
    act = jax.jit(lambda b: model.sample_actions(params, b, NOISE))
    changed = dataclasses.replace(
        group[1],
        images=tuple(255 - i for i in group[1].images),
        text=group[1].text[::-1].copy(),
        state=-group[1].state,
    )
    before = np.asarray(act(pack([group], PACKED)))
    after = np.asarray(act(pack([[group[0], changed, *group[2:]]], PACKED)))
    np.testing.assert_array_equal(before[:, [0, 2, 3]], after[:, [0, 2, 3]])
    assert np.abs(before[:, 1] - after[:, 1]).max() > 1e-3


@pytest.mark.slow
def test_the_loss_is_the_mean_of_its_chunks_and_ignores_masked_entries(params):
    batch = pack([samples(7)], PACKED)
    time, noise = jax.device_get(
        jax.jit(flow.draw, static_argnums=(2, 3))(KEY, batch.sample_id, 2, (4, 6))
    )
    noised, target = jax.device_get(
        jax.jit(flow.interpolate)(batch.actions[:, :, None], noise, time)
    )
    error = 0.0
    for c in range(2):  # one chunk at a time, so that chunks cannot have seen each other
        v = np.asarray(velocity(params, batch, noised[:, :, c : c + 1], time[:, :, c : c + 1]))
        error += np.sum(np.where(batch.action_mask, (v[:, :, 0] - target[:, :, c]) ** 2, 0)) / 2
    total, count = jax.jit(MODEL.loss)(params, batch, KEY)
    np.testing.assert_allclose(total, error, rtol=1e-5)
    assert count == batch.action_mask.sum()


def test_sampling_integrates_the_velocity_that_training_learns(params):
    batch = pack([samples(8)], PACKED)
    sample = jax.jit(Pi(dataclasses.replace(CONFIG, euler_steps=2)).sample_actions)
    sampled = np.asarray(sample(params, batch, NOISE))
    x = NOISE[:, :, None]
    for t in (1.0, 0.5):
        x = x - np.float32(0.5) * velocity(params, batch, x, np.full((1, 5, 1), t, np.float32))
        x = np.asarray(x)
    real = slice(0, 4)
    np.testing.assert_allclose(sampled[:, real], x[:, real, 0], atol=1e-5)


def test_time_and_noise_depend_on_key_and_sample_id_alone():
    ids = jnp.asarray([[3, 9], [5, 3]])
    time, noise = flow.draw(KEY, ids, 2, (4, 6))
    np.testing.assert_array_equal(noise[0, 0], noise[1, 1])
    assert np.abs(noise[0, 0] - noise[0, 1]).max() > 0.1
    assert not np.array_equal(flow.draw(jax.random.key(8), ids, 2, (4, 6))[0], time)


def test_flow_times_have_the_density_of_beta_1_5_1():
    time = np.asarray(flow.draw(KEY, jnp.arange(4000), 2, (1, 1))[0]).ravel()
    assert time.min() >= 0.001
    assert time.max() <= 1
    for quantile in (0.1, 0.5, 0.9):
        exact = quantile ** (1 / 1.5) * 0.999 + 0.001
        assert abs(np.quantile(time, quantile) - exact) < 0.02


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"language": dataclasses.replace(CONFIG.language, depth=3)}, r"depth is 3 .* is 2"),
        ({"image_size": 9}, "image_size is 9"),
        ({"vocabulary": 100}, "vocabulary is 100"),
    ],
)
def test_sizes_that_do_not_fit_each_other_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


def test_state_as_text_needs_no_state_parameters():
    text_state = Pi(dataclasses.replace(CONFIG, state_input="text", film=False))
    assert "state_in" not in jax.eval_shape(text_state.init, KEY)
    assert text_state.config.layout(prefix=24, samples=1, images=2).state_tokens == 0


def test_every_parameter_matches_exactly_one_sharding_rule():
    paths = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree.leaves_with_path(jax.eval_shape(MODEL.init, KEY))
    ]
    matches = {p: [r for r, _ in SHARDING_RULES if re.search(r, p)] for p in paths}
    assert {p: m for p, m in matches.items() if len(m) != 1} == {}


def test_real_size_pi05_has_the_released_number_of_parameters():
    shapes = jax.eval_shape(Pi(PiConfig()).init, KEY)
    assert sum(x.size for x in jax.tree.leaves(shapes)) == 3_353_433_872
