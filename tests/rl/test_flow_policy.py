"""Draws of a flow policy: what they are, how likely they are said to be, and that saying it again
under the same parameters changes nothing."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import Pi
from models.flow import flow
from models.layers.layers import Compute
from rl import flow_policy
from rl.config import FlowConfig
from tests.helpers.models.tiny_policy import CONFIG, KEYS, openpi, tiny_policy

MODEL = Pi(CONFIG)
EVERY = [
    FlowConfig(),
    FlowConfig(random="all"),
    FlowConfig(noise="cps"),
    FlowConfig(noise="learned", random="all"),
]
UNLIKE = EVERY[::3]
EACH = [EVERY[0], *(pytest.param(config, marks=pytest.mark.slow) for config in EVERY[1:])]


def named(config):
    return f"{config.noise}-{config.random}" if isinstance(config, FlowConfig) else None


@cache
def batch(size: int = 5):
    """The tiny policy's observations, one a row, of which every other action counts."""
    policy = tiny_policy().varied(sizes=(size,))
    requests = policy.prepare(openpi(5), KEYS)
    (_, _, found), *_ = policy.batches(requests)
    mask = np.zeros(found.action_mask.shape, bool)
    mask[:, :, ::2, :2] = True
    return replace(found, action_mask=mask)


@cache
def parameters(config: FlowConfig):
    """The tiny policy with heads that say something."""
    params = flow_policy.init(MODEL, tiny_policy().params, jax.random.key(3), config)
    rng = np.random.default_rng(2)
    heads = {name: head for name, head in params.items() if name != "policy"}
    moved = jax.tree.map(
        lambda x: np.asarray(x) + 0.1 * rng.normal(size=x.shape).astype(np.float32), heads
    )
    return {"policy": params["policy"], **moved}


_draw = jax.jit(flow_policy.draw, static_argnums=(0, 4))
_log_prob = jax.jit(flow_policy.log_prob, static_argnums=(0, 5))


def drawn_by(config, params=None, model=MODEL, rows=slice(None), keys=KEYS):
    given = jax.tree.map(lambda x: x[rows], batch())
    return jax.device_get(_draw(model, params or parameters(config), given, keys[rows], config))


FEW = slice(1, 4)
"""The learner's batches are others than the actor's."""


def said(config, drawn, params=None, model=MODEL):
    """Results of `log_prob` for a few rows."""
    given, taken = (jax.tree.map(lambda x: x[FEW], tree) for tree in (batch(), drawn))
    return jax.device_get(
        _log_prob(model, params or parameters(config), given, taken, None, config)
    )


@pytest.mark.parametrize(
    ("steps", "widths"),
    [
        (3, [0.5, 0.4082, 0.2041]),
        (4, [0.5, 0.433, 0.25, 0.1443]),
        (
            10,
            [0.5, 0.4743, 0.3162, 0.2415, 0.1936, 0.1581, 0.1291, 0.1035, 0.0791, 0.0527],
        ),
    ],
)
def test_the_sdes_widths_and_drifts_are_those_of_its_closed_form(steps, widths):
    drift, std = flow_policy.schedule(FlowConfig(noise="sde", level=0.5, euler_steps=steps))
    np.testing.assert_allclose(std, widths, atol=5e-5)
    k = np.arange(1, steps)
    np.testing.assert_allclose(std[1:], 0.5 * np.sqrt((steps - k) / (k * steps)), rtol=1e-6)
    np.testing.assert_allclose(drift, [0.5**2 / 2, *(0.5**2 / (2 * k))], rtol=1e-6)


def test_cps_keeps_the_interpolants_coefficients_and_its_last_step_has_no_width():
    config = FlowConfig(noise="cps", level=0.5, euler_steps=4)
    drift, std = flow_policy.schedule(config)
    after = 1 - np.arange(1, 5) / 4
    np.testing.assert_allclose((after - drift) ** 2 + std**2, after**2, atol=1e-7)
    assert std[-1] == 0
    assert flow_policy.random_steps(config) == 3


class Normal:
    """A flow between unit noise and data that are normal around `mean`, without error."""

    mean, std = 0.7, 0.3
    config = SimpleNamespace(action_dim=4)
    feature_width = 1

    def field(self, params, batch, observed):
        def predicted(x, time):
            t = time[..., None, None]
            away = (x - (1 - t) * self.mean) / (((1 - t) * self.std) ** 2 + t**2)
            velocity = t * away - self.mean - (1 - t) * self.std**2 * away
            return flow.Predicted(velocity, x[..., :1])

        return predicted


def spread(config: FlowConfig) -> tuple[float, float]:
    """Mean and standard deviation of 64 thousand numbers drawn from `Normal`."""
    given = SimpleNamespace(actions=np.zeros((2048, 1, 8, 4)))
    keys = np.arange(4096, dtype=np.uint32).reshape(-1, 2)
    draw = jax.jit(lambda k: flow_policy.draw(Normal(), {"policy": None}, given, k, config))
    actions = np.asarray(draw(keys).actions)
    return float(actions.mean()), float(actions.std())


def width(config: FlowConfig) -> float:
    """The standard deviation that draws from `Normal` must have: every step is linear."""
    drifts, stds = flow_policy.schedule(config)
    steps, variances = config.euler_steps, []
    for chosen in range(steps):
        variance = 1.0
        for k, (drift, std) in enumerate(zip(drifts, stds, strict=True)):
            random = config.random == "all" or k == chosen
            t = 1 - k / steps
            slope = (t - (1 - t) * Normal.std**2) / (((1 - t) * Normal.std) ** 2 + t**2)
            factor = 1 - slope / steps - random * drift * (1 + (1 - t) * slope)
            variance = factor**2 * variance + random * std**2
        variances.append(variance)
    return float(np.sqrt(np.mean(variances)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("random", "level", "expected"),
    [
        ("one", 0.0, {4: 0.177, 10: 0.247, 400: 0.298}),
        ("one", 0.5, {4: 0.201, 10: 0.251, 400: 0.298}),
        ("all", 0.5, {4: 0.238, 10: 0.271, 400: 0.300}),
    ],
)
def test_the_sde_keeps_the_flows_marginals(random, level, expected):
    """The mean exactly, the width but for the error of K Euler steps, with noise at one or all."""
    for steps, std in expected.items():
        config = FlowConfig(random=random, level=level, euler_steps=steps)
        assert width(config) == pytest.approx(std, abs=0.0015)
        if steps < 20:
            mean, found = spread(config)
            assert mean == pytest.approx(0.7, abs=0.004)
            assert found == pytest.approx(width(config), abs=0.003)


def test_cps_keeps_the_mean():
    config = FlowConfig(noise="cps", random="all", euler_steps=10)
    assert spread(config)[0] == pytest.approx(0.7, abs=0.006)


@pytest.mark.slow
def test_without_width_draws_are_the_plain_samplers_and_have_no_likelihood():
    config = FlowConfig(level=0.0, euler_steps=4)
    drawn = drawn_by(config)
    sample = jax.jit(MODEL.config.changed(euler_steps=4).build().sample_actions)
    start = flow.noise(jnp.asarray(KEYS), (6, 4))
    plain = sample(parameters(config)["policy"], batch(), start[:, None])
    np.testing.assert_allclose(drawn.actions, plain[:, 0], atol=1e-6)
    assert not np.any(drawn.log_prob)


@pytest.mark.parametrize("config", EACH, ids=named)
def test_a_draw_is_what_its_record_says(config):
    drawn = drawn_by(config)
    random = flow_policy.random_steps(config)
    if config.random == "one":
        assert drawn.at.shape == (5, 1)
        assert 0 <= drawn.at.min() <= drawn.at.max() < random
    else:
        np.testing.assert_array_equal(drawn.at, np.tile(np.arange(random), (5, 1)))
        np.testing.assert_array_equal(drawn.before[:, 1:], drawn.after[:, :-1])
        start = flow.noise(jnp.asarray(KEYS), (6, 4))
        np.testing.assert_array_equal(drawn.before[:, 0], start)
    last = np.asarray(drawn.at)[:, -1] == config.euler_steps - 1
    np.testing.assert_array_equal(drawn.after[last, -1], drawn.actions[last])
    assert np.abs(drawn.after - drawn.before).min(axis=(0, 1)).max() > 0
    assert np.all(np.isfinite(drawn.log_prob))


def test_which_step_is_random_is_drawn_for_each_chunk_by_itself_and_evenly():
    keys = np.arange(8000, dtype=np.uint32).reshape(-1, 2)
    given = SimpleNamespace(actions=np.zeros((4000, 1, 1, 1)))
    for noise, steps in (("sde", 4), ("cps", 3)):
        config = FlowConfig(noise=noise)
        at = flow_policy.draw(Normal(), {"policy": None}, given, keys, config).at
        counts = np.bincount(np.asarray(at)[:, 0], minlength=4)
        np.testing.assert_allclose(counts[:steps], 4000 / steps, atol=130)
        assert counts.sum() == counts[:steps].sum() == 4000


@pytest.mark.parametrize("config", EACH, ids=named)
def test_the_density_of_a_draw_is_normals(config):
    """Compares `log_prob` with scipy's density around means computed by hand."""
    from scipy.stats import norm

    drawn, params = drawn_by(config), parameters(config)
    field = jax.jit(lambda p, b, *given: MODEL.field(p, b)(*given))
    total = np.zeros((5, 6, 4))
    for m in range(drawn.at.shape[1]):
        k, x = np.asarray(drawn.at)[:, m, None, None], np.asarray(drawn.before[:, m])
        t = 1 - k / config.euler_steps
        predicted = field(params["policy"], batch(), x[:, None, None], t[:, :, 0, None])
        velocity, features = jax.device_get(predicted)
        v = np.asarray(velocity[:, 0, 0])
        data, noise = x - t * v, x + (1 - t) * v
        after = t - 1 / config.euler_steps
        if config.noise == "sde":
            sigma = config.level * np.sqrt(t / np.where(k == 0, 1 / config.euler_steps, 1 - t))
            std = sigma / np.sqrt(config.euler_steps)
            mean = data * (1 - after) + noise * (after - sigma**2 / config.euler_steps / (2 * t))
        elif config.noise == "cps":
            angle = np.pi * config.level / 2
            mean = data * (1 - after) + noise * after * np.cos(angle)
            std = after * np.sin(angle)
        else:
            z = features[:, 0, 0]
            for i in range(3):
                layer = params["noise"][f"layer{i}"]
                z = np.tanh(z @ layer["kernel"] + layer["bias"])
            low, high = np.log(config.least**2), np.log(config.most**2)
            std = np.exp(0.5 * (low + (high - low) * (z + 1) / 2))
            mean = x - v / config.euler_steps
        total += norm.logpdf(drawn.after[:, m], mean, std)
    np.testing.assert_allclose(said(config, drawn)[0], total[FEW], rtol=1e-3, atol=1e-3)


def narrowed(params):
    """A form of snapshot: bfloat16 but for the heads."""
    return params | {"policy": jax.tree.map(lambda x: jnp.bfloat16(x), params["policy"])}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "dtype", "snapshot", "tolerance"),
    [
        *[(config, "float32", False, 1e-4) for config in EVERY],
        (EVERY[0], "bfloat16", False, 1e-4),
        (EVERY[0], "bfloat16", True, 0.15),
    ],
    ids=named,
)
def test_an_unchanged_policy_has_ratio_one_and_nothing_is_clipped(
    config, dtype, snapshot, tolerance
):
    """Holds for all sizes of batches and dtypes of acting and learning; but a snapshot whose every
    leaf was rounded is another policy, and the ratio says so."""
    model = Pi(replace(CONFIG, compute=Compute(dtype=dtype)))
    params = parameters(config)
    drawn = drawn_by(config, narrowed(params) if snapshot else params, model)
    acted = batch().action_mask[FEW, 0]
    density, value, _ = said(config, drawn, params, model)
    difference = (density - drawn.log_prob[FEW]) * acted
    ratio = np.exp(difference.sum((1, 2)))
    assert np.abs(ratio - 1).max() < tolerance
    assert np.mean(np.abs(ratio - 1) > 0.2) == 0
    np.testing.assert_allclose(value, drawn.value[FEW], atol=tolerance)


@pytest.mark.parametrize("config", UNLIKE, ids=named)
def test_a_rows_draw_depends_on_its_key_and_observation_alone(config):
    whole = drawn_by(config)
    order = np.array([3, 0, 4, 2, 2])
    other = drawn_by(config, rows=order)
    for x, y in zip(whole, other, strict=True):
        np.testing.assert_allclose(x[order], y, atol=1e-5, rtol=1e-5)
    keys = KEYS.copy()
    keys[1] = 11, 11
    moved = drawn_by(config, keys=keys)
    np.testing.assert_array_equal(moved.actions[[0, 2, 3, 4]], whole.actions[[0, 2, 3, 4]])
    assert np.abs(moved.actions[1] - whole.actions[1]).max() > 1e-3
    np.testing.assert_allclose(moved.value, whole.value, atol=1e-6)


@pytest.mark.slow
def test_the_gradient_of_a_likelihood_is_its_slope():
    config = EVERY[-1]
    drawn, params = drawn_by(config), parameters(config)
    rng = np.random.default_rng(4)
    direction = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), params)
    acted = batch().action_mask[:, 0]

    @jax.jit
    def total(by):
        moved = jax.tree.map(lambda x, d: x + by * d, params, direction)
        return jnp.sum(flow_policy.log_prob(MODEL, moved, batch(), drawn, None, config)[0] * acted)

    slope = float(jax.jit(jax.grad(total))(0.0))
    step = 1e-3
    found = (float(total(step)) - float(total(-step))) / (2 * step)
    assert abs(slope) > 1
    assert found == pytest.approx(slope, rel=0.02)


@pytest.mark.slow
def test_the_values_gradient_reaches_its_head_alone_and_entropys_the_noise_head():
    config = FlowConfig(noise="learned")
    drawn, params = drawn_by(config), parameters(config)

    @jax.jit
    def gradients(params):
        def totals(p):
            found = flow_policy.log_prob(MODEL, p, batch(), drawn, None, config)
            return [x.sum() for x in found[1:]]

        pull = jax.vjp(totals, params)[1]
        return pull([1.0, 0.0])[0], pull([0.0, 1.0])[0]

    of_value, of_entropy = (
        {name: max(np.abs(x).max() for x in jax.tree.leaves(part)) for name, part in found.items()}
        for found in gradients(params)
    )
    assert of_value["value"] > 0
    assert of_value["policy"] == of_value["noise"] == 0
    assert of_entropy["noise"] > 0
    assert of_entropy["value"] == 0


def test_heads_begin_at_no_value_and_at_the_middle_of_the_widths():
    config = FlowConfig(noise="learned", random="all")
    params = flow_policy.init(MODEL, tiny_policy().params, jax.random.key(0), config)
    assert set(params) == {"policy", "value", "noise"}
    drawn = drawn_by(config, params)
    assert not np.any(drawn.value)
    middle = np.sqrt(config.least * config.most)
    _, _, entropy = said(config, drawn, params)
    np.testing.assert_allclose(entropy, 0.5 * np.log(2 * np.pi * np.e * middle**2), rtol=1e-5)
    without = flow_policy.init(
        MODEL, tiny_policy().params, jax.random.key(0), FlowConfig(), value=False
    )
    assert set(without) == {"policy"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"euler_steps": 0}, "flow.euler_steps is 0; 'sde' needs at least 1"),
        ({"noise": "cps", "euler_steps": 1}, "'cps' needs at least 2"),
        ({"level": -0.1}, "flow.level is -0.1"),
        ({"noise": "cps", "level": 1.5}, "at most 1 for 'cps'"),
        ({"least": 0.0}, "flow.least and flow.most are 0.0 and 0.16"),
        ({"least": 0.2}, "flow.least and flow.most are 0.2 and 0.16"),
    ],
)
def test_noise_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        FlowConfig(**changes)
