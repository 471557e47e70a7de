"""Runs of RL on a device and populations, killed, on full disks and with folders taken away: what
was learnt comes back the same."""

import random
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from models.checkpoints import digests, own
from parallel import checkpoint
from parallel.hosts import exits
from parallel.monitor.metrics import read_metrics
from tests.helpers.parallel.full_disk import fill
from tests.helpers.parallel.toy import environment
from tests.helpers.rl import struck
from tests.helpers.rl.counted import Counting, losses, run


def filling(out, at):
    def full(step, told):
        if step == at:
            fill(out / "metrics.jsonl")
        return False

    return full


def test_a_log_on_a_full_disk_stops_the_run_after_its_last_step_is_saved(tmp_path):
    whole = run(tmp_path / "whole")
    out = tmp_path / "run"
    with pytest.raises(OSError, match=r"metrics.jsonl: No space left .* after step 4 of 7, saved"):
        run(out, Counting(filling(out, 3)))
    assert own.steps(out / "checkpoints")[-1] == 4
    again = run(out, resume=True)
    assert np.asarray(again.params["w"]) == np.asarray(whole.params["w"])
    known = dict(losses(tmp_path / "whole"))
    assert dict(losses(out)) == {step: known[step] for step in known if step != 3}


def test_checkpoints_that_are_taken_away_end_the_run_and_come_back(tmp_path):
    def unmount(step, told):
        if step == 4:
            while not (tmp_path / "checkpoints" / "4").exists():
                pass
            struck.strike("unmounted", tmp_path)
        return False

    with pytest.raises(OSError, match=r"Step 6 could not be saved .* is not a folder: mount it"):
        run(tmp_path, Counting(unmount))
    struck.repair(tmp_path)
    assert own.steps(tmp_path / "checkpoints") == [2, 4]
    assert run(tmp_path, resume=True).finished


def start(out, *options):
    return subprocess.run(
        [sys.executable, "-m", "tests.helpers.rl.struck", str(out), *options],
        env=environment(1),
        capture_output=True,
        text=True,
        timeout=240,
    )


def runs(out):
    return [path.parent for path in sorted(out.rglob("metrics.jsonl"))]


def learnt(run):
    """Results of each step, without its times."""
    keys = ("loss", "success", "return", "grad_norm")
    return {
        row["step"]: [row.get(key) for key in keys] for row in read_metrics(run) if "loss" in row
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "strikes", "seed"),
    [
        pytest.param("population", 4, 0, marks=pytest.mark.slow),
        *(
            pytest.param(kind, strikes, seed, marks=pytest.mark.drill)
            for kind, strikes in (("colocated", 6), ("population", 12))
            for seed in (1, 2, 3)
        ),
    ],
)
def test_faults_change_nothing_of_what_is_learnt(tmp_path, kind, strikes, seed):
    chance, out, befallen = random.Random(seed), tmp_path / "run", []
    assert start(tmp_path / "whole", kind).returncode == 0
    for number in range(strikes):
        fault = struck.KINDS[number % len(struck.KINDS)]
        done = start(out, kind, fault, str(chance.randrange(1, 6)))
        if done.returncode == 0:
            break
        befallen.append(fault)
        assert f"struck {fault}" in done.stdout, done.stderr
        if fault == "kill":
            assert done.returncode == -signal.SIGKILL, done.stderr
        else:
            assert done.returncode == exits.FAILED, done.stderr
            assert done.stderr.count("error: ") == 1, done.stderr
            # tensorstore's threads may still call, all at once, a loop that a failed save closed
            noise = done.stderr.count("RuntimeError: Event loop is closed")
            assert (done.stderr.count("Traceback") > 0) == (noise > 0), done.stderr
        struck.repair(out)
        for folder in out.rglob("checkpoints"):
            whole = [digests.damage(folder / str(step)) for step in checkpoint.steps(folder)]
            assert whole == [[]] * len(whole)
    assert set(befallen) == set(struck.KINDS)
    done = start(out, kind)
    assert done.returncode == 0, done.stderr
    assert len(runs(out)) == len(runs(tmp_path / "whole")) > 0
    for one, other in zip(runs(out), runs(tmp_path / "whole"), strict=True):
        found, expected = learnt(one), learnt(other)
        assert len(expected) == 24
        assert found == {step: expected[step] for step in found}
        same = jax.tree.map(np.array_equal, *(own.restore_params(path) for path in (one, other)))
        assert jax.tree.all(same)
