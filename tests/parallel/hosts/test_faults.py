"""Faults of a run of two processes, each with real processes: it is detected within 15 seconds,
named, and the run goes on with the losses of one without faults.

One launched run takes all faults in turn, so that each costs one start. Times of detection are
between the moment that the process struck itself and the launcher's, not those of the test.
"""

import random
import re
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import pytest

from parallel.hosts import exits, inject
from parallel.mesh import make_mesh
from tests.helpers.parallel.launched import launch
from tests.helpers.parallel.opened import Run, train
from tests.helpers.parallel.toy import OPTIMIZER, RULES, Denoiser, batches, losses, position
from tests.helpers.parallel.train_hosts import CONFIG

pytestmark = pytest.mark.slow

WITHIN = 15.0
FAULTS = {
    "kill@rank1:step4": r"rank 1 was killed by SIGKILL",
    "kill@rank0:step8": r"rank 0 was killed by SIGKILL",
    "stop@rank1:step12": r"rank 1 was stopped",
    "stuck@rank0:step16": r"no progress .* suspect: rank 0 \(",
    "hang@rank1:step20": r"no progress .* suspect: rank 1 \(",
    "exception@rank0:step24": r"rank 0 ended with exit code 1: RuntimeError: exception@rank0",
    "full@rank1:step29": r"rank 1 ended with exit code 1",
}
TOLD = "term@rank1:step1"


@dataclass(frozen=True)
class Drill:
    """A run that faults hit, and what all its processes said."""

    folder: Path
    told: str
    said: str


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> list[tuple[float, float]]:
    """Losses of a run on two devices of this process."""
    run = Run(tmp_path_factory.mktemp("whole"), config={"model": "toy"}, assets={})
    mesh = make_mesh(devices=jax.devices()[:2])
    train(Denoiser(), RULES, batches, position, run, CONFIG, OPTIMIZER, mesh=mesh)
    return losses(run.directory)


@pytest.fixture(scope="module")
def drill(tmp_path_factory) -> Drill:
    folder = tmp_path_factory.mktemp("drill")
    told = launch(folder, "--inject", TOLD, code=exits.UNFINISHED)
    options = ("--resume", "--patience", "4", "--inject", ",".join(FAULTS))
    said = launch(folder, *options, launcher=("--max-restarts", str(2 * len(FAULTS))))
    return Drill(folder, told, said)


def detection(said: str, fault: str) -> tuple[float, str]:
    """Seconds until the launcher knew, and what it knew."""
    struck = re.search(rf"inject: {fault} at ([\d.]+)", said)
    assert struck is not None, said
    found = re.search(r"launch: detected at ([\d.]+): (.*)", said[struck.end() :])
    assert found is not None, said
    return float(found[1]) - float(struck[1]), found[2]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_detected_in_time_and_its_first_cause_named(drill, fault):
    seconds, what = detection(drill.said, fault)
    assert re.search(FAULTS[fault], what), what
    assert 0 <= seconds < WITHIN


def test_after_all_faults_the_losses_are_those_of_an_untouched_run(drill, whole):
    assert len(whole) == CONFIG.train_steps
    assert losses(drill.folder) == whole


def test_sigterm_to_one_stops_all_after_the_same_step_and_saves(drill):
    assert "Stopped by SIGTERM on host 1 after step" in drill.told
    assert len(set(re.findall(r"stopped at (\d+)", drill.told))) == 1
    assert drill.told.count("stopped at") == 2
    assert "detected" not in drill.told


def test_a_stall_leaves_the_stacks_of_all_and_shows_where_the_suspect_stands(drill):
    for rank in range(2):
        stacks = (drill.folder / "stacks" / f"rank-{rank}.txt").read_text()
        assert stacks.count("no progress") == 2
        assert "train_hosts.py" in stacks
    for rank in range(2):  # stuck on rank 0, in a collective on rank 1
        assert re.search(rf"\[{rank}\] .*inject\.py.*in _happen", drill.said)


def test_a_smaller_job_goes_on_with_the_same_batches(tmp_path, whole):
    options = ("--inject", "kill@rank1:step9")
    said = launch(tmp_path, *options, launcher=("--max-restarts", "1", "--min-processes", "1"))
    assert "restarting with 1 processes" in said
    found = losses(tmp_path)
    assert [step for step, _ in found] == [step for step, _ in whole]
    np.testing.assert_allclose([loss for _, loss in found], [loss for _, loss in whole], rtol=1e-5)


@pytest.mark.drill
@pytest.mark.parametrize("seed", range(8))
def test_faults_at_random_steps_and_ranks_change_no_loss(tmp_path, whole, seed):
    chance = random.Random(seed)
    kinds = [kind for kind in inject.KINDS if kind not in ("nan", "term")]
    steps = sorted(chance.sample(range(1, CONFIG.train_steps), 4))
    faults = [f"{chance.choice(kinds)}@rank{chance.randrange(2)}:step{step}" for step in steps]
    options = ("--patience", "4", "--inject", ",".join(faults))
    said = launch(tmp_path, *options, launcher=("--max-restarts", "8"))
    assert losses(tmp_path) == whole
    struck = re.findall(r"inject: (\S+) at", said)
    assert struck
    for fault in struck:
        if not fault.startswith("full"):  # nothing fails before the next save
            assert detection(said, fault)[0] < WITHIN
