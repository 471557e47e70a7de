"""Logs that cannot be written: what was trained is saved, and then the run ends with a sentence."""

import errno
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from models.checkpoints import digests
from parallel import checkpoint
from parallel.hooks import Hook
from parallel.hosts import exits
from parallel.hosts.distributed import host_index
from parallel.mesh import make_mesh
from parallel.monitor.metrics import FILE_NAME, MetricsWriter, read_metrics
from parallel.runs.log_failure import naming
from parallel.trainer import TrainerConfig
from tests.helpers.parallel.full_disk import fill
from tests.helpers.parallel.opened import Run, train
from tests.helpers.parallel.toy import (
    OPTIMIZER,
    RULES,
    Denoiser,
    batches,
    environment,
    losses,
    position,
)

CONFIG = TrainerConfig(train_steps=12, save_every=100, log_every=1)
LOGS = ("metrics.jsonl", "goodput.jsonl", "tensorboard")


def run(directory, source=batches, config=CONFIG, **options):
    where = Run(directory, config={"model": "toy"}, assets={})
    mesh = make_mesh(devices=jax.devices()[:1])
    return train(
        Denoiser(), RULES, source, position, where, config, OPTIMIZER, mesh=mesh, **options
    )


def filling(where, step=6):
    """Batches; with that of a step the disk fills up."""

    def source(start, position):
        for i, fed in enumerate(batches(start, position), start):
            if i == step:
                fill(where)
            yield fed

    return source


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    directory = tmp_path_factory.mktemp("untouched")
    run(directory)
    return dict(losses(directory))


@pytest.mark.slow
@pytest.mark.parametrize("log", LOGS)
def test_a_log_on_a_full_disk_stops_the_run_after_saving_it(tmp_path, untouched, log):
    with pytest.raises(OSError, match="No space left on device; make room") as error:
        run(tmp_path, filling(tmp_path / log))
    saved = checkpoint.newest_good(tmp_path / "checkpoints")
    assert 1 <= saved <= 8
    assert str(error.value) == (
        f"{tmp_path / log}: No space left on device; make room. The run was stopped after step "
        f"{saved} of 12, saved in {tmp_path / 'checkpoints'}; the same command with --resume then "
        f"continues from there."
    )
    run(tmp_path, resume=True)
    found = dict(losses(tmp_path))
    assert found == {step: untouched[step] for step in found}
    lost = set(range(12)) - set(found)
    assert lost == (set(range(min(lost), saved)) if log == FILE_NAME else set())


def test_an_evaluation_that_cannot_be_noted_stops_the_run_after_saving_it(tmp_path):
    def evaluate(step, state, stopping):
        with naming(tmp_path / "closed_loop.jsonl"), open("/dev/full", "w") as file:
            file.write("{}\n")

    with pytest.raises(OSError, match=r"closed_loop.jsonl: No space .* after step [4-6] of 12"):
        run(tmp_path, hooks=[Hook(4, evaluate)])
    assert 4 <= checkpoint.newest_good(tmp_path / "checkpoints") <= 6


def test_a_fault_that_is_no_disks_is_raised_as_it_was_once_the_run_is_saved(tmp_path):
    fault = BrokenPipeError(errno.EPIPE, "Broken pipe")

    def evaluate(step, state, stopping):
        raise fault

    with pytest.raises(BrokenPipeError) as error:
        run(tmp_path, hooks=[Hook(4, evaluate)])
    assert error.value is fault
    assert 4 <= checkpoint.newest_good(tmp_path / "checkpoints") <= 6


def test_a_log_and_a_save_that_both_fail_are_told_in_one_line(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(digests, "digest_files", full)
    with pytest.raises(OSError, match="jsonl: No space left on device; make room") as error:
        run(tmp_path, filling(tmp_path / FILE_NAME))
    assert re.search(
        r"make room\. Step \d could not be saved in .* then resume\.$", str(error.value)
    )
    assert "\n" not in str(error.value)


def test_a_write_that_fails_names_its_file_and_closing_says_no_more(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"loss": 1.0})
        fill(tmp_path / "tensorboard")
        with pytest.raises(OSError, match=r"No space left on device: '.*tensorboard'"):
            writer.write(1, {"loss": 1.0})
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1]


def test_every_line_is_the_systems_as_soon_as_it_is_written(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"loss": 1.0})
        assert len(read_metrics(tmp_path)) == 1


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.ENOSPC, "x", "runs/log"), "runs/log: No space left on device; make room."),
        (OSError(errno.ENOSPC, "x", "from", None, "to"), "to: No space left on device; make room."),
        (OSError(errno.ENOSPC, "x"), "here: No space left on device; make room."),
        (PermissionError(errno.EACCES, "x", "a"), "a: Permission denied; change its permissions"),
        (OSError(errno.EROFS, "x", "a"), "a: Read-only file system; mount it for writing"),
        (OSError("Step 2 could not be saved."), "Step 2 could not be saved."),
        (ValueError("no such field"), "no such field"),
        (FileNotFoundError(errno.ENOENT, "No such file", "a"), "[Errno 2] No such file: 'a'"),
    ],
)
def test_an_error_from_outside_is_a_sentence_with_a_remedy(error, says):
    assert exits.sentence(error, Path("here")).startswith(says)


@pytest.mark.parametrize("error", [RuntimeError("x"), KeyError("x"), BrokenPipeError(32, "x")])
def test_what_may_be_a_fault_of_the_code_keeps_its_traceback(error):
    assert exits.sentence(error) is None


def hosts(folder, source, save_every):
    """A run of two processes, whose batches are what a function of this file yields."""
    program = f"""
from dataclasses import replace
from tests.helpers.parallel import train_hosts
from tests.parallel.runs import test_log_failure
train_hosts.CONFIG = replace(train_hosts.CONFIG, save_every={save_every})
train_hosts.shares = test_log_failure.{source}(train_hosts.shares, {str(folder)!r})
train_hosts.main()
"""
    return subprocess.run(
        [sys.executable, "-m", "tools.launch", "-n", "2", "--", "python", "-c", program, folder],
        env=environment(1),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=150,
    )


def unlogged(source, folder):
    def filling(start, where):
        for step, fed in enumerate(source(start, where), start):
            if step == 6:
                fill(Path(folder) / FILE_NAME)
            yield fed

    return filling


def unmounted(source, folder):
    def losing(start, where):
        for step, fed in enumerate(source(start, where), start):
            if step == 6 and host_index() == 0:
                checkpoints = Path(folder) / "checkpoints"
                while not (checkpoints / "4").exists():
                    time.sleep(0.01)
                shutil.rmtree(checkpoints, ignore_errors=True)
                checkpoints.touch()
            yield fed

    return losing


@pytest.mark.slow
def test_two_processes_save_and_end_when_the_first_cannot_log(tmp_path):
    done = hosts(tmp_path, "unlogged", 100)
    assert done.returncode == exits.FAILED, done.stdout
    saved = checkpoint.newest_good(tmp_path / "checkpoints")
    assert saved is not None, done.stdout
    said = f"No space left on device; make room. The run was stopped after step {saved} of 32"
    assert f"{tmp_path / FILE_NAME}: {said}" in done.stdout
    assert "Traceback" not in done.stdout


@pytest.mark.slow
def test_two_processes_end_when_the_first_cannot_save(tmp_path):
    done = hosts(tmp_path, "unmounted", 4)
    assert done.returncode == exits.FAILED, done.stdout
    assert "error: Step 8 could not be saved in" in done.stdout
    assert f"{tmp_path / 'checkpoints'} is not a folder: mount it" in done.stdout
    assert "Traceback" not in done.stdout
