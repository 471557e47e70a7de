import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from parallel import moments

decode = jax.jit(moments.decode)
encode = jax.jit(moments.encode, static_argnames="least_power")
B2 = 0.95
ROWS, WIDTH = 64, 1024


@pytest.fixture(scope="module")
def averages():
    """Second moments after 80 steps of gradients whose scales differ by orders of magnitude: in
    f32, and kept in float8 between steps with rounding to the nearest and stochastic rounding."""
    scale = 1e-4 * jnp.exp(2.4 * jax.random.normal(jax.random.key(9), (ROWS, WIDTH)))

    def step(carry, i):
        exact, nearest, random = carry
        g = scale * jax.random.normal(jax.random.fold_in(jax.random.key(0), i), scale.shape)
        add = lambda v: B2 * v + (1 - B2) * g * g  # noqa: E731
        nearest = encode(add(decode(nearest)), least_power=0.5)
        key = jax.random.fold_in(jax.random.key(1), i)
        return (add(exact), nearest, encode(add(decode(random)), key, least_power=0.5)), None

    none = jnp.zeros_like(scale)
    start = (none, encode(none), encode(none))
    exact, nearest, random = jax.jit(lambda s: jax.lax.scan(step, s, jnp.arange(80))[0])(start)
    return np.asarray(exact), np.asarray(decode(nearest)), np.asarray(decode(random))


@pytest.mark.slow
def test_expansion_keeps_what_plain_float8_loses(averages):
    exact = averages[0]
    grouped = exact.reshape(-1, moments.GROUP)
    scale = grouped.max(-1, keepdims=True) / 448
    plain = np.asarray((grouped / scale).astype(jnp.float8_e4m3fn), np.float32) * scale
    ours = np.asarray(decode(encode(exact, least_power=0.5)))
    assert 0.3 < (plain == 0).mean() < 0.45
    assert (ours > 0).all()
    assert np.median(np.abs(ours / exact - 1)) < 0.05


@pytest.mark.slow
def test_averages_follow_stochastic_rounding_but_stall_when_rounded_to_the_nearest(averages):
    exact, nearest, random = averages
    largest = exact.reshape(-1, moments.GROUP).max(-1).repeat(moments.GROUP).reshape(exact.shape)
    held = exact > largest / 1e9
    assert held.mean() > 0.9
    assert np.mean((random / exact)[held]) == pytest.approx(1, abs=0.03)
    assert np.mean((nearest / exact)[held]) > 1.3


@pytest.mark.parametrize("least_power", [0.5, 1.0])
def test_rounding_is_right_on_average_and_near_each_time(least_power):
    x = jax.random.normal(jax.random.key(0), (3, 200)) * jnp.array([[1e-6], [1.0], [1e4]])
    keys = jax.random.split(jax.random.key(1), 1000)
    drawn = jax.jit(jax.vmap(lambda k: decode(encode(x, k, least_power=least_power))))(keys)
    spread = np.asarray(drawn.std(0)) / np.sqrt(len(keys))
    assert (np.abs(drawn.mean(0) - x) <= 5 * spread + 1e-6 * np.abs(x).max(1, keepdims=True)).all()
    nearest = np.asarray(decode(encode(x, least_power=least_power)))
    assert np.median(np.abs(nearest / x - 1)) < 0.03


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1,), (5, 3), (4, 3, 300)])
def test_any_shape_keeps_signs_zeros_equal_values_and_what_is_not_finite(shape):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    first = (0,) * len(shape)
    x[first] = 0
    got = encode(jnp.asarray(x), jax.random.key(0))
    assert got.codes.shape == shape
    assert got.scale.shape == (*shape[:-1], -(-shape[-1] // moments.GROUP))
    np.testing.assert_array_equal(np.sign(decode(got)), np.sign(x))
    np.testing.assert_array_equal(decode(encode(jnp.zeros(shape))), np.zeros(shape))
    equal = encode(jnp.full(shape, -3e-9))
    np.testing.assert_allclose(decode(equal), -3e-9, rtol=5e-3)
    x[first] = np.nan
    assert np.isnan(decode(encode(jnp.asarray(x), jax.random.key(0)))[first])


def test_the_first_update_is_adams_and_small_leaves_stay_f32():
    params = {"kernel": jnp.ones((64, 96)), "bias": jnp.ones(96), "frozen": None}
    grads = jax.tree.map(lambda p: jnp.sin(jnp.arange(p.size) + 1.0).reshape(p.shape), params)
    ours, theirs = (make(0.9, 0.95, 1e-8) for make in (moments.scale_by_adam, optax.scale_by_adam))
    state, other = jax.jit(ours.init)(params), theirs.init(params)
    update, state = jax.jit(ours.update)(grads, state)
    expected, _ = theirs.update(grads, other)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), update, expected)
    assert isinstance(state.mu["kernel"], moments.Float8)
    assert state.nu["bias"].dtype == jnp.float32
    assert state.mu["frozen"] is None
