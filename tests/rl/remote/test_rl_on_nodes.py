"""`tools.rl` with its workers on a Ray cluster of several nodes: one is slow, one is lost, and
another joins. Takes some minutes, needs root and Linux's namespaces."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from models.checkpoints import own
from parallel.monitor.metrics import read_metrics
from tests.helpers.data.ray_nodes import ray_nodes
from tests.helpers.namespaces import available
from tests.helpers.parallel.toy import environment
from tests.helpers.rl.several_hosts import begin

pytestmark = [
    pytest.mark.drill,
    pytest.mark.skipif(not available(), reason="needs root, ip, unshare and nsenter"),
]
STEPS = 100


def test_a_run_outlives_a_slow_node_a_lost_one_and_one_that_joins(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    out = tmp_path / "out"
    command = [sys.executable, *begin(tmp_path), "--out", out, "--learner-steps", STEPS]
    command += ["--mesh.fsdp", 1, "--eval-every", 0, "--save-every", 0, "--rollout.slots", 4]
    command += ["--placement", "disaggregated", "--disaggregated.simulators", 2]
    with ray_nodes(3, cpus=1) as nodes:
        process = subprocess.Popen(
            nodes.inside([*map(str, command), "--ray-address", nodes.address]),
            env=environment(1),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

        def until(count):
            while process.poll() is None and len(read_metrics(out)) < count:
                time.sleep(0.2)
            assert process.poll() is None, process.communicate()

        until(2)
        with nodes.nodes[1].slow():
            until(len(read_metrics(out)) + 3)
        nodes.lose(nodes.nodes[2])
        nodes.join()
        said, _ = process.communicate(timeout=900)
    assert process.returncode == 0, said
    rows = [row for row in read_metrics(out) if "success" in row]
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert sum(row["workers_replaced"] for row in rows) >= 1
    assert {row["episodes"] for row in rows} == {8}
    assert own.steps(out / "checkpoints") == [STEPS]
