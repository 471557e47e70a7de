from dataclasses import replace

import numpy as np
import pytest

from data.frames import Runs
from data.packing.order import PlanSource
from data.packing.packing import assign_rows, fit_layout, pack_kinds
from data.packing.plan import Plan
from models.inputs.packed_batch import ImageSlots, count_code, counts_of
from tests.helpers.data.layouts import assert_within, layout, samples

MIXTURES = {
    "one and two cameras of 36 tokens": (layout(512, 12, 10, 320, 36, 1), (1, 2)),
    "one and two cameras of 16 tokens": (layout(512, 16, 12, 512, 16, 1), (1, 2)),
    "one and two cameras of 256 tokens": (layout(1952, 7, 7, 192, 256), (1, 2)),
    "one camera of 256 tokens": (layout(2048, 7, 7, 256, 256), (1,)),
    "one to three cameras of 64 tokens": (layout(1024, 14, 12, 400, 64, 1), (1, 2, 3)),
}


def pack(images, text, lay):
    kinds, kind, counts = np.unique(
        np.stack([images, text]), axis=1, return_inverse=True, return_counts=True
    )
    packing = pack_kinds(kinds[0], kinds[1], counts, lay)
    return packing.rows, assign_rows(packing, kind.reshape(-1))


@pytest.mark.parametrize("name", MIXTURES)
def test_rows_keep_every_budget_and_hold_every_sample_once(name):
    lay, cameras = MIXTURES[name]
    images, text = samples(cameras, 3000)
    count, rows = pack(images, text, lay)
    assert np.array_equal(np.unique(rows), np.arange(count))
    assert_within(lay, rows, images, text)


@pytest.mark.parametrize("name", MIXTURES)
def test_rows_are_nearly_as_full_as_their_budgets_allow(name):
    lay, cameras = MIXTURES[name]
    images, text = samples(cameras)
    rows, _ = pack(images, text, lay)
    needed = max(
        lay.prefix_length(images, text).sum() / lay.prefix,
        images.sum() / lay.images,
        text.sum() / lay.text,
    )
    assert needed / rows >= 0.99


@pytest.mark.parametrize("kinds", [1, 2, 3, 6])
@pytest.mark.parametrize("per_row", [8, 16, 24])
def test_long_rows_of_few_kinds_are_full(kinds, per_row):
    """As of one camera and a handful of prompts."""
    images, text = np.ones(1200, int), 5 + 3 * (np.arange(1200) % kinds)
    own = (64 + text + 1).mean()
    lay = layout(round(1.02 * own * per_row), 9999, per_row + per_row // 4, 9999, 64, 1)
    fitted = fit_layout(images, text, lay)
    rows, _ = pack(images, text, fitted)
    assert own * 1200 / (rows * fitted.prefix) >= 0.98


@pytest.mark.parametrize("cameras", [(1,), (2,), (1, 2), (1, 2, 3)])
def test_fitted_budgets_fill_prefix_and_image_slots_to_99_percent(cameras):
    lay = layout(2048, 99, 16, 999, 256)
    images, text = samples(cameras)
    fitted = fit_layout(images, text, lay)
    assert fitted.prefix <= lay.prefix
    rows, _ = pack(images, text, fitted)
    assert (images * 256 + text).sum() / (rows * fitted.prefix) >= 0.99
    assert images.sum() / (rows * fitted.images) >= 0.99


def fewest(images, text, lay):
    """The fewest rows that hold a few samples, found by trying all ways."""
    every = (1 << len(images)) - 1

    def fits(chosen):
        some = [i for i in range(len(images)) if chosen >> i & 1]
        own = lay.prefix_length(images[some], text[some]).sum()
        within = (len(some) <= lay.samples, images[some].sum() <= lay.images)
        return all(within) and text[some].sum() <= lay.text and own <= lay.prefix

    fitting = [fits(chosen) for chosen in range(every + 1)]
    best = [0] + [len(images)] * every
    for left in range(1, every + 1):
        row, first = left, left & -left
        while row:
            if row & first and fitting[row]:
                best[left] = min(best[left], 1 + best[left ^ row])
            row = (row - 1) & left
    return best[every]


@pytest.mark.parametrize("seed", range(5))
def test_few_samples_are_packed_into_the_fewest_rows(seed):
    rng, lay = np.random.default_rng(seed), layout(24, 4, 5, 14, 4, 1)
    for number in rng.integers(4, 9, 20):
        images, text = rng.integers(1, 4, number), rng.integers(1, 9, number)
        assert pack(images, text, lay)[0] == fewest(images, text, lay)


@pytest.mark.parametrize("seed", range(4))
def test_rows_of_any_budgets_keep_them_and_hold_every_sample_once(seed):
    rng = np.random.default_rng(seed)
    for _ in range(40):
        tokens, states, most, longest = rng.integers((1, 0, 1, 1), (9, 5, 4, 12)).tolist()
        images, text = rng.integers(0, most + 1, 40), rng.integers(1, longest + 1, 40)
        images[0], text[0] = most, longest
        least = most * tokens + longest + states
        prefix, slots, words = (n * int(rng.integers(4, 17)) // 4 for n in (least, most, longest))
        lay = layout(prefix, slots, int(rng.integers(1, 7)), words, tokens, states)
        count, rows = pack(images, text, lay)
        assert np.array_equal(np.unique(rows), np.arange(count))
        assert_within(lay, rows, images, text)


def test_samples_that_nearly_fill_a_prefix_get_rows_of_one():
    images, text = np.array([1, 2, 2]), np.array([30, 8, 9])
    fitted = fit_layout(images, text, layout(100, 9, 9, 99, 36, 10))
    budgets = fitted.samples, fitted.images, fitted.text, fitted.prefix
    assert budgets == (1, 2, 30, 36 * 2 + 9 + 10)


@pytest.mark.parametrize(
    ("tokens", "images", "text", "most", "prefix", "slots"),
    [(10, 1, 20, 90, 90, 3), (24, 1, 1, 101, 100, 4), (24, 2, 5, 55, 53, 2)],
    ids=["no smaller than seven tenths", "as many pictures as fit", "one sample"],
)
def test_samples_that_are_all_alike_fill_their_budgets(tokens, images, text, most, prefix, slots):
    given = layout(most, 99, 16, 99, tokens)
    fitted = fit_layout(np.full(40, images), np.full(40, text), given)
    assert (fitted.prefix, fitted.images) == (prefix, slots)


def test_samples_without_a_picture_count_for_their_text():
    images, text = np.array([0, 1] * 40), np.array([12, 4] * 40)
    fitted = fit_layout(images, text, layout(120, 99, 16, 99, 8))
    rows, _ = pack(images, text, fitted)
    assert (8 * images + text).sum() / (rows * fitted.prefix) >= 0.95


def test_fitted_budgets_hold_any_sample_and_most_of_the_prefix_given():
    images, text = samples((1, 2, 3), 500)
    for prefix in (260, 300, 512, 700):
        fitted = fit_layout(images, text, layout(prefix, 99, 16, 999, 64, 1))
        assert 0.7 * prefix <= fitted.prefix <= prefix
        assert fitted.prefix >= fitted.prefix_length(images, text).max()
        assert fitted.images >= 3
        assert fitted.text >= text.max()


@pytest.mark.slow
@pytest.mark.parametrize(
    "lay",
    [layout(96, 9, 5, 99, 16, 1), layout(120, 9, 6, 99, 8, 10), layout(64, 9, 9, 99, 4)],
    ids=["one place for a state", "ten places for a state", "none"],
)
def test_no_budgets_that_are_tried_waste_a_fifth_of_a_percent_less_than_those_chosen(lay):
    """All that were to be tried are: image slots, and text that is plentiful by up to 8 %."""
    rng = np.random.default_rng(lay.prefix)
    images, text = rng.integers(1, 4, 400), rng.integers(1, 14, 400)
    tokens, states = lay.tokens_per_image, lay.state_tokens
    own = lay.prefix_length(images, text)

    def wasted(budgets):
        rows, _ = pack(images, text, budgets)
        return 1 - (own.sum() + tokens * images.sum()) / rows / (
            budgets.prefix + tokens * budgets.images
        )

    candidates = []
    for slots in range(3, lay.prefix // tokens + 1):
        share = slots / images.sum()
        for margin in (0.0, 0.01, 0.02, 0.04, 0.08):
            words = max(int(np.ceil(text.sum() * share * (1 + margin))), text.max())
            prefix = max(slots * tokens + round(states * len(images) * share) + words, own.max())
            if 0.7 * lay.prefix <= prefix <= lay.prefix:
                samples = min(lay.samples, slots)
                candidates.append(
                    replace(lay, prefix=prefix, images=slots, samples=samples, text=words)
                )
    fitted = fit_layout(images, text, lay)
    assert fitted in candidates
    assert wasted(fitted) <= min(map(wasted, candidates)) + 0.002
    assert wasted(fitted) < np.median([wasted(each) for each in candidates])


def test_a_sample_as_large_as_the_prefix_fits_it():
    lay = fit_layout(np.array([1, 1]), np.array([60, 1]), layout(100, 9, 9, 99, 36, 4))
    assert (lay.prefix, lay.text) == (100, 60)


def test_a_single_kind_fills_rows_with_as_many_as_fit():
    rows, _ = pack(np.full(100, 2), np.full(100, 8), layout(250, 6, 9, 100, 36))
    assert rows == 34


def test_a_sample_larger_than_the_prefix_is_refused():
    with pytest.raises(
        ValueError, match=r"layout\.prefix is 100, but the largest sample takes 260"
    ):
        fit_layout(np.array([1]), np.array([4]), layout(100, 1, 1, 10, 256))


def several_groups(sizes, past):
    """A front and perhaps a wrist camera, each with up to `past` earlier pictures."""
    rng = np.random.default_rng(0)
    shown = np.stack([np.ones(2000, int), rng.integers(0, 2, 2000)], axis=1)
    counts = shown if sizes == 2 else shown.sum(axis=1, keepdims=True)
    text = rng.integers(5, 30, 2000)
    return count_code(np.hstack([counts, counts * past] if past else [counts])), text


@pytest.mark.parametrize(("sizes", "past"), [(2, 0), (1, 5), (2, 3)])
def test_rows_keep_the_budget_of_every_group_of_pictures(sizes, past):
    images, text = several_groups(sizes, past)
    more = [ImageSlots(24, 48, 9)] * (sizes - 1)
    more += [ImageSlots(48, 48, 0, past=True), ImageSlots(24, 48, 0, past=True)][
        : sizes * (past > 0)
    ]
    fitted = fit_layout(images, text, replace(layout(400, 0, 20, 400, 16, 1), more=tuple(more)))
    assert all(group.number for group in fitted.groups)
    count, rows = pack(images, text, fitted)
    assert np.array_equal(np.unique(rows), np.arange(count))
    assert_within(fitted, rows, images, text)
    assert fitted.prefix_length(images, text).sum() / (count * fitted.prefix) > 0.9
    plan = Plan([source_of(images, text)], fitted, 4)
    drawn = [draw for row in plan.rows(0) for draw in row]
    assert 0 < plan.fill(range(3)).images <= 1
    assert len({draw.id for draw in drawn}) == len(drawn)
    with pytest.raises(ValueError, match=r"needs .* images places, but a row has .*; raise layout"):
        Plan([source_of(images, text)], replace(fitted, images=0), 4)


def source_of(images, text):
    """A run of one frame for each sample."""
    every, zeros = np.arange(len(images)), np.zeros(len(images), np.int64)
    runs = Runs(every, zeros, np.ones(len(images), np.int64), every)
    return PlanSource("groups", 1.0, runs, images, text[:, None])


def test_without_pictures_rows_are_filled_by_text():
    text = np.random.default_rng(0).integers(5, 30, 500)
    lay = replace(layout(200, 0, 20, 200, 1, 1), image_size=0)
    fitted = fit_layout(np.zeros(500, np.int64), text, lay)
    count, rows = pack(np.zeros(500, np.int64), text, fitted)
    assert_within(fitted, rows, np.zeros(500, np.int64), text)
    assert (text + 1).sum() / (count * fitted.prefix) > 0.95


def test_more_groups_or_pictures_than_a_number_can_count_are_refused():
    for counts in ([1] * 6, [256, 0]):
        with pytest.raises(ValueError, match="at most 5 groups of fewer than 256"):
            count_code(np.array(counts))
    assert counts_of(count_code(np.array([7, 255, 3])), 3).tolist() == [7, 255, 3]
