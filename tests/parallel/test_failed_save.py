"""Saves that fail, as on a full disk: said where the run can act on it, and nothing lost."""

import errno
import re
import resource
import subprocess
import sys
import time

import jax
import pytest

from models.checkpoints import digests
from parallel import checkpoint
from parallel.mesh import make_mesh
from tests.parallel import checkpoint_host as host
from tests.parallel.toy import environment

MESH = make_mesh(devices=jax.devices()[:1])


@pytest.fixture
def writer(tmp_path):
    host.save(tmp_path, MESH, (1,))
    return checkpoint.CheckpointWriter(tmp_path, {}, {})


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def save(writer, step):
    return writer.save(step, host.state(MESH, step), {"next": step})


def check_until_raised(writer):
    while True:
        writer.check()
        time.sleep(0.01)


@pytest.mark.parametrize("at", ["digest_files", "write_digests"])
def test_a_disk_that_fills_up_leaves_the_checkpoints_before_it(writer, tmp_path, monkeypatch, at):
    with monkeypatch.context() as patch:
        patch.setattr(digests, at, full)
        save(writer, 2)
        with pytest.raises(OSError, match=r"Step 2 could not be saved .*No space left") as error:
            writer.wait()
    assert "Checkpoints of steps [1] are whole" in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    assert checkpoint.newest_good(tmp_path) == 1
    save(writer, 2)
    writer.wait()
    assert checkpoint.newest_good(tmp_path) == 2


def test_what_failed_in_the_background_surfaces_at_the_next_save_or_check(writer, monkeypatch):
    monkeypatch.setattr(digests, "digest_files", full)
    save(writer, 2)
    with pytest.raises(OSError, match="Step 2 could not be saved"):
        save(writer, 3)
    save(writer, 4)
    with pytest.raises(OSError, match="Step 4 could not be saved"):
        check_until_raised(writer)
    writer.check()


def test_a_process_over_its_file_limit_reports_it_and_keeps_what_it_had(tmp_path):
    """The system refuses to write, as it does when the disk is full."""
    program = "import sys; from tests.parallel import test_failed_save as t; t.overrun(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    for limit in (0, 600, 3000):
        assert f"limit {limit}: Step 2 could not be saved in {tmp_path}: " in done.stdout
    assert done.stdout.count("File too large") == 3
    assert done.stdout.count("left ['1']") == 3
    assert "then saved 2" in done.stdout


def overrun(directory):
    host.save(directory, MESH, (1,))
    with checkpoint.CheckpointWriter(directory, {}, {}) as writer:
        for limit in (0, 600, 3000):
            state = host.state(MESH, 2)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            try:
                writer.save(2, state, {})
                writer.wait()
            except OSError as error:
                found = str(error)
            resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
            print(f"limit {limit}: {found}")
            print("left", [path.name for path in digests.Path(directory).iterdir()])
        save(writer, 2)
    print("then saved", checkpoint.newest_good(directory))


@pytest.mark.slow
def test_a_host_whose_disk_is_full_says_so_while_the_others_wait_for_it(tmp_path):
    others, full = host.start("overrun", tmp_path, 2, 2, "fsdp=4")
    try:
        said = full.communicate(timeout=240)[0]
    finally:
        others.kill()
        others.communicate()
    seconds, message = re.search(r"^after (\S+) s: (.*)$", said, re.MULTILINE).groups()
    assert float(seconds) < 15
    assert message.startswith(f"Step 2 could not be saved in {tmp_path}: [Errno 27] File too large")
    assert checkpoint.newest_good(tmp_path) == 1
    with checkpoint.CheckpointWriter(tmp_path, {}, {}):
        assert [path.name for path in tmp_path.iterdir()] == ["1"]


def test_a_step_saved_again_replaces_it_and_ends_what_came_later(tmp_path):
    host.save(tmp_path, MESH, (1, 2, 3))
    with checkpoint.CheckpointWriter(tmp_path, {}, {}) as writer:
        writer.save(2, host.state(MESH, 7), {})
    assert checkpoint.steps(tmp_path) == [1, 2]
    restored = checkpoint.restore(tmp_path / "2", host.abstract(MESH))
    assert host.differing(restored, MESH, 7) == []
