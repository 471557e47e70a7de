"""Evaluation counts each seed once and right, and its controls show what a policy uses."""

import json

import numpy as np
import pytest

from sim.clips import choose, encode_mp4
from sim.evaluate import evaluate, evaluate_expert
from sim.statistics import Rate, wilson
from tests.sim.point_world import PointWorld, expert, idle_policy, seeing_policy

SEEDS = range(1000, 1040)


def test_perfect_policy_always_succeeds_and_idle_policy_never():
    env = PointWorld()
    good = evaluate(env, seeing_policy, SEEDS)
    idle = evaluate(env, idle_policy, SEEDS)
    assert good.success == good.named == Rate(40, 40)
    assert idle.success == Rate(0, 40)
    assert {e.length for e in idle.episodes} == {env.max_steps}
    assert idle.roughness == 0


def test_expert_sees_the_state_and_acts_step_by_step():
    result = evaluate_expert(PointWorld(), expert, SEEDS, clips=2)
    assert result.success == Rate(40, 40)
    assert {e.length for e in result.episodes} == {6}
    assert [clip.frames.shape for clip in result.clips] == [(6, 160, 160, 3)] * 2


def test_wrong_prompt_counts_the_goal_it_names():
    env = PointWorld()
    result = evaluate(env, seeing_policy, SEEDS, prompt_goal="other")
    assert result.success == Rate(0, 40)
    assert result.named == Rate(40, 40)
    assert all(e.goal != e.named_goal and e.named_goal in e.prompt for e in result.episodes)
    pairs = {(e.goal, e.named_goal) for e in result.episodes}
    assert len(pairs) == 6, "every other goal is named somewhere"
    ignoring = evaluate(env, _toward_own_goal(env, SEEDS), SEEDS, prompt_goal="other")
    assert ignoring.success == Rate(40, 40)
    assert ignoring.named == Rate(0, 40)


def test_blank_hides_the_image():
    assert evaluate(PointWorld(), seeing_policy, SEEDS, blank=True).success == Rate(0, 40)


def test_an_episode_is_counted_once_though_auto_reset_continues():
    env = PointWorld()
    total = 0.0

    class Counting(PointWorld):
        def step_chunk(self, state, actions):
            nonlocal total
            state, transition = super().step_chunk(state, actions)
            total += float(transition.reward.sum())
            return state, transition

    policy = _first_idle_then_toward_goal()
    result = evaluate(Counting(), policy, SEEDS, execute=20)
    assert total > 0, "a second episode did succeed"
    assert result.success == result.named == Rate(0, 40)
    assert all(e.reward == 0 and e.length == env.max_steps for e in result.episodes)


def test_success_is_rewarded_once_and_ends_the_episode():
    result = evaluate(PointWorld(), seeing_policy, SEEDS)
    assert all(e.reward == 1 and e.length in (6, 7) for e in result.episodes)


def test_a_batch_equals_its_episodes_alone_in_any_order():
    env = PointWorld()
    together = evaluate(env, seeing_policy, [5, 3, 9], prompt_goal="other")
    alone = [evaluate(env, seeing_policy, [s], prompt_goal="other").episodes[0] for s in (5, 3, 9)]
    assert together.episodes == tuple(alone)


def test_same_seeds_give_the_same_result():
    env = PointWorld()
    assert evaluate(env, seeing_policy, SEEDS) == evaluate(env, seeing_policy, SEEDS)
    assert evaluate(env, seeing_policy, SEEDS) != evaluate(env, seeing_policy, range(40))


def test_groups_add_up_and_cover_all_wordings():
    result = evaluate(PointWorld(), seeing_policy, SEEDS)
    assert list(result.by_goal) == ["red", "green", "blue"]
    assert set(result.by_prompt) == {w for wordings in PointWorld.prompts for w in wordings}
    for groups in (result.by_goal, result.by_prompt):
        assert sum(rate.trials for rate in groups.values()) == 40


def test_roughness_is_the_second_difference_of_what_was_executed():
    def zigzag(observation, prompts, seed):
        signs = np.tile([1.0, -1.0], 2)[None, :, None]
        return np.full((len(prompts), 4, 2), 0.1) * signs

    assert evaluate(PointWorld(), zigzag, [1]).roughness == pytest.approx(0.4)


def test_clips_show_failures_beside_successes():
    env = PointWorld()

    def only_red(observation, prompts, seed):
        red = np.array(["red" in prompt for prompt in prompts])[:, None, None]
        return seeing_policy(observation, prompts, seed) * red

    result = evaluate(env, only_red, SEEDS, clips=6)
    shown = [result.episodes[clip.episode] for clip in result.clips]
    assert sum(e.success for e in shown) == 3
    assert {e.goal for e in shown if not e.success} == {"green", "blue"}
    assert [len(clip.frames) for clip in result.clips] == [e.length for e in shown]


def test_choose_takes_what_there_is():
    assert choose([True, True], [0, 1], 6) == [0, 1]
    assert choose([False] * 3, [0, 0, 1], 2) == [0, 2]
    assert choose([True] * 9 + [False], [0] * 10, 4) == [0, 1, 2, 9]
    assert choose([True, False], [0, 0], 1) == [0]
    assert choose([True, False], [0, 0], 0) == []


def test_result_is_plain_json():
    data = json.loads(json.dumps(evaluate(PointWorld(), seeing_policy, SEEDS).to_json()))
    assert data["success"]["rate"] == 1.0
    assert len(data["episodes"]) == 40
    assert data["episodes"][0]["seed"] == 1000


def test_progress_ends_at_all_episodes():
    seen = []
    evaluate(PointWorld(), seeing_policy, SEEDS, progress=lambda done, of: seen.append((done, of)))
    assert seen[-1] == (40, 40)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


@pytest.mark.parametrize("seeds", [[], [1, 1], [-1]])
def test_bad_seeds_are_refused(seeds):
    with pytest.raises(ValueError, match="distinct non-negative"):
        evaluate(PointWorld(), idle_policy, seeds)


def test_actions_that_are_not_finite_name_the_episode():
    def broken(observation, prompts, seed):
        actions = idle_policy(observation, prompts, seed)
        actions[2, 1, 0] = np.nan
        return actions

    with pytest.raises(ValueError, match="not finite at step 0 of the episode of seed 1002"):
        evaluate(PointWorld(), broken, SEEDS)


def test_chunks_shorter_than_execute_are_refused():
    with pytest.raises(ValueError, match="at least 5 steps"):
        evaluate(PointWorld(), idle_policy, SEEDS, execute=5)


def test_an_environment_that_does_not_end_is_named():
    class Endless(PointWorld):
        def step_chunk(self, state, actions):
            state, t = super().step_chunk(state, actions)
            return state, t._replace(truncated=np.zeros_like(t.truncated))

    with pytest.raises(ValueError, match="'points' did not end the episode of seed 1000"):
        evaluate(Endless(), idle_policy, SEEDS)


# Published values: Newcombe, Statistics in Medicine 17 (1998), table I, method 3.
@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_matches_published_intervals(successes, trials, low, high):
    assert wilson(successes, trials) == pytest.approx((low, high), abs=5e-5)
    mirrored = wilson(trials - successes, trials)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=5e-5)


def test_rate_reads_as_a_sentence_would_say_it():
    assert str(Rate(125, 128)) == "97.7 % (125/128, 95 % CI 93.3–99.2 %)"
    assert Rate(4, 4).interval[1] == 1.0
    with pytest.raises(ValueError, match="got 0 of 0"):
        Rate(0, 0)


def test_odd_sized_frames_are_encoded():
    assert encode_mp4(np.zeros((3, 15, 17, 3), np.uint8), 5)[4:8] == b"ftyp"


def _toward_own_goal(env, seeds):
    def policy(observation, prompts, seed):
        state = env.reset(np.asarray(seeds))._replace(place=observation.state)
        return np.repeat(expert(env, state)[:, None], 4, 1)

    return policy


def _first_idle_then_toward_goal():
    def policy(observation, prompts, seed):
        env = PointWorld()
        following = env.reset(np.asarray(SEEDS) + 100_003)
        go = np.repeat(expert(env, following)[:, None], 8, 1)
        return np.concatenate([np.zeros((len(prompts), 12, 2)), go], 1)

    return policy
