"""Samples drawn as often as their weights say: counted."""

import hashlib
import pickle
from dataclasses import replace

import numpy as np
import pytest

from data.frames import Runs
from data.packing.order import Order, PlanSource
from data.packing.plan import Plan, typical_costs
from tests.helpers.data.layouts import assert_within, layout

LAYOUT = layout(512, 12, 10, 320, 36, 1)
WEIGHTS = {
    "a few kinds": lambda rng, size: rng.choice([0.5, 1, 2, 3.3], size),
    "all their own": lambda rng, size: rng.exponential(size=size) + 1e-6,
    "one heavy": lambda rng, size: np.where(np.arange(size) == 7, 300.0, rng.uniform(0.1, 1, size)),
    "nearly alike": lambda rng, size: 1 + 1e-3 * rng.normal(size=size),
}


def source(name="one", episodes=60, cameras=1, wordings=1, weight=1.0, longest=40):
    """Every second episode, each a run from frame 3 on with a task of its own."""
    rng = np.random.default_rng(episodes)
    task = rng.permutation(episodes)
    length = rng.integers(1, longest, episodes)
    text = rng.integers(5, 61, (episodes, wordings))
    text[:, 1:] *= np.arange(1, wordings) <= (np.arange(episodes) % wordings)[:, None]
    runs = Runs(np.arange(episodes) * 2, np.full(episodes, 3), length, task)
    return PlanSource(name, weight, runs, np.full(episodes, cameras), text)


def weighed(data, kind):
    rng = np.random.default_rng(1)
    return replace(data, weights=WEIGHTS[kind](rng, len(data.runs.length)))


def expected_and_counted(data, orders):
    """Each sample's share by weight, and how often it was drawn after each of several stretches of
    the order."""
    starts = np.cumsum(data.runs.length) - data.runs.length
    share = np.repeat(data.weights, data.runs.length)
    counts = np.zeros(len(share))
    for drawn in orders:
        run = drawn.episode // 2
        counts += np.bincount(starts[run] + drawn.frame - 3, minlength=len(share))
        yield share / share.sum() * counts.sum(), counts


def hashed(*arrays):
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array, np.int64).tobytes())
    return digest.hexdigest()[:16]


@pytest.mark.parametrize("weights", [None, 1.0, 0.3])
@pytest.mark.parametrize(("ranks", "drawn"), [(1, "0c9e24d2f2bfad0d"), (8, "7172e8b7a1920a74")])
def test_alike_or_absent_weights_give_the_plan_of_before_there_were_any(weights, ranks, drawn):
    sources = [
        source("one", weight=0.7),
        source("two", 25, 2, 3, 0.3),
        source("rare", 4, 3, weight=np.pi / 100),
    ]
    if weights is not None:
        sources = [replace(s, weights=np.full(len(s.runs.length), weights)) for s in sources]
    plan = Plan(sources, LAYOUT, 32, window=1024, seed=3, ranks=ranks)
    steps = [array for step in (0, 1, 7, 1000, 10**9) for array in plan.draws(step)]
    assert (plan.digest, plan.rows_per_window) == ("837984413abb034f", 168)
    assert hashed(*steps, *typical_costs(sources)) == drawn


@pytest.mark.slow
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("longest", [2, 30])
def test_samples_are_drawn_as_their_weights_say_after_any_number_of_windows(kind, longest):
    """Independent draws would be off by 4.5 on average after 20 passes, and by 33 at worst."""
    data = weighed(source(episodes=300, longest=longest), kind)
    windows = int(20 * data.runs.length.sum() / 256)
    order = Order(data, (256, 256), 0)
    parts = (order.draws(256 * n, 256 * (n + 1)) for n in range(windows))
    for expected, counts in expected_and_counted(data, parts):
        assert np.abs(counts - expected).max() < 3.5
        assert np.sqrt(np.mean((counts - expected) ** 2)) < 0.8


def test_samples_of_one_cost_are_drawn_as_expected_rounded_over_2_to_the_k_epochs():
    data = weighed(replace(source(), text=np.full((60, 1), 9)), "all their own")
    share = np.repeat(data.weights, data.runs.length)
    epoch = int(data.masses.dot(data.runs.length) // data.masses.max())
    order = Order(data, (256, 256), 0)
    for power in range(8):
        parts = [order.draws(0, epoch << power)]
        ((_, counts),) = expected_and_counted(data, parts)
        expected = share / share.sum() * (epoch << power)
        assert np.all((counts == np.floor(expected)) | (counts == np.ceil(expected)))


@pytest.mark.slow
def test_over_seeds_even_a_few_draws_come_as_the_weights_say():
    """Chances are those of the weights, whatever the grid: five standard errors at most."""
    runs = Runs(np.arange(40), *np.zeros((1, 40), np.int64), np.ones(40, int), np.zeros(40, int))
    weights = np.random.default_rng(0).exponential(size=40)
    data = PlanSource("one", 1.0, runs, np.ones(40, np.int64), np.full((1, 1), 9), weights)
    seeds, draws = 3000, 7
    counts = np.zeros(40)
    for seed in range(seeds):
        counts += np.bincount(Order(data, (7, 7), seed).draws(0, draws).episode, minlength=40)
    expected = weights / weights.sum() * draws * seeds
    assert np.abs((counts - expected) / np.sqrt(expected)).max() < 5


def test_weights_of_whole_proportions_are_met_exactly_in_each_epoch():
    runs = Runs(np.arange(0, 8, 2), np.full(4, 3), np.full(4, 5), np.zeros(4, np.int64))
    weights = np.array([4.0, 2.0, 1.0, 1.0])
    data = PlanSource("one", 1.0, runs, np.ones(4, np.int64), np.full((1, 1), 9), weights)
    order, epoch = Order(data, (10, 10), 0), 5 * 8
    for low in range(0, 10 * epoch, epoch):
        ((_, counts),) = expected_and_counted(data, [order.draws(low, low + epoch)])
        assert counts.tolist() == [4] * 5 + [2] * 5 + [1] * 10


def test_each_wording_of_a_weighted_sample_is_drawn_equally_often():
    data = weighed(source(wordings=3), "a few kinds")
    drawn = Order(data, (256, 256), 0).draws(0, 200_000)
    share = data.weights / data.weights.dot(data.runs.length) * 200_000
    for run in range(60):
        of = drawn.episode == 2 * run
        wordings = np.count_nonzero(data.text[data.runs.task[run]])
        for frame in range(3, 3 + data.runs.length[run]):
            counts = np.bincount(drawn.wording[of & (drawn.frame == frame)], minlength=wordings)
            assert len(counts) == wordings
            assert np.abs(counts - share[run] / wordings).max() < 3


def test_weights_count_whatever_the_numbers_of_wordings():
    """The least common multiple of 1 to 49 has more bits than a whole number."""
    data = replace(source(episodes=49, wordings=49), weights=np.linspace(1, 3, 49))
    data.text[:] = 7 * (np.arange(49) <= np.arange(49)[:, None])
    wordings = data.wordings[data.runs.task]
    assert sorted(wordings) == list(range(1, 50))
    np.testing.assert_allclose(
        data.masses * wordings / data.masses[0] / wordings[0], data.weights, rtol=1e-9
    )
    assert 0 < (data.masses * wordings * data.runs.length).sum() < 1 << 60


def test_an_epoch_of_few_draws_shows_nothing_that_recurs():
    """Episodes as long as a stratum, beside one sample that is drawn all the time."""
    runs = Runs(*np.zeros((4, 1001), np.int64))
    runs = runs._replace(episode=np.arange(1001), length=np.r_[1, np.full(1000, 100)])
    weights = np.r_[100.0, np.ones(1000)]
    text = np.full((1, 1), 9)
    data = PlanSource("one", 1.0, runs, np.ones(1001, np.int64), text, weights)
    drawn = Order(data, (1000, 1000), 0).draws(0, 500)
    frames = drawn.frame[drawn.episode > 0]
    assert np.histogram(frames, 10, (0, 100))[0].min() > 25


@pytest.mark.slow
@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_weighted_plan_keeps_budgets_shares_and_every_promise_of_a_plan(kind):
    sources = [
        weighed(source("one", weight=0.7), kind),
        weighed(source("two", 25, 2, 3, 0.3), kind),
    ]

    def planned(**options):
        return Plan(sources, LAYOUT, 32, window=1024, **options)

    plan = planned()
    rows = plan.draws(0, 0, 20 * plan.rows_per_window)
    images, text = plan.kinds[:, rows.kind]
    row = np.repeat(np.arange(rows.number), np.diff(rows.offsets))
    assert_within(LAYOUT, row, images, text)
    assert abs(np.mean(rows.source == 0) - 0.7) < 2 / len(rows.id)
    assert sorted(rows.id.tolist()) == list(range(20 * 1024))
    assert plan.fill(range(20)).prefix > 0.9
    copied = pickle.loads(pickle.dumps(plan))
    for step in (10**12, 5, 0):
        assert copied.rows(step) == planned().rows(step) == plan.rows(step)
        hosts = [planned().draws(step, low, low + 8) for low in range(0, 32, 8)]
        assert np.array_equal(np.concatenate([h.id for h in hosts]), plan.draws(step).id)
        assert sorted(planned(ranks=8).rows(step)) == sorted(plan.rows(step))


def test_weights_are_in_the_digest_by_their_proportions():
    data, heavier = source(), np.arange(1.0, 61)
    digests = [
        Plan([replace(data, weights=weights)], LAYOUT, 32).digest
        for weights in (None, heavier, 2 * heavier, heavier[::-1].copy())
    ]
    assert digests[1] == digests[2]
    assert len(set(digests)) == 3


def test_typical_costs_are_those_of_weighted_draws():
    data = weighed(source(wordings=2), "one heavy")
    drawn = Order(data, (256, 256), 0).draws(0, 50_000)
    text = typical_costs([data], 4000)[1]
    assert text.mean() == pytest.approx(data.text[drawn.task, drawn.wording].mean(), abs=0.5)


@pytest.mark.parametrize("weight", [0.0, -1.0, np.nan, np.inf])
def test_a_samples_weight_that_is_not_positive_is_refused_by_its_episode(weight):
    weights = np.ones(60)
    weights[4] = weight
    with pytest.raises(ValueError, match=r"'one', episode 8: a sample has weight"):
        Plan([replace(source(), weights=weights)], LAYOUT, 32)


def test_a_hundred_million_weighted_frames_are_planned_in_memory_that_follows_their_runs():
    size = 100_000
    runs = Runs(np.arange(size), np.zeros(size, np.int64), np.full(size, 1000), np.zeros(size, int))
    weights = np.random.default_rng(0).exponential(size=size)
    text = np.full((1, 1), 9)
    data = PlanSource("one", 1.0, runs, np.ones(size, np.int64), text, weights)
    plan = Plan([data], LAYOUT, 32)
    held = sum(
        x.nbytes for x in vars(plan._mixtures[0]._orders[0]).values() if isinstance(x, np.ndarray)
    )
    assert held < 40 * size
    assert len(plan.draws(10**9).id) > 100
