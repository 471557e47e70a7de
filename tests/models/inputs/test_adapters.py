"""Conversions of a robot's units give the numbers of their authors' code."""

from dataclasses import replace

import numpy as np
import pytest

from models import Embodiment, Normalizer, Processor
from models.inputs.adapters import ADAPTERS
from tests.helpers.models.processors import word_processor

VALUES = [-0.9, -0.746, -0.592, -0.438, -0.285, -0.131, 0.25]
VALUES += [0.177, 0.331, 0.485, 0.638, 0.792, 0.946, 0.8]
TURNED = [-0.9, 0.746, 0.592, -0.438, -0.285, -0.131, np.nan]
TURNED += [0.177, -0.331, -0.485, 0.638, 0.792, 0.946, np.nan]
"""Joints as openpi's `aloha_policy.py` turns them."""
GRIPPERS = {"state": (-0.513078, 0.306024), "acted": (0.671732, 0.932112)}
GRIPPERS |= {"learned": (-0.640825, 0.52094)}
"""Grippers of VALUES as openpi's `_decode_state`, `_encode_actions` and `_encode_actions_inv` give
them."""


def expected(kind: str) -> np.ndarray:
    values = np.array(TURNED)
    values[[6, 13]] = GRIPPERS[kind]
    return values


@pytest.mark.parametrize("kind", ["state", "acted", "learned"])
def test_alohas_units_are_converted_as_openpi_converts_them(kind):
    given = np.array([VALUES, VALUES])
    found = getattr(ADAPTERS["aloha"], kind)(given)
    np.testing.assert_allclose(found, [expected(kind)] * 2, atol=1e-6)
    np.testing.assert_array_equal(given, [VALUES, VALUES])


def aloha(relative: tuple[int, ...]) -> Processor:
    one = Normalizer((0.0,) * 14, (1.0,) * 14)
    robot = Embodiment("robot", ("front",), one, one, relative, adapter="aloha")
    return word_processor(14, 16, 16, 2, "suffix", (), (robot,))


def test_alohas_actions_are_added_to_the_converted_state_and_converted_back():
    joints = [d for d in range(14) if d not in (6, 13)]
    relative = tuple(d if d in joints else -1 for d in range(14))
    step = np.full((2, 16), 0.1)
    acted = aloha(relative).actions(step, state=np.array(VALUES))
    signs = np.array([1, -1, -1, 1, 1, 1, 1, 1, -1, -1, 1, 1, 1, 1])
    moved = np.array(VALUES) + 0.1 * signs
    np.testing.assert_allclose(acted[:, joints], [moved[joints]] * 2, atol=1e-6)
    gripper = (0.1 + 0.5476 + 0.6213) / (1.4910 + 0.6213)
    np.testing.assert_allclose(acted[:, [6, 13]], gripper, atol=1e-6)


def test_a_chunk_of_aloha_comes_back_from_the_models_units():
    joints = tuple(d if d not in (6, 13) else -1 for d in range(14))
    processor, state = aloha(joints), np.array(VALUES, np.float32)
    chunk = np.linspace(-0.5, 0.5, 28, dtype=np.float32).reshape(1, 2, 14)
    padded, learned, _ = processor.numbers(state[None], chunk)
    np.testing.assert_allclose(padded[0, :14], expected("state"), atol=1e-6)
    np.testing.assert_allclose(processor.actions(learned[0], state=state), chunk[0], atol=1e-5)


def test_an_adapter_that_does_not_fit_the_robot_is_refused():
    robot = aloha(()).embodiments[0]
    with pytest.raises(ValueError, match=r"adapter is 'yumi'; expected one of \['aloha'\]"):
        replace(robot, adapter="yumi")
    three = Normalizer((0.0,) * 3, (1.0,) * 3)
    with pytest.raises(ValueError, match=r"has 3 state and 14 action dims; the adapter 'aloha'"):
        replace(robot, state=three)
    with pytest.raises(ValueError, match="absent names 'wrist'"):
        replace(robot, absent=("wrist",))
