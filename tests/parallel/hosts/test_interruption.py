"""Runs of other processes that are told to stop, or killed, at seeded random moments."""

import random
import re
import signal
import subprocess
import sys
import time

import jax
import pytest

from parallel import checkpoint
from parallel.hosts import exits
from parallel.mesh import make_mesh
from parallel.monitor.goodput import read_account
from parallel.monitor.metrics import read_metrics
from tests.helpers.parallel.opened import Run, train
from tests.helpers.parallel.toy import OPTIMIZER, RULES, Denoiser, environment, free_port, position
from tests.helpers.parallel.train_toy import CONFIG, POISONED, poisoned

pytestmark = pytest.mark.slow


def uninterrupted(directory, devices):
    mesh, run = make_mesh(devices=jax.devices()[:devices]), Run(directory, config={}, assets={})
    train(Denoiser(), RULES, poisoned, position, run, CONFIG, OPTIMIZER, mesh=mesh)
    found = losses(directory)
    assert [step for step, _, skipped in found if skipped] == [POISONED]
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return uninterrupted(tmp_path_factory.mktemp("alone"), 1)


@pytest.fixture(scope="module")
def paired(tmp_path_factory):
    return uninterrupted(tmp_path_factory.mktemp("paired"), 2)


def losses(directory):
    lines = [line for line in read_metrics(directory) if "loss" in line]
    return [(line["step"], repr(line["loss"]), line["skipped"]) for line in lines]


class Job:
    """The toy's run as `count` processes."""

    def __init__(self, directory, *options, count=1):
        port = free_port()
        self.processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.helpers.parallel.train_toy",
                    str(directory),
                    *options,
                ],
                env=environment(
                    1,
                    CHILIAD_COORDINATOR=f"127.0.0.1:{port}",
                    CHILIAD_PROCESSES=str(count),
                    CHILIAD_RANK=str(index),
                    CHILIAD_RESTARTS="0",  # as launched: a busy machine is no lost heartbeat
                ),
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for index in range(count)
        ]

    def strike(self, moment, delay, number, index=0):
        """Sends one process a signal some time after it began something; None if it never did."""
        heard = []
        for line in self.processes[index].stdout:
            heard.append(line)
            if line == f"{moment}\n":
                time.sleep(delay)
                self.processes[index].send_signal(number)
                break
        return self.end("".join(heard) if index == 0 else "")

    def end(self, heard=""):
        """Output of the first process, once all have ended."""
        try:
            outputs = [process.communicate(timeout=240)[0] for process in self.processes]
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"still running: {error.output}") from error
        finally:
            for process in self.processes:
                process.kill()
        self.codes = [process.returncode for process in self.processes]
        self.said = "\n--\n".join(outputs)
        return heard + outputs[0]


def finish(directory, count=1):
    job = Job(directory, "--resume", count=count)
    output = job.end()
    assert set(job.codes) == {0}, job.said
    assert f"finished at {CONFIG.train_steps}" in output


def struck_until_finished(directory, count, signals, seed):
    """Strikes at one of `count` processes, at moments of all its life, and resumes each time. Lines
    of steps that a killed run did not save stay until a resumed one has made a step."""
    chance, options = random.Random(seed), ()
    for name in signals:
        saved = checkpoint.latest(directory / "checkpoints") or 0
        batches = [f"batch {saved}", f"batch {saved + chance.randrange(1, 6)}"]  # first it compiles
        evaluations = [f"evaluating {s}" for s in range(saved + 1, saved + 6) if s % 5 == 0]
        moment, number = chance.choice(batches + evaluations), signal.Signals[name]
        job, index = Job(directory, *options, count=count), chance.randrange(count)
        output = job.strike(moment, chance.uniform(0, 0.3), number, index)
        at = checkpoint.latest(directory / "checkpoints") or 0
        if "finished" in output:
            break
        if number == signal.SIGKILL:
            assert job.codes[index] == -signal.SIGKILL, f"{moment}: {job.said}"
        else:
            assert set(job.codes) == {exits.of_signal(number)}, f"{moment}: {job.said}"
            assert f"Stopped by {name}" in output, f"{moment}: {job.said}"
            assert f"after step {at} of 40" in output
            assert "--resume" in output
            assert ("on host" in output) == (count > 1)
            assert f"stopped at {at}\n" in output
            assert len(re.findall(rf"stopped at {at}\n", job.said)) >= count - 1
            written = [step for step, *_ in losses(directory)]
            assert written == list(range(at if at > saved else max(at, len(written))))
        options = ("--resume",)
    finish(directory, count)


def test_a_run_killed_and_stopped_has_the_losses_of_an_uninterrupted_one(tmp_path, alone):
    directory = tmp_path / "run"
    struck_until_finished(directory, 1, ["SIGKILL", "SIGTERM", "SIGINT"], seed=1)
    assert losses(directory) == alone
    assert checkpoint.steps(directory / "checkpoints") == [39, 40]
    assert {path.name for path in (directory / "checkpoints").iterdir()} == {"39", "40"}


def test_two_processes_stop_together_when_one_is_told_to(tmp_path, paired):
    struck_until_finished(tmp_path / "run", 2, ["SIGTERM"], seed=2)
    assert losses(tmp_path / "run") == paired
    assert read_account(tmp_path / "run").lost_steps == 0


def test_two_processes_make_the_last_evaluation_that_a_signal_to_one_interrupted(tmp_path):
    job = Job(tmp_path, "--long", count=2)
    job.strike(f"evaluating {CONFIG.train_steps}", 0, signal.SIGTERM, index=1)
    assert job.said.count(f"stopped at {CONFIG.train_steps}\n") == 2, job.said
    for _ in range(2):
        finish(tmp_path, 2)
        found = [line["step"] for line in read_metrics(tmp_path) if "eval_loss" in line]
        assert found == list(range(CONFIG.eval_every - 1, CONFIG.train_steps, CONFIG.eval_every))


@pytest.mark.drill
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("count", [1, 2])
def test_drill_of_many_moments(tmp_path, alone, paired, count, seed):
    signals = ["SIGTERM", "SIGINT"] * 3 + ["SIGKILL", "SIGTERM"] * (count == 1)
    struck_until_finished(tmp_path / "run", count, signals, seed)
    assert losses(tmp_path / "run") == (alone if count == 1 else paired)


def test_processes_told_to_stop_while_one_prepares_leave_at_once_and_save_nothing(tmp_path):
    job = Job(tmp_path / "run", "--slow", count=2)
    job.strike("begins", 0.0, signal.SIGTERM)
    assert job.codes == [exits.UNFINISHED] * 2, job.said
    assert "told to stop with nothing to save" in job.said
    assert not (tmp_path / "run" / "checkpoints").exists()
