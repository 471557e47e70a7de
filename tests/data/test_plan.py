import json
import pickle
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from data.plan import Plan, Source
from tests.data.test_packing import layout

LAYOUT = layout(512, 12, 10, 320, 36, 1)


def source(name, weight, episodes, cameras, seed=0):
    rng = np.random.default_rng(seed)
    return Source(
        name,
        weight,
        np.arange(episodes) * 2,
        rng.integers(1, 40, episodes),
        np.full(episodes, cameras),
        rng.integers(5, 61, episodes),
    )


@pytest.fixture(scope="module")
def mixture():
    return source("one", 0.7, 60, 1), source("two", 0.3, 25, 2, seed=1)


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
    longer = replace(mixture[1], lengths=mixture[1].lengths + 1)
    assert plan((mixture[0], longer)).digest != plan(mixture).digest


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
            for episode, length in zip(data.episodes.tolist(), data.lengths.tolist(), strict=True)
            for frame in range(length)
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
    costs = {
        (number, int(episode)): (int(images), int(text))
        for number, s in enumerate(mixture)
        for episode, images, text in zip(s.episodes, s.images, s.text, strict=True)
    }
    rows = planned.rows(3) + planned.rows(4)
    used = [costs[draw.source, draw.episode] for row in rows for draw in row]
    images, text = sum(u[0] for u in used), sum(u[1] for u in used)
    assert fill.images == pytest.approx(images / (64 * LAYOUT.images))
    assert fill.prefix == pytest.approx((36 * images + text + len(used)) / (64 * LAYOUT.prefix))
    assert fill.samples == pytest.approx(len(used) / 64)


def test_a_sample_too_large_for_a_row_is_refused_by_its_episode(mixture):
    mixture[1].text[7], before = 321, mixture[1].text[7]
    with pytest.raises(
        ValueError, match=r"'two', episode 14: a sample needs 321 text places, but a row has 320"
    ):
        plan(mixture)
    mixture[1].text[7] = before
    with pytest.raises(ValueError, match=r"needs .* prefix places, but a row has 90"):
        Plan(mixture, replace(LAYOUT, prefix=90), 32)


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf")])
def test_a_weight_that_is_not_positive_is_refused(mixture, weight):
    with pytest.raises(ValueError, match="'one' has weight"):
        plan((replace(mixture[0], weight=weight), mixture[1]))


def test_a_source_without_samples_is_refused(mixture):
    none = np.zeros(0, np.int64)
    empty = Source("empty", 1.0, none, none, none, none)
    with pytest.raises(ValueError, match="'empty' has no samples"):
        plan((*mixture, empty))
