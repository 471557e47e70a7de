"""Evaluation counts each start once and right wherever it is acted, and its controls show what a
policy uses."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from data.video.video import encode_mp4
from sim.acting import RERUNS
from sim.clips import ENCODING, choose
from sim.environments.device_slots import DeviceSlots
from sim.environments.experts import expert as tabletop_expert
from sim.evaluate import evaluate, evaluate_expert
from sim.protocol import Start
from sim.results import Failure, compared, joined
from sim.statistics import Rate
from tests.helpers.sim.point_world import (
    PointWorld,
    Shuffled,
    expert,
    idle_policy,
    noisy_policy,
    seeing_policy,
)


def starts(*seeds):
    return [Start("points", seed) for seed in seeds]


STARTS = starts(*range(1000, 1040))
acted = partial(evaluate, clips=0)


def lanes(count=40, env=None):
    return DeviceSlots(env or PointWorld(), count, expert)


def test_perfect_policy_always_succeeds_and_idle_policy_never():
    good = acted(lanes(), seeing_policy, STARTS)
    idle = acted(lanes(), idle_policy, STARTS)
    assert good.success == good.named == Rate(40, 40)
    assert idle.success == Rate(0, 40)
    assert {e.length for e in idle.episodes} == {PointWorld.max_steps}
    assert idle.mean_length == PointWorld.max_steps
    assert (idle.roughness, idle.mean_return, good.mean_return) == (0, 0, 1)


def test_expert_sees_the_state_and_acts_step_by_step():
    result = evaluate_expert(lanes(), STARTS, clips=2)
    assert result.success == Rate(40, 40)
    assert {e.length for e in result.episodes} == {6}
    assert [clip.frames.shape for clip in result.clips] == [(6, 160, 160, 3)] * 2
    assert result.latency is None


def test_wrong_prompt_counts_the_goal_it_names():
    result = acted(lanes(), seeing_policy, STARTS, control="other prompt")
    assert result.success == Rate(0, 40)
    assert result.named == Rate(40, 40)
    assert all(e.goal != e.named_goal and e.named_goal in e.prompt for e in result.episodes)
    pairs = {(e.goal, e.named_goal) for e in result.episodes}
    assert len(pairs) == 6, "every other goal is named somewhere"
    ignoring = acted(lanes(), _toward_own_goal(STARTS), STARTS, control="other prompt")
    assert ignoring.success == Rate(40, 40)
    assert ignoring.named == Rate(0, 40)


def test_blank_hides_the_image():
    assert acted(lanes(), seeing_policy, STARTS, control="blank").success == Rate(0, 40)


def test_an_episode_is_counted_once_though_auto_reset_continues():
    total = 0.0

    class Counting(PointWorld):
        def step_chunk(self, state, actions):
            nonlocal total
            state, transition = super().step_chunk(state, actions)
            total += float(transition.reward.sum())
            return state, transition

    policy = _first_idle_then_toward_goal()
    result = acted(lanes(env=Counting()), policy, STARTS, replan_steps=20)
    assert total > 0, "a second episode did succeed"
    assert result.success == result.named == Rate(0, 40)
    assert all(e.reward == 0 and e.length == PointWorld.max_steps for e in result.episodes)


def test_success_is_rewarded_once_and_ends_the_episode():
    result = acted(lanes(), seeing_policy, STARTS)
    assert all(e.reward == 1 and e.length in (6, 7) for e in result.episodes)


@pytest.mark.parametrize("control", ["own", "other prompt"])
def test_many_starts_over_few_slots_equal_each_alone_in_whatever_order_they_report(control):
    apart = partial(acted, policy=noisy_policy, control=control)
    alone = [apart(lanes(1), starts=[start]).episodes[0] for start in STARTS]
    assert 5 < sum(e.obeyed for e in alone) < 35, "neither outcome is the rule"
    for slots in (lanes(40), lanes(7), Shuffled(5, seed=1), Shuffled(16, seed=2)):
        together = apart(slots, starts=STARTS)
        assert list(together.episodes) == alone
        for one, other in zip(together.episodes, alone, strict=True):
            assert np.array_equal(one.actions, other.actions)


def test_experts_do_alike_in_any_slots():
    alone = [evaluate_expert(lanes(1), [start]).episodes[0] for start in STARTS]
    assert list(evaluate_expert(Shuffled(6), STARTS).episodes) == alone
    assert list(evaluate_expert(lanes(9), STARTS).episodes) == alone


@pytest.mark.slow
def test_on_the_tabletop_a_batch_equals_its_episodes_alone(envs):
    env, seeds = envs["reach"], range(1_000_000_000, 1_000_000_005)
    some = [Start(env.name, seed) for seed in seeds]

    def policy(observation, prompts, keys):
        """Goes where its noise and what it sees tell it."""
        noise = [np.random.default_rng(key).random((4, 4)) for key in keys.tolist()]
        seen = observation.images.mean((1, 2, 3)) / 255
        low, high = np.asarray(env.action_range).T
        return low + (np.asarray(noise) + seen[:, None, [0, 1, 2, 0]]) / 2 * (high - low)

    together = evaluate(DeviceSlots(env, 3, tabletop_expert), policy, some, clips=2)
    alone = [acted(DeviceSlots(env, 1), policy, [start]).episodes[0] for start in some]
    assert list(together.episodes) == alone
    assert together.unrepeatable == 0
    assert [len(clip.frames) for clip in together.clips] == [
        together.episodes[clip.episode].length for clip in together.clips
    ]


def test_same_starts_give_the_same_result():
    assert acted(lanes(), noisy_policy, STARTS) == acted(lanes(), noisy_policy, STARTS)
    others = starts(*range(40))
    assert acted(lanes(), noisy_policy, STARTS) != acted(lanes(), noisy_policy, others)


def test_a_policy_is_asked_for_ready_slots_only_by_keys_of_episode_and_step():
    calls = []

    def policy(observation, prompts, keys):
        calls.append(keys)
        assert len(observation.images) == len(observation.state) == len(prompts) == len(keys)
        return seeing_policy(observation, prompts, keys)

    result = acted(Shuffled(4), policy, STARTS[:9])
    assert len(result.seconds) == len(calls)
    assert {len(keys) for keys in calls} <= {1, 2, 3, 4}
    asked = np.concatenate(calls)
    assert len(np.unique(asked, axis=0)) == len(asked), "nothing was asked twice"
    assert len(set(asked[:, 0])) == 9
    assert set(asked[:, 1]) == {0, 4}


def test_done_episodes_are_not_acted_again_and_the_result_is_the_same():
    whole, kept = evaluate(Shuffled(3), noisy_policy, STARTS, clips=4), []

    class Enough(Exception):
        pass

    def keep(episode):
        kept.append(episode)
        if len(kept) == 17:
            raise Enough

    with pytest.raises(Enough):
        acted(Shuffled(5, seed=4), noisy_policy, STARTS, on_episode=keep)
    slots, seen = Shuffled(4, seed=9), []
    resumed = evaluate(
        slots,
        noisy_policy,
        STARTS,
        done=kept,
        clips=4,
        progress=lambda done, _: seen.append(done),
    )
    assert resumed == whole
    assert seen == list(range(18, 41))
    for one, other in zip(resumed.clips, whole.clips, strict=True):
        assert one.episode == other.episode
        assert np.array_equal(one.frames, other.frames)


def test_episodes_of_other_starts_do_not_count():
    done = acted(lanes(), seeing_policy, STARTS).episodes
    assert acted(lanes(), idle_policy, starts(5), done=done).success == Rate(0, 1)


def test_an_episode_whose_simulator_failed_is_begun_again_and_counted():
    def fails(start, attempt):
        return start.seed % 4 == 0 and attempt <= start.seed % 3 + 1

    slots = Shuffled(6, fails=fails)
    result = acted(slots, noisy_policy, STARTS)
    sound = acted(lanes(), noisy_policy, STARTS)
    assert result == sound
    assert [e.reruns for e in result.episodes] == [
        start.seed % 3 + 1 if start.seed % 4 == 0 else 0 for start in STARTS
    ]
    assert result.reruns == sum(e.reruns for e in result.episodes) > 10
    assert result.to_json()["reruns"] == result.reruns


def test_an_episode_that_always_fails_is_given_up_and_named():
    slots = Shuffled(4, fails=lambda start, attempt: start.seed == 1007)
    result = acted(slots, noisy_policy, STARTS)
    assert slots.attempts[Start("points", 1007)] == RERUNS + 1
    assert result.failures == (Failure("points", 1007, "it fell over", RERUNS),)
    assert result.success.trials == 39
    assert result.reruns == RERUNS
    with pytest.raises(ValueError, match=r"'points' failed in every episode.*it fell over"):
        acted(slots, noisy_policy, starts(1007))


def test_groups_add_up_and_cover_all_wordings():
    result = acted(lanes(), seeing_policy, STARTS)
    assert list(result.by_goal) == ["red", "green", "blue"]
    assert set(result.by_prompt) == {w for wordings in PointWorld.prompts for w in wordings}
    for groups in (result.by_goal, result.by_prompt):
        assert sum(rate.trials for rate in groups.values()) == 40


def test_tasks_evaluated_apart_join_into_one_suite():
    class Other(PointWorld):
        name = "other points"
        goals = ("green", "blue", "red")
        prompts = tuple(PointWorld.prompts[i] for i in (1, 2, 0))

    one = evaluate(lanes(), seeing_policy, STARTS[:4], clips=1)
    two = evaluate(
        lanes(env=Other()), idle_policy, [Start("other points", s) for s in (1, 2)], clips=2
    )
    both = joined([one, two], "both")
    assert (both.suite, both.tasks) == ("both", ("points", "other points"))
    assert both.success == Rate(4, 6)
    assert {task: part.success for task, part in both.by_task.items()} == {
        "points": Rate(4, 4),
        "other points": Rate(0, 2),
    }
    assert both.by_task["other points"].mean_length == PointWorld.max_steps
    assert [both.episodes[clip.episode].task for clip in both.clips] == [
        "points",
        "other points",
        "other points",
    ]
    assert sum(rate.trials for rate in both.by_goal.values()) == 6


def test_two_policies_are_compared_on_the_starts_that_both_finished():
    good = acted(lanes(), seeing_policy, STARTS)
    poor = acted(lanes(), noisy_policy, STARTS[5:] + starts(1))
    pairs = compared(good, poor)
    won = sum(not e.success for e in poor.episodes[:-1])
    assert pairs.trials == 35
    assert (pairs.first_only, pairs.second_only, pairs.both) == (won, 0, 35 - won)
    with pytest.raises(ValueError, match="one pair"):
        compared(good, replace(poor, episodes=poor.episodes[-1:]))


def test_roughness_is_the_second_difference_of_what_was_executed():
    def zigzag(observation, prompts, keys):
        signs = np.tile([1.0, -1.0], 2)[None, :, None]
        return np.full((len(prompts), 4, 2), 0.1) * signs

    result = acted(lanes(), zigzag, starts(1, 2))
    assert result.roughness == pytest.approx(0.4)
    assert [e.roughness for e in result.episodes] == pytest.approx([0.4, 0.4])
    short = replace(result.episodes[0], length=4, roughness=1.0)
    weighed = replace(result, episodes=(short, result.episodes[1]))
    assert weighed.roughness == pytest.approx((2 * 1.0 + 10 * 0.4) / 12)


def test_clips_show_failures_beside_successes():
    def only_red(observation, prompts, keys):
        red = np.array(["red" in prompt for prompt in prompts])[:, None, None]
        return seeing_policy(observation, prompts, keys) * red

    for slots in (lanes(), Shuffled(3)):
        result = evaluate(slots, only_red, STARTS, clips=6)
        shown = [result.episodes[clip.episode] for clip in result.clips]
        assert sum(e.success for e in shown) == 3
        assert {e.goal for e in shown if not e.success} == {"green", "blue"}
        assert [len(clip.frames) for clip in result.clips] == [e.length for e in shown]
        for clip, episode in zip(result.clips, shown, strict=True):
            state = PointWorld().reset([episode.seed])
            _, happened = PointWorld().step_chunk(state, episode.actions[None])
            assert np.array_equal(clip.frames, PointWorld().render(happened.scene, 160)[0])


def test_a_clip_that_came_out_otherwise_is_left_out_and_counted():
    class Forgetful(PointWorld):
        resets = 0

        def reset(self, seeds):
            self.resets += 1
            return super().reset(np.asarray(seeds) + (100 if self.resets > 2 else 0))

    result = evaluate(DeviceSlots(Forgetful(), 1), seeing_policy, starts(1), clips=1)
    assert result.success == Rate(1, 1)
    assert (result.clips, result.unrepeatable) == ((), 1)


def test_choose_takes_what_there_is():
    assert choose([True, True], [0, 1], 6) == [0, 1]
    assert choose([False] * 3, [0, 0, 1], 2) == [0, 2]
    assert choose([True] * 9 + [False], [0] * 10, 4) == [0, 1, 2, 9]
    assert choose([True, False], [0, 0], 1) == [0]
    assert choose([True, False], [0, 0], 0) == []


def test_result_is_plain_json():
    data = json.loads(json.dumps(acted(lanes(), seeing_policy, STARTS).to_json()))
    assert data["success"]["rate"] == data["by_task"]["points"]["success"]["rate"] == 1.0
    assert len(data["episodes"]) == 40
    assert data["episodes"][0]["seed"] == 1000
    assert data["latency"]["p50"] > 0


def test_progress_ends_at_all_episodes():
    seen = []
    acted(lanes(), seeing_policy, STARTS, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, 40) for done in range(1, 41)]


@pytest.mark.parametrize("bad", [[], starts(1, 1), starts(-1)])
def test_bad_starts_are_refused(bad):
    with pytest.raises(ValueError, match="at least one start, all distinct and with"):
        acted(lanes(), idle_policy, bad)


def test_an_unknown_task_and_a_missing_expert_are_named():
    with pytest.raises(ValueError, match=r"'points' has no task \['lines'\]"):
        acted(lanes(), idle_policy, [Start("lines", 1)])
    with pytest.raises(ValueError, match="'points' has no scripted expert"):
        evaluate_expert(DeviceSlots(PointWorld(), 1), STARTS)


def test_actions_that_are_not_finite_name_the_episode():
    def broken(observation, prompts, keys):
        actions = idle_policy(observation, prompts, keys)
        actions[2, 1, 0] = np.nan
        return actions

    with pytest.raises(ValueError, match="not finite at step 0 of the episode of seed 1002"):
        acted(lanes(), broken, STARTS)


def test_chunks_shorter_than_execute_are_refused():
    with pytest.raises(ValueError, match="at least 5 steps"):
        acted(lanes(), idle_policy, STARTS, replan_steps=5)


def test_an_environment_that_does_not_end_is_named():
    class Endless(PointWorld):
        def step_chunk(self, state, actions):
            state, t = super().step_chunk(state, actions)
            return state, t._replace(truncated=np.zeros_like(t.truncated))

    with pytest.raises(ValueError, match="'points' did not end the episode of seed 1000"):
        acted(lanes(env=Endless()), idle_policy, STARTS)


def test_odd_sized_frames_are_encoded():
    assert encode_mp4(np.zeros((3, 15, 17, 3), np.uint8), 5, ENCODING)[4:8] == b"ftyp"


def _toward_own_goal(starts):
    env = PointWorld()
    state = env.reset([start.seed for start in starts])

    def policy(observation, prompts, keys):
        here = env.reset([start.seed for start in starts])._replace(place=observation.state)
        assert len(prompts) == len(state.goal)
        return np.repeat(expert(env, here)[:, None], 4, 1)

    return policy


def _first_idle_then_toward_goal():
    def policy(observation, prompts, keys):
        env = PointWorld()
        following = env.reset(np.array([start.seed for start in STARTS]) + 100_003)
        go = np.repeat(expert(env, following)[:, None], 8, 1)
        return np.concatenate([np.zeros((len(prompts), 12, 2)), go], 1)

    return policy
