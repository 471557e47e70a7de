import json
import pickle
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from data.frames import Runs
from data.plan import Plan, Source, typical_costs
from tests.data.test_packing import layout

LAYOUT = layout(512, 12, 10, 320, 36, 1)


def source(name, weight, episodes, cameras, seed=0, wordings=1):
    """Every second episode, each a run from frame 3 on with a task of its own."""
    rng = np.random.default_rng(seed)
    task = rng.permutation(episodes)
    length = rng.integers(1, 40, episodes)
    text = rng.integers(5, 61, (episodes, wordings))
    text[:, 1:] *= np.arange(1, wordings) <= (np.arange(episodes) % wordings)[:, None]
    runs = Runs(np.arange(episodes) * 2, np.full(episodes, 3), length, task)
    return Source(name, weight, runs, np.full(episodes, cameras), text)


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


def test_an_anchor_changes_nothing_but_what_is_planned(mixture):
    whole = plan(mixture)
    for step in (0, 1, 9, 40):
        position = json.loads(json.dumps(whole.position(step)))
        resumed = plan(mixture, anchor=position)
        assert resumed.rows(step) == whole.rows(step)
        assert resumed.rows(step + 30) == whole.rows(step + 30)
        assert resumed.position(step + 30) == whole.position(step + 30)


def test_a_step_before_the_anchor_is_refused(mixture):
    position = plan(mixture).position(40)
    with pytest.raises(ValueError, match="before the plan's anchor"):
        plan(mixture, anchor=position).rows(0)


def test_another_seed_gives_another_order(mixture):
    assert plan(mixture, seed=1).rows(0) != plan(mixture).rows(0)
    assert plan(mixture, seed=1).digest != plan(mixture).digest


def test_the_digest_names_what_rows_depend_on(mixture):
    assert plan(mixture).digest == plan(mixture, anchor=plan(mixture).position(9)).digest
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


def draws_of_windows(planned, windows):
    """All draws of the first windows, from the row stream, in order of their numbers."""
    rows_before = planned.position(0)[1]
    step, draws = 0, []
    while planned.position(step)[0] <= windows:
        draws += [draw for row in planned.rows(step) for draw in row]
        step += 1
    assert rows_before == 0
    draws.sort(key=lambda draw: draw.id)
    return draws[: windows * planned.window]


def test_every_draw_happens_once(mixture):
    draws = draws_of_windows(plan(mixture), 5)
    assert [draw.id for draw in draws] == list(range(5 * 1024))


def test_every_sample_is_drawn_once_per_epoch(mixture):
    draws = draws_of_windows(plan(mixture), 8)
    for number, data in enumerate(mixture):
        own = [(draw.episode, draw.frame) for draw in draws if draw.source == number]
        every = {
            (episode, frame)
            for episode, first, length, _ in zip(*map(np.ndarray.tolist, data.runs), strict=True)
            for frame in range(first, first + length)
        }
        epochs = len(own) // len(every)
        assert epochs >= 2
        orders = set()
        for epoch in range(epochs):
            drawn = own[epoch * len(every) : (epoch + 1) * len(every)]
            assert set(drawn) == every
            orders.add(tuple(drawn))
        assert len(orders) == epochs


def test_sources_get_exactly_their_weight_of_every_window(mixture):
    weights = (0.7, 0.3, 0.0004)
    sources = (*mixture, source("rare", weights[2], 3, 1))
    draws = draws_of_windows(plan(sources), 6)
    share = np.array(weights) / sum(weights)
    for windows in range(1, 7):
        counts = Counter(draw.source for draw in draws[: windows * 1024])
        for number in range(3):
            assert abs(counts[number] - share[number] * windows * 1024) < 2


def test_many_rare_sources_never_ask_for_a_negative_number_of_draws():
    weights = np.random.default_rng(0).uniform(0.00001, 1, 40) ** 6
    planned = plan([source(str(n), w, 2, 1) for n, w in enumerate(weights)], window=64)
    draws = draws_of_windows(planned, 20)
    assert [draw.id for draw in draws] == list(range(20 * 64))


@pytest.mark.parametrize(
    "per_image",
    [16, 36, 64],
)
def test_fill_is_at_least_97_percent_on_one_and_two_cameras(per_image):
    sources = source("one", 0.5, 400, 1), source("two", 0.5, 400, 2, seed=1)
    lay = layout(768, 24, 16, 512, per_image, 1)
    fill = Plan(sources, lay, 64).fill(range(20))
    assert fill.prefix >= 0.97


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
    empty = Source("empty", 1.0, Runs(none, none, none, none), none, np.ones((1, 1), np.int64))
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


def test_draws_stay_inside_their_runs():
    """Two runs of one episode with other tasks and a gap between them."""
    runs = Runs(*np.array([[5, 5], [2, 20], [10, 7], [1, 0]]))
    data = Source("gap", 1.0, runs, np.ones(2, np.int64), np.array([[9], [12]]))
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
