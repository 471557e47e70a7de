"""The serving benchmark, shrunk: what it counts, not how fast."""

from functools import partial

import pytest

from models.files.terminal import Console
from tools.bench.models.random_policy import random_policy
from tools.bench.serving import serve
from tools.bench.serving.start import starts
from tools.recipes.presets import TINY


@pytest.mark.slow
def test_batches_and_one_at_a_time_are_measured_in_turn(monkeypatch):
    monkeypatch.setattr(serve, "_MODEL", TINY.model)
    monkeypatch.setattr(serve, "starts", lambda save, console: {"started": save.args[0].sizes})
    load = serve.ClientLoad(clients=2, rounds=1, requests=4)
    result = serve.run(Console(quiet=True), load)
    assert result["start"] == {"started": serve.make_policy().sizes}
    batched, single = result["table"].values()
    assert result["ratio"] == batched["requests/s"] / single["requests/s"] > 0
    assert single["rows a batch"] == 1
    assert 1 < batched["rows a batch"] <= 2
    for row in (batched, single):
        assert 0 < row["p50_ms"] <= row["p90_ms"] <= row["p99_ms"]


@pytest.mark.slow
def test_each_start_listens_before_it_is_ready_and_answers_then():
    pytest.importorskip("flatbuffers")
    found = starts(partial(serve.save, random_policy(TINY.model, ["lift"])), Console(quiet=True))
    assert list(found) == ["all batches first", "nothing kept", "programs kept"]
    for row in found.values():
        assert 0 < row["listening"] < row["ready"] < row["answer"]
        assert row["cpu"] > 0


@pytest.mark.slow
def test_a_random_policy_reads_states_of_all_dims_as_text():
    """π0.5's, as `--width real` serves it; its words are the prompt's, so numbers are spelt."""
    model = TINY.model.changed(state_input="text", state_dim=32)
    policy = random_policy(model, ["lift"], state=32)
    assert policy.processor.longest_text(["lift"], 0, 1)[0] > 100
