"""One camera under the names that datasets, suites and clients give it."""

import pytest

from models.inputs.camera_names import find_camera, plain_name

SUITE = ("observation.images.front", "observation.images.left.wrist", "observation.images.top")


def test_a_plain_name_is_without_what_says_only_that_it_is_a_picture():
    spelt = ("observation/front", "observation.images.front", "image/front", "front")
    assert {plain_name(key) for key in spelt} == {"front"}
    assert plain_name("observation/image") == "image"


@pytest.mark.parametrize(
    ("wanted", "place"),
    [
        ("observation.images.top", 2),
        ("top", 2),
        ("observation/top", 2),
        ("wrist", 1),
        ("left/wrist", 1),
        ("right/wrist", None),
        ("ront", None),
    ],
)
def test_a_camera_is_found_by_as_much_of_its_name_as_tells_it(wanted, place):
    assert find_camera(wanted, SUITE) == place


def test_a_camera_that_could_be_two_is_not_found():
    two = ("left.wrist", "right.wrist")
    assert find_camera("wrist", two) is None
    assert find_camera("wrist", (*two, "image/wrist")) == 2
    assert find_camera("wrist", ("wrist", "image/wrist")) == 0
    assert find_camera("observation/wrist", ("wrist", "image/wrist")) is None
