"""GR00T-N1.7's pictures to the byte, and the algebra of its poses."""

import json
from dataclasses import replace

import numpy as np
import pytest

from models.families.groot.n17.pictures import GrootPicture, tower_size
from models.families.groot.n17.qwen_turn import QwenTurn
from models.families.groot.n17.units import GrootUnits, UnitPart
from tests.helpers.models.groot17_case import CASE
from tests.helpers.models.qwen_case import smooth_pictures

RELEASED = GrootPicture(256, edge=256, crop=0.9, least=65_536, most=16_777_216)
PICTURES = {1: (96, 128), 2: (128, 96), 3: (50, 70)}


@pytest.mark.parametrize("way", ["opencv", "torch"])
@pytest.mark.parametrize("number", PICTURES)
def test_pictures_are_the_ports_to_the_byte(number, way):
    told = json.loads(str(CASE[f"pictures/{number}/settings"]))
    wanted = CASE[f"pictures/{number}/{way}"]
    crop = told["crop_fraction"] or told["image_crop_size"][0] / told["image_target_size"][0]
    fit = GrootPicture(
        wanted.shape[:2],
        area=way == "opencv",
        edge=told["shortest_image_edge"],
        crop=crop,
        target=tuple(told["image_target_size"]),
        letter_box=told["letter_box_transform"],
        step=1,
        most=65_536,
    )
    (image,) = smooth_pictures([PICTURES[number]], 40 + number)
    np.testing.assert_array_equal(fit(image), wanted)


def test_a_picture_of_another_aspect_names_the_size_to_ask_for():
    with pytest.raises(ValueError, match="image-size 256 352"):
        RELEASED(np.zeros((480, 640, 3), np.uint8))
    free = replace(RELEASED, any_size=True)
    assert free(np.zeros((480, 640, 3), np.uint8)).shape == (256, 352, 3)


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [((240, 320), (256, 320)), ((720, 1280), (704, 1280)), ((100, 100), (256, 256))],
)
def test_sizes_of_the_tower_are_qwens(shape, wanted):
    assert tower_size(shape, 32, 65_536, 16_777_216) == wanted


@pytest.mark.parametrize("pose", ["rot6d", "rotvec"])
def test_relative_poses_act_where_they_were_learned(pose):
    """Poses seen from the state's, scaled step by step, and back."""
    rng, dims = np.random.default_rng(0), {"rot6d": 9, "rotvec": 6}[pose]
    low, high = -5 - rng.random((3, dims)), 5 + rng.random((3, dims))
    rows = [tuple(map(tuple, x.tolist())) for x in (low, high)]
    state = UnitPart("eef", rows[0][:1], rows[1][:1])
    units = GrootUnits(3, (state,), (UnitPart("eef", *rows, origin=0, pose=pose),), dims)

    def drawn(*shape):
        turn = rng.normal(size=(*shape, 3, 3))
        q = np.linalg.qr(turn)[0]
        q *= np.sign(np.linalg.det(q))[..., None, None]
        if pose == "rot6d":
            return np.concatenate(
                [rng.normal(size=(*shape, 3)), q[..., :2, :].reshape(*shape, 6)], -1
            )
        axis = rng.normal(size=(*shape, 3))
        axis *= (rng.random((*shape, 1)) * 3.1) / np.linalg.norm(axis, axis=-1, keepdims=True)
        return np.concatenate([rng.normal(size=(*shape, 3)), axis], -1)

    at, actions = drawn(4), drawn(4, 3)
    learned = units.learned(actions, at)
    np.testing.assert_allclose(units.acted(learned, at), actions, atol=1e-9)
    still = units.learned(np.repeat(at[:, None], 3, axis=1), at)
    nothing = (still + 1) / 2 * (high - low) + low
    same = [0, 0, 0, 1, 0, 0, 0, 1, 0] if pose == "rot6d" else [0] * 6
    np.testing.assert_allclose(nothing, np.broadcast_to(same, nothing.shape), atol=1e-9)


def test_words_are_formalised():
    turn = QwenTurn(None).turn("Put the MUG_2 on 中文, ö!", 1)
    assert turn.endswith("<|vision_end|>put the mug_2 on 中文 ö<|im_end|>\n")
