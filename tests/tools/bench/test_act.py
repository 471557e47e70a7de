"""The benchmark of acting times both halves alike, and counts what it timed."""

import sys
from contextlib import contextmanager
from itertools import chain, repeat
from pathlib import Path

import pytest

from models.files.terminal import Console
from tools.bench.models import act, pi05

CONSOLE = Console(quiet=True)


def test_openpi_acts_in_turn_with_ours_and_the_first_round_is_not_counted(monkeypatch):
    asked, order = [], []

    @contextmanager
    def asking(python, script):
        def ask(**request):
            asked.append(request)
            order.append("openpi")
            return {"seconds": 9.0 if order.count("openpi") == 2 else 0.3}

        assert (python, script) == (Path(sys.executable), "openpi")
        yield ask

    def acts(policy, batch):
        for seconds in chain((50.0,), repeat(0.1 * batch)):
            order.append("ours")
            yield seconds

    monkeypatch.setattr(act, "asking", asking)
    monkeypatch.setattr(act, "acts", acts)
    monkeypatch.setattr(act, "_policy", lambda *_: None)
    found = act.compared(CONSOLE, Path(sys.executable), pi05.CONFIG, (1, 2), 3)
    assert order == ["openpi", *["ours", "openpi"] * 8]
    first, *rest = asked
    assert first["config"] == pi05.their_config(pi05.CONFIG) | {"dtype": "float32"}
    assert first["steps"] == pi05.CONFIG.euler_steps
    assert rest == [{"run": "act", "batch": 1}] * 4 + [{"run": "act", "batch": 2}] * 4
    assert found["ratio"] == pytest.approx(3)
    assert [row["ratio"] for row in found["rows"]] == pytest.approx([3, 1.5])
    assert found["rows"][1] == pytest.approx(
        {"batch": 2, "ratio": 1.5, "ours_p50_ms": 200, "ours_p99_ms": 200}
        | {"openpi_p50_ms": 300, "openpi_p99_ms": 300}
    )


def test_percentiles_are_of_milliseconds():
    assert act.percentiles([0.001, 0.002, 0.003]) == pytest.approx({"p50_ms": 2, "p99_ms": 2.98})


def test_released_sizes_on_a_cpu_are_refused_with_what_can_be_run():
    with pytest.raises(ValueError, match=r"needs a GPU, or --peer PYTHON .* --tiny"):
        act.run(CONSOLE)
