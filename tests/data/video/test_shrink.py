"""Frames made smaller by libswscale are those of `resize_with_pad` within one grey level."""

import av
import numpy as np
import pytest
from av.video.reformatter import VideoReformatter

from data.video.seek import rgb
from data.video.shrink import LARGEST, MOST_TIMES, shrink_with_pad, shrinks
from models.inputs.pictures import resize_with_pad

FORMATS = (
    "yuv420p", "yuvj420p", "yuv422p", "yuvj422p", "yuv444p", "yuvj444p", "yuv420p10le", "nv12",
    "rgb24", "rgba", "gray", "gbrp",
)  # fmt: skip
SHAPES = (  # of the picture, and of the square
    (480, 640, 224), (480, 640, 96), (640, 480, 224), (360, 641, 224), (720, 1280, 224),
    (1080, 1920, LARGEST), (257, 257, LARGEST), (256, 256, 224), (225, 225, 224), (240, 320, 224),
    (64, 640, 50), (480, 640, 640 // MOST_TIMES),
)  # fmt: skip


def picture(kind, height, width):
    """Noise of all levels, of two, and edges of blocks: the worst for a filter."""
    draw = np.random.default_rng(0)
    if kind == "noise":
        return draw.integers(0, 256, (height, width, 3), np.uint8)
    cell = {"black and white": 1, "blocks": 9}[kind]
    cells = 255 * draw.integers(0, 2, (-(-height // cell), -(-width // cell), 3), np.uint8)
    return cells.repeat(cell, 0).repeat(cell, 1)[:height, :width]


def frame_of(pixels, form="rgb24"):
    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
    return VideoReformatter().reformat(frame, format=form, threads=1)


def differences(frame, size):
    out = np.full((size, size, 3), 7, np.uint8)
    shrink_with_pad(frame, out)
    return np.abs(out - resize_with_pad(rgb(frame), size).astype(int))


@pytest.mark.parametrize("kind", ["noise", "black and white", "blocks"])
@pytest.mark.parametrize(("height", "width", "size"), SHAPES)
def test_no_value_is_more_than_one_level_off_at_worst(height, width, size, kind):
    frame = frame_of(picture(kind, height, width))
    assert shrinks(frame, (size, size))
    apart = differences(frame, size)
    assert apart.max() <= 1
    assert apart.mean() < 0.25


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("width", [160, 168, 154])
def test_pictures_of_any_format_and_width_are_converted_as_they_are_without_it(form, width):
    apart = differences(frame_of(picture("noise", 120, width), form), 64)
    assert apart.max() <= 1


def test_of_a_cameras_picture_nine_values_in_ten_are_the_same():
    lines = np.linspace(20, 200, 480)[:, None, None] * np.array([1, 0.8, 0.6])
    noisy = lines + np.random.default_rng(0).normal(0, 4, (480, 640, 3))
    apart = differences(frame_of(noisy.clip(0, 255).astype(np.uint8), "yuv420p"), 224)
    assert apart.max() <= 1
    assert apart.mean() < 0.12


def test_what_lies_around_the_picture_is_black():
    out = np.full((64, 64, 3), 7, np.uint8)
    shrink_with_pad(frame_of(np.full((240, 320, 3), 200, np.uint8)), out)
    assert not out[:8].any()
    assert not out[56:].any()
    assert (out[8:56] == 200).all()


def test_what_does_not_become_smaller_is_left_to_pillow():
    asked = (224, 224, 224), (200, 100, 224), (480, 6, 224), (480, 640, LARGEST + 1)
    for height, width, size in asked:
        assert not shrinks(frame_of(np.zeros((height, width, 3), np.uint8)), (size, size))
    assert not shrinks(frame_of(np.zeros((480, 640, 3), np.uint8)), (640 // MOST_TIMES - 1,) * 2)
