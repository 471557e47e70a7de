"""The attention benchmark's rows are full, and each sample lies end to end in them."""

import math

import numpy as np
import pytest

from models.files.terminal import Console
from tools.bench.models import attention
from tools.bench.models.attention import Case, alternate, rows, segments


@pytest.mark.parametrize("case", [Case(1, 64, 4, 1, 8), Case(3, 50, 6, 1, 8)])
def test_samples_lie_end_to_end_and_fill_their_row(case):
    found = segments(case, np.random.default_rng(0))
    assert found.shape == (case.rows, case.keys)
    for row in found:
        np.testing.assert_array_equal(np.unique(row), np.arange(1, case.segments + 1))
        assert (np.diff(row) >= 0).all()


def test_ratios_are_taken_within_a_round():
    first, second = rows({"auto": [1.0, 10.0, 2.0], "dense": [2.0, 20.0, 8.0]}, "ratio")
    assert first["ratio"] == 1
    assert second["ratio"] == 2
    assert first["ms"] == 2000


def test_one_that_fails_leaves_the_others_measured(monkeypatch):
    def gradient(case, name, dtype):
        def step():
            if name == "auto":
                raise RuntimeError("no kernel")
            return np.zeros(1)

        return step

    monkeypatch.setattr(attention, "gradient", gradient)
    found = attention.run(Console(quiet=True), tiny=True)
    assert {row["error"] for row in found["scaling"]} == {"RuntimeError: no kernel"}
    assert all(any("ms" in row for row in case["rows"]) for case in found["released"])
    assert found["packed"][0]["auto"]["error"] == "RuntimeError: no kernel"
    assert found["packed"][0]["dense"]["ms"] >= 0
    assert math.isnan(found["ratio"])


def test_brief_calls_are_made_several_times_before_they_are_waited_for(monkeypatch):
    monkeypatch.setattr(attention, "_BRIEF", 60.0)  # as brief a call is on any busy machine
    calls = []
    took = alternate({"brief": lambda: calls.append(0)}, 3)
    assert len(calls) == 1 + 3 * attention._MOST
    assert len(took["brief"]) == 3
