"""Real-time chunking draws a chunk to the one before it: where, how strongly, and what it leaves
alone."""

import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.flow import flow
from models.flow.realtime_chunking import Guidance, guided, left_over, soft_mask
from tests.helpers.models.tiny_policy import (
    ARM,
    KEYS,
    PROCESSOR,
    PROMPTS,
    openpi,
    programs,
    recorded_groot,
    seen,
    tiny_policy,
)

HORIZON, DIMS, STEPS = 10, 2, 10


@pytest.fixture(scope="module")
def policy():
    return tiny_policy()


def bimodal(spread: float = 0.1, scale: float = 1.0):
    """The exact velocity of chunks that are near a curve or near its mirror image, either one as
    likely."""
    curve = scale * np.stack([np.linspace(0.5, 1.5, HORIZON), np.ones(HORIZON)], -1)
    modes = jnp.asarray(np.stack([curve, -curve]), jnp.float32)

    def velocity(x, t):
        centres = (1 - t) * modes  # [2, h, a]
        variance = ((1 - t) * spread) ** 2 + t**2
        away = x[..., None, :, :] - centres
        odds = jax.nn.softmax(-0.5 * jnp.sum(away**2, (-2, -1)) / variance)
        ends = modes + (1 - t) * spread**2 / variance * away
        return (x - jnp.einsum("...m,...mha->...ha", odds, ends)) / t

    return velocity


def noise(count: int, seed: int = 0):
    drawn = np.random.default_rng(seed).normal(size=(count, HORIZON, DIMS))
    return drawn.astype(np.float32)


def integrated(velocity, start, guidance=None):
    """Ends of the flow (numpy)."""
    return np.asarray(flow.integrate(velocity, start, STEPS, guidance))


def weights(committed: int, overlap: int):
    mask = soft_mask(HORIZON, np.array(committed), np.array(overlap))
    return np.tile(mask[:, None], DIMS)


def test_the_mask_is_one_where_committed_then_decays_and_ends_with_the_overlap():
    linear = np.array([0.8, 0.6, 0.4, 0.2])  # (6 − i) / (6 − 2 + 1) for i = 2 … 5
    expected = np.array([1, 1, *(linear * (np.exp(linear) - 1) / (np.e - 1)), 0, 0, 0, 0])
    np.testing.assert_allclose(soft_mask(10, np.array(2), np.array(6)), expected, rtol=1e-6)
    several = soft_mask(10, np.array([2, 0, 4, 0]), np.array([6, 10, 4, 0]))
    np.testing.assert_allclose(several[0], expected, rtol=1e-6)
    assert (np.diff(several[1]) < 0).all()
    assert 0 < several[1, -1] < several[1, 0] < 1
    assert several[2].tolist() == [1] * 4 + [0] * 6
    assert not several[3].any()


def test_the_correction_is_the_gradient_of_the_weighted_distance_to_the_expected_end():
    with jax.enable_x64(True):
        matrix = np.random.default_rng(0).normal(size=(HORIZON * DIMS,) * 2) / 5

        def velocity(x, t):
            flat = x.reshape(*x.shape[:-2], -1)
            return jnp.sin(flat @ matrix + t).reshape(x.shape) + x**2 * t

        x, target = (np.random.default_rng(i).normal(size=(HORIZON, DIMS)) for i in (1, 2))
        weight = np.asarray(weights(2, 7), np.float64)
        for t, strength in ((1.0, 5.0), (0.5, 2.0), (0.2, 4.25), (0.1, 5.0)):

            def distance(x, t=t):
                return 0.5 * float((((x - t * velocity(x, t)) - target) ** 2 * weight).sum())

            corrected = guided(velocity, Guidance(target, weight))(jnp.asarray(x), jnp.asarray(t))
            step, slope = 1e-5, np.zeros_like(x)
            for at in np.ndindex(x.shape):
                moved = np.zeros_like(x)
                moved[at] = step
                slope[at] = (distance(x + moved) - distance(x - moved)) / (2 * step)
            np.testing.assert_allclose(
                corrected - velocity(x, t), strength * slope, rtol=1e-6, atol=1e-7
            )


def test_guidance_without_weight_leaves_the_flow_as_it_is():
    velocity, start = bimodal(), noise(4)
    plain = integrated(velocity, start)
    none = Guidance(np.ones_like(start), np.zeros_like(start))
    np.testing.assert_allclose(integrated(velocity, start, none), plain, atol=1e-6)


def test_committed_entries_end_near_the_previous_chunk_and_nearer_with_a_higher_limit():
    """The method draws, it does not force: that is said by the numbers here."""
    velocity, start = bimodal(spread=0.5), noise(64)
    previous = integrated(velocity, noise(64, seed=1))
    mask = weights(4, 8)

    def error(limit: float) -> float:
        guidance = Guidance(previous, mask, limit)
        sampled = integrated(velocity, start, guidance)
        return float(np.sqrt(np.mean((sampled - previous)[:, :4] ** 2)))

    errors = [error(limit) for limit in (0.0, 1.0, 5.0)]
    assert errors[2] < errors[1] < errors[0]
    assert errors[2] < 0.1 * errors[0]


def test_a_flow_that_allows_one_chunk_only_is_not_moved():
    """Correction is 0 where the end does not depend on the noise: nothing is forced."""

    def velocity(x, t):
        return (x - 0.7) / t

    wanted = Guidance(np.full((HORIZON, DIMS), -1, np.float32), weights(4, 8))
    sampled = integrated(velocity, noise(1)[0], wanted)
    np.testing.assert_allclose(sampled, 0.7, atol=1e-5)


def test_a_chunk_stays_with_the_mode_of_the_one_before_it():
    velocity = bimodal()
    previous = integrated(velocity, noise(200, seed=1))
    left = np.concatenate([previous[:, 3:], np.zeros((200, 3, DIMS), np.float32)], 1)
    plain = integrated(velocity, noise(200))
    drawn = integrated(velocity, noise(200), Guidance(left, weights(3, HORIZON - 3)))

    def jumps(sampled):
        """|step| from the last committed action to the first one of the new chunk."""
        return np.linalg.norm(sampled[:, 3] - left[:, 2], axis=-1)

    side = np.sign(previous[:, :, 1].mean(1))
    assert 0.35 < (np.sign(plain[:, :, 1].mean(1)) == side).mean() < 0.65
    assert (np.sign(drawn[:, :, 1].mean(1)) == side).mean() > 0.97
    assert jumps(drawn).mean() < 0.3 * jumps(plain).mean()
    end = drawn[:, -3:, 1]  # what nothing guides is still a chunk of the data's
    np.testing.assert_allclose(np.abs(end).mean(), 1.0, atol=0.15)


def test_a_chunk_is_drawn_by_its_own_guidance_alone():
    velocity, start, other = bimodal(), noise(3), noise(3, seed=5)
    target, mask = noise(3, seed=2), np.stack([weights(2, 6), weights(0, 0), weights(5, 9)])
    whole = integrated(velocity, start, Guidance(target, mask))
    start[0], target[0] = other[0], 9
    changed = integrated(velocity, start, Guidance(target, mask))
    np.testing.assert_array_equal(whole[1:], changed[1:])
    assert np.abs(whole[0] - changed[0]).max() > 0.1


@pytest.mark.slow
def test_a_policy_continues_each_robots_own_chunk(policy):
    plain = policy.infer(openpi(4), keys=KEYS[:4])["actions"]
    last = policy.infer(openpi(4), keys=KEYS[1:5])["actions"]
    assert np.abs(last - plain).max() > 0.05
    previous = [last[0, 1:], None, last[2, 3:], last[3]]
    answer = policy.infer(openpi(4), keys=KEYS[:4], previous=previous, committed=[2, 5, 3, 0])[
        "actions"
    ]
    np.testing.assert_array_equal(answer[0, :2], last[0, 1:3])
    np.testing.assert_array_equal(answer[2, :3], last[2, 3:])
    np.testing.assert_allclose(answer[1], plain[1], atol=1e-5)
    for i, chunk in ((0, last[0, 1:]), (3, last[3])):
        far, near = (np.abs(x[i, : len(chunk)] - chunk).mean() for x in (plain, answer))
        assert near < 0.8 * far
    alone = policy.infer(openpi(1), keys=KEYS[:1], previous=previous[:1], committed=2)["actions"]
    np.testing.assert_allclose(alone[0], answer[0], atol=1e-5)
    requests = policy.prepare(openpi(4), KEYS[:4], previous=previous, committed=[2, 5, 3, 0])
    np.testing.assert_array_equal(policy.sample_actions(requests), answer)


def test_without_a_previous_chunk_not_a_bit_changes(policy):
    plain = policy.infer(openpi(4), keys=KEYS[:4])["actions"]
    same = policy.infer(openpi(4), keys=KEYS[:4], previous=[None] * 4, committed=2)["actions"]
    np.testing.assert_array_equal(same, plain)


def test_relative_actions_continue_where_the_robot_is_now(policy):
    """The same motion, seen as differences from the new state, is the absolute one moved there."""
    moved = replace(ARM, relative=(1, -1))
    relative = replace(policy, processor=replace(PROCESSOR, embodiments=(moved,)))
    states = seen()[1]
    observation = openpi(2)
    origin = np.stack([states[:2, 1], np.zeros(2)], -1)[:, None].astype(np.float32)
    last = policy.infer(observation, keys=KEYS[1:3])["actions"]
    absolute = policy.infer(observation, keys=KEYS[:2], previous=list(last), committed=2)
    there = relative.infer(observation, keys=KEYS[:2], previous=list(last + origin), committed=2)[
        "actions"
    ]
    np.testing.assert_allclose(there - origin, absolute["actions"], atol=2e-5)


def test_warming_compiles_what_chunking_needs(policy):
    fresh = replace(policy, sizes=(2,))
    fresh.warm(text=16, guided=True)
    assert programs(fresh) == 2
    observation = openpi(2)
    last = fresh.infer(observation)["actions"]
    fresh.infer(observation, previous=[last[0], None], committed=1)
    assert programs(fresh) == 2


@pytest.mark.slow
def test_groot_continues_in_its_own_units(tmp_path):
    groot, observation = recorded_groot(tmp_path / "groot")
    plain = groot.infer(observation)["actions"]
    keys = np.stack([np.ones(len(plain)), np.arange(len(plain))], -1).astype(np.uint32)
    last = groot.infer(observation, keys=keys)["actions"]
    previous = [last[0], *[None] * (len(plain) - 1)]
    answer = groot.infer(observation, previous=previous, committed=2)["actions"]
    np.testing.assert_array_equal(answer[0, :2], last[0, :2])
    np.testing.assert_allclose(answer[1:], plain[1:], atol=1e-4 * np.abs(plain).max())
    far, near = (np.abs(x[0] - last[0]).mean() for x in (plain, answer))
    assert near < far


@pytest.mark.parametrize(
    ("previous", "committed", "message"),
    [
        ([np.zeros((7, 2))], 0, r"previous has shape \[7, 2\]; expected at most 6 steps of 2 dims"),
        ([np.zeros((3, 4))], 0, r"previous has shape \[3, 4\]"),
        ([np.zeros(3)], 0, r"previous has shape \[3\]"),
        ([np.full((3, 2), np.nan)], 0, "not finite"),
        ([np.zeros((3, 2))], 4, "committed is 4, but previous has 3 actions"),
        ([np.zeros((3, 2))], -1, "committed is -1"),
        ([np.zeros((3, 2))] * 2, 0, "previous is for 2 observations and committed for 1, .* are 1"),
        ([np.zeros((3, 2))], [0, 0], "previous is for 1 observations and committed for 2"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_a_previous_chunk_that_does_not_fit_is_refused(previous, committed, message):
    with pytest.raises(ValueError, match=message):
        left_over(previous, committed, (1, 6, 2))


@pytest.mark.slow
def test_the_guide_drives_robots(policy):
    guide = (Path(__file__).parents[3] / "docs" / "chunking.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    acted: list[np.ndarray] = []
    policy = replace(policy, sizes=(1, 2))
    pictures, states = seen()
    shown = {"image": {"front": pictures[0, 0]}, "state": states[0], "prompt": PROMPTS[0]}
    found: dict = {"policy": policy, "observe": lambda: shown}
    for block in blocks[1:]:  # the first loads a run
        exec(block, found)
    assert len(found["chunks"]) == 4
    assert found["batcher"].statistics().items == 4
    found["drive"](policy, found["observe"], acted.append, ticks=9)
    first = policy.infer(openpi(1), keys=[(0, 0)])["actions"][0]
    np.testing.assert_array_equal(acted[:3], first[:3])
    second = policy.infer(openpi(1), keys=[(0, 2)], previous=[first[2:]], committed=1)["actions"]
    np.testing.assert_array_equal(acted[3:5], second[0, 1:3])
    assert len(acted) == 9
