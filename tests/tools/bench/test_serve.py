"""The serving benchmark, shrunk: what it counts, not how fast."""

from rich.console import Console

from tools.bench import serve
from tools.recipes.presets import TINY


def test_batches_and_one_at_a_time_are_measured_in_turn(monkeypatch):
    monkeypatch.setattr(serve, "_MODEL", TINY.model)
    load = serve.ClientLoad(clients=2, rounds=1, requests=4)
    result = serve.run(Console(quiet=True), load)
    batched, single = result["table"].values()
    assert result["ratio"] == batched["requests/s"] / single["requests/s"] > 0
    assert single["rows a batch"] == 1
    assert 1 < batched["rows a batch"] <= 2
    for row in (batched, single):
        assert 0 < row["p50_ms"] <= row["p90_ms"] <= row["p99_ms"]
