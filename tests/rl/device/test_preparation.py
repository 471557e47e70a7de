"""Preparation on a device equals the host's processor to the last bit."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from models import Embodiment, Normalizer
from models.inputs.packed_batch import pack
from rl.device.preparation import Preparation
from sim.protocol import Observation
from tests.helpers.models.tiny_policy import ARM, tiny_policy
from tests.helpers.rl.point import Point

POINT = Point()
ODD = Embodiment(
    "odd",
    ("front",),
    Normalizer((0.11234567, -1.7182818, 3.1415926e-3), (1.0123e-4, 0.36787944, 2.9979246)),
    Normalizer((0.31830989, -1.0986123), (2.2360679, 1.4142136e-3)),
    relative=(2, -1),
)


def _policy(robot=ODD, **changed):
    policy = tiny_policy()
    return replace(policy, processor=replace(policy.processor, embodiments=(robot,), **changed))


def _seen(count=12):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (count, 2, 8, 8, 3), dtype=np.uint8)
    return Observation(images, rng.normal(size=(count, 3)).astype(np.float32))


def test_rows_are_the_processors_samples_exactly():
    policy, seen = _policy(), _seen()
    goal = np.arange(12) % 2
    wording = np.linspace(0, 0.999, 12, dtype=np.float32)
    rows = jax.jit(Preparation(policy, POINT).batch)(seen, goal, wording)
    prompts = [
        POINT.prompts[g][int(w * len(POINT.prompts[g]))] for g, w in zip(goal, wording, strict=True)
    ]
    assert len(set(prompts)) == 3
    samples = [
        policy.processor.sample([images[1]], state, prompt)
        for images, state, prompt in zip(*seen, prompts, strict=True)
    ]
    prefix, text = rows.prefix_source.shape[1], rows.text.shape[1]
    assert text == max(len(sample.text) for sample in samples), "no longer than it must be"
    layout = policy.model.config.layout(prefix=prefix, samples=1, images=1, text=text)
    expected = pack([[sample] for sample in samples], layout)
    for name, value in vars(expected).items():
        assert np.array_equal(getattr(rows, name), value), name
        assert getattr(rows, name).dtype == value.dtype, name


@pytest.mark.parametrize("robot", [ODD, replace(ODD, relative=())])
def test_actions_are_the_processors_exactly(robot):
    policy, seen = _policy(robot), _seen()
    chunk = np.random.default_rng(1).normal(size=(12, 6, 4)).astype(np.float32)
    found = jax.jit(Preparation(policy, POINT).actions)(chunk, seen.state)
    assert np.array_equal(found, policy.processor.actions(chunk, 0, seen.state))


def test_acted_are_real_dims_of_the_first_steps():
    mask = np.asarray(Preparation(_policy(), POINT).acted(np.array([0, 2]), (6, 4)))
    assert not mask[0].any()
    assert mask[1, :2, :2].all()
    assert mask.sum() == 4


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"robot": replace(ARM, cameras=("behind",))}, "cameras"),
        ({"robot": replace(ARM, actions=Normalizer((0.0,), (1.0,)))}, "dims"),
        ({"image_size": 16}, "image_size=16"),
        ({"state_input": "text"}, "as text"),
    ],
)
def test_a_policy_that_does_not_fit_is_refused(changed, says):
    with pytest.raises(ValueError, match=says):
        Preparation(_policy(**changed), POINT)


def test_a_policy_without_its_preparation_is_refused():
    with pytest.raises(ValueError, match="without its preparation"):
        Preparation(replace(tiny_policy(), processor=None), POINT)
