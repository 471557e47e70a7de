"""Curves of several runs: what is drawn of values as training leaves them."""

import re

import numpy as np
import pytest

from sim.report.charts import Course, courses


def drawn(y, log=False, noisy=False):
    """Heights of the line, and the labels of the y axis."""
    y = np.array(y, np.float64)
    text = courses([Course("a", "k", np.arange(0.0, len(y)), y, noisy=noisy)], name="n", log=log)
    (line,) = re.findall(r'<polyline class="line" points="([^"]*)"', text)
    labels = re.findall(r'text-anchor="end">([^<]*)<', text)
    return [float(point.split(",")[1]) for point in line.split()], labels


@pytest.mark.parametrize("value", [1e-3, 1e20])
def test_values_that_are_all_the_same_stand_in_the_middle_of_an_axis_around_them(value):
    heights, labels = drawn([value, value])
    assert heights == [108.0, 108.0]
    assert value / 2 <= float(labels[0]) < value < float(labels[-1]) <= value * 1.5


def test_a_mean_after_a_huge_value_is_that_of_what_follows():
    y = np.full(1000, 100.0)
    y[0], y[100] = 1.0, 1e18
    heights, _ = drawn(y, log=True, noisy=True)
    assert heights[-1] == pytest.approx(206 - 196 * 2 / 18, abs=0.1), "100 of 1 to 1e18"


def test_labels_of_many_decades_do_not_lie_over_each_other():
    _, labels = drawn(np.logspace(-10, 20, 50), log=True)
    assert 3 <= len(labels) <= 11


def test_a_smoothed_value_is_told_as_such():
    y = np.arange(10.0)
    for noisy, said in ((True, "a, smoothed: 9 at"), (False, "a: 9 at")):
        course = Course("a", "k", y, y, noisy=noisy)
        assert said in courses([course], name="n")
