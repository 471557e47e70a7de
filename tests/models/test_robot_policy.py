"""A policy at its robot: what a device prepares is what the host does, to the last bit; each camera
gets its own picture; and a robot that does not fit is refused in one sentence."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from models import Embodiment, Normalizer
from models.inputs.camera_names import with_names
from models.inputs.observation import RobotObservation
from models.inputs.packed_batch import pack
from models.inputs.pictures import Antialiased, StretchedMiddle
from models.inputs.prompts import TemplatePrompt, template
from models.robot_policy import RobotPolicy, processor_of
from sim.environments.device_slots import spec_of
from sim.protocol import Observation
from tests.helpers.models.tiny_policy import ARM, KEYS, PROCESSOR, PROMPTS, tiny_policy
from tests.helpers.rl.point import Point

SPEC = spec_of(Point(), (8, 8))
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


def _at_robot(robot=ODD, **changed):
    return RobotPolicy.in_suite(_policy(robot, **changed), SPEC)


def _seen(count=12):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (count, 2, 8, 8, 3), dtype=np.uint8)
    return Observation(images, rng.normal(size=(count, 3)).astype(np.float32))


def test_rows_are_the_processors_samples_exactly():
    robot, seen = _at_robot(), _seen()
    policy = robot.policy
    goal = np.arange(12) % 2
    wording = np.linspace(0, 0.999, 12, dtype=np.float32)
    rows = jax.jit(robot.batch)(seen, goal, wording)
    prompts = [
        SPEC.prompts[g][int(w * len(SPEC.prompts[g]))] for g, w in zip(goal, wording, strict=True)
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
    for (path, value), row in zip(
        *map(jax.tree_util.tree_leaves_with_path, (expected, rows)), strict=True
    ):
        assert np.array_equal(row[1], value), path
        assert row[1].dtype == value.dtype, path


@pytest.mark.parametrize("robot", [ODD, replace(ODD, relative=())])
def test_actions_are_the_processors_exactly(robot):
    policy, seen = _policy(robot), _seen()
    chunk = np.random.default_rng(1).normal(size=(12, 6, 4)).astype(np.float32)
    found = jax.jit(_at_robot(robot).actions)(chunk, seen.state)
    assert np.array_equal(found, policy.processor.actions(chunk, 0, seen.state))


def test_acted_are_real_dims_of_the_first_steps():
    mask = np.asarray(_at_robot().acted(np.array([0, 2]), (6, 4)))
    assert not mask[0].any()
    assert mask[1, :2, :2].all()
    assert mask.sum() == 4


def test_a_policy_in_a_suite_sees_its_own_cameras_in_its_own_order():
    turned = replace(ARM, cameras=("front", "side"))
    robot, seen = _at_robot(turned), _seen(5)
    assert robot.cameras == (1, 0)
    expected = robot.policy.act((seen.images[:, ::-1], seen.state), PROMPTS, KEYS)
    np.testing.assert_array_equal(robot.act(seen, PROMPTS, KEYS), expected)
    other = robot.policy.act((seen.images, seen.state), PROMPTS, KEYS)
    assert not np.array_equal(other, expected)


PANDA = replace(ARM, cameras=("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"))
MAP = {"side": "base_0_rgb", "front": "left_wrist_0_rgb"}


def test_a_camera_map_feeds_the_policys_cameras_and_one_that_is_absent_costs_nothing():
    """Case 7, for a policy whose authors call its cameras otherwise."""
    policy, seen = _policy(PANDA), _seen(5)
    robot = _at_robot(with_names(PANDA, MAP))
    assert robot.cameras == (0, 1, None)
    cameras = dict(zip(PANDA.cameras, np.moveaxis(seen.images, 1, 0), strict=False))
    wanted = {"image": cameras, "state": seen.state, "prompt": PROMPTS}
    expected = policy.infer(wanted, keys=KEYS)["actions"]
    np.testing.assert_array_equal(robot.act(seen, PROMPTS, KEYS), expected)

    goal, wording = np.zeros(5, int), np.zeros(5, np.float32)
    rows = jax.jit(robot.batch)(seen, goal, wording)
    assert rows.images.shape[1] == 2
    assert np.array_equal(rows.images, seen.images)
    assert rows.image_camera.tolist() == [[0, 1]] * 5


def test_a_camera_that_is_missing_is_refused_unless_it_may_be_absent():
    one = replace(ARM, cameras=("front", "behind"))
    with pytest.raises(ValueError, match="--cameras SUITE'S=POLICY'S"):
        _at_robot(one)
    assert _at_robot(replace(one, absent=("behind",))).cameras == (1, None)
    with pytest.raises(ValueError, match="Use a suite of the policy's own robot"):
        _at_robot(replace(ARM, cameras=("behind",), absent=("behind",)))
    with pytest.raises(ValueError, match="absent names 'above', which is not one of its cameras"):
        replace(ARM, absent=("above",))


def test_a_suites_camera_may_be_named_by_its_last_part():
    spec = replace(SPEC, cameras=("observation.images.side", "observation.images.front"))
    assert RobotPolicy.in_suite(_policy(ARM), spec).cameras == (1,)


def test_an_observation_may_leave_cameras_out_and_have_pictures_of_any_size():
    policy = _policy(replace(ARM, cameras=("front", "side")))
    picture, state = np.full((6, 10, 3), 200, np.uint8), np.zeros(3, np.float32)
    (request,) = policy.prepare([RobotObservation({"side": picture}, "push", state)], [(5, 1)])
    (expected,) = policy.prepare(
        {"image": {"side": picture}, "state": state, "prompt": "push"}, np.array([[5, 1]])
    )
    assert request.sample.cameras == expected.sample.cameras == (1,)
    for name in ("images", "text", "state"):
        mine, theirs = getattr(request.sample, name), getattr(expected.sample, name)
        np.testing.assert_array_equal(mine, theirs)
    assert request.key.tolist() == [5, 1]


def test_the_longest_text_is_that_of_the_prompts_and_the_limit_where_they_are_unknown():
    policy = _policy(ARM)
    longest = max(len(policy.processor.sample([None], np.zeros(3), p).text) for p in PROMPTS)
    spec = replace(SPEC, prompts=(tuple(PROMPTS[:2]), tuple(PROMPTS[2:])))
    assert RobotPolicy.in_suite(policy, spec).longest_text == longest
    assert RobotPolicy.for_clients(policy).longest_text == 100


@pytest.mark.parametrize(
    "changed",
    [{"cameras": ("behind",)}, {"actions": Normalizer((0.0,), (1.0,))}, {"state": ARM.actions}],
)
def test_another_robots_policy_is_refused_with_what_both_have_and_a_remedy(changed):
    robot = replace(ARM, **changed)
    ours = f"{len(robot.state.offset)} state and {len(robot.actions.offset)} action dims"
    with pytest.raises(ValueError, match="Use a suite of the policy's own robot") as refused:
        _at_robot(robot)
    for part in ("'arm'", str(list(robot.cameras)), ours, "point has cameras ['side', 'front'], 3"):
        assert part in str(refused.value)
    assert "8 × 8 pixels" in str(refused.value)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"pictures": Antialiased(16)}, "image_size=16"),
        (
            {
                "state_input": "text",
                "prompts": TemplatePrompt(PROCESSOR.tokenizer, template=template("text")),
            },
            "text",
        ),
        ({"pictures": StretchedMiddle(8)}, "only the middle"),
    ],
)
def test_what_a_device_cannot_prepare_is_refused_there_alone(changed, says):
    robot = _at_robot(**changed)
    with pytest.raises(ValueError, match=says):
        robot.check_traced()
    _at_robot().check_traced()


def test_a_policy_without_its_processor_is_refused():
    bare = replace(tiny_policy(), processor=None)
    for refused in (
        lambda: RobotPolicy.in_suite(bare, SPEC),
        lambda: RobotPolicy.for_clients(bare),
        lambda: processor_of(bare, "point"),
    ):
        with pytest.raises(ValueError, match="without a processor"):
            refused()
