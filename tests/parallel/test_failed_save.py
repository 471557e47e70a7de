"""Saves that fail, as on a full disk: said where the run can act on it, and nothing lost."""

import errno
import json
import logging
import os
import re
import resource
import shutil
import subprocess
import sys
import threading
import time

import jax
import pytest

from models.checkpoints import digests
from parallel import checkpoint
from parallel.mesh import make_mesh
from tests.helpers.parallel import checkpoint_host as host
from tests.helpers.parallel.toy import environment

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
    assert "Checkpoints of steps [1] are complete" in str(error.value)
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


@pytest.mark.slow
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
def test_a_process_whose_checkpoint_folder_is_lost_says_so_and_ends(tmp_path):
    """Orbax's threads would keep it for five minutes."""
    program = "import sys; from tests.parallel import test_failed_save as t; t.lose(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env=environment(1),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    for way in ("file", "dangling"):
        folder = tmp_path / way
        assert re.search(
            f"Step 2 could not be saved in {folder}: .*{folder} is not a folder: mount it",
            done.stdout,
        )
    assert "Step 2 could not be saved in " + str(tmp_path / "removed") in done.stdout
    assert "Traceback" not in done.stderr


def lose(directory):
    written, lost, digest_files = threading.Event(), threading.Event(), digests.digest_files

    def when_lost(*args):
        written.set()
        lost.wait(60)
        return digest_files(*args)

    digests.digest_files = when_lost
    for way in ("file", "dangling", "removed"):
        folder = digests.Path(directory) / way
        lost.set()
        host.save(folder, MESH, (1,))
        lost.clear()
        written.clear()
        with checkpoint.CheckpointWriter(folder, {}, {}) as writer:
            if way == "removed":
                save(writer, 2)
                written.wait(60)  # while orbax writes, it would make the folder anew
            shutil.rmtree(folder, ignore_errors=True)
            lost.set()
            if way == "file":
                folder.touch()
            if way == "dangling":
                folder.symlink_to("nowhere")
            try:
                if way != "removed":
                    save(writer, 2)
                writer.wait()
            except OSError as error:
                print(error, flush=True)


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


class Said:
    """A console, for its lines."""

    def __init__(self):
        self.lines = []

    def print(self, line, **_):
        self.lines.append(line)


def rotating(directory, console):
    return checkpoint.CheckpointWriter(directory, {}, {}, keep=1, console=console)


def test_of_a_linked_checkpoint_only_the_link_is_removed(tmp_path):
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    host.save(folder, MESH, (1,))
    (folder / "1").rename(elsewhere)
    (folder / "1").symlink_to(elsewhere)
    (folder / "0.deleted").symlink_to(elsewhere)  # left by an earlier rotation
    with rotating(folder, said := Said()) as writer:
        save(writer, 2)
    assert [path.name for path in folder.iterdir()] == ["2"]
    assert said.lines == []
    assert digests.damage(elsewhere) == []


@pytest.mark.parametrize("reason", [errno.ENOTEMPTY, errno.EACCES, errno.EBUSY])
def test_what_cannot_be_removed_fails_no_save_and_goes_later(tmp_path, monkeypatch, reason):
    host.save(tmp_path, MESH, (1,))
    with rotating(tmp_path, said := Said()) as writer:
        with monkeypatch.context() as patch:

            def refuse(path, ignore_errors=False):
                if not ignore_errors:
                    raise OSError(reason, os.strerror(reason), str(path))

            patch.setattr(shutil, "rmtree", refuse)
            for step in (2, 3):
                save(writer, step)
                writer.wait()
        assert checkpoint.steps(tmp_path) == [3]
        assert [line.split(" (")[0] for line in said.lines] == [
            f"{tmp_path / name} could not be removed" for name in ("1.deleted", "2.deleted")
        ]
        assert f" ({os.strerror(reason)}); the next save tries again." in said.lines[0]
        save(writer, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["4"]


def test_an_error_of_many_lines_is_told_by_its_first_and_by_what_is_free(writer, monkeypatch):
    def lose(*_):
        raise ValueError("No such zarr.\n[source locations]\nposix.cc:12")

    free = shutil.disk_usage("/")._replace(free=12_340_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    monkeypatch.setattr(digests, "digest_files", lose)
    save(writer, 2)
    with pytest.raises(OSError, match=r": No such zarr\. Checkpoints.*\(12\.3 GB are free there\)"):
        writer.wait()


def test_of_what_is_logged_only_orbaxs_errors_are_dropped():
    """Raised too, they would be told twice."""
    for level, file, kept in (
        (logging.ERROR, "/site/orbax/handler.py", False),
        (logging.CRITICAL, "/site/orbax/handler.py", False),
        (logging.WARNING, "/site/orbax/handler.py", True),
        (logging.ERROR, "/site/absl/app.py", True),
    ):
        record = logging.LogRecord("absl", level, file, 1, "told", None, None)
        assert checkpoint._is_said_here(record) == kept


def refuse_to_rename(monkeypatch, name):
    rename = digests.Path.rename

    def refuse(path, target):
        if path.name == name:
            raise OSError(errno.EBUSY, "Device or resource busy")
        return rename(path, target)

    monkeypatch.setattr(digests.Path, "rename", refuse)


def test_an_older_step_that_cannot_be_renamed_stays_and_fails_no_save(tmp_path, monkeypatch):
    host.save(tmp_path, MESH, (1,))
    refuse_to_rename(monkeypatch, "1")
    with rotating(tmp_path, said := Said()) as writer:
        save(writer, 2)
    assert checkpoint.steps(tmp_path) == [1, 2]
    assert said.lines == [
        f"{tmp_path / '1'} could not be removed (Device or resource busy); the next save tries "
        "again."
    ]


def test_what_is_done_once_a_step_is_saved_may_fail_with_a_warning(tmp_path, capsys):
    with checkpoint.CheckpointWriter(tmp_path, {}, {}, on_saved=full) as writer:
        assert 0 <= save(writer, 1) < 60
    assert "warning: step 1 is saved, but [Errno 28] No space left" in capsys.readouterr().err
    assert checkpoint.newest_good(tmp_path) == 1


def test_a_copy_is_the_only_checkpoint_in_its_folder(tmp_path):
    host.save(tmp_path / "run", MESH, (1, 2))
    for step in (1, 2):
        checkpoint.copy(tmp_path / "run" / str(step), tmp_path / "best")
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["2"]


def test_three_checkpoints_stay_unless_told_otherwise(tmp_path):
    with checkpoint.CheckpointWriter(tmp_path, {}, {}) as writer:
        for step in range(1, 6):
            save(writer, step)
    assert checkpoint.steps(tmp_path) == [3, 4, 5]


def test_a_step_saved_again_beside_its_remains_fails_no_save(tmp_path):
    """A rollback saves a step again whose first checkpoint somebody on NFS still reads."""
    with rotating(tmp_path, None) as writer:
        kept = tmp_path / "1.deleted" / ".nfs000000000001a2b300000001"
        kept.parent.mkdir()
        kept.touch()
        save(writer, 1)
        save(writer, 1)
    assert checkpoint.newest_good(tmp_path) == 1


def test_a_later_step_that_cannot_be_renamed_fails_the_save(tmp_path, monkeypatch):
    """The run would go on from it, though it is of a history that was given up."""
    host.save(tmp_path, MESH, (1, 5))
    refuse_to_rename(monkeypatch, "5")
    with checkpoint.CheckpointWriter(tmp_path, {}, {}) as writer:
        save(writer, 2)
        with pytest.raises(OSError, match=r"Step 2 could not be saved .*busy"):
            writer.wait()


def test_files_that_nfs_keeps_for_their_readers_are_no_damage(tmp_path):
    host.save(tmp_path, MESH, (1,))
    (tmp_path / "1" / "state" / ".nfs000000000001a2b300000001").write_bytes(b"gone")
    assert checkpoint.newest_good(tmp_path) == 1
    checkpoint.copy(tmp_path / "1", tmp_path / "copied")
    assert not list((tmp_path / "copied").rglob(".nfs*"))
    (tmp_path / "1" / "state" / ".nfsbox").write_bytes(b"somebody's")
    assert "was not saved with the checkpoint" in digests.damage(tmp_path / "1")[0]


def test_a_stale_handle_is_read_again_and_is_damage_only_if_it_stays(tmp_path, monkeypatch):
    host.save(tmp_path, MESH, (1,))
    opened, left = digests.Path.open, [1]

    def stale(path, mode="r"):
        if path.name == "manifest.ocdbt" and left[0]:
            left[0] -= 1
            raise OSError(errno.ESTALE, "Stale file handle")
        return opened(path, mode)

    monkeypatch.setattr(digests.Path, "open", stale)
    assert digests.damage(tmp_path / "1") == []
    left[0] = 1000
    assert all("Stale file handle" in found for found in digests.damage(tmp_path / "1"))
    assert digests.damage(tmp_path / "1")


def test_files_missing_from_the_first_hosts_listing_are_digested_too(tmp_path, monkeypatch):
    """NFS may show the others' files late; each host digests a share of those it sees."""
    names, late = digests.names, "state/late"

    def stale(folder):
        return [name for name in names(folder) if name != late]

    def agreed(name, mine, decide):
        if name != "saved":
            return decide([mine])
        (tmp_path / ".1.saving" / late).write_bytes(b"of the other host")
        other = {"files": [*json.loads(mine)["files"], late], "digests": {}}
        return decide([mine, json.dumps(other)])

    monkeypatch.setattr(digests, "names", stale)
    monkeypatch.setattr(checkpoint, "agree", agreed)
    with checkpoint.CheckpointWriter(tmp_path, {}, {}) as writer:
        save(writer, 1)
    monkeypatch.undo()
    assert digests.damage(tmp_path / "1") == []
