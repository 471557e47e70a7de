from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from parallel.mesh import MeshConfig, make_mesh
from parallel.optimizer import make_optimizer, make_schedule
from parallel.step import TrainState, apply_gradients
from rl.config import LearnerConfig, ObjectiveConfig
from rl.host.experience import micro_batches
from rl.learner import Diverged, FlowLearner
from rl.objectives import objective, value_loss
from rl.step import Scale, abstract_learner_state, learner_state, optimizer_of, scale_of
from tests.helpers.parallel.toy import together
from tests.helpers.rl import learner_host
from tests.helpers.rl.gaussian import OPTIMIZER, RULES, log_prob, observe, packed, params, ticket

ONE = make_mesh(devices=jax.devices()[:1])
PPO = ObjectiveConfig(entropy_weight=0.01)


def learner(
    config=PPO,
    optimizer=OPTIMIZER,
    epochs=1,
    mesh=ONE,
    policy=log_prob,
    minibatches=1,
    kept=None,
    warmup=0,
):
    abstract = abstract_learner_state(params(), optimizer, RULES, mesh)
    state = learner_state(params(), optimizer, abstract)
    learning = LearnerConfig(epochs=epochs, minibatches=minibatches, warmup=warmup)
    return FlowLearner(policy, state, optimizer, config, learning, mesh, kept)


def tickets(version, count=6, **how):
    """Tickets of a learner's step."""
    return [ticket(count * version + i, version=version, **how) for i in range(count)]


def decisions(given):
    return sum(len(t.decisions) for each in given for t in each.trajectories)


def learn(mine, given, size, order=None, config=PPO):
    batches = list(micro_batches(given, packed, config, size, mine.evaluate))
    for i in range(len(batches)) if order is None else order(len(batches)):
        mine.add(*batches[i])
    return mine.update()


def restart(mine):
    """Back to the beginning, with its programs compiled."""
    mine.state = jax.device_put(jax.device_get(learner().state), ONE.devices.flat[0])
    mine.version = mine.learnt = 0


def same(one, other):
    """Metrics, but for rounding."""
    assert one.pop("lags") == other["lags"]
    rest = {name: other[name] for name in one}
    assert one == pytest.approx(rest, rel=1e-5, abs=1e-6)


def close(one, other, tolerance):
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def test_fresh_experience_in_one_micro_batch_is_the_synchronous_step_bit_for_bit():
    """Three steps against PPO with a value head written out. Gradient and update are two programs,
    as the learner's are: a program that holds both may round differently."""

    @jax.jit
    def differentiate(params, square, weight, experience):
        real, drawn = experience.weight, experience.drawn
        scale = scale_of(Scale(square, weight))

        def loss(params):
            new, value, entropy = log_prob(params, experience.batch, drawn)
            advantage, lag = experience.advantage / scale, jnp.zeros(len(real), jnp.int32)
            terms = objective(PPO, new, drawn.log_prob, advantage, experience.acted, real, lag)
            error = value_loss(value, experience.target, real)
            bonus = jnp.sum(entropy * real)
            total = terms.loss - PPO.entropy_weight * bonus + PPO.value_weight * error
            return total, (new, terms)

        sums = jnp.sum(real), jnp.sum(experience.advantage**2 * real)
        (total, read), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        return (total, gradients, *sums), read

    @jax.jit
    def apply(train, square, weight, total, gradients, count, squares):
        new, read = apply_gradients(train, total, count, gradients, OPTIMIZER, placed)
        kept = 0.9 * square + (1 - 0.9) * (squares / count), 0.9 * weight + (1 - 0.9)
        return jax.tree.map(lambda x, y: jnp.where(read["finite"], x, y), new, train), *kept, read

    abstract = abstract_learner_state(params(), OPTIMIZER, RULES, ONE)
    placed = jax.tree.map(lambda x: x.sharding, abstract.params)
    begun = learner_state(params(), OPTIMIZER, abstract)
    train = TrainState(begun.step, begun.params, begun.ema, begun.opt_state)
    mine, running = learner(), (0.0, 0.0)
    for version in range(3):
        given = tickets(version, like=train.params, moved=0.0)
        ((experience, named),) = micro_batches(given, packed, PPO, 32)
        sums, _ = differentiate(train.params, *running, experience)
        train, *running, read = apply(train, *running, *sums)
        mine.add(experience, named)
        metrics = mine.update()
        assert metrics["loss"] == float(read["loss"])
        assert metrics["clip_fraction"] == 0
        jax.tree.map(np.testing.assert_array_equal, mine.state.params, train.params)
        assert tuple(map(float, mine.state.scale)) == tuple(map(float, running))
        assert mine.version == int(mine.state.version) == int(mine.state.step) == version + 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "vtrace"])
def test_streamed_micro_batches_in_any_order_learn_what_one_big_batch_does(name):
    config = replace(PPO, name=name)
    given = tickets(0, moved=0.3)
    whole, mine = learner(config), learner(config)
    reference = learn(whole, given, 32, config=config)
    for order in (range, lambda n: reversed(range(n)), np.random.default_rng(0).permutation):
        metrics = learn(mine, given, 4, order, config)
        close(mine.state.params, whole.state.params, 1e-6)
        close(mine.state.opt_state, whole.state.opt_state, 1e-6)
        same(metrics, reference)
        restart(mine)


def test_gradients_are_those_of_the_whole_batch_and_no_mean_of_means():
    """Plain gradient descent would show any other weighting; micro-batches differ in their
    padding."""
    given = tickets(0, moved=0.3)
    ((experience, _),) = micro_batches(given, packed, PPO, 32)

    def loss(p):
        new, value, _ = log_prob(p, experience.batch, experience.drawn)
        weight, drawn = experience.weight, experience.drawn
        terms = objective(
            PPO, new, drawn.log_prob, experience.advantage, experience.acted, weight,
            jnp.zeros(32, jnp.int32),
        )  # fmt: skip
        entropy = jnp.sum(p["policy"]["bias"] ** 2) * jnp.sum(weight)
        total = terms.loss + PPO.value_weight * value_loss(value, experience.target, weight)
        return (total - PPO.entropy_weight * entropy) / jnp.sum(weight)

    norm = float(optax.tree_utils.tree_norm(jax.jit(jax.grad(loss))(params())))
    for size in (3, 32):
        assert learn(learner(), given, size)["grad_norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "minibatches"), [("ppo", 1), ("decoupled", 1), ("decoupled", 3)])
def test_later_epochs_replay_the_step_with_its_first_proximal_policy(name, minibatches):
    config, optimizer = replace(PPO, name=name), replace(OPTIMIZER, learning_rate=0.1)
    given = tickets(0, moved=0.3)
    ((experience, _),) = micro_batches(given, packed, config, 32)
    near, _, _ = log_prob(params(), experience.batch, experience.drawn)
    transformation, weights = make_optimizer(optimizer), params()
    opt_state = jax.jit(transformation.init)(weights)

    @jax.jit
    def moved(slopes, opt_state, weights):
        updates, opt_state = transformation.update(slopes, opt_state, weights)
        return optax.apply_updates(weights, updates), opt_state

    @jax.jit
    def gradient(weights, rows):
        def loss(p):
            new, value, entropy = log_prob(p, experience.batch, experience.drawn)
            weight = experience.weight * rows
            terms = objective(
                config, new, experience.drawn.log_prob, experience.advantage, experience.acted,
                weight, jnp.zeros(32, jnp.int32), near,
            )  # fmt: skip
            total = terms.loss + PPO.value_weight * value_loss(value, experience.target, weight)
            total -= PPO.entropy_weight * jnp.sum(entropy * weight)
            return total / jnp.sum(weight), terms

        return jax.grad(loss, has_aux=True)(weights)

    micro = np.arange(32) // 4
    parts = -(-decisions(given) // 4)
    for epoch in range(3):
        order = np.random.default_rng((0, epoch)).permutation(parts)
        minis = np.array_split(order, minibatches if epoch else 1)
        clipped = ratios = 0.0
        for mini in minis:
            slopes, terms = gradient(weights, np.isin(micro, mini))
            weights, opt_state = moved(slopes, opt_state, weights)
            clipped += float(terms.sums["clipped"])
            ratios += float(terms.sums["ratios"])
    mine = learner(config, optimizer, epochs=3, minibatches=minibatches)
    metrics = learn(mine, given, 4)
    close(mine.state.params, weights, 1e-5)
    assert clipped > 0
    assert metrics["clip_fraction"] == pytest.approx(clipped / ratios)
    rms = np.sqrt((experience.advantage[experience.weight > 0] ** 2).mean())
    assert float(scale_of(mine.state.scale)) == pytest.approx(rms, rel=1e-5)
    counts = (mine.version, int(mine.state.step), mine.learnt)
    assert counts == (1, 1 + 2 * minibatches, decisions(given))


@pytest.mark.slow
def test_what_is_kept_of_observations_is_made_once_and_changes_nothing():
    how = {"epochs": 3, "minibatches": 2}
    mine, plain, made = learner(kept=observe, **how), learner(**how), []
    observing = mine._observe
    mine._observe = lambda *given: made.append(given) or observing(*given)
    for version in range(2):
        given = tickets(version, moved=0.3)
        same(learn(mine, given, 4), learn(plain, given, 4))
        parts = -(-decisions(given) // 4)
        assert len(made) == parts
        made.clear()
    close(mine.state.params, plain.state.params, 1e-6)


@pytest.mark.slow
def test_a_mesh_learns_as_one_device_does():
    mesh = make_mesh(MeshConfig(data=2, fsdp=4))
    spread, alone = learner(mesh=mesh, epochs=2, kept=observe), learner(epochs=2)
    kernel = spread.state.params["policy"]["kernel"]
    assert {s.data.shape for s in kernel.addressable_shards} == {(2, 6)}
    for version in range(3):
        given = tickets(version, moved=0.3)
        found, wanted = (learn(each, given, 8) for each in (spread, alone))
        same(found, wanted)
    close(spread.state.params, alone.state.params, 1e-5)
    assert spread.state.params["policy"]["kernel"].sharding == kernel.sharding


def test_frozen_parameters_stay_and_cost_neither_gradients_nor_moments():
    optimizer = replace(OPTIMIZER, rate_factors=((r"^policy/kernel", 0.0), (r".", 1.0)))
    mine, before = learner(optimizer=optimizer), params()
    mine.add(*next(micro_batches(tickets(0), packed, PPO, 8)))
    assert mine._total.gradients["policy"]["kernel"] is None
    mine.update()
    jax.tree.map(
        np.testing.assert_array_equal, mine.state.params["policy"]["kernel"],
        before["policy"]["kernel"],
    )  # fmt: skip
    assert np.abs(mine.state.params["value"]["kernel"] - before["value"]["kernel"]).max() > 0
    assert not any(x.shape == (8, 6) for x in jax.tree.leaves(mine.state.opt_state))


def test_decisions_and_lags_are_counted():
    mine, total = learner(), 0
    for version in range(3):
        given = [
            ticket(6 * version + i, version=max(version - i % 2, 0), moved=0.1) for i in range(6)
        ]
        for batch in micro_batches(given, packed, PPO, 4):
            mine.add(*batch)
        assert (mine.learnt, mine.pending) == (total, decisions(given))
        metrics = mine.update()
        total += decisions(given)
        assert mine.learnt == total
        assert metrics["decisions"] == metrics["count"] == decisions(given)
        late = decisions(given[1::2]) if version else 0
        assert metrics["lags"] == [decisions(given) - late, late][: 1 + (version > 0)]
        assert metrics["lag"] == pytest.approx(late / decisions(given))
        assert metrics["lag_max"] == (version > 0)


def spoiling(params, batch, drawn, _):
    """NaN for decisions of ticket 4."""
    found, value, entropy = log_prob(params, batch, drawn)
    bad = (batch.sample_id[:, 0] // 1000 == 4)[:, None, None]
    return jnp.where(bad, jnp.nan, found), value, entropy


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_gradient_that_is_none_stops_with_step_and_tickets_and_is_not_learnt(epochs):
    mine = learner(policy=spoiling, epochs=epochs)
    before = jax.device_get((mine.state.params, mine.state.opt_state, mine.state.version))
    batches = [b for each in tickets(0) for b in micro_batches([each], packed, PPO, 8)]
    for batch in batches:
        mine.add(*batch)
    with pytest.raises(Diverged, match=r"Step 0 .*nan.* 1 of 6 micro-batches.*tickets 4,") as first:
        mine.update()
    now = jax.device_get((mine.state.params, mine.state.opt_state, mine.state.version))
    jax.tree.map(np.testing.assert_array_equal, before, now)
    assert (mine.learnt, mine.pending) == (0, decisions(tickets(0)))
    for again in (mine.update, lambda: mine.add(*batches[0])):
        with pytest.raises(Diverged) as later:
            again()
        assert later.value is first.value


def test_advantages_are_scaled_by_their_size_in_former_steps():
    """Nothing in the first step; twice the rewards later on are the same gradient of the policy."""
    still = replace(OPTIMIZER, learning_rate=1e-30)
    config = replace(PPO, value_weight=0.0, entropy_weight=0.0)
    first, norms = tickets(0), {}
    for factor in (1.0, 8.0):
        mine, expected = learner(config, still), 1.0
        for version in range(2):
            assert float(scale_of(mine.state.scale)) == pytest.approx(expected, rel=1e-5)
            batches = micro_batches(first, packed, config, 8)
            for experience, named in batches:
                advantage = experience.advantage * np.float32(factor)
                mine.add(replace(experience, advantage=advantage), named)
            metrics = mine.update()
            expected = metrics["advantage_rms"]
            norms[factor, version] = metrics["grad_norm"]
    assert norms[8.0, 0] == pytest.approx(8 * norms[1.0, 0], rel=1e-5)
    assert norms[8.0, 1] == pytest.approx(norms[1.0, 1], rel=1e-5)


def test_only_the_value_head_learns_at_first_whatever_decays_or_is_paid_for_entropy():
    config, optimizer = replace(PPO, entropy_weight=0.1), replace(OPTIMIZER, weight_decay=0.1)
    mine = learner(config, optimizer, epochs=2, warmup=1)
    begin = jax.device_get(mine.state.params)
    learn(mine, tickets(0, moved=0.3), 8, config=config)
    after = jax.device_get(mine.state)
    for tree in (after.params, after.ema):
        jax.tree.map(np.testing.assert_array_equal, tree["policy"], begin["policy"])
        assert not np.array_equal(tree["value"]["kernel"], begin["value"]["kernel"])
    learn(mine, tickets(1, moved=0.3), 8, config=config)
    moved = jax.tree.map(np.array_equal, jax.device_get(mine.state.params), begin)
    assert not any(jax.tree.leaves(moved))


def test_a_learner_goes_on_from_its_state_as_if_never_stopped():
    direct, stopped = learner(), learner()
    for version in range(2):
        for each in (direct, stopped):
            learn(each, tickets(version), 8)
    state = jax.tree.map(jnp.array, stopped.state)
    resumed = FlowLearner(log_prob, state, OPTIMIZER, PPO, LearnerConfig(), ONE)
    assert resumed.version == 2
    metrics = [learn(each, tickets(2), 8) for each in (direct, resumed)]
    assert metrics[0] == metrics[1]
    jax.tree.map(np.testing.assert_array_equal, direct.state, resumed.state)


def test_what_makes_no_sense_is_refused():
    mine = learner()
    with pytest.raises(ValueError, match="Step 0 has no decisions"):
        mine.update()
    with pytest.raises(
        ValueError, match=r"Tickets 3 were sampled by policy version 1.* is at version 0"
    ):
        mine.add(*next(micro_batches([ticket(3, version=1)], packed, PPO, 8)))
    assert mine.learnt == mine.pending == 0


def test_metrics_tell_how_much_of_the_targets_the_value_head_explains():
    given = tickets(0)
    metrics = learn(learner(), given, 32)
    ((experience, _),) = micro_batches(given, packed, PPO, 32)
    real = experience.weight > 0
    value, target = (
        np.asarray(x)[real]
        for x in (log_prob(params(), experience.batch, experience.drawn)[1], experience.target)
    )
    expected = 1 - ((value - target) ** 2).mean() / target.var()
    assert metrics["explained_variance"] == pytest.approx(expected, rel=1e-4)
    rms = np.sqrt((experience.advantage[real] ** 2).mean())
    assert metrics["advantage_rms"] == pytest.approx(rms, rel=1e-5)


def test_an_open_schedule_ends_with_the_run():
    config = LearnerConfig(epochs=3)
    assert optimizer_of(config, 50).decay_steps == 150
    assert optimizer_of(replace(config, minibatches=4), 50).decay_steps == 450
    assert optimizer_of(replace(config, optimizer=OPTIMIZER), 50) == OPTIMIZER


def test_an_open_schedule_ends_with_a_run_whose_steps_have_few_micro_batches():
    open_ended = replace(OPTIMIZER, schedule="linear", decay_steps=None)
    optimizer = optimizer_of(LearnerConfig(epochs=2, minibatches=4, optimizer=open_ended), 3)
    mine, schedule = learner(optimizer=optimizer, epochs=2, minibatches=4), make_schedule(optimizer)
    for version in range(3):
        begun = jax.device_get(mine.state)
        metrics = learn(mine, tickets(version), 32)  # one micro-batch: two updates of five
        rate = float(schedule(5 * version + 1))
        assert metrics["learning_rate"] == pytest.approx(rate)
        counts = optax.tree_utils.tree_get_all_with_path(mine.state.opt_state, "count")
        assert sorted(int(count) for _, count in counts) == sorted(
            [2 * version + 2, 5 * version + 5]
        )
    assert int(mine.state.step) == optimizer.decay_steps == 15
    assert schedule(15) == pytest.approx(optimizer.final_fraction * optimizer.learning_rate)
    resumed = learner(optimizer=optimizer, epochs=2, minibatches=4)
    resumed.state, resumed.version = jax.device_put(begun, ONE.devices.flat[0]), 2
    learn(resumed, tickets(2), 32)
    jax.tree.map(np.testing.assert_array_equal, resumed.state.params, mine.state.params)


@pytest.mark.slow
def test_two_processes_with_unlike_shares_learn_as_one_does():
    outputs = together("tests.helpers.rl.learner_host", 2, 2)
    lines = [
        [list(map(float, line.split()[1:])) for line in output.splitlines() if "learnt" in line]
        for output in outputs
    ]
    alone = learner(learner_host.CONFIG, epochs=2)
    for step, (first, second) in enumerate(zip(*lines, strict=True)):
        given = tickets(step, learner_host.TICKETS, moved=0.3)
        metrics = learn(alone, given, 8, config=learner_host.CONFIG)
        assert first[:2] == second[:2] == pytest.approx([metrics["loss"], metrics["count"]], 1e-5)
        assert first[2] == second[2] == decisions(given)
