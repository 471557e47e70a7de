from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.config import ObjectiveConfig
from rl.objectives import SURROGATES, combine, interpolated, objective, summary, value_loss

NAMES, LEVELS = tuple(SURROGATES), ("chunk", "action", "token")
ROWS, HORIZON, DIMS = 24, 3, 2


def case(spread=0.4, seed=0):
    """Log-probabilities of three policies, and decisions of which some are cut short and the last
    two are padding."""
    rng = np.random.default_rng(seed)
    behaviour = rng.normal(size=(ROWS, HORIZON, DIMS))
    near, far = (rng.normal(0, spread, behaviour.shape) for _ in range(2))
    acted = np.zeros(behaviour.shape, bool)
    for row, steps in enumerate(rng.integers(1, HORIZON + 1, ROWS)):
        acted[row, :steps] = True
    acted[3, :, 1] = False
    return {
        "log_prob": (behaviour + near + far).astype(np.float32),
        "behaviour": behaviour.astype(np.float32),
        "advantage": rng.normal(size=ROWS).astype(np.float32),
        "acted": acted,
        "weight": (np.arange(ROWS) < ROWS - 2).astype(np.float32),
        "lag": rng.integers(0, 4, ROWS).astype(np.int32),
        "proximal": (behaviour + near).astype(np.float32),
    }


@cache
def program(config):
    """Loss, terms and gradient of a case, compiled."""

    def loss(log_prob, rest):
        terms = objective(config, log_prob=log_prob, **rest)
        return terms.loss, terms

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def evaluate(config, given):
    """Loss sum, its gradient in log π, and the terms."""
    rest = {name: x for name, x in given.items() if name != "log_prob"}
    (value, terms), gradient = program(config)(given["log_prob"], rest)
    return float(value), np.asarray(gradient), terms


def by_hand(config, given):
    """The same in f64, one ratio after another, and how many were clipped and truncated."""
    value, gradient, cut, above = 0.0, np.zeros((ROWS, HORIZON, DIMS)), 0, 0
    sides = [np.float64(given[k]) for k in ("log_prob", "proximal", "behaviour")]
    for row in range(ROWS):
        parts = {
            "chunk": [np.s_[row : row + 1, :, :]],
            "action": [np.s_[row : row + 1, i, :] for i in range(HORIZON)],
            "token": [np.s_[row : row + 1, i, j] for i in range(HORIZON) for j in range(DIMS)],
        }[config.ratio]
        for part in parts:
            acted = given["acted"][part]
            if not acted.any() or not given["weight"][row]:
                continue
            new, near, old = (side[part][acted].sum() for side in sides)
            a = float(given["advantage"][row])
            if config.name in ("aipo", "vtrace"):
                bounded = min(np.exp(new - old), config.truncation)
                above += np.exp(new - old) > config.truncation
                gain, slope = bounded * a, bounded * a
            else:
                anchor = old if config.name == "ppo" else near
                weight = 1.0 if config.name == "ppo" else np.exp(near - old)
                above += weight > config.truncation
                if config.name == "decoupled" and weight > config.truncation:
                    continue
                weight, u = min(weight, config.truncation), np.exp(new - anchor)
                low, high = 1 - config.clip, 1 + config.clip
                clipped = (a > 0 and u > high) or (a < 0 and u < low)
                cut += clipped
                gain = weight * a * (np.clip(u, low, high) if clipped else u)
                slope = 0.0 if clipped else weight * a * u
            value -= gain
            gradient[part] -= slope * acted
    return value, gradient, cut, above


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", NAMES)
def test_each_is_its_formula_within_and_beyond_its_bounds(name, level):
    config, given = ObjectiveConfig(name=name, ratio=level, truncation=1.3), case()
    value, gradient, terms = evaluate(config, given)
    expected, slope, cut, above = by_hand(config, given)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient, slope, atol=1e-5)
    assert float(terms.sums["clipped"]) == cut
    assert float(terms.sums["truncated"]) == above
    assert (cut > 2) == (name in ("ppo", "decoupled", "tis"))
    assert (above > 2) == (name != "ppo")


@pytest.mark.parametrize("level", LEVELS)
def test_all_have_one_value_and_gradient_where_all_policies_are_alike(level):
    given = case()
    given |= dict.fromkeys(("log_prob", "proximal"), given["behaviour"])
    found = [evaluate(ObjectiveConfig(name=name, ratio=level), given) for name in NAMES]
    for value, gradient, terms in found:
        np.testing.assert_allclose(value, found[0][0], rtol=1e-6)
        np.testing.assert_allclose(gradient, found[0][1], rtol=1e-6)
        metrics = summary(terms)
        assert metrics["ess"] == pytest.approx(1, abs=1e-6)
        assert metrics["clip_fraction"] == metrics["truncated_fraction"] == 0
        assert metrics["behaviour_kl"] == 0
        assert metrics["weight_mean"] == metrics["weight_max"] == 1
    advantage = given["advantage"] * given["weight"]
    np.testing.assert_allclose(
        found[0][1], -advantage[:, None, None] * given["acted"], rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize("level", LEVELS)
def test_decoupled_is_ppo_where_the_proximal_policy_acted(level):
    given = case()
    given["proximal"] = given["behaviour"]
    one, other = (
        evaluate(ObjectiveConfig(name=name, ratio=level), given) for name in ("ppo", "decoupled")
    )
    assert float(one[2].sums["clipped"]) > 2
    np.testing.assert_allclose(one[0], other[0], rtol=1e-6)
    np.testing.assert_array_equal(one[1], other[1])


@pytest.mark.parametrize("name", NAMES)
def test_what_was_not_acted_and_padding_change_nothing(name):
    config, given = ObjectiveConfig(name=name, ratio="action"), case()
    value, gradient, _ = evaluate(config, given)
    unseen = ~given["acted"]
    other = {**given, "advantage": given["advantage"].copy()}
    other["advantage"][-2:] = 1e6
    for key in ("log_prob", "behaviour", "proximal"):
        other[key] = np.where(unseen, np.nan, given[key]).astype(np.float32)
    again, slope, _ = evaluate(config, other)
    assert value == again
    np.testing.assert_array_equal(gradient, slope)
    assert not gradient[unseen].any()


def test_sums_of_parts_are_those_of_the_whole():
    config, given = ObjectiveConfig(name="tis"), case()
    whole = evaluate(config, given)[2]
    parts = [{k: v[rows] for k, v in given.items()} for rows in (slice(0, 5), slice(5, None))]
    joined = jax.jit(combine)(*(evaluate(config, part)[2] for part in parts))
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(joined), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_metrics_are_those_of_the_importance_weights():
    given = case()
    metrics = summary(evaluate(ObjectiveConfig(ratio="chunk"), given)[2])
    gap = np.where(given["acted"], np.float64(given["log_prob"]) - given["behaviour"], 0)
    w, lag = np.exp(gap.sum((1, 2)))[: ROWS - 2], given["lag"][: ROWS - 2]
    expected = {
        "ess": w.sum() ** 2 / (len(w) * (w**2).sum()),
        "behaviour_kl": (w - 1 - np.log(w)).mean(),
        "weight_mean": w.mean(),
        "weight_max": w.max(),
        "lag": lag.mean(),
        "lag_max": lag.max(),
        "count": ROWS - 2,
    }
    assert {k: metrics[k] for k in expected} == pytest.approx(expected, rel=1e-5)


def test_a_proximal_policy_that_is_not_given_is_the_learners():
    given = case()
    config = ObjectiveConfig(name="decoupled")
    fixed = {**given, "proximal": given["log_prob"]}
    found = [evaluate(config, x) for x in ({**given, "proximal": None}, fixed)]
    assert found[0][0] == found[1][0]
    np.testing.assert_array_equal(found[0][1], found[1][1])
    assert not float(found[0][2].sums["clipped"])


def test_an_interpolated_proximal_policy_stands_as_far_as_its_version():
    given = case()
    near = np.asarray(interpolated(given["log_prob"], given["behaviour"], given["lag"]))
    for row, lag in enumerate(given["lag"]):
        d = lag + 1
        expected = given["behaviour"][row] / d + given["log_prob"][row] * (1 - 1 / d)
        np.testing.assert_allclose(near[row], expected, atol=1e-6)
    config = ObjectiveConfig(name="decoupled", proximal="interpolated")
    explicit = replace(config, proximal="recomputed")
    one, other = evaluate(config, given), evaluate(explicit, {**given, "proximal": near})
    np.testing.assert_allclose(one[1], other[1], rtol=1e-6)
    fresh = {**given, "lag": np.zeros(ROWS, np.int32)}
    ppo = evaluate(ObjectiveConfig(), fresh)
    np.testing.assert_array_equal(evaluate(config, fresh)[1], ppo[1])


@pytest.mark.parametrize("name", NAMES)
def test_ratios_beyond_all_bounds_stay_finite(name):
    given = case(spread=200)
    value, gradient, terms = evaluate(ObjectiveConfig(name=name), given)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()
    assert all(np.isfinite(x) for x in jax.tree.leaves(terms))


def test_value_loss_is_half_the_squared_error_over_real_rows():
    value, target, weight = jnp.array([1.0, 2, 9]), jnp.array([3.0, 1, 0]), jnp.array([1.0, 1, 0])
    assert float(value_loss(value, target, weight)) == 2.5
    slopes = jax.grad(value_loss)(value, target, weight)
    np.testing.assert_array_equal(slopes, [-2, 1, 0])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "trpo"}, "objective.name is 'trpo'"),
        ({"name": "vtrace", "advantage": "group"}, "objective.advantage is 'group'"),
        ({"clip": 0.0}, "objective.clip"),
        ({"truncation": 0.5}, "truncation 0.5"),
        ({"discount": 1.5}, "objective.discount"),
    ],
)
def test_senseless_configurations_are_refused(change, said):
    with pytest.raises(ValueError, match=said):
        objective(ObjectiveConfig(**change), **case())
