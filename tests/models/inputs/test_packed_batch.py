"""Laying samples into rows, and the preparation that training and acting share."""

import dataclasses

import numpy as np
import pytest

from models import Embodiment, Normalizer, Sample, pack
from models.inputs.packed_batch import image_segments, lay_out
from models.inputs.prompts import TemplatePrompt, template
from models.inputs.tokenizer import BOS, Tokenizer
from tests.helpers.models.processors import tokens_of, word_processor
from tests.helpers.models.rows import LAYOUT, sample


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


def test_image_slots_belong_to_the_sample_whose_pictures_they_hold():
    beside = [
        dataclasses.replace(sample(1, 3, 10), image_at=(2,)),
        sample(0, 2, 5),
        sample(1, 1, 2),
    ]
    batch = pack([beside, [sample(0, 2, 20)], [sample(3, 1, 1)]], LAYOUT)
    owners = image_segments(batch, [LAYOUT.tokens_per_image])
    np.testing.assert_array_equal(owners, [[1, 3, 0], [0, 0, 0], [1, 1, 1]])


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
PROCESSOR = word_processor(
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
    reader = TemplatePrompt(PROCESSOR.tokenizer, template=template("text"))
    spelt = dataclasses.replace(PROCESSOR, state_input="text", prompts=reader)
    low, high = (tokens_of(spelt, "lift", np.asarray([x])) for x in (-1.0, 0.999))
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


def random_sample(rng, lay):
    images, text = int(rng.integers(0, 3)), int(rng.integers(0, 7))
    subtask, tokens = rng.integers(0, 3, 2)
    at = tuple(sorted(rng.integers(0, text + 1, images).tolist())) if rng.random() < 0.5 else ()
    shape = (lay.image_size, lay.image_size, 3)
    chunk = (lay.horizon, lay.action_dim)
    return Sample(
        images=tuple(rng.integers(0, 256, shape).astype(np.uint8) for _ in range(images)),
        text=rng.integers(1, 99, text).astype(np.int32),
        state=rng.normal(size=lay.state_dim).astype(np.float32),
        actions=rng.normal(size=chunk).astype(np.float32),
        action_mask=rng.random(chunk) < 0.5,
        embodiment=int(rng.integers(5)),
        weight=float(np.float32(rng.random())),
        id=int(rng.integers(1 << 40)),
        image_at=at,
        subtask=rng.integers(1, 9, subtask).astype(np.int32),
        action_tokens=rng.integers(1, 9, tokens).astype(np.int32),
        cameras=tuple(rng.permutation(4)[:images].tolist()),
    )


def place_by_place(row, lay):
    """Source, segment and position of a row's prefix, one place after the other."""
    places, image_slot, text_place = [], 0, 0
    for j, made in enumerate(row):
        at = made.image_at or (0,) * len(made.images)
        own = []
        for word in range(len(made.text) + 1):
            for k, before in enumerate(at):
                if before == word:
                    first = (image_slot + k) * lay.tokens_per_image
                    own += range(first, first + lay.tokens_per_image)
            if word < len(made.text):
                own.append(lay.images * lay.tokens_per_image + text_place + word)
        own += [lay.images * lay.tokens_per_image + lay.text + j] * lay.state_tokens
        places += [(place, j + 1, position) for position, place in enumerate(own)]
        image_slot, text_place = image_slot + len(made.images), text_place + len(made.text)
    places += [(0, 0, 0)] * (lay.prefix - len(places))
    return np.array(places).T


@pytest.mark.parametrize("seed", range(20))
def test_rows_of_any_samples_are_those_laid_place_by_place(seed):
    rng = np.random.default_rng(seed)
    lay = dataclasses.replace(
        LAYOUT, prefix=60, images=6, text=20, targets=4,
        tokens_per_image=int(rng.integers(1, 5)), state_tokens=int(rng.integers(2)),
    )  # fmt: skip
    counts = rng.integers(0, lay.samples + 1, rng.integers(0, 6))
    rows = [[random_sample(rng, lay) for _ in range(count)] for count in counts]
    batch = pack(rows, lay)
    assert batch.images.shape == (len(rows), lay.images, 4, 4, 3)
    for i, row in enumerate(rows):
        prefix = batch.prefix_source[i], batch.prefix_segment[i], batch.prefix_position[i]
        np.testing.assert_array_equal(prefix, place_by_place(row, lay))
        images = [image for made in row for image in made.images]
        cameras = [camera for made in row for camera in made.cameras]
        words = [word for made in row for word in made.text]
        for array, filled in (
            (batch.images[i], images),
            (batch.image_camera[i], cameras),
            (batch.text[i], words),
        ):
            assert not array[len(filled) :].any()
            if filled:
                np.testing.assert_array_equal(array[: len(filled)], filled)
        for name in ("state", "actions", "action_mask", "embodiment", "weight"):
            array = getattr(batch, name)[i]
            assert not array[len(row) :].any()
            for j, made in enumerate(row):
                np.testing.assert_array_equal(array[j], getattr(made, name))
        for j, made in enumerate(row):
            assert np.uint32(batch.sample_id[i, j].astype(np.int64) & 0xFFFFFFFF) == made.id % 2**32
            targets, kinds = batch.targets[i, j].tolist(), batch.target_kind[i, j].tolist()
            ends = len(made.subtask), len(made.subtask) + len(made.action_tokens)
            assert targets[: ends[1]] == [*made.subtask, *made.action_tokens]
            assert kinds == [
                1 if n < ends[0] else 2 if n < ends[1] else 0 for n in range(lay.targets)
            ]


def test_lent_memory_is_blackened_where_no_sample_has_a_picture():
    memory = np.full((2, 3, 4, 4, 3), 9, np.uint8)
    text = [np.zeros(1, np.int32)] * 3
    arrays, at = lay_out(np.array([1, 2]), np.array([1, 0, 2]), text, LAYOUT, pictures=[memory])
    assert arrays["images"] is memory
    np.testing.assert_array_equal(memory[:, :, 0, 0, 0], [[9, 0, 0], [9, 9, 0]])
    np.testing.assert_array_equal(at[:2], [[0, 1, 1], [0, 0, 1]])
    np.testing.assert_array_equal(at.image, [[0, -1], [-1, -1], [0, 1]])
