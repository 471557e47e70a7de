"""Episodes: what a seed fixes, how they end and restart, and what a policy may see of them."""

import jax
import numpy as np
import pytest

from sim.environments.bodies import COLOURS, blocks
from sim.environments.experts import expert
from sim.environments.tabletop import Tabletop, TabletopState
from sim.protocol import EVAL_SEEDS, TRAIN_SEEDS

SEEDS = np.array([3, 7, 1_000_000_000, 4_294_967_295, 11])


@pytest.fixture(scope="module")
def env(envs) -> Tabletop:
    return envs["lift"]


def _equal(one, other) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def _actions(env: Tabletop, n: int, steps: int) -> np.ndarray:
    """Somewhere on the table, low and high, opening and closing."""
    rng = np.random.default_rng(0)
    low, high = (-0.15, -0.1, 0.0, 0.0), (0.15, 0.15, 0.2, 1.0)
    return rng.uniform(low, high, (n, steps, 4)).astype(np.float32)


def test_same_seed_gives_the_same_episode_and_others_differ(env):
    one, again = env.reset(SEEDS), env.reset(SEEDS)
    assert _equal(one, again)
    starts = np.asarray(env.reset(np.arange(64)).physics.position)
    assert len(np.unique(starts, axis=0)) == 64
    assert set(np.asarray(env.goal(env.reset(np.arange(64))))) == {0, 1, 2}


def test_seeds_for_training_and_for_judging_are_disjoint():
    assert TRAIN_SEEDS.stop <= EVAL_SEEDS.start
    assert EVAL_SEEDS.stop <= 2**32


def test_blocks_start_apart_and_in_view(envs):
    for env in (envs[task] for task in ("reach", "lift", "push", "stack")):
        place = np.asarray(blocks(env.reset(np.arange(256)).physics.position))[..., :2]
        gaps = np.linalg.norm(place[:, (0, 0, 1)] - place[:, (1, 2, 2)], axis=-1)
        assert gaps.min() > 0.0566, "blocks overlap when turned"
        assert np.abs(place).max() < 0.16


@pytest.mark.slow
def test_an_episode_is_the_same_in_any_batch(env):
    actions = _actions(env, len(SEEDS), 6)
    together = env.step_chunk(env.reset(SEEDS), actions)
    pictures = env.observe(together[0]).images
    for i, seed in enumerate(SEEDS):
        alone = env.step_chunk(env.reset(SEEDS[i : i + 1]), actions[i : i + 1])
        assert _equal(alone, jax.tree.map(lambda x, i=i: x[i : i + 1], together)), seed
        assert np.array_equal(env.observe(alone[0]).images[0], pictures[i])


@pytest.mark.slow
def test_more_environments_than_lanes_act_alike(env):
    seeds = np.arange(env.group_size + 3)
    actions = _actions(env, len(seeds), 2)
    state, transition = env.step_chunk(env.reset(seeds), actions)
    last = env.step_chunk(env.reset(seeds[-2:]), actions[-2:])
    assert _equal(jax.tree.map(lambda x: x[-2:], (state, transition)), last)


def test_a_chunk_is_its_steps_one_by_one(env):
    state, actions = env.reset(SEEDS), _actions(env, len(SEEDS), 5)
    after, transition = env.step_chunk(state, actions)
    for t in range(5):
        state, single = env.step_chunk(state, actions[:, t : t + 1])
        assert _equal(single, jax.tree.map(lambda x, t=t: x[:, t : t + 1], transition))
    assert _equal(state, after)


def test_running_out_of_time_truncates_and_starts_afresh(env):
    start = env.reset(SEEDS)
    idle = np.tile(np.asarray(start.physics.setpoint)[:, None], (1, env.max_steps + 1, 1))
    state, transition = env.step_chunk(start, idle)
    assert not np.any(transition.terminated)
    assert np.array_equal(transition.truncated.sum(1), np.ones(len(SEEDS)))
    assert np.all(transition.truncated[:, env.max_steps - 1])
    assert np.array_equal(state.episode, np.ones(len(SEEDS)))
    assert np.array_equal(state.step, np.ones(len(SEEDS)))
    assert np.array_equal(state.seed, start.seed)
    poses = transition.scene.poses
    last, fresh = poses[:, env.max_steps - 1], poses[:, env.max_steps]
    first = np.asarray(start.start)
    assert np.allclose(last[:, 3:, :2], first, atol=1e-3), "the terminal scene is the old one"
    assert np.all(np.abs(fresh[:, 3:, :2] - first).max((1, 2)) > 1e-3), "a new draw"


def test_reaching_the_goal_terminates_with_the_terminal_values_and_a_reward(env):
    seeds = np.arange(16)
    state = env.reset(seeds)
    ended = np.zeros(16, int)
    for _ in range(env.max_steps):
        before = state
        state, t = env.step_chunk(state, np.asarray(expert(env, state))[:, None])
        done = t.terminated[:, 0]
        own = t.achieved[np.arange(16), 0, np.asarray(env.goal(before))]
        assert np.array_equal(own, done)
        assert np.array_equal(t.reward[:, 0], done)
        assert not np.any(t.terminated & t.truncated)
        heights = t.scene.poses[np.arange(16), 0, 3 + np.asarray(env.goal(before)), 2]
        assert np.array_equal(heights > 0.06, done), "terminal scene, before the new start"
        now = np.asarray(state.physics.position)[:, 2]
        assert np.allclose(
            t.state[:, 0, 0] - t.state[:, 0, 1],
            np.where(done, t.state[:, 0, 0] - t.state[:, 0, 1], now),
        )
        assert np.all(np.asarray(state.step)[done] == 0)
        ended += done
    assert ended.min() >= 1
    assert np.array_equal(state.episode, ended + 0)


def test_each_new_episode_of_a_lane_is_another(env):
    state = env.reset(SEEDS)
    seen = [np.asarray(state.start)]
    for _ in range(2):
        idle = np.tile(np.asarray(state.physics.setpoint)[:, None], (1, env.max_steps, 1))
        state, _ = env.step_chunk(state, idle)
        seen.append(np.asarray(state.start))
    assert len(np.unique(np.concatenate(seen), axis=0)) == 3 * len(SEEDS)


def test_a_policy_sees_no_place_of_a_block_and_no_x_or_y_of_the_tip(env):
    state = env.reset(SEEDS)
    position = np.asarray(state.physics.position).copy()
    position[:, :2] += 0.05
    position[:, 5:] += 0.01
    moved = state._replace(physics=state.physics._replace(position=position))
    assert env.observe(state).state.shape == (len(SEEDS), len(env.state_names))
    assert np.array_equal(env.observe(state).state, env.observe(moved).state)


def test_pictures_show_each_block_and_the_gripper_where_they_are(env):
    state = env.reset(SEEDS)
    picture = np.asarray(env.observe(state).images)
    assert picture.shape == (len(SEEDS), 1, 48, 48, 3)
    assert picture.dtype == np.uint8
    for part in (slice(0, 3), slice(5, 8), slice(12, 15), slice(19, 22)):
        position = np.asarray(state.physics.position).copy()
        position[:, part] += (0.01, 0.0, 0.0)
        moved = state._replace(physics=state.physics._replace(position=position))
        changed = np.any(np.asarray(env.observe(moved).images) != picture, axis=(1, 2, 3, 4))
        assert changed.all()


def test_push_counts_only_its_own_block_and_direction(envs):
    env = envs["push"]
    state = env.reset(SEEDS)
    position = np.asarray(state.physics.position).copy()
    position[:, 12] -= 0.06  # the green block, to the left
    moved = state._replace(physics=state.physics._replace(position=position))
    hold = np.asarray(state.physics.setpoint)[:, None]
    achieved = np.asarray(env.step_chunk(moved, hold)[1].achieved)[:, 0]
    assert np.array_equal(achieved, np.tile([g == "green left" for g in env.goals], (5, 1)))
    position[:, 5] += 0.03  # and the red one with it
    moved = state._replace(physics=state.physics._replace(position=position))
    assert not np.any(env.step_chunk(moved, hold)[1].achieved)


def _achieved(env: Tabletop, state: TabletopState, **changes) -> list[set[str]]:
    """The goals that hold in each state once some of its physics is changed."""
    moved = state.physics._replace(**changes)
    found = np.asarray(jax.vmap(env.task.achieved)(moved, state.start))
    return [{env.goals[goal] for goal in np.flatnonzero(row)} for row in found]


def test_a_block_is_stacked_once_it_rests_on_its_own_other_and_is_let_go(envs):
    env = envs["stack"]
    state = env.reset(SEEDS)
    on = np.asarray(state.physics.position).copy()
    on[:, 5:7], on[:, 7] = on[:, 19:21] + (0.005, 0.0), 0.06  # the red block, on the blue one
    assert _achieved(env, state, position=on) == [{"red on blue"}] * 5
    above, beside, held, gone = on.copy(), on.copy(), on.copy(), on.copy()
    above[:, 7] += 0.02
    beside[:, 5] += 0.03
    held[:, :3], held[:, 3:5] = held[:, 5:8] - (0, 0, 0.008), 0.021
    gone[:, :3], gone[:, 3:5] = held[:, :3] + (0, 0, 0.05), 0.021
    falling = np.zeros_like(state.physics.velocity)
    falling[:, 7] = -0.1
    for position in (above, beside, held):
        assert _achieved(env, state, position=position) == [set()] * 5
    assert _achieved(env, state, position=on, velocity=falling) == [set()] * 5
    assert _achieved(env, state, position=gone) == [{"red on blue"}] * 5, "closed, but above it"


def test_a_drawer_is_open_or_closed_whatever_its_place(envs):
    env = envs["drawer"]
    state = env.reset(np.arange(64))
    orders = np.argsort(np.asarray(state.start)[..., 0])
    assert len(np.unique(orders, axis=0)) == 6, "any colour stands anywhere"
    assert _achieved(env, state) == [set()] * 64
    position = np.asarray(state.physics.position).copy()
    position[:, 5], position[:, 7] = 0.095, 0.005  # the left one and the right one
    for goals, colours in zip(
        _achieved(env, state, position=position), np.array(COLOURS)[orders], strict=True
    ):
        assert goals == {f"open {colours[0]}", f"close {colours[2]}"}


@pytest.mark.slow
def test_a_scan_to_trace_acts_as_the_loop_does(envs):
    env = envs["drawer"]
    actions = _actions(env, len(SEEDS), 3)
    state, happened = env.step_chunk(env.reset(SEEDS), actions)

    @jax.jit
    def whole(seeds, actions):
        state, happened = env.pure_step(env.pure_reset(seeds), actions)
        return state, happened, env.pure_observe(state)

    traced, same, seen = whole(SEEDS.astype(np.uint32), actions)
    np.testing.assert_allclose(traced.physics.position, state.physics.position, atol=1e-5)
    np.testing.assert_allclose(same.state, happened.state, atol=1e-5)
    assert np.array_equal(same.terminated, happened.terminated)
    off = np.abs(np.int32(seen.images) - np.int32(env.observe(state).images))
    assert np.mean(off > 8) < 0.01


def test_every_goal_has_wordings_that_name_it(envs):
    for env in envs.values():
        assert len(env.prompts) == len(env.goals)
        for goal, wordings in zip(env.goals, env.prompts, strict=True):
            assert len(set(wordings)) >= 4
            assert all(word in wording.split() for wording in wordings for word in goal.split())


def test_bad_tasks_seeds_and_actions_are_named(env):
    with pytest.raises(ValueError, match="no tabletop task 'fly'"):
        Tabletop("fly")
    with pytest.raises(ValueError, match="impl is 'numpy', expected 'auto'"):
        Tabletop(impl="numpy")
    with pytest.raises(ValueError, match="seeds must lie in"):
        env.reset(np.array([-1]))
    state = env.reset(SEEDS)
    with pytest.raises(ValueError, match=r"shape \[5, steps, 4\], got \(5, 2, 3\)"):
        env.step_chunk(state, np.zeros((5, 2, 3)))
    actions = np.zeros((5, 2, 4))
    actions[3, 1, 2] = np.nan
    with pytest.raises(ValueError, match="action 'z' of environment 3 at step 1"):
        env.step_chunk(state, actions)
