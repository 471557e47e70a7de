import pickle
import tracemalloc
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from data.frames import Runs
from data.packing.balance import excess
from data.packing.packing import fit_layout
from data.packing.plan import Draw, Plan, PlanSource, typical_costs
from tests.helpers.data.layouts import assert_within, layout

LAYOUT = layout(512, 12, 10, 320, 36, 1)


def source(name, weight, episodes, cameras, seed=0, wordings=1):
    """Every second episode, each a run from frame 3 on with a task of its own."""
    rng = np.random.default_rng(seed)
    task = rng.permutation(episodes)
    length = rng.integers(1, 40, episodes)
    text = rng.integers(5, 61, (episodes, wordings))
    text[:, 1:] *= np.arange(1, wordings) <= (np.arange(episodes) % wordings)[:, None]
    runs = Runs(np.arange(episodes) * 2, np.full(episodes, 3), length, task)
    return PlanSource(name, weight, runs, np.full(episodes, cameras), text)


@pytest.fixture(scope="module")
def mixture():
    return source("one", 0.7, 60, 1), source("two", 0.3, 25, 2, seed=1, wordings=3)


def plan(sources, **options):
    return Plan(sources, LAYOUT, 32, window=options.pop("window", 1024), **options)


def test_rows_depend_on_the_step_alone(mixture):
    ordered = [plan(mixture).rows(step) for step in range(12)]
    again = plan(mixture)
    for step in (11, 3, 7, 0, 3):
        assert again.rows(step) == ordered[step]
    copied = pickle.loads(pickle.dumps(again))
    assert copied.rows(5) == ordered[5]


def test_any_step_is_reached_without_those_before(mixture):
    whole = plan(mixture)
    late = 10**12
    assert whole.rows(late) == plan(mixture).rows(late)
    per_step = len(draws_of_windows(whole, 1)) / whole.rows_per_window * 32
    assert whole.rows(late)[0][0].id == pytest.approx(late * per_step, rel=1e-6)


@pytest.mark.parametrize("hosts", [2, 8, 32])
def test_hosts_draw_their_rows_of_the_same_batch(mixture, hosts):
    whole, share = plan(mixture).draws(7), 32 // hosts
    for host in range(hosts):
        part = plan(mixture).draws(7, host * share, (host + 1) * share)
        for column, own in zip(whole.cut(host * share, (host + 1) * share), part, strict=True):
            assert np.array_equal(column, own)


def test_threads_share_a_plan(mixture):
    shared, steps = plan(mixture), [*range(60)] * 2
    with ThreadPoolExecutor(8) as pool:
        drawn = list(pool.map(shared.rows, steps))
    expected = [plan(mixture).rows(step) for step in steps[:60:20]]
    assert [drawn[step] for step in steps[:60:20]] == expected
    assert drawn[:60] == drawn[60:]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_steps(mixture):
    planned = plan(mixture)
    planned.draws(0, 0, 10 * planned.rows_per_window)
    tracemalloc.start()
    for step in range(0, 4000, 20):
        planned.draws(step)
    now, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert now < 1_000_000


def test_another_seed_gives_another_order(mixture):
    assert plan(mixture, seed=1).rows(0) != plan(mixture).rows(0)
    assert plan(mixture, seed=1).digest != plan(mixture).digest


def test_the_digest_names_what_rows_depend_on(mixture):
    used = plan(mixture)
    used.rows(9)
    assert used.digest == plan(mixture).digest
    one, two = mixture
    changed = [
        replace(two, runs=two.runs._replace(**{name: array[::-1] + (name == "first")}))
        for name, array in two.runs._asdict().items()
    ]
    changed += [replace(two, images=two.images + 1), replace(two, weight=0.31)]
    changed += [replace(two, text=np.maximum(two.text - 1, 0))]
    digests = {plan((one, other)).digest for other in (two, *changed)}
    digests |= {plan(mixture, seed=1).digest, plan(mixture, window=512).digest}
    digests |= {Plan(mixture, LAYOUT, 16, window=1024).digest}
    digests |= {Plan(mixture, replace(LAYOUT, prefix=500), 32, window=1024).digest}
    assert len(digests) == len(changed) + 5


def draws_of_windows(planned, windows, first=0):
    """All draws of some windows, in order of their numbers."""
    rows = planned.rows_per_window
    drawn = planned.draws(0, first * rows, (first + windows) * rows)
    draws = [Draw(*map(int, draw)) for draw in zip(*drawn[:6], strict=True)]
    return sorted(draws, key=lambda draw: draw.id)


def test_every_draw_happens_once(mixture):
    draws = draws_of_windows(plan(mixture), 5)
    assert [draw.id for draw in draws] == list(range(5 * 1024))


def test_samples_are_drawn_equally_often_up_to_once(mixture):
    """Holds for any number of windows, so that each is drawn once per epoch."""
    draws = draws_of_windows(plan(mixture), 8)
    for windows in range(1, 9):
        for number, data in enumerate(mixture):
            own = [d for d in draws[: windows * 1024] if d.source == number]
            every = {
                (episode, frame)
                for episode, first, length, _ in zip(
                    *map(np.ndarray.tolist, data.runs), strict=True
                )
                for frame in range(first, first + length)
            }
            counts = Counter((draw.episode, draw.frame) for draw in own)
            epochs = len(own) // len(every)
            assert set(counts) <= every
            assert {counts[sample] for sample in every} <= {epochs, epochs + 1}


def test_epochs_have_different_orders():
    one = source("one", 1, 30, 1)
    size = int(one.runs.length.sum())
    draws = draws_of_windows(plan([one], window=size), 3)
    orders = [
        tuple((d.episode, d.frame) for d in draws[n * size : (n + 1) * size]) for n in range(3)
    ]
    assert len(set(orders)) == 3
    assert len({tuple(sorted(order)) for order in orders}) == 1


def test_sources_get_exactly_their_weight_of_every_window(mixture):
    weights = (0.7, 0.3, 0.0004)
    sources = (*mixture, source("rare", weights[2], 3, 1))
    draws = draws_of_windows(plan(sources), 6)
    share = np.array(weights) / sum(weights)
    for windows in range(1, 7):
        counts = Counter(draw.source for draw in draws[: windows * 1024])
        for number in range(3):
            assert abs(counts[number] - share[number] * windows * 1024) < 2


@pytest.mark.parametrize(("episodes", "window"), [(60, 4096), (300, None), (4000, 32768)])
def test_a_window_is_an_epoch_where_that_is_neither_small_nor_large(episodes, window):
    one = source("one", 1, episodes, 1)
    assert Plan([one], LAYOUT, 32).window == (window or one.runs.length.sum())


def test_many_rare_sources_never_ask_for_a_negative_number_of_draws():
    weights = np.random.default_rng(0).uniform(0.00001, 1, 40) ** 6
    planned = plan([source(str(n), w, 2, 1) for n, w in enumerate(weights)], window=64)
    draws = draws_of_windows(planned, 20)
    assert [draw.id for draw in draws] == list(range(20 * 64))


def five():
    """Weights that are no multiples of each other, one to three cameras, up to three wordings."""
    return [
        source("a", 0.37, 900, 1),
        source("b", 0.211, 400, 2, 1, wordings=2),
        source("c", 0.1, 1500, 3, 2, wordings=3),
        source("d", 0.29, 300, 2, 3),
        source("e", np.pi / 100, 40, 3, 4),
    ]


@pytest.mark.parametrize(("tokens", "places"), [(36, 450), (256, 2000)])
def test_rows_are_99_percent_full_on_one_to_three_cameras(tokens, places):
    sources = five()
    fitted = fit_layout(*typical_costs(sources), layout(places, places, 16, places, tokens, 1))
    fill = Plan(sources, fitted, 64).fill(range(70))
    assert fill.prefix >= 0.99
    assert fill.images >= 0.99


@pytest.mark.slow
def test_ranks_with_four_rows_or_more_wait_less_than_2_percent_for_the_slowest():
    sources = five()
    fitted = fit_layout(*typical_costs(sources), layout(2000, 2000, 16, 2000, 256, 1))
    packed = Plan(sources, fitted, 64)
    for ranks in (4, 8, 16):
        planned = Plan(sources, fitted, 64, ranks=ranks)
        found = np.mean([planned.excess(step) for step in range(70)])
        assert found < 0.02
        assert found < np.mean([excess(packed.costs(step), ranks) for step in range(70)]) / 4


def test_ranks_change_the_order_of_a_steps_rows_and_nothing_else(mixture):
    whole, shared = plan(mixture), plan(mixture, ranks=8)
    assert shared.digest == whole.digest
    for step in (0, whole.rows_per_window // 32, 9):
        assert sorted(shared.rows(step)) == sorted(whole.rows(step))
        assert shared.rows(step) != whole.rows(step)
        assert shared.draws(step, 4, 8).id.tolist() == [
            draw.id for row in shared.rows(step)[4:8] for draw in row
        ]


def test_the_excess_is_of_squared_lengths(mixture):
    planned, lengths = plan(mixture, ranks=4), []
    for row in planned.rows(5):
        images = [1 + draw.source for draw in row]
        text = [mixture[d.source].text[d.task, d.wording] for d in row]
        lengths.append(sum((36 * i + t + 1) ** 2 for i, t in zip(images, text, strict=True)))
    shares = np.reshape(lengths, (4, 8)).sum(axis=1)
    assert planned.costs(5).tolist() == lengths
    assert planned.excess(5) == pytest.approx(shares.max() / shares.mean() - 1)


def test_rows_that_do_not_divide_among_ranks_are_refused(mixture):
    with pytest.raises(ValueError, match="32 rows a step do not divide among 5 ranks"):
        plan(mixture, ranks=5)


@pytest.mark.parametrize("window", [60, 1024])
@pytest.mark.parametrize("samples", [1, 10])
def test_rows_keep_every_budget(window, samples):
    mixed = source("mixed", 0.4, 200, 1, 5, wordings=3)
    mixed.images[:] = np.random.default_rng(0).choice([0, 1, 3], 200, p=[0.01, 0.6, 0.39])
    sources = [*five(), mixed]
    lay = replace(LAYOUT, samples=samples, prefix=330, text=100)
    planned = Plan(sources, lay, 32, window=window)
    rows = planned.draws(0, 0, 40 * planned.rows_per_window)
    images, text = planned.kinds[:, rows.kind]
    assert np.all(text == [sources[s].text[t, w] for s, t, w in zip(*rows_of(rows), strict=True)])
    row = np.repeat(np.arange(rows.number), np.diff(rows.offsets))
    assert_within(lay, row, images, text)


def rows_of(rows):
    return rows.source, rows.task, rows.wording


def test_fill_counts_the_places_that_rows_use(mixture):
    planned = plan(mixture)
    fill = planned.fill([3, 4])
    rows = planned.rows(3) + planned.rows(4)
    used = [
        (draw.source + 1, mixture[draw.source].text[draw.task, draw.wording])
        for row in rows
        for draw in row
    ]
    images, text = sum(u[0] for u in used), sum(u[1] for u in used)
    assert fill.images == pytest.approx(images / (64 * LAYOUT.images))
    assert fill.prefix == pytest.approx((36 * images + text + len(used)) / (64 * LAYOUT.prefix))
    assert fill.samples == pytest.approx(len(used) / 64)


def test_a_sample_too_large_for_a_row_is_refused_by_its_episode(mixture):
    text = mixture[1].text.copy()
    text[mixture[1].runs.task[7], 0] = 321
    with pytest.raises(
        ValueError, match=r"'two', episode 14: a sample needs 321 text places, but a row has 320"
    ):
        plan((mixture[0], replace(mixture[1], text=text)))
    with pytest.raises(ValueError, match=r"needs .* prefix places, but a row has 90"):
        Plan(mixture, replace(LAYOUT, prefix=90), 32)


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf")])
def test_a_weight_that_is_not_positive_is_refused(mixture, weight):
    with pytest.raises(ValueError, match="'one' has weight"):
        plan((replace(mixture[0], weight=weight), mixture[1]))


def test_a_source_without_samples_is_refused(mixture):
    none = np.zeros(0, np.int64)
    empty = PlanSource("empty", 1.0, Runs(none, none, none, none), none, np.ones((1, 1), np.int64))
    with pytest.raises(ValueError, match="'empty' has no samples"):
        plan((*mixture, empty))


def test_a_task_without_a_wording_is_refused(mixture):
    text = mixture[0].text.copy()
    text[mixture[0].runs.task[4]] = 0
    with pytest.raises(ValueError, match=r"'one', episode 8: its task \d+ has no wording"):
        plan((replace(mixture[0], text=text), mixture[1]))


def test_the_task_of_a_draw_is_its_runs(mixture):
    tasks = [dict(zip(s.runs.episode.tolist(), s.runs.task.tolist(), strict=True)) for s in mixture]
    draws = [draw for row in plan(mixture).rows(2) for draw in row]
    assert all(draw.task == tasks[draw.source][draw.episode] for draw in draws)


def test_every_wording_of_a_task_is_drawn_equally_often(mixture):
    draws = [d for d in draws_of_windows(plan(mixture), 24) if d.source == 1]
    text = mixture[1].text
    for wordings in (1, 2, 3):
        own = [d for d in draws if np.count_nonzero(text[d.task]) == wordings]
        counts = np.bincount([d.wording for d in own], minlength=3)
        assert np.all(counts[wordings:] == 0)
        assert np.abs(counts[:wordings] / len(own) - 1 / wordings).max() < 0.03


def test_a_frame_is_told_in_all_wordings_of_its_task(mixture):
    told = defaultdict(set)
    for draw in draws_of_windows(plan(mixture), 40):
        if draw.source == 1:
            told[draw.episode, draw.frame, draw.task].add(draw.wording)
    complete = [
        len(wordings) == np.count_nonzero(mixture[1].text[task])
        for (_, _, task), wordings in told.items()
    ]
    assert np.mean(complete) > 0.95


def test_draws_stay_inside_their_runs():
    """Two runs of one episode with other tasks and a gap between them."""
    runs = Runs(*np.array([[5, 5], [2, 20], [10, 7], [1, 0]]))
    data = PlanSource("gap", 1.0, runs, np.ones(2, np.int64), np.array([[9], [12]]))
    frames = {0: set(), 1: set()}
    for row in plan([data], window=64).rows(0):
        for draw in row:
            assert draw.episode == 5
            frames[draw.task].add(draw.frame)
    assert frames == {1: set(range(2, 12)), 0: set(range(20, 27))}


def test_typical_costs_are_those_of_the_draws(mixture):
    images, text = typical_costs(mixture, 4000)
    drawn = draws_of_windows(plan(mixture), 16)
    share = np.mean([d.source == 1 for d in drawn])
    mean = np.mean([mixture[d.source].text[d.task, d.wording] for d in drawn])
    assert 4000 <= len(images) < 4200
    assert np.mean(images == 2) == pytest.approx(share, abs=0.02)
    assert text.mean() == pytest.approx(mean, abs=1)


def test_a_million_episodes_are_planned_in_memory_that_follows_their_metadata():
    rng = np.random.default_rng(0)
    size = 1_000_000
    runs = Runs(
        np.arange(size),
        np.zeros(size, np.int64),
        rng.integers(8, 200, size),
        rng.integers(0, 50_000, size),
    )
    text = rng.integers(5, 61, (50_000, 1))
    tracemalloc.start()
    planned = Plan([PlanSource("large", 1.0, runs, np.ones(size, np.int64), text)], LAYOUT, 64)
    kept, peak = tracemalloc.get_traced_memory()
    planned.draws(10**9)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 40 * size
    assert peak < 200 * size
    assert after - kept < 4_000_000
