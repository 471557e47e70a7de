"""`tools.rl` on two hosts with networks of their own, one of which is lost: the other ends, and a
run of one host goes on. Takes some minutes, needs root and Linux's namespaces."""

import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from models.checkpoints import own
from tests.helpers.namespaces import available
from tests.helpers.parallel.box import box
from tests.helpers.parallel.toy import environment
from tests.helpers.rl.several_hosts import begin, improve, learnt

pytestmark = [
    pytest.mark.drill,
    pytest.mark.skipif(not available(), reason="needs root, ip, unshare and nsenter"),
]


def test_a_host_that_is_lost_ends_the_other_which_goes_on_alone(tmp_path):
    alone, out, command = tmp_path / "alone", tmp_path / "out", begin(tmp_path)
    mine = [*command, "--out", str(out), "--save-every", "1"]
    with box(2, tmp_path) as hosts:
        job = ["--coordinator", f"{hosts[0].address}:8476", "--num-processes", "2"]
        stuck = ["--inject", "stuck@rank1:step1", "--stall-seconds", "600"]
        processes = [
            subprocess.Popen(
                host.inside([sys.executable, *mine, *job, *stuck, "--process-id", str(number)]),
                env=environment(1),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for number, host in enumerate(hosts)
        ]
        while not own.steps(out / "checkpoints") and processes[0].poll() is None:
            time.sleep(0.1)
        hosts[1].lose()
        said, _ = processes[0].communicate(timeout=300)
        processes[1].communicate(timeout=60)
    assert processes[0].returncode not in (0, None), said
    assert own.steps(out / "checkpoints") == [1], said
    improve(mine, "--resume", hosts=1, devices=2)
    improve(command, "--out", alone, hosts=1, devices=2)
    (params, _), (others, _) = learnt(alone), learnt(out)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), params, others)
