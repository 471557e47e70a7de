"""Prompts that enter the vision stem."""

import dataclasses

import numpy as np
import pytest

from models import pack
from models.layers.vision.film import image_prompts
from tests.helpers.models.pi_samples import CONFIG
from tests.helpers.models.rows import LAYOUT, sample


@pytest.mark.parametrize("at", [(), (1, 3)])
def test_an_image_is_told_the_mean_of_its_own_samples_prompt_wherever_it_stands(at):
    first = dataclasses.replace(sample(2, 3, 10), image_at=at)
    batch = pack([[first, sample(1, 2, 20)], [sample(1, 4, 30)]], LAYOUT)
    told = image_prompts(batch, np.stack([batch.text, -batch.text], -1).astype(np.float32), 4)
    means = [11, 11, 20.5, 31.5, 0, 0]  # the second row's last two slots are free
    np.testing.assert_allclose(told, np.stack([means, np.negative(means)], -1), rtol=1e-6)


def test_an_image_is_told_the_order_of_its_prompts_words_wherever_it_lies_in_the_row():
    def told(prompt, before):
        row = [sample(1, before, 50), dataclasses.replace(sample(1, 3, 0), text=np.array(prompt))]
        batch = pack([row], LAYOUT)
        embedding = np.random.default_rng(0).normal(size=(100, 8)).astype(np.float32)
        return image_prompts(batch, embedding[batch.text], 4, ordered=True)[1]

    np.testing.assert_allclose(told([1, 2, 3], 2), told([1, 2, 3], 5), atol=1e-6)
    assert np.abs(told([1, 2, 3], 2) - told([3, 2, 1], 2)).max() > 0.1


def test_the_order_of_words_that_enter_no_vision_stem_is_refused():
    with pytest.raises(ValueError, match=r"film_order is true but model.film is false"):
        CONFIG.changed(film=False, film_order=True)
