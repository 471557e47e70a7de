"""A policy's chunks depend on their own observation and key alone, and few programs serve them."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from models.flow import flow
from models.inputs.observation import inputs_of
from tests.helpers.models.tiny_policy import (
    KEYS,
    PROMPTS,
    openpi,
    programs,
    recorded_groot,
    seen,
    tiny_policy,
)


@pytest.fixture(scope="module")
def policy():
    return tiny_policy()


def test_noise_is_each_keys_own_whatever_is_drawn_beside_it():
    together = flow.noise(jnp.asarray(KEYS), (6, 4))
    for i, key in enumerate(KEYS):
        np.testing.assert_array_equal(together[i], flow.noise(jnp.asarray(key), (6, 4)))
    assert len({np.asarray(x).tobytes() for x in together}) == len(KEYS)
    many = flow.noise(jnp.arange(4000, dtype=jnp.uint32).reshape(-1, 2), (6, 4))
    assert abs(float(many.mean())) < 0.02
    assert abs(float(many.std()) - 1) < 0.02


def test_a_rows_chunk_does_not_depend_on_its_neighbours_or_its_place(policy):
    pictures, states = seen()
    whole = policy.act((pictures, states), PROMPTS, KEYS)
    assert whole.shape == (5, 6, 2)
    for order in ([3, 0, 4, 1], [1, 3, 2, 0], [3, 2]):
        part = policy.act(
            (pictures[order], states[order]), [PROMPTS[i] for i in order], KEYS[order]
        )
        np.testing.assert_allclose(part, whole[order], atol=2e-6)
    other_pictures, other_states = seen(seed=1)
    other_pictures[2], other_states[2] = pictures[2], states[2]
    among = policy.act((other_pictures[:4], other_states[:4]), PROMPTS[:4], KEYS[[4, 3, 2, 0]])
    np.testing.assert_array_equal(among[2], whole[2])
    assert np.abs(among[[0, 1, 3]] - whole[[0, 1, 3]]).max() > 1e-3


@pytest.mark.parametrize(
    ("observation", "prompts", "message"),
    [
        (lambda i, s: (i, s), PROMPTS[0], "each of the n needs a state and a prompt"),
        (lambda i, s: (i, s), PROMPTS[:4], "each of the n needs a state and a prompt"),
        (lambda i, s: (i, s), None, "each of the n needs a state and a prompt"),
        (lambda i, s: (i, s), [3] * 5, "The prompt is int 3; expected text"),
        (lambda i, s: (i, s[:3]), PROMPTS, "each of the n needs a state and a prompt"),
        (lambda i, s: (i, None), PROMPTS, "each of the n needs a state and a prompt"),
        (
            lambda i, s: (i[:, 0], s),
            PROMPTS,
            r"are \[n, 1, h, w, 3\], got \[5, 8, 8, 3\]",
        ),
        (lambda i, s: (None, s), PROMPTS, r"are \[n, 1, h, w, 3\], got \[\]"),
        (lambda i, s: i, PROMPTS, "act takes a pair, .* `infer` takes an observation by its keys"),
        (lambda i, s: {"images": i, "state": s}, PROMPTS, "act takes a pair"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_act_cannot_read_is_refused_in_a_sentence(policy, observation, prompts, message):
    with pytest.raises(ValueError, match=message):
        policy.act(observation(*seen()), prompts)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("observation", [3, None, "x", [{"image": {}}]])
def test_an_observation_that_is_no_map_is_refused_with_its_entries(policy, observation):
    with pytest.raises(ValueError, match=r"The observation is .*; expected a map of \['obs"):
        policy.infer(observation)


def test_a_picture_in_place_of_the_prompt_is_refused_by_its_type(policy):
    with pytest.raises(ValueError, match=r"The prompt is uint8 \[8, 8, 3\]; expected text"):
        policy.infer({**openpi(1), "prompt": np.zeros((8, 8, 3), np.uint8)})


@pytest.mark.parametrize("shape", [(0, 0, 3), (0, 8, 3), (8, 0, 3)])
def test_a_picture_without_pixels_is_refused(policy, shape):
    one = openpi(1)
    (camera,) = one["image"]
    with pytest.raises(ValueError, match=r"Image '.*' is uint8 .*; expected uint8"):
        policy.infer({**one, "image": {camera: np.zeros(shape, np.uint8)}})


def test_with_one_size_the_number_of_rows_changes_not_a_bit(policy):
    alone = replace(policy, sizes=(4,))
    pictures, states = seen()
    whole = alone.act((pictures, states), PROMPTS, KEYS)
    for count in (1, 2, 3, 4):
        part = alone.act((pictures[:count], states[:count]), PROMPTS[:count], KEYS[:count])
        np.testing.assert_array_equal(part, whole[:count])
    assert programs(alone) == 1


@pytest.mark.slow
def test_a_long_prompt_or_a_chunk_to_continue_changes_not_a_bit_of_the_rows_beside_it(policy):
    alone = replace(policy, sizes=(4,))
    long = " ".join(["push"] * 40)
    observations = {**openpi(4), "prompt": [*PROMPTS[:2], long, PROMPTS[3]]}
    requests = alone.prepare(observations, KEYS[:4])
    (going_on,) = alone.prepare(openpi(1), KEYS[4:], previous=[np.ones((3, 2))])
    first = alone.sample_actions(requests[:2])
    together = alone.sample_actions([requests[2], requests[1], going_on, requests[0], requests[3]])
    np.testing.assert_array_equal(together[[3, 1]], first)
    for i, request in ((0, requests[2]), (2, going_on)):
        np.testing.assert_array_equal(together[i], alone.sample_actions([request])[0])
    assert programs(alone) == 3


def test_a_key_changes_its_own_row_alone(policy):
    pictures, states = seen(4)
    first = policy.act((pictures, states), PROMPTS[:4], KEYS[:4])
    keys = KEYS[:4].copy()
    keys[1] = 11, 11
    second = policy.act((pictures, states), PROMPTS[:4], keys)
    np.testing.assert_array_equal(first[[0, 2, 3]], second[[0, 2, 3]])
    assert np.abs(first[1] - second[1]).max() > 1e-3


def test_infer_act_and_requests_of_several_callers_give_the_same_chunks(policy):
    pictures, states = (x[:4] for x in seen())
    acted = policy.act((pictures, states), PROMPTS[:4], KEYS[:4])
    one = openpi(4)
    np.testing.assert_array_equal(policy.infer(one, keys=KEYS[:4])["actions"], acted)
    requests = [
        request
        for i in range(4)
        for request in policy.prepare(
            {"image": {"front": pictures[i, 0]}, "state": states[i], "prompt": PROMPTS[i]},
            KEYS[i : i + 1],
        )
    ]
    np.testing.assert_array_equal(policy.sample_actions(requests), acted)
    noise = np.asarray(flow.noise(jnp.asarray(KEYS[:4]), (6, 4)))
    np.testing.assert_allclose(policy.infer(one, noise)["actions"], acted, atol=1e-6)
    default = np.stack([np.zeros(4, int), np.arange(4)], -1)
    np.testing.assert_array_equal(
        policy.infer(one)["actions"], policy.infer(one, keys=default)["actions"]
    )


FRONT = "observation.images.front"
PICTURE, STATE = (x[0] for x in seen())


@pytest.mark.parametrize(
    "told",
    [
        {"observation/front": PICTURE[0], "observation/state": STATE, "prompt": PROMPTS[0]},
        {FRONT: PICTURE[0], "observation.state": STATE, "task": PROMPTS[0], "timestamp": 0.1},
        {FRONT: PICTURE[0].transpose(2, 0, 1), "observation.state": STATE, "task": PROMPTS[0]},
        {"images": {"front": PICTURE[0]}, "state": STATE.tolist(), "prompt": PROMPTS[0]},
        {"image": {"front": PICTURE[0]}, "state": STATE, "prompt": np.array(PROMPTS[0])},
        {"image": {FRONT: PICTURE[0]}, "state": STATE, "prompt": PROMPTS[0].encode()},
        {"observation": {"images": {"front": PICTURE[0]}, "state": STATE}, "task": PROMPTS[0]},
        {"front": PICTURE[0], "state": STATE, "prompt": PROMPTS[0], "action": np.zeros(2)},
    ],
)
def test_infer_takes_the_keys_that_a_server_tells_and_the_datasets_own(policy, told):
    robot = replace(policy.processor.embodiments[0], cameras=(FRONT,))
    dataset = replace(policy, processor=replace(policy.processor, embodiments=(robot,)))
    vars(dataset).update(_sample=policy._sample)
    expected = policy.act((PICTURE[None], STATE[None]), PROMPTS[:1])
    assert list(dataset.inputs.expected) == ["observation/front", "observation/state", "prompt"]
    found = dataset.infer(told)["actions"]
    assert found.shape == (6, 2)
    np.testing.assert_array_equal(found, expected[0])
    rows = {"task": PROMPTS[:2], FRONT: PICTURE.repeat(2, 0), "observation.state": [STATE] * 2}
    np.testing.assert_array_equal(dataset.infer(rows)["actions"][0], expected[0])


def test_cameras_of_one_plain_name_are_told_apart_by_their_whole_names(policy):
    robot = replace(policy.processor.embodiments[0], cameras=("observation.images.front", "front"))
    first, second = PICTURE[0], 255 - PICTURE[0]
    told = {"image": {FRONT: first, "front": second}, "state": STATE, "prompt": "push"}
    (read,) = inputs_of(robot, True).read(told).rows
    np.testing.assert_array_equal(read.images[FRONT], first)
    np.testing.assert_array_equal(read.images["front"], second)


@pytest.mark.slow
def test_warming_compiles_all_that_acting_needs(policy):
    fresh, done = replace(policy), []
    fresh.warm(progress=lambda *count: done.append(count))
    assert done == [(i, 8) for i in range(1, 9)]  # sizes 2, 4 by 16, 32, 64, 100 words
    assert programs(fresh) == 8
    pictures, states = seen()
    for count, words in ((1, 2), (2, 40), (3, 80), (5, 98)):
        prompts = [" ".join(["push"] * words)] + ["pull"] * (count - 1)
        fresh.act((pictures[:count], states[:count]), prompts, KEYS[:count])
    assert programs(fresh) == 8
    with pytest.raises(ValueError, match=r"no sizes \[3\] to compile for; it has \(2, 4\)"):
        fresh.warm([2, 3])


@pytest.mark.slow
def test_groots_rows_are_padded_and_split_too(tmp_path):
    groot, observation = recorded_groot(tmp_path / "groot")
    count = len(observation["state"])
    whole = replace(groot, sizes=(count,)).infer(observation)["actions"]
    other = replace(groot, sizes=(count - 1,)).infer(observation)["actions"]
    np.testing.assert_allclose(other, whole, atol=1e-5 * np.abs(whole).max())


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([(0, 0)], r"keys are int64 \[1, 2\]; expected two integers for each of 2"),
        (np.zeros((2, 2)), "keys are float64"),
        ([0, 1], r"int64 \[2\]"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_keys_that_do_not_fit_are_refused(policy, keys, message):
    with pytest.raises(ValueError, match=message):
        policy.act(seen(2), PROMPTS[:2], keys)


def test_noise_for_another_number_of_rows_is_refused(policy):
    with pytest.raises(ValueError, match="noise is for 3 observations, but there are 2"):
        policy.infer(openpi(2), np.zeros((3, 6, 4)))


@pytest.mark.parametrize("sizes", [(), (0, 2), (4, 2), (2, 2)])
def test_sizes_out_of_order_are_refused(policy, sizes):
    with pytest.raises(ValueError, match="positive and ascending"):
        replace(policy, sizes=sizes)


def test_no_observation_is_refused_in_a_sentence(policy):
    pictures, states = seen()
    with pytest.raises(ValueError, match="no observations; give at least one"):
        policy.act((pictures[:0], states[:0]), [], KEYS[:0])
