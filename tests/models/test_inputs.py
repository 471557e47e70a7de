"""Laying samples into rows, and the preparation that training and acting share."""

import dataclasses

import numpy as np
import pytest

from models import Embodiment, Layout, Normalizer, Processor, Sample, pack
from models.tokenizer import BOS, Tokenizer

LAYOUT = Layout(
    prefix=24, images=3, samples=3, text=12, image_size=4, tokens_per_image=4, state_tokens=1,
    state_dim=2, horizon=2, action_dim=3,
)  # fmt: skip


def sample(images: int, text: int, value: int) -> Sample:
    return Sample(
        images=tuple(np.full((4, 4, 3), value + i, np.uint8) for i in range(images)),
        text=np.arange(value, value + text, dtype=np.int32),
        state=np.full(2, value, np.float32),
        actions=np.full((2, 3), value, np.float32),
        action_mask=np.ones((2, 3), bool),
        id=value,
    )


def test_every_place_of_a_row_points_at_what_belongs_to_its_sample():
    row = [sample(1, 3, 10), sample(2, 2, 20)]
    batch = pack([row], LAYOUT)
    text_base, state_base = 12, 24
    first = [0, 1, 2, 3, text_base, text_base + 1, text_base + 2, state_base]
    second = [*range(4, 12), text_base + 3, text_base + 4, state_base + 1]
    np.testing.assert_array_equal(batch.prefix_source[0, :19], first + second)
    np.testing.assert_array_equal(batch.prefix_segment[0], [1] * 8 + [2] * 11 + [0] * 5)
    np.testing.assert_array_equal(batch.prefix_position[0, :19], [*range(8), *range(11)])
    np.testing.assert_array_equal(batch.text[0, :5], [10, 11, 12, 20, 21])
    np.testing.assert_array_equal(batch.images[0, :, 0, 0, 0], [10, 20, 21])
    np.testing.assert_array_equal(batch.weight[0], [1, 1, 0])


def test_images_stand_among_the_text_where_a_sample_says():
    row = [
        dataclasses.replace(sample(2, 3, 10), image_at=(1, 3)),
        dataclasses.replace(sample(1, 2, 20), image_at=(1,)),
    ]
    batch = pack([row], LAYOUT)
    first = [12, *range(4), 13, 14, *range(4, 8), 24]
    second = [15, *range(8, 12), 16, 25]
    np.testing.assert_array_equal(batch.prefix_source[0, :19], first + second)
    np.testing.assert_array_equal(batch.prefix_position[0, :19], [*range(12), *range(7)])


@pytest.mark.parametrize("at", [(0,), (2, 1), (0, 4), (-1, 0)])
def test_a_place_for_an_image_that_is_not_among_the_text_is_refused(at):
    with pytest.raises(ValueError, match=r"image_at is .* its 2 images"):
        pack([[dataclasses.replace(sample(2, 3, 10), image_at=at)]], LAYOUT)


@pytest.mark.parametrize(
    ("row", "budget"),
    [
        ([sample(1, 1, 1)] * 4, "samples"),
        ([sample(2, 1, 1)] * 2, "images"),
        ([sample(0, 7, 1)] * 2, "text"),
        ([sample(3, 12, 1)], "prefix"),
    ],
)
def test_a_row_that_does_not_fit_is_refused_by_the_name_of_its_budget(row, budget):
    with pytest.raises(ValueError, match=budget):
        pack([row], LAYOUT)


ROBOT = Embodiment(
    "arm", ("front",), Normalizer((1.0,), (2.0,)), Normalizer((0.0, 3.0), (1.0, 4.0))
)
PROCESSOR = Processor(
    image_size=4, state_dim=2, action_dim=3, horizon=2, state_input="token",
    words=("lift", "red"), embodiments=(ROBOT,),
)  # fmt: skip
IMAGE = np.zeros((4, 4, 3), np.uint8)


def test_actions_come_back_in_the_robots_units():
    actions = np.asarray([[0.5, 7.0], [-1.0, 2.0]], np.float32)
    made = PROCESSOR.sample([IMAGE], np.ones(1), "lift", actions=actions)
    np.testing.assert_allclose(PROCESSOR.actions(made.actions), actions, rtol=1e-6)
    np.testing.assert_array_equal(made.action_mask, [[True, True, False]] * 2)


def test_steps_past_the_episodes_end_are_masked_and_zero():
    actions = np.full((2, 2), 5.0, np.float32)
    valid = np.asarray([True, False])
    made = PROCESSOR.sample([IMAGE], np.ones(1), "lift", actions=actions, valid=valid)
    assert not made.action_mask[1].any()
    assert not made.actions[1].any()


def test_state_text_spells_256_bins_of_the_normalised_state():
    spelt = dataclasses.replace(PROCESSOR, state_input="text")
    low, high = (spelt.tokens("lift", np.asarray([x])) for x in (-1.0, 0.999))
    expected = spelt.tokenizer.encode("Task: lift, State: 0;\nAction: ")
    np.testing.assert_array_equal(low, expected)
    np.testing.assert_array_equal(high, spelt.tokenizer.encode("Task: lift, State: 255;\nAction: "))


@pytest.mark.parametrize(
    ("images", "state", "actions", "message"),
    [
        ([], np.ones(1), None, "got 0 images"),
        ([IMAGE], np.ones(3), None, "1 state dims, got 3"),
        ([IMAGE], np.ones(1), np.ones((2, 5)), r"got \(2, 5\)"),
    ],
)
def test_an_observation_of_another_robot_is_refused(images, state, actions, message):
    with pytest.raises(ValueError, match=message):
        PROCESSOR.sample(images, state, "lift", actions=actions)


def test_pictures_are_padded_to_a_square_with_their_aspect_kept():
    wide = np.full((2, 8, 3), 200, np.uint8)
    made = PROCESSOR.sample([wide], np.ones(1), "lift").images[0]
    np.testing.assert_array_equal(made[:, 0, 0], [0, 200, 0, 0])


def test_words_known_and_unknown_have_ids_of_their_own():
    tokenizer = Tokenizer.build(["lift the red block", "lift the blue block"], vocabulary=262)
    assert len(tokenizer.words) == 4
    known = tokenizer.encode("lift the block")
    assert known[0] == BOS
    assert (known[1:] >= 258).all()
    spelt = tokenizer.encode("lift zürich")
    assert len(spelt) == 2 + len("zürich".encode())
    assert (spelt[2:] < 258).all()
