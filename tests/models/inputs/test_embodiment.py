"""Scales go there and back, and a robot that cannot be is refused by the field at fault."""

import numpy as np
import pytest

from models import Embodiment, Normalizer


def test_an_identity_leaves_numbers_as_they_are():
    numbers = np.array([[-3.0, 0.5, 1e6]], np.float32)
    same = Normalizer.identity(3)
    np.testing.assert_array_equal(same(numbers), numbers)
    np.testing.assert_array_equal(same.inverse(numbers), numbers)


def test_a_scale_is_undone_by_its_inverse():
    scale = Normalizer((1.0, -2.0), (0.5, 4.0))
    np.testing.assert_array_equal(scale(np.array([2.0, 2.0])), [2.0, 1.0])
    np.testing.assert_array_equal(scale.inverse(np.array([2.0, 1.0])), [2.0, 2.0])


@pytest.mark.parametrize(
    ("offset", "scale", "why"),
    [
        ((0.0,), (1.0, 1.0), "1 offsets but 2 scales"),
        ((0.0, float("nan")), (1.0, 1.0), r"offset\[1\] is nan"),
        ((0.0,), (0.0,), r"scale\[0\] is 0.0"),
        ((0.0,), (float("inf"),), r"scale\[0\] is inf"),
    ],
)
def test_a_scale_that_would_spoil_numbers_is_refused_by_its_dim(offset, scale, why):
    with pytest.raises(ValueError, match=why):
        Normalizer(offset, scale)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"cameras": ("top", "top")}, "name each only once"),
        ({"relative": (3, -1, 0)}, r"relative is \[3, -1, 0\]; .* below 3"),
        ({"relative": (0,)}, r"relative is \[0\]; give for each of 3"),
        ({"absent": ("wrist",)}, "absent names 'wrist'"),
        ({"actions": Normalizer((), ())}, "has no action dims"),
    ],
)
def test_a_robot_that_cannot_be_is_refused_by_the_field_at_fault(fields, why):
    same = Normalizer.identity(3)
    with pytest.raises(ValueError, match=f"'arm'.*{why}"):
        Embodiment(**{"name": "arm", "cameras": (), "state": same, "actions": same} | fields)
