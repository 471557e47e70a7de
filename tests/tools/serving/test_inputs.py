"""Spellings of an observation that the policy server reads, and its errors on others."""

from dataclasses import replace

import numpy as np
import pytest

from models.families.pi.released import RELEASED
from models.inputs.embodiment import Embodiment, Normalizer
from models.inputs.observation import inputs_of
from models.inputs.raw import RawKeys
from tests.helpers.tools.served import OBSERVATION, PICTURE, ROBOT
from tools.serving.inputs import client_inputs, read_message

INPUTS = inputs_of(ROBOT, reads_state=True)
FRONT, WRIST = ROBOT.cameras


@pytest.mark.parametrize(
    "message",
    [
        OBSERVATION,
        {"image": {FRONT: PICTURE, WRIST: PICTURE}, "state": np.zeros(3), "prompt": "go"},
        {"images": {"front": PICTURE, "wrist": PICTURE}, "state": [0, 0, 0.5], "prompt": "go"},
        {FRONT: PICTURE, WRIST: PICTURE, "observation.state": np.zeros(3, "f4"), "prompt": "go"},
        {**OBSERVATION, "observation/front": PICTURE.transpose(2, 0, 1)},
        {**OBSERVATION, "observation/front": (PICTURE + 0.5) / 255},
        {**OBSERVATION, "prompt": b"go", "timestamp": 0.1, "image_mask": {"front": True}},
    ],
)
def test_flat_nested_and_dataset_spellings_are_the_same_observation(message):
    read = read_message(INPUTS, message)
    assert read.executed is read.committed is None
    np.testing.assert_array_equal(read.observation.images[FRONT], PICTURE)
    assert read.observation.state.shape == (3,)


@pytest.mark.parametrize("joint", ["joint_position", "state"])
def test_pairs_name_what_an_openpi_client_sends(joint):
    pairs = ["observation/image=front", f"{joint}=state", "gripper_position=state"]
    inputs = client_inputs(INPUTS, pairs)
    joints = {f"observation/{joint}": np.array([1.0, 2.0]), "observation/gripper_position": 3}
    read = read_message(inputs, {"observation/image": PICTURE, **joints, "prompt": "go"})
    assert list(read.observation.images) == [FRONT]
    np.testing.assert_array_equal(read.observation.state, [1, 2, 3])


@pytest.mark.parametrize(
    ("pairs", "why"),
    [
        (["image=back"], "not KEY=CAMERA"),
        (["image"], "not KEY=CAMERA"),
        (["a=front", "b=front"], "repeats"),
        (["a=front", "observation/a=wrist"], "repeats"),
    ],
)
def test_pairs_that_name_no_camera_or_one_twice_are_refused(pairs, why):
    with pytest.raises(ValueError, match=why):
        client_inputs(INPUTS, pairs)


def test_cameras_of_one_short_name_need_names_from_the_user():
    twins = replace(ROBOT, cameras=("observation.images.front", "front"))
    with pytest.raises(ValueError, match="--inputs"):
        client_inputs(inputs_of(twins, reads_state=True))
    pairs = ["left=observation.images.front", "right=front"]
    assert client_inputs(inputs_of(twins, True), pairs).cameras == {
        "left": "observation.images.front",
        "right": "front",
    }


def released(name):
    """The robot of a released policy, in the model's units."""
    row = RELEASED[name]
    dims = Normalizer((0.0,) * row.state_dims, (1.0,) * row.state_dims)
    return Embodiment(name, row.cameras, dims, dims, absent=row.absent, keys=row.keys)


def test_a_released_policys_server_takes_its_authors_observation_as_it_is():
    """openpi's LIBERO client sends a state that pi05_libero does not read."""
    message = {
        "observation/image": PICTURE,
        "observation/wrist_image": PICTURE,
        "observation/state": np.zeros(8),
        "prompt": "go",
    }
    read = read_message(inputs_of(released("pi05_libero"), reads_state=False), message)
    assert read.observation.state is None
    assert set(read.observation.images) == {"base_0_rgb", "left_wrist_0_rgb"}
    droid = inputs_of(released("pi05_droid"), reads_state=True)
    read = read_message(
        droid,
        {
            "observation/exterior_image_1_left": PICTURE,
            "observation/exterior_image_2_left": PICTURE,
            "observation/wrist_image_left": PICTURE,
            "observation/joint_position": np.arange(7.0),
            "observation/gripper_position": np.array([9.0]),
            "prompt": "go",
        },
    )
    assert set(read.observation.images) == {"base_0_rgb", "left_wrist_0_rgb"}
    np.testing.assert_array_equal(read.observation.state, [0, 1, 2, 3, 4, 5, 6, 9])


@pytest.mark.parametrize("words", [{}, {"prompt": ""}])
def test_a_released_policys_default_stands_for_a_prompt_that_is_absent_or_empty(words):
    """openpi's client for the simulated ALOHA sends none."""
    aloha = inputs_of(released("pi0_aloha_sim"), reads_state=True)
    seen = {"state": np.zeros(14), "images": {"cam_high": PICTURE.transpose(2, 0, 1)}}
    assert read_message(aloha, {**seen, **words}).observation.prompt == "Transfer cube"
    assert read_message(aloha, {**seen, "prompt": "wave"}).observation.prompt == "wave"
    assert aloha.expected["prompt"] == {"dtype": "str", "optional": True}
    pairs = client_inputs(aloha, ["cam_high=base_0_rgb"])
    assert read_message(pairs, {**seen, **words}).observation.prompt == "Transfer cube"


def test_an_empty_prompt_is_refused_where_a_policy_of_others_has_no_default():
    message = {"observation/image": PICTURE, "observation/wrist_image": PICTURE}
    libero = inputs_of(released("pi05_libero"), reads_state=False)
    with pytest.raises(ValueError, match="'prompt' is empty; describe the task"):
        read_message(libero, {**message, "prompt": ""})
    with pytest.raises(ValueError, match=r"lacks \['prompt'\]"):
        read_message(libero, message)


def test_the_prompt_may_come_by_the_name_that_a_policys_authors_have_for_it():
    keys = RawKeys((("observation.images.front", FRONT),), ("observation.state",), "task")
    lerobot = inputs_of(replace(ROBOT, cameras=(FRONT,), keys=keys), reads_state=True)
    seen = {"observation.images.front": PICTURE, "observation.state": np.zeros(3)}
    for name in ("task", "prompt"):
        assert read_message(lerobot, {**seen, name: "go"}).observation.prompt == "go"
    with pytest.raises(ValueError, match="the prompt twice"):
        read_message(lerobot, {**seen, "task": "go", "prompt": "go"})
    task = {**{k: v for k, v in OBSERVATION.items() if k != "prompt"}, "task": "go"}
    assert read_message(INPUTS, task).observation.prompt == "go"


def test_a_camera_that_may_be_absent_may_be_left_out():
    inputs = inputs_of(replace(ROBOT, absent=(WRIST,)), reads_state=True)
    assert set(read_message(inputs, OBSERVATION).observation.images) == {FRONT, WRIST}
    without = {key: x for key, x in OBSERVATION.items() if "wrist" not in key}
    assert set(read_message(inputs, without).observation.images) == {FRONT}
    assert inputs.expected["observation/wrist"]["optional"]
    with pytest.raises(ValueError, match=r"lacks \['front'\]"):
        read_message(inputs, {key: x for key, x in OBSERVATION.items() if "front" not in key})


def test_a_state_that_is_not_read_may_be_sent_where_a_pair_names_it():
    inputs = client_inputs(inputs_of(ROBOT, False), ["image=front", "pose=state"])
    read = read_message(
        inputs, {"observation/image": PICTURE, "observation/pose": [1.0], "prompt": "go"}
    )
    assert read.observation.state is None


def test_a_policy_that_reads_no_state_expects_none():
    assert not any("state" in key for key in inputs_of(ROBOT, reads_state=False).expected)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"observation/wrist": None}, r"lacks \['wrist'\]"),
        ({"prompt": None}, r"lacks \['prompt'\]"),
        ({"observation/state": None}, r"lacks \['state'\]"),
        ({"observation/elbow": PICTURE}, "unknown entries.*elbow"),
        ({"front": PICTURE}, "'front' twice"),
        (
            {"observation/front": PICTURE.astype(np.float32)},
            r"float32 \[6, 8, 3\] from 0 to 143",
        ),
        ({"observation/front": PICTURE.astype(np.int64)}, r"int64 \[6, 8, 3\]; expected uint8"),
        ({"observation/front": PICTURE[None]}, r"batch axis, .*front': 1}; send one"),
        ({"observation/front": PICTURE[..., 0]}, r"uint8 \[6, 8\]; expected"),
        ({"observation/front": b"\xff\xd8"}, r"bytes b'.xff.xd8'; expected"),
        ({"image_mask": 5}, "image_mask is int 5; expected a map"),
        ({"prompt": ["go"]}, "batch axis, {'the prompt': 1}; send one"),
        ({"prompt": [3]}, r"list \[3\]; expected text"),
        ({"prompt": None, "tokenized_prompt": [1, 2]}, "holds 1; expected token ids"),
        ({"prompt": None, "tokenized_prompt": {"a": 1}}, "unknown entries .*'tokenized_prompt.a'"),
        ({"prompt": None, "tokenized_prompt": ["a"]}, r"expected token ids \[t\] or"),
        ({"observation/front": PICTURE[..., :2]}, r"\[6, 8, 2\]"),
        ({"observation/front": np.zeros((1, 8193, 3), np.uint8)}, "at most 8192 pixels"),
        ({"observation/front": "a picture"}, "str 'a picture'"),
        ({"observation/state": np.zeros(4)}, "4 dims; this policy reads 3"),
        ({"observation/state": np.zeros((1, 3))}, "batch axis, {'state': 1}; send one"),
        ({"observation/state": np.zeros((1, 1, 3))}, r"\[1, 1, 3\]; expected numbers"),
        ({"observation/state": np.zeros(3, bool)}, "bool"),
        ({"observation/state": [1, [2], 3]}, "expected numbers"),
        ({"observation/state": np.array([0, np.nan, 0])}, "NaN"),
        ({"observation/state": np.full(3, 1e300)}, "infinity"),
        ({"prompt": 3}, "int 3; expected text"),
        ({"prompt": "a" * 2001}, "2001 characters"),
        ({"executed": -1}, "'executed'.*steps"),
        ({"executed": True}, "'executed'.*steps"),
        ({"committed": 1.5}, "'committed'.*steps"),
    ],
)
def test_what_is_wrong_with_an_observation_is_named(changed, why):
    message = {k: v for k, v in {**OBSERVATION, **changed}.items() if v is not None}
    with pytest.raises(ValueError, match=why):
        read_message(INPUTS, message)
