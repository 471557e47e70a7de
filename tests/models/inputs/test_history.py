"""Past observations in rows: laid beside the present, whatever a sample is packed with, and nothing
at all where a model reads none."""

import jax
import numpy as np
import pytest

from models import Embodiment, Normalizer
from models.inputs.history import NOW, History
from models.inputs.packed_batch import count_code, image_segments, most_images, pack
from models.inputs.tokenizer import Tokenizer
from models.layers.siglip import SiglipConfig
from tests.own_smol import SmolConfig

TOWER = SiglipConfig(width=16, depth=1, hidden=16, heads=2, patch=8)
CONFIG = SmolConfig(
    vision=TOWER, width=16, depth=1, heads=2, image_size=16, state_dim=2, action_dim=2, horizon=3
)
ROBOT = Embodiment(
    "point", ("front", "wrist"), Normalizer.identity(2), Normalizer.identity(2), absent=("wrist",)
)
PROCESSOR = CONFIG.processor([ROBOT], Tokenizer(("push", "pull")))


def sample(number):
    """Samples with one or two cameras and with more or less of the past."""
    rng = np.random.default_rng(number)
    front, wrist, old = rng.integers(0, 256, (3, 20, 30, 3), dtype=np.uint8)
    states = [rng.normal(size=2) if age < number else None for age in range(3)]
    return PROCESSOR.sample(
        [front, wrist if number % 2 else None],
        rng.normal(size=2),
        "push",
        actions=rng.normal(size=(3, 2)),
        past={"state": states, "front": [(None, front, old)[number % 3]]},
        id=number,
    )


SAMPLES = [sample(number) for number in range(4)]


def batch(samples, room=1):
    images = int(count_code(np.array([2 * room, 2 * room])))
    layout = CONFIG.layout(prefix=12 * room, samples=room, images=images, text=4 * room)
    return pack([samples], layout)


def test_a_samples_loss_does_not_depend_on_what_it_is_packed_with():
    model, key = CONFIG.build(), jax.random.key(1)
    loss = jax.value_and_grad(lambda p, b: model.loss(p, b, key)[0])
    params = model.init(jax.random.key(0))
    alone = [loss(params, batch([one])) for one in SAMPLES]
    together = loss(params, batch(SAMPLES, 4))
    summed = jax.tree.map(lambda *x: sum(x), *alone)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), together, summed
    )
    silent = [
        loss(
            params,
            batch([PROCESSOR.sample([np.zeros((9, 9, 3), np.uint8), None], np.zeros(2), "push")]),
        )[0]
    ]
    assert silent[0] == 0, "nothing to learn from"


def test_past_pictures_take_slots_of_their_own_and_no_place_of_the_prefix():
    rows = batch(SAMPLES, 4)
    (earlier,), now = rows.more_images, rows.images.shape[1]
    assert rows.image_age[0, :now].tolist() == [0] * now
    owner = np.asarray(image_segments(rows, [4]))[0]
    assert owner.tolist() == [1, 2, 2, 3, 4, 4, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0]
    assert rows.image_past[0, :6, 0].tolist() == [-1, 1, -1, now, -1, -1], "a camera's own"
    np.testing.assert_array_equal(earlier[0, 0], SAMPLES[2].past[0][0])
    assert not earlier[0, 1:].any()
    assert (rows.prefix_segment > 0).sum() == sum(
        4 * len(s.images) + len(s.text) + 1 for s in SAMPLES
    )
    assert rows.past_state_mask[0].sum(-1).tolist() == [0, 1, 2, 3]
    np.testing.assert_array_equal(rows.past_state[0, 3, 2], SAMPLES[3].past_state[2])


def test_a_model_of_the_present_has_no_array_more():
    plain = SmolConfig(vision=TOWER, memory=())
    assert plain.observed == NOW
    layout = plain.layout(prefix=40, samples=1, images=1)
    assert layout.more == ()
    empty = pack([[]], layout)
    assert empty.more_images == ()
    assert len(jax.tree.leaves(empty)) == 14


def test_the_past_is_as_old_at_any_rate():
    history = History((("state", (1, 2, 4)),), "mask")
    at, read = history.frames(history.state, np.array([0, 3, 20]), 2.5)
    assert at.tolist() == [[0, 0, 0], [0, 0, 0], [17, 15, 10]]
    assert read.tolist() == [[False] * 3, [True, False, False], [True] * 3]
    assert History(history.ago).frames(history.state, np.array([0]), 2.5)[1].all()


def test_rows_have_room_for_all_of_the_past():
    layout = CONFIG.layout(prefix=0, samples=1, images=0)
    assert most_images(SAMPLES[:1], layout) == count_code(np.array([1, 1]))
    assert most_images(SAMPLES, layout) == count_code(np.array([2, 2]))


@pytest.mark.parametrize(
    "ago",
    [
        (("state", (0, 1)),),
        (("state", (2, 1)),),
        (("front", ()),),
        (("state", (1,)), ("state", (2,))),
    ],
)
def test_steps_that_are_not_back_in_order_are_refused(ago):
    with pytest.raises(ValueError, match=r"observed.ago of '\w+' is .*ascending order"):
        History(ago)


def test_a_past_of_another_length_is_refused():
    with pytest.raises(ValueError, match="past of 'state' has 1 values, but the policy reads 3"):
        PROCESSOR.sample([None, None], np.zeros(2), "push", past={"state": [np.zeros(2)]})
