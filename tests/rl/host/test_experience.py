from dataclasses import replace

import jax
import numpy as np
import pytest

from rl.advantages import gae, group, vtrace
from rl.config import ObjectiveConfig
from rl.host.experience import micro_batches
from tests.helpers.rl.gaussian import log_prob, packed, params, ticket

GAE = ObjectiveConfig()


def rows(batches):
    """Experience of each decision, by its sample's id; padding left out."""
    found = {}
    for experience, _ in batches:
        for i in np.flatnonzero(experience.weight):
            key = int(experience.batch.sample_id[i, 0])
            assert key not in found
            found[key] = jax.tree.map(lambda x, i=i: np.asarray(x)[i], experience)
    return found


def expected(tickets, worth):
    return {
        d.sample.id: (d, advantage, target)
        for each in tickets
        for t in each.trajectories
        for d, advantage, target in zip(t.decisions, *worth(t), strict=True)
    }


def of(trajectory):
    rewards = np.array([d.reward.sum() for d in trajectory.decisions], np.float64)
    values = np.array([d.drawn.value for d in trajectory.decisions])
    return rewards, values, 0.0 if trajectory.terminated else trajectory.final_value


def test_every_decision_becomes_one_row_with_its_advantage():
    tickets = [ticket(i, version=i % 3) for i in range(12)]
    assert {t.trajectories[0].terminated for t in tickets} == {True, False}
    found = rows(micro_batches(tickets, packed, GAE, 8))
    wanted = expected(tickets, lambda t: gae(*of(t), GAE.discount, GAE.gae_lambda))
    assert found.keys() == wanted.keys()
    for key, row in found.items():
        decision, advantage, target = wanted[key]
        np.testing.assert_allclose(row.advantage, advantage, rtol=1e-5)
        np.testing.assert_allclose(row.target, target, rtol=1e-5)
        assert row.version == decision.version
        np.testing.assert_array_equal(row.batch.state[0], decision.sample.state)
        np.testing.assert_array_equal(row.batch.action_mask[0], decision.sample.action_mask)
        for one, other in zip(row.drawn, decision.drawn, strict=True):
            np.testing.assert_array_equal(one, other)


def test_batches_have_one_shape_come_as_soon_as_they_are_full_and_name_their_tickets():
    seen = []

    def arriving():
        for i in range(9):
            seen.append(i)
            yield ticket(i)

    decisions, shapes, named = 0, set(), []
    for experience, tickets in micro_batches(arriving(), packed, GAE, 8):
        decisions += int(experience.weight.sum())
        complete = sum(len(ticket(i).trajectories[0].decisions) for i in seen)
        assert complete - decisions < 8
        shapes.add(str(jax.tree.map(np.shape, experience)))
        named += tickets
        assert np.isfinite(experience.batch.state).all()
        assert (experience.batch.prefix_segment > 0).any(1).all()
    assert decisions == sum(len(ticket(i).trajectories[0].decisions) for i in range(9))
    assert len(shapes) == 1
    assert set(named) == set(range(9))
    assert decisions % 8


def test_group_advantages_are_those_of_the_tickets_own_episodes_in_any_order():
    config = replace(GAE, advantage="group")
    tickets = [ticket(i, members=4) for i in range(3)]
    found = rows(micro_batches(tickets[::-1], packed, config, 8))
    for each in tickets:
        returns = np.array([of(t)[0].sum() for t in each.trajectories])
        for trajectory, advantage in zip(each.trajectories, group(returns), strict=True):
            for decision in trajectory.decisions:
                row = found[decision.sample.id]
                np.testing.assert_allclose(row.advantage, advantage, rtol=1e-4)
                assert row.weight == np.float32(1 / len(trajectory.decisions))
                assert row.target == 0


def test_vtrace_takes_values_and_ratios_of_the_learners_policy():
    config, mine = replace(GAE, name="vtrace", truncation=1.0), params(5)
    tickets = [ticket(i, members=2) for i in range(4)]

    def evaluate(experience):
        return log_prob(mine, experience.batch, experience.drawn)[:2]

    found = rows(micro_batches(tickets, packed, config, 4, evaluate))

    def worth(trajectory):
        rewards, _, _ = of(trajectory)
        samples = packed([d.sample for d in trajectory.decisions])
        final = 0.0 if trajectory.terminated else valued(mine, trajectory.last)
        drawn = jax.tree.map(lambda *x: np.stack(x), *(d.drawn for d in trajectory.decisions))
        ours, values, _ = log_prob(mine, samples, drawn)
        gap = np.where(samples.action_mask[:, 0], ours - drawn.log_prob, 0)
        return vtrace(
            rewards, values, final, np.exp(gap.sum((1, 2))), config.discount, config.gae_lambda, 1.0
        )

    for key, (_, advantage, target) in expected(tickets, worth).items():
        np.testing.assert_allclose(found[key].advantage, advantage, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found[key].target, target, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"Learner\.evaluate"):
        next(micro_batches(tickets, packed, config, 4))


def valued(mine, sample):
    return float(sample.state @ np.asarray(mine["value"]["kernel"]) + mine["value"]["bias"])


def test_what_an_older_value_head_said_of_the_end_is_no_advantage_under_vtrace():
    """Every chunk pays 1 and goes on for ever, as the learner's head knows and the actor's did
    not."""
    config = replace(GAE, name="vtrace")
    worth = 1 / (1 - config.discount)
    cut = next(t for t in map(ticket, range(20)) if not t.trajectories[0].terminated)
    (trajectory,) = cut.trajectories
    decisions = tuple(replace(d, reward=np.ones(1, np.float32)) for d in trajectory.decisions)
    paid = replace(trajectory, decisions=decisions, final_value=0.0)

    def evaluate(experience):
        return experience.drawn.log_prob, np.full(len(experience.weight), worth)

    batches = micro_batches([replace(cut, trajectories=(paid,))], packed, config, 4, evaluate)
    for row in rows(batches).values():
        np.testing.assert_allclose(row.advantage, 0, atol=1e-4)
        np.testing.assert_allclose(row.target, worth, rtol=1e-6)


@pytest.mark.parametrize("what", ["reward", "value", "log_prob"])
def test_a_number_that_is_none_is_refused_with_its_place(what):
    spoilt = ticket(7, members=2)
    trajectory = spoilt.trajectories[1]
    decision = trajectory.decisions[1]
    if what == "reward":
        decision = replace(decision, reward=np.full(2, np.nan, np.float32))
    else:
        value = getattr(decision.drawn, what) * np.float32(np.nan)
        decision = replace(decision, drawn=decision.drawn._replace(**{what: value}))
    decisions = (trajectory.decisions[0], decision, *trajectory.decisions[2:])
    trajectories = (spoilt.trajectories[0], replace(trajectory, decisions=decisions))
    with pytest.raises(ValueError, match=rf"Ticket 7, episode 1 .*decision 1, has {what} \[.*nan"):
        next(micro_batches([replace(spoilt, trajectories=trajectories)], packed, GAE, 8))


def test_a_value_that_is_none_counts_only_where_time_ran_out():
    cut = next(t for t in map(ticket, range(20)) if not t.trajectories[0].terminated)
    (trajectory,) = cut.trajectories
    spoilt = replace(cut, trajectories=(replace(trajectory, final_value=float("nan")),))
    with pytest.raises(ValueError, match=f"Ticket {cut.number}.*ended with the value nan"):
        next(micro_batches([spoilt], packed, GAE, 8))
