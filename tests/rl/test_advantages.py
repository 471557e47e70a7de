import numpy as np
import pytest

from rl.advantages import gae, group, vtrace

DISCOUNT, TRACE, LENGTH = 0.97, 0.9, 7
RNG = np.random.default_rng(3)
REWARDS, VALUES = RNG.normal(size=(2, LENGTH))
RATIOS = np.exp(RNG.normal(0, 0.8, LENGTH))
FINAL = 0.7


def later(final):
    return np.append(VALUES[1:], final)


@pytest.mark.parametrize("final", [0.0, FINAL])
def test_gae_is_the_discounted_sum_of_errors(final):
    error = REWARDS + DISCOUNT * later(final) - VALUES
    expected = [
        sum((DISCOUNT * TRACE) ** (i - t) * error[i] for i in range(t, LENGTH))
        for t in range(LENGTH)
    ]
    advantage, target = gae(REWARDS, VALUES, final, DISCOUNT, TRACE)
    np.testing.assert_allclose(advantage, expected, rtol=1e-12)
    np.testing.assert_allclose(target, advantage + VALUES, rtol=1e-12)


def test_gae_with_full_trace_compares_returns_and_counts_what_lies_beyond_the_time_limit():
    goes_on = gae(REWARDS, VALUES, FINAL, DISCOUNT, 1.0)
    ended = gae(REWARDS, VALUES, 0.0, DISCOUNT, 1.0)
    powers = DISCOUNT ** np.arange(LENGTH)
    assert ended.target[0] == pytest.approx((powers * REWARDS).sum())
    assert goes_on.target[0] - ended.target[0] == pytest.approx(DISCOUNT**LENGTH * FINAL)


def test_group_advantages_are_returns_in_the_groups_own_deviations():
    returns = np.array([1.0, 0, 0, 1, 1, 0.5])
    centred = returns - returns.mean()
    np.testing.assert_allclose(group(returns, scaled=False), centred)
    np.testing.assert_allclose(group(returns), centred / np.sqrt((centred**2).mean()))


@pytest.mark.parametrize("scaled", [True, False])
def test_a_group_that_did_alike_teaches_nothing(scaled):
    alike = np.full(5, 0.3) + np.array([0, 1e-12, 0, -1e-12, 0])
    assert not group(alike, scaled).any()


def test_a_group_of_one_is_refused():
    with pytest.raises(
        ValueError, match=r"A group of 1 has no episodes to compare.*rollout\.group"
    ):
        group(np.array([1.0]))


def slow_vtrace(final, bound, gae_lambda):
    """Equation 1 of the paper as it stands: a sum over products."""
    rho, c = np.minimum(bound, RATIOS), gae_lambda * np.minimum(1, RATIOS)
    error = rho * (REWARDS + DISCOUNT * later(final) - VALUES)
    target = np.array(
        [
            VALUES[s]
            + sum(DISCOUNT ** (t - s) * np.prod(c[s:t]) * error[t] for t in range(s, LENGTH))
            for s in range(LENGTH)
        ]
    )
    after = gae_lambda * np.append(target[1:], final) + (1 - gae_lambda) * later(final)
    return REWARDS + DISCOUNT * after - VALUES, target


@pytest.mark.parametrize("final", [0.0, FINAL])
@pytest.mark.parametrize("bound", [1.0, 1.5])
@pytest.mark.parametrize("gae_lambda", [1.0, TRACE])
def test_vtrace_is_its_recursion_written_out(final, bound, gae_lambda):
    found = vtrace(REWARDS, VALUES, final, RATIOS, DISCOUNT, gae_lambda, bound)
    expected = slow_vtrace(final, bound, gae_lambda)
    np.testing.assert_allclose(found.advantage, expected[0], rtol=1e-12)
    np.testing.assert_allclose(found.target, expected[1], rtol=1e-12)


def test_vtrace_of_the_policy_that_acted_has_the_targets_of_gae():
    fresh = vtrace(REWARDS, VALUES, FINAL, np.ones(LENGTH), DISCOUNT, TRACE)
    np.testing.assert_allclose(fresh.target, gae(REWARDS, VALUES, FINAL, DISCOUNT, TRACE).target)
    full = vtrace(REWARDS, VALUES, FINAL, np.ones(LENGTH), DISCOUNT, 1.0)
    np.testing.assert_allclose(full.advantage, gae(REWARDS, VALUES, FINAL, DISCOUNT, 1.0).advantage)
