"""Runs of another process that is told to stop, or killed, at seeded random moments."""

import random
import signal
import subprocess
import sys
import time

import jax
import pytest

from parallel import checkpoint
from parallel.mesh import make_mesh
from parallel.metrics import read_metrics
from parallel.trainer import Run, train
from tests.parallel.toy import OPTIMIZER, RULES, Denoiser, batches, environment, position
from tests.parallel.train_toy import CONFIG


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    directory = tmp_path_factory.mktemp("uninterrupted")
    mesh = make_mesh(devices=jax.devices()[:1])
    run = Run(directory, config={}, assets={})
    train(Denoiser(), RULES, batches, position, run, CONFIG, OPTIMIZER, mesh=mesh)
    return losses(directory)


def losses(directory):
    return [(line["step"], line["loss"]) for line in read_metrics(directory)]


def start(directory, *arguments):
    command = [sys.executable, "-m", "tests.parallel.train_toy", str(directory), *arguments]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, env=environment(), text=True, **pipe)


def strike(process, batch, delay, number):
    """Sends a signal some time after that batch was made; returns what the process said after."""
    assert process.stdout is not None
    heard = []
    for line in process.stdout:
        heard.append(line)
        if line == f"batch {batch}\n":
            break
    else:
        pytest.fail(f"The run ended before batch {batch}: {''.join(heard)}")
    time.sleep(delay)
    process.send_signal(number)
    return process.communicate(timeout=60)[0]


def finish(directory):
    process = start(directory, "--resume")
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 0, output
    assert f"finished at {CONFIG.steps}" in output


@pytest.mark.slow
def test_killed_runs_resume_with_the_losses_of_an_uninterrupted_one(tmp_path, uninterrupted):
    random_moment, directory = random.Random(0), tmp_path / "run"
    arguments: tuple[str, ...] = ()
    for earliest in (2, 12, 22):
        process = start(directory, *arguments)
        batch = random_moment.randrange(earliest, earliest + 10)
        strike(process, batch, random_moment.uniform(0, 0.1), signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
        arguments = ("--resume",)
    finish(directory)
    assert losses(directory) == uninterrupted
    assert checkpoint.steps(directory / "checkpoints") == [39, 40]
    assert {path.name for path in (directory / "checkpoints").iterdir()} == {"39", "40"}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_saves_says_how_to_go_on_and_resumes(tmp_path, uninterrupted, number):
    directory = tmp_path / "run"
    process = start(directory)
    output = strike(process, 10, 0.01, number)
    step = checkpoint.latest(directory / "checkpoints")
    assert process.returncode == 0, output
    assert f"stopped at {step}" in output
    assert f"Stopped by {number.name} after step {step}" in output
    assert "--resume" in output
    assert losses(directory) == uninterrupted[:step]
    finish(directory)
    assert losses(directory) == uninterrupted
