import numpy as np
import pytest

from data.packing.packing import assign_rows, fit_layout, pack_kinds
from tests.helpers.data.layouts import layout, samples

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
    for amount, budget in (
        (images, lay.images),
        (text, lay.text),
        (np.ones_like(text), lay.samples),
        (images * lay.tokens_per_image + text + lay.state_tokens, lay.prefix),
    ):
        assert np.bincount(rows, weights=amount).max() <= budget


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


@pytest.mark.parametrize("cameras", [(1,), (2,), (1, 2), (1, 2, 3)])
def test_fitted_budgets_fill_prefix_and_image_slots_to_99_percent(cameras):
    lay = layout(2048, 99, 16, 999, 256)
    images, text = samples(cameras)
    fitted = fit_layout(images, text, lay)
    assert fitted.prefix <= lay.prefix
    rows, _ = pack(images, text, fitted)
    assert (images * 256 + text).sum() / (rows * fitted.prefix) >= 0.99
    assert images.sum() / (rows * fitted.images) >= 0.99


def test_a_single_kind_fills_rows_with_as_many_as_fit():
    rows, _ = pack(np.full(100, 2), np.full(100, 8), layout(250, 6, 9, 100, 36))
    assert rows == 34


def test_a_sample_larger_than_the_prefix_is_refused():
    with pytest.raises(
        ValueError, match=r"layout\.prefix is 100, but the largest sample takes 260"
    ):
        fit_layout(np.array([1]), np.array([4]), layout(100, 1, 1, 10, 256))
