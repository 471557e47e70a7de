"""`tools.rl` as two processes of one job: the same learning as one process, one folder, and an
orderly end on all hosts."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from models.checkpoints import own
from parallel.hosts import exits
from rl.host import placement
from rl.host.placement import most_episodes
from tests.helpers.rl.points import HOST
from tests.helpers.rl.several_hosts import begin, improve, learnt


@pytest.mark.slow
def test_two_hosts_learn_as_two_devices_of_one_do_and_go_on_as_one(tmp_path):
    """Also after one of them was told to stop, which ends both after the same step; and the folder
    is that of one run, whose counts are of both."""
    alone, several, command = tmp_path / "alone", tmp_path / "several", begin(tmp_path)
    improve(command, "--out", alone, hosts=1, devices=2)
    command += ["--out", str(several)]
    told = "--inject", "term@rank1:step1"
    stopped = improve(command, *told, hosts=2, devices=1, code=exits.UNFINISHED)
    (done,) = own.steps(several / "checkpoints")
    assert stopped.count(f"Stopped after step {done} of 3") == 1
    counts = own.read_json(several / "checkpoints" / str(done), "position")["counts"]
    assert counts["learnt"] == done * 4 * 2 == counts["finished"]
    improve(command, "--resume", hosts=1, devices=2)
    (params, rows), (others, found) = learnt(alone), learnt(several)
    assert list(found) == [0, 1, 2]
    for step, row in rows.items():
        assert found[step].keys() == row.keys()
        numbers = [[x[name] for name in row] for x in (row, found[step])]
        np.testing.assert_allclose(*numbers, rtol=1e-5, atol=1e-6, err_msg=f"{step}: {list(row)}")
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), params, others)


@pytest.mark.parametrize(("groups", "hosts", "each"), [(4, 1, 24), (4, 2, 12), (5, 2, 18)])
def test_a_host_has_slots_for_its_own_groups(monkeypatch, groups, hosts, each):
    monkeypatch.setattr(placement, "host_count", lambda: hosts)
    rollout = replace(HOST.rollout, groups=groups, group=3, staleness=1)
    assert most_episodes(replace(HOST, rollout=rollout)) == each
