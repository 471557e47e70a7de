"""Errors beside recorded chunks are those written out, steps beyond an episode count for nothing,
and each mistake that ruins a policy on a robot is named."""

import json

import numpy as np
import pytest

from sim.open_loop import AGAIN, BLIND, HOLD, MEAN, POLICY, TOLD, OpenLoop, RecordedChunks, without

RNG = np.random.default_rng(0)
N, H, A = 24, 4, 2


def recorded(actions=None, valid=None, before=None, scale=(1.0, 2.0)):
    actions = RNG.normal(size=(N, H, A)) if actions is None else actions
    return RecordedChunks(
        episode=np.repeat([3, 5, 9, 11], N // 4),
        frame=np.tile(np.arange(N // 4), 4),
        actions=actions,
        valid=np.ones((N, H), bool) if valid is None else valid,
        before=RNG.normal(size=(N, A)) if before is None else before,
        scale=np.array(scale),
        names=("x", "grip"),
    )


def result(told, /, **predicted):
    names = {"policy": POLICY, "blind": BLIND, "told": TOLD, "front": without("front")}
    chunks = {names[key]: value for key, value in predicted.items()}
    return OpenLoop(told, chunks, {"x": 1.0}, ("push",) * N, 0.3)


def test_errors_are_those_written_out_one_by_one():
    valid = np.ones((N, H), bool)
    valid[5, 2:] = valid[11, 1:] = False
    told = recorded(valid=valid)
    predicted = told.actions + RNG.normal(size=told.actions.shape)
    found = told.errors(predicted)
    entries = [
        (n, k, d, predicted[n, k, d] - told.actions[n, k, d])
        for n in range(N)
        for k in range(H)
        for d in range(A)
        if valid[n, k]
    ]

    def mean(of, keep=lambda *_: True):
        return np.mean([of(d, off) for n, k, d, off in entries if keep(n, k, d)])

    def scaled(d, off):
        return abs(off) / told.scale[d]

    assert found.mean == pytest.approx(mean(scaled))
    for d in range(A):
        only = lambda n, k, dim, d=d: dim == d  # noqa: E731
        assert found.by_dim[d] == pytest.approx(mean(lambda _, off: abs(off), only))
        assert found.root[d] == pytest.approx(mean(lambda _, off: off**2, only) ** 0.5)
        assert found.bias[d] == pytest.approx(mean(lambda _, off: off, only))
    for step in range(H):
        assert found.by_step[step] == pytest.approx(
            mean(scaled, lambda n, k, dim, step=step: k == step)
        )
    for e in (3, 5, 9, 11):
        rows = np.flatnonzero(told.episode == e)
        assert found.by_episode[e] == pytest.approx(
            mean(scaled, lambda n, k, dim, rows=rows: n in rows)
        )
    low, high = found.interval
    assert low < found.mean < high


def test_steps_beyond_an_episode_change_nothing():
    valid = np.ones((N, H), bool)
    valid[::3, 1:] = False
    told, nonsense = recorded(valid=valid), RNG.normal(size=(N, H, A))
    strange = np.where(valid[..., None], nonsense, 1e9)
    other = recorded(
        actions=np.where(valid[..., None], told.actions, -1e9), valid=valid, before=told.before
    )
    assert told.errors(nonsense) == other.errors(strange)
    assert np.allclose(told.constant, other.constant)


def test_the_baselines_are_the_last_action_and_the_mean():
    before = RNG.normal(size=(N, A))
    before[0] = np.nan
    told = recorded(before=before)
    assert np.allclose(told.held[7], before[7])
    assert np.allclose(told.held[0], told.actions.mean((0, 1)))
    assert np.allclose(told.constant[3], told.actions.mean((0, 1)))


def test_two_episodes_have_no_interval():
    told = recorded()
    few = RecordedChunks(
        told.episode.clip(max=5),
        *(told.frame, told.actions, told.valid, told.before, told.scale, told.names),
    )
    assert few.errors(told.actions + 1).interval is None


def test_a_policy_that_copies_has_nothing_to_be_said_about():
    told = recorded()
    good = told.actions + 0.01 * RNG.normal(size=told.actions.shape)
    changed = RNG.normal(size=told.actions.shape)
    found = result(told, policy=good, blind=changed, told=changed, front=changed)
    assert found.findings() == []
    assert found.errors[POLICY].mean < 0.02 < found.errors[HOLD].mean
    assert found.errors[POLICY].mean < found.errors[MEAN].mean


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda x: -x, "'x' moves against the recorded one"),
        (lambda x: np.concatenate([x[..., :1], 57.3 * x[..., 1:]], -1), "'grip' varies 57.3"),
        (lambda x: 0 * x, "no smaller than that of one constant action"),
    ],
)
def test_wrong_signs_units_and_constants_are_named(spoil, said):
    told = recorded()
    found = result(told, policy=spoil(told.actions))
    assert any(said in sentence for sentence in found.findings()), found.findings()


@pytest.mark.filterwarnings("error")
def test_a_dim_that_never_changes_has_no_correlation_in_32_bits_either():
    """The spread of so many equal f32 numbers is not 0 but rounding."""
    actions = RNG.normal(size=(N, H, A)).astype(np.float32)
    actions[..., 1] = 100.7
    found = result(recorded(actions), policy=actions + np.float32(0.01))
    assert np.full(N * H, 100.7, np.float32).std() > 1e-6
    assert found.correlation[1] is None
    assert found.spread_ratio[1] is None
    json.dumps(found.to_json(), allow_nan=False)


def test_unused_inputs_are_named_and_used_ones_are_not():
    told = recorded()
    good = told.actions + 0.01
    found = result(told, policy=good, front=good + 1e-4, told=good, blind=good + 1)
    said = " ".join(found.findings())
    assert "camera 'front' black" in said
    assert "another task's prompt" in said
    assert "all images black" not in said


def test_a_policy_that_is_as_good_blind_is_said_to_be():
    told = recorded()
    found = result(told, policy=told.actions + 0.1, blind=told.actions + 0.1)
    assert any("as good with black images" in s for s in found.findings())


def test_states_far_from_the_scales_are_named():
    told = recorded()
    found = OpenLoop(told, {POLICY: told.actions}, {"x": 2.0, "joint": 57.0}, ("p",) * N, 1.0)
    (said,) = found.findings()
    assert "'joint' lies up to 57 scales" in said


def test_other_noise_that_changes_nothing_is_no_finding():
    told = recorded()
    found = OpenLoop(told, dict.fromkeys((POLICY, AGAIN), told.actions), {}, ("p",) * N, 1.0)
    assert found.findings() == []


def test_the_worst_episode_comes_first():
    told = recorded()
    off = np.array([{3: 0.1, 5: 3.0, 9: 0.2, 11: 1.0}[e] for e in told.episode])
    assert result(told, policy=told.actions + off[:, None, None]).worst == [5, 11, 9, 3]


def test_numbers_that_are_not_finite_are_refused_by_episode_and_frame():
    actions = RNG.normal(size=(N, H, A))
    actions[8, 1, 0] = np.nan
    with pytest.raises(ValueError, match="recorded actions at frame 2 of episode 5"):
        recorded(actions=actions)
    told = recorded()
    with pytest.raises(ValueError, match="predicted actions at frame 2 of episode 5"):
        told.errors(actions)


def test_figures_are_json_without_nan():
    actions = RNG.normal(size=(N, H, A))
    actions[..., 1] = 0.5
    told = recorded(actions=actions)
    text = json.dumps(result(told, policy=told.actions + 0.1).to_json(), allow_nan=False)
    dims = json.loads(text)["dims"]
    assert dims[0]["correlation"] == pytest.approx(1)
    assert dims[1]["correlation"] is None
    assert dims[1]["bias"] == pytest.approx(0.1)
