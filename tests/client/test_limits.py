"""No command is outside its limits, whatever was wanted, and what cannot be kept is
refused first."""

import numpy as np
import pytest

from chiliad_client import SafetyLimits

LOW, HIGH, STEP = np.array([-1.0, -2.0]), np.array([1.0, 0.5]), np.array([0.1, 0.3])


def reach(action, seen):
    """A two-link arm of 1 m and 0.5 m."""
    a, b = action
    return np.array([np.cos(a) + np.cos(a + b) / 2, np.sin(a) + np.sin(a + b) / 2])


def test_absolute_targets_stay_in_range_step_and_box_over_a_wild_walk():
    box = (np.array([0.6, -0.6]), np.array([1.6, 0.4]))
    limits = SafetyLimits(LOW, HIGH, STEP, box, reach)
    rng, last, changed = np.random.default_rng(0), np.zeros(2), set()
    limits.check(last, {})
    for _ in range(2000):
        sent, by = limits.applied(rng.normal(0, 2, 2), last, {})
        changed.update(by)
        assert (sent >= LOW).all()
        assert (sent <= HIGH).all()
        assert (np.abs(sent - last) <= STEP + 1e-12).all()
        assert (reach(sent, {}) >= box[0]).all()
        assert (reach(sent, {}) <= box[1]).all()
        last = sent
    assert changed == {"range", "step", "box"}


def test_relative_actions_are_limited_in_size():
    limits = SafetyLimits(step=0.2)
    assert limits.applied(np.array([5.0, -0.1]), np.zeros(2), {}).action.tolist() == [0.2, -0.1]


def test_what_is_within_is_sent_as_it_is():
    wanted = np.array([0.05, -0.2])
    sent, by = SafetyLimits(LOW, HIGH, STEP).applied(wanted, np.zeros(2), {})
    assert sent.tolist() == wanted.tolist()
    assert by == ()


def test_the_box_lets_a_robot_go_as_far_as_its_wall():
    limits = SafetyLimits(box=([-1.0], [1.0]), forward=lambda action, seen: action[:1])
    sent, by = limits.applied(np.array([3.0, 0.0]), np.zeros(2), {})
    assert by == ("box",)
    assert 0.999 < sent[0] <= 1.0


def test_a_robot_outside_its_box_is_held_until_it_is_led_back():
    limits = SafetyLimits(box=([-1.0], [1.0]), forward=lambda action, seen: action[:1])
    rest = np.array([2.0, 0.0])
    assert limits.applied(np.array([1.5, 0.0]), rest, {}).action.tolist() == [2.0, 0.0]
    assert limits.applied(np.array([0.5, 0.0]), rest, {}).action.tolist() == [0.5, 0.0]


def test_a_robot_that_is_a_little_out_of_range_is_led_back_and_a_far_one_refused():
    limits = SafetyLimits(LOW, HIGH, STEP)
    limits.check(np.array([1.05, 0.0]), {})
    assert limits.applied(np.array([2.0, 0.0]), np.array([1.05, 0.0]), {}).action[0] == 1.0
    with pytest.raises(ValueError, match=r"dim 0 holds the robot at 1\.3, 0\.3 outside its range"):
        limits.check(np.array([1.3, 0.0]), {})
    boxed = SafetyLimits(box=([-1.0], [1.0]), forward=lambda action, seen: action[:1])
    with pytest.raises(ValueError, match="outside the box"):
        boxed.check(np.array([1.3, 0.0]), {})


def test_a_robot_that_was_pushed_out_of_its_range_is_led_back_step_by_step():
    limits, held = SafetyLimits(LOW, HIGH, STEP), np.array([1.34, 0.0])
    walked = []
    for _ in range(5):
        sent, by = limits.applied(np.array([-1.0, 0.0]), held, {})
        walked.append(sent[0])
        assert "step" in by
        held = sent
    assert walked == pytest.approx([1.24, 1.14, 1.04, 0.94, 0.84])
    assert limits.applied(np.array([1.34, 0.0]), np.array([1.34, 0.0]), {}).action[0] == 1.24
    boxed = SafetyLimits(high=1.0, step=0.1, box=([1.3], [2.0]), forward=lambda a, seen: a[:1])
    sent, by = boxed.applied(np.array([0.0, 0.0]), np.array([1.34, 0.0]), {})
    assert 1.3 <= sent[0] < 1.301
    assert by == ("step", "box")


def test_nothing_that_is_not_finite_is_sent():
    for wanted, rest in ((np.nan, 0.0), (np.inf, 0.0), (0.0, np.nan)):
        with pytest.raises(ValueError, match="both must be finite"):
            SafetyLimits(LOW, HIGH).applied(np.array([wanted, 0]), np.array([rest, 0]), {})


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"low": 1.0, "high": 0.0}, "low must not be above"),
        ({"low": np.nan}, "one for each dim"),
        ({"step": 0.0}, "above 0"),
        ({"box": ([0], [1])}, "give both, or neither"),
        ({"forward": reach}, "give both, or neither"),
        ({"box": ([1], [0]), "forward": reach}, "lower and its upper corner"),
    ],
)
def test_limits_that_make_no_sense_are_refused(given, why):
    with pytest.raises(ValueError, match=why):
        SafetyLimits(**given)


def test_limits_of_another_robot_are_refused_by_name():
    with pytest.raises(ValueError, match="step has 3 numbers, but actions have 2 dims"):
        SafetyLimits(step=[0.1, 0.1, 0.1]).check(np.zeros(2), {})
    boxed = SafetyLimits(box=([0, 0, 0], [1, 1, 1]), forward=reach)
    with pytest.raises(ValueError, match=r"`forward` returns shape \[2\], but .* shape \[3\]"):
        boxed.check(np.zeros(2), {})
