"""Trained real-time chunking: what is learnt of a chunk whose first steps are given, and how such a
model continues the actions that a robot has committed to."""

import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import Pi, pack
from models.families.pi import model as pi
from models.flow import flow
from models.load import load_policy
from tests.helpers.models.pi_samples import CONFIG, KEY, samples
from tests.helpers.models.random_parameters import random_parameters
from tests.helpers.models.released_cases import RELEASED_CASES, answers, case_policy
from tests.helpers.models.tiny_policy import (
    KEYS,
    openpi,
    programs,
    recorded_groot,
    tiny_policy,
)
from tests.helpers.models.velocity import velocity_of

MOST = 2
TRAINED = Pi(replace(CONFIG, rtc_max_delay=MOST))
PACKED = CONFIG.layout(prefix=64, samples=5, images=8)


@pytest.fixture(scope="module")
def params():
    """Random everywhere: π0.5 begins with closed gates, which would hide a step's flow time."""
    return random_parameters(TRAINED)


@pytest.fixture(scope="module")
def policies():
    """A policy by how it continues chunks; one that was trained to, and one that was not."""
    plain = tiny_policy()
    trained = replace(plain, model=Pi(replace(plain.model.config, rtc_max_delay=4)))
    return plain, trained


@jax.jit
def loss_and_gradient(params, batch):
    (_, count), gradient = jax.value_and_grad(lambda p: TRAINED.loss(p, batch, KEY), has_aux=True)(
        params
    )
    return (_, count), gradient


def assert_close(a, b, atol=1e-5) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        scale = max(1.0, float(np.abs(x).max()))
        np.testing.assert_allclose(np.asarray(x) / scale, np.asarray(y) / scale, atol=atol)


def test_delays_are_even_and_depend_on_key_and_sample_id_alone():
    ids = jnp.arange(4000)
    drawn = np.asarray(flow.delays(KEY, ids, 2, 4))
    shares = np.bincount(drawn.ravel(), minlength=5) / drawn.size
    np.testing.assert_allclose(shares, 0.2, atol=0.02)
    assert (drawn[:, 0] != drawn[:, 1]).mean() > 0.7
    np.testing.assert_array_equal(flow.delays(KEY, ids[::-7].reshape(2, -1), 2, 4).reshape(-1, 2),
                                  drawn[::-7])  # fmt: skip
    assert (flow.delays(jax.random.key(8), ids, 2, 4) != drawn).mean() > 0.7


@pytest.mark.slow
def test_the_loss_is_that_of_the_paper_for_every_chunk_by_itself(params):
    """Algorithm 1 of arXiv 2512.05964 in loops of numpy, in our time: given steps are clean, have
    time 0 and do not count."""
    batch = pack([samples(7)], PACKED)
    actions, mask = np.asarray(batch.actions), np.asarray(batch.action_mask)
    time, noise = (np.asarray(x) for x in flow.draw(KEY, batch.sample_id, 2, (4, 6)))
    delay = np.asarray(flow.delays(KEY, batch.sample_id, 2, MOST))
    velocity = jax.jit(partial(velocity_of, TRAINED))
    total = counted = 0.0
    for c in range(2):
        noised, times = np.array(actions), np.zeros(actions.shape[:-1], np.float32)
        for k in range(5):
            for h in range(delay[0, k, c], 4):
                t = times[0, k, h] = time[0, k, c]
                noised[0, k, h] = (1 - t) * actions[0, k, h] + t * noise[0, k, c, h]
        v = np.asarray(velocity(params, batch, noised[:, :, None], times[:, :, None]))[:, :, 0]
        for k in range(5):
            for h in range(delay[0, k, c], 4):
                error = v[0, k, h] - (noise[0, k, c, h] - actions[0, k, h])
                total += (error**2)[mask[0, k, h]].sum() / 2
                counted += mask[0, k, h].sum() / 2
    loss, count = jax.jit(TRAINED.loss)(params, batch, KEY)
    np.testing.assert_allclose(loss, total, rtol=1e-5)
    assert count == counted
    assert 0 < count < mask.sum()


@pytest.mark.slow
def test_given_steps_get_no_gradient(params, monkeypatch):
    batch, act = pack([samples(7)], PACKED), pi._Modules.act
    delay = flow.delays(KEY, batch.sample_id, 2, MOST)

    def loss(moved):
        def moving(self, noised, time, *, cache):
            found = act(self, noised, time, cache=cache)
            return found._replace(velocity=found.velocity + moved)

        monkeypatch.setattr(pi._Modules, "act", moving)
        return TRAINED.loss(params, batch, KEY)[0]

    gradient = np.asarray(jax.jit(jax.grad(loss))(np.zeros((1, 5, 2, 4, 6), np.float32)))
    given = np.arange(4) < np.asarray(delay)[..., None]
    used = np.asarray(batch.action_mask).any(-1)[:, :, None] & ~given
    assert given.any()
    assert used.any()
    np.testing.assert_array_equal(np.abs(gradient).max(-1) > 0, used)


@pytest.mark.slow
def test_packing_changes_neither_the_loss_nor_the_gradients(params):
    group = samples(1)
    alone = [loss_and_gradient(params, pack([[s]], PACKED)) for s in group]
    together = loss_and_gradient(params, pack([group[::-1]], PACKED))
    assert_close(together, jax.tree.map(lambda *x: sum(map(np.asarray, x)), *alone))


@pytest.mark.slow
@pytest.mark.parametrize("time", ["modulation", "input"])
def test_steps_of_one_flow_time_are_the_chunk_that_it_is_today(params, time):
    model = Pi(replace(CONFIG, time=time, rtc_max_delay=MOST))
    params = random_parameters(model)
    batch = pack([samples(7)], PACKED)
    times, noise = (np.asarray(x) for x in flow.draw(KEY, batch.sample_id, 2, (4, 6)))
    velocity = jax.jit(partial(velocity_of, model))
    whole = np.asarray(velocity(params, batch, noise, times))
    steps = np.tile(times[..., None], 4)
    np.testing.assert_allclose(velocity(params, batch, noise, steps), whole, atol=1e-5)
    steps[..., 3] *= 0.5
    later = np.asarray(velocity(params, batch, noise, steps))
    real = np.asarray(batch.action_mask).any((-1, -2))
    assert (np.abs(later - whole).max((2, 4))[real] > 1e-4).all()  # steps see each other


@pytest.mark.slow
def test_a_model_trained_without_delays_is_todays_to_the_bit(params, monkeypatch):
    """The option costs nothing where it is 0, and a delay of 0 is no other loss."""
    batch = pack([samples(7)], PACKED)
    plain = jax.jit(Pi(CONFIG).loss)(params, batch, KEY)

    @jax.jit
    def before(params, batch, key):
        time, noise = flow.draw(key, batch.sample_id, 2, (4, 6))
        noised, target = flow.interpolate(batch.actions[:, :, None], noise, time)
        velocity = Pi(CONFIG).field(params, batch)(noised, time).velocity
        weight = batch.action_mask * batch.weight[..., None, None]
        return jnp.sum(((velocity - target) ** 2).mean(2) * weight), jnp.sum(weight)

    assert [float(x) for x in before(params, batch, KEY)] == [float(x) for x in plain]
    monkeypatch.setattr(flow, "delays", lambda key, ids, c, most: jnp.zeros((*ids.shape, c), int))
    assert_close(jax.jit(lambda *x: TRAINED.loss(*x))(params, batch, KEY), plain, atol=1e-6)


def test_more_steps_given_than_a_chunk_leaves_are_refused():
    with pytest.raises(ValueError, match=r"model.rtc_max_delay is 4 with chunks of 4 steps"):
        replace(CONFIG, rtc_max_delay=4)


def test_committed_actions_come_out_exactly_and_the_rest_continues_them(policies):
    policy = policies[1]
    assert policy.continues == "trained"
    plain = policy.infer(openpi(4), keys=KEYS[:4])["actions"]
    last = policy.infer(openpi(4), keys=KEYS[1:5])["actions"]
    previous = [last[0, 1:], None, last[2, 3:], last[3]]
    given = {"keys": KEYS[:4], "committed": [2, 3, 3, 0]}
    answer = policy.infer(openpi(4), previous=previous, **given)["actions"]
    np.testing.assert_array_equal(answer[0, :2], last[0, 1:3])
    np.testing.assert_array_equal(answer[2, :3], last[2, 3:])
    np.testing.assert_allclose(answer[[1, 3]], plain[[1, 3]], atol=1e-5)
    assert np.abs(answer[0, 2:] - plain[0, 2:]).max() > 1e-3
    planned = [last[0, 1:] + np.arange(5)[:, None] // 2, *previous[1:]]  # but for what is committed
    np.testing.assert_array_equal(
        policy.infer(openpi(4), previous=planned, **given)["actions"], answer
    )
    other = [last[0, 1:] + 0.3, *previous[1:]]
    changed = policy.infer(openpi(4), previous=other, **given)["actions"]
    np.testing.assert_array_equal(changed[1:], answer[1:])
    assert np.abs(changed[0, 2:] - answer[0, 2:]).max() > 1e-3


def test_what_is_sampled_stands_on_the_given_steps_at_every_denoising_step(policies):
    """Euler by hand: given actions at time 0 in every call, never moved."""
    policy = policies[1]
    last = policy.infer(openpi(1), keys=KEYS[1:2])["actions"][0]
    answer = policy.infer(openpi(1), keys=KEYS[:1], previous=[last], committed=3)["actions"][0]
    (request,) = policy.prepare(openpi(1), KEYS[:1], previous=[last], committed=3)
    batch, model = policy.rows([request.sample]), policy.model
    x = np.asarray(flow.noise(request.key[None], batch.actions.shape[2:]))[:, None, None]
    still, velocity = np.arange(6) < 3, jax.jit(partial(velocity_of, model))
    for t in (1.0, 0.5):
        x = np.where(still[:, None], batch.actions[:, :, None], x)
        times = np.where(still, np.float32(0), np.float32(t))[None, None, None]
        x = x - np.float32(0.5) * np.asarray(velocity(policy.params, batch, x, times))
    chunk = policy.robot_actions(x[:, 0, 0], request.state[None])[0]
    np.testing.assert_allclose(answer[3:], chunk[3:], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("row", [0, 1])
def test_lerobots_own_trained_chunking_gives_the_same_numbers(row, tmp_path):
    """Recorded by make_rtc.py from LeRobot's source: its π0.5 with random weights."""
    case = RELEASED_CASES / "lerobot" / "0.6.1" / "pi05"
    root = case_policy(case, tmp_path)
    told = json.loads((root / "config.json").read_text()) | {"rtc_training_max_delay": 4}
    (root / "config.json").unlink()
    (root / "config.json").write_text(json.dumps(told))
    policy = load_policy(root, tokenizer=RELEASED_CASES / "tokenizer.model")
    assert policy.model.config.rtc_max_delay == 4
    seen, _ = answers(case)
    with np.load(RELEASED_CASES / "trained_chunking.npz") as file:
        theirs = {name: file[name][row] for name in file.files}
    committed = int(theirs["committed"])
    noise = theirs["noise"][None]
    given = {"noise": noise, "previous": [theirs["left"]], "committed": committed}
    found = policy.infer(seen[row], **given)["actions"].reshape(10, 7)
    scale = np.abs(theirs["actions"]).max()
    np.testing.assert_allclose(found, theirs["actions"], atol=1e-5 * scale)
    plain = policy.infer(seen[row], noise=noise)["actions"].reshape(10, 7)
    assert np.abs(plain - theirs["actions"])[committed:].max() > 5e-4 * scale
    times = np.where(np.arange(10) < committed, 0, theirs["time"])[None]
    error = policy.loss(seen[row], theirs["chunk"][None], noise=noise, time=times)[0]
    np.testing.assert_allclose(error, theirs["losses"].mean(-1), rtol=1e-5)


def test_without_committed_actions_not_a_bit_changes(policies):
    plain, trained = policies
    free = plain.infer(openpi(4), keys=KEYS[:4])["actions"]
    last = plain.infer(openpi(4), keys=KEYS[1:5])["actions"]
    np.testing.assert_array_equal(trained.infer(openpi(4), keys=KEYS[:4])["actions"], free)
    again = trained.infer(openpi(4), keys=KEYS[:4], previous=list(last))["actions"]
    np.testing.assert_array_equal(again, free)


@pytest.mark.slow
def test_the_way_of_continuing_is_a_choice(policies):
    plain, trained = policies
    asked = {"keys": KEYS[:4], "committed": 2}
    free = plain.infer(openpi(4), keys=KEYS[:4])["actions"]
    asked["previous"] = list(plain.infer(openpi(4), keys=KEYS[1:5])["actions"])
    switching = replace(trained, chunking="none").infer(openpi(4), **asked)["actions"]
    np.testing.assert_array_equal(switching[:, 2:], free[:, 2:])
    np.testing.assert_array_equal(switching[:, :2], np.stack(asked["previous"])[:, :2])
    guided = plain.infer(openpi(4), **asked)["actions"]
    same = replace(trained, chunking="guided").infer(openpi(4), **asked)["actions"]
    np.testing.assert_array_equal(same, guided)
    with pytest.raises(ValueError, match=r"not trained to continue chunks.*rtc-max-delay"):
        replace(plain, chunking="trained")


def test_more_committed_than_was_trained_is_refused(policies):
    with pytest.raises(ValueError, match=r"committed is 5, but the model was trained .* at most 4"):
        policies[1].infer(openpi(1), previous=[np.zeros((6, 2))], committed=5)


@pytest.mark.slow
def test_a_family_without_the_option_says_so(tmp_path):
    groot, observation = recorded_groot(tmp_path / "groot")
    with pytest.raises(ValueError, match="family 'groot' have no `rtc_max_delay`"):
        replace(groot, chunking="trained")
    plain = groot.infer(observation)["actions"]
    previous = [plain[0] + 1, *[None] * (len(plain) - 1)]
    switching = replace(groot, chunking="none").infer(observation, previous=previous, committed=2)
    np.testing.assert_array_equal(switching["actions"][0, :2], previous[0][:2])
    np.testing.assert_array_equal(switching["actions"][0, 2:], plain[0, 2:])


def test_warming_compiles_what_a_trained_policy_needs(policies):
    fresh = replace(policies[1], sizes=(2,))
    fresh.warm(text=16, guided=True)
    assert programs(fresh) == 2
    last = fresh.infer(openpi(2))["actions"]
    fresh.infer(openpi(2), previous=[last[0], None], committed=1)
    assert programs(fresh) == 2
