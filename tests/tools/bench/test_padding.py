"""Rows of the packing benchmark hold the same samples, and the padding that was asked for."""

from dataclasses import replace

import numpy as np
import pytest

from tools.bench.data.packing import mixture, packed, padded
from tools.bench.data.padding import CASES, Padding, compared, forms, lengths, micro_batches
from tools.bench.models.pi05 import wide
from tools.recipes.presets import TINY

CONFIG = replace(wide(2), image_size=28)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_padded_rows_have_the_padding_asked_for_and_packed_rows_none(case):
    made = {name: batch.prefix_segment > 0 for name, batch in forms(case, CONFIG).items()}
    assert made["padded"].size == case.places
    assert 1 - made["padded"].mean() == pytest.approx(case.padding, abs=0.002)
    rows = len(made["packed"])
    assert rows == -(-made["packed"].sum() // 16_384)
    assert made["packed"].mean() == 1 if rows == 1 else made["packed"].mean() > 0.99
    assert made["packed"].sum() == made["padded"].sum()
    for of in made.values():
        assert len(of) % micro_batches(*of.shape, CONFIG) == 0


def test_micro_batches_are_equal_and_small_enough_and_small_widths_need_none():
    assert micro_batches(16, 2048, CONFIG) == 2  # 32,768 places of the released width
    assert micro_batches(15, 2048, CONFIG) == 3
    assert micro_batches(7, 4096, CONFIG) == 7
    assert micro_batches(2, 16_390, CONFIG) == 2
    samples = mixture(256)
    for batch in (packed(samples), padded(samples)):
        assert micro_batches(*batch.prefix_segment.shape, TINY.model) == 1


def test_both_forms_hold_the_same_samples():
    made = forms(Padding(512, 0.5, 1), CONFIG)
    packed, padded = made["packed"], made["padded"]
    np.testing.assert_array_equal(packed.sample_id[0], padded.sample_id[:, 0])
    np.testing.assert_array_equal(packed.images[0], padded.images[:, 0])
    words = padded.prefix_segment.sum(1) - CONFIG.tokens_per_image
    text = np.concatenate([row[:n] for row, n in zip(padded.text, words, strict=True)])
    np.testing.assert_array_equal(packed.text[0], text)


def test_more_padding_than_samples_can_leave_is_refused():
    with pytest.raises(ValueError, match=r"padding is 0\.95 of 16 rows of 128.*expected 5 to 128"):
        lengths(128, 16, 0.95, 5)


@pytest.mark.slow
def test_of_places_saved_is_the_ratio_of_times_over_that_of_places():
    made = forms(Padding(512, 0.4, 1, samples=4), TINY.model)
    found = compared(TINY.model, TINY.optimizer, made, 1)
    places = found["places"]["padded"] / found["places"]["packed"]
    assert places == pytest.approx(1 / 0.6, rel=0.02)
    assert found["of_places_saved"] == pytest.approx(found["ratio"] / places)
    assert found["ratio"] == pytest.approx(found["seconds"]["padded"] / found["seconds"]["packed"])
