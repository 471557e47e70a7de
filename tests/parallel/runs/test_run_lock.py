"""One run to a folder: who is refused, who takes over, and what is then touched."""

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys

import jax
import pytest
from rich.console import Console

from parallel.hosts import exits
from parallel.mesh import make_mesh
from parallel.runs import run_lock
from parallel.runs.run_lock import LOCK_NAME, InUse, locked
from parallel.trainer import TrainerConfig
from tests.helpers.parallel.opened import Run, train
from tests.helpers.parallel.toy import OPTIMIZER, RULES, Denoiser, batches, environment, position

HERE = socket.gethostname()


def holder(folder, *options):
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.parallel.lock_holder", str(folder), *options],
        env=environment(1),
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    word, pid = process.stdout.readline().split()
    return process, word, int(pid)


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    """A run's folder that another process has locked, and that process's id."""
    folder = tmp_path_factory.mktemp("held")
    toy(folder, steps=2)
    process, word, pid = holder(folder)
    assert word == "held"
    yield folder, pid
    process.stdin.close()
    assert process.wait(60) == 0
    assert not (folder / LOCK_NAME).exists()


def toy(folder, steps, **options):
    run, config = Run(folder, {"model": "toy"}, {}), TrainerConfig(train_steps=steps, save_every=2)
    mesh = make_mesh(devices=jax.devices()[:1])
    return train(Denoiser(), RULES, batches, position, run, config, OPTIMIZER, mesh=mesh, **options)


def content(folder):
    return {
        path: (path.lstat().st_mtime_ns, path.is_file() and path.read_bytes())
        for path in [folder, *folder.rglob("*")]
    }


def write(path, host, pid, began=None):
    said = {"host": host, "pid": pid, "since": "2026-01-01 10:00:00+00:00", "began": began}
    path.write_text(json.dumps(said) + "\n")


def test_a_second_run_is_refused_with_who_has_the_folder_and_touches_nothing(held):
    folder, pid = held
    before = content(folder)
    with pytest.raises(InUse, match=rf"in use by process {pid} on {HERE}, since 20\d\d-") as found:
        toy(folder, steps=4, resume=True)
    assert found.value.exit_code == exits.REFUSED
    assert "remove" not in str(found.value), "its holder is known to be alive"
    assert content(folder) == before


def test_a_process_may_lock_again_what_it_has_locked(tmp_path):
    with locked(tmp_path), locked(tmp_path):
        assert (tmp_path / LOCK_NAME).exists()
    assert not (tmp_path / LOCK_NAME).exists()


def test_a_folder_that_nothing_came_of_is_removed_and_one_with_something_stays(tmp_path):
    with locked(tmp_path / "a" / "b"):
        pass
    assert not (tmp_path / "a").exists()
    with locked(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b" / "config.json").touch()
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["config.json"]


@pytest.mark.slow
@pytest.mark.parametrize("child", ["fork", "exec"])
def test_a_killed_runs_folder_is_free_at_once_though_its_child_lives_on(child, tmp_path, capsys):
    process, word, pid = holder(tmp_path, child)
    assert word == "child"
    try:
        with pytest.raises(InUse, match=f"in use by process {process.pid} on"):
            locked(tmp_path).__enter__()
        process.kill()
        assert process.wait(60) == -signal.SIGKILL
        os.kill(pid, 0)
        with locked(tmp_path, Console()):
            said = capsys.readouterr().out
            assert f"left by process {process.pid} on {HERE}, since" in said
            assert "taking over" in said
            process.stdin.close()
            if child == "fork":
                assert process.stdout.read() == ""  # the child has ended, and its block with it
            assert json.loads((tmp_path / LOCK_NAME).read_text())["pid"] == os.getpid()
    finally:
        process.stdin.close()


def test_reading_and_copying_the_folder_does_not_give_the_lock_away(tmp_path):
    with locked(tmp_path / "run"):
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        path = str(tmp_path / "run" / LOCK_NAME)
        code = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
        assert "BlockingIOError" in done.stderr


@pytest.fixture(params=[errno.ENOLCK, errno.EOPNOTSUPP])
def no_locks(request, monkeypatch):
    """A filesystem without locks."""

    def flock(*_):
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr("fcntl.flock", flock)


def test_without_locks_the_file_decides(no_locks, held, tmp_path, capsys):
    path = tmp_path / LOCK_NAME
    shutil.copyfile(held[0] / LOCK_NAME, path)
    with pytest.raises(InUse, match=f"in use by process {held[1]} on {HERE}"):
        locked(tmp_path).__enter__()
    ended = subprocess.Popen(["true"])
    ended.wait()
    for pid, began in ((ended.pid, None), (held[1], 1)):  # dead, and another of the same number
        write(path, HERE, pid, began)
        with locked(tmp_path, Console(width=200)):
            assert f"left by process {pid} on {HERE}" in capsys.readouterr().out
            assert json.loads(path.read_text())["pid"] == os.getpid()
        assert not path.exists()
    write(path, "node7", held[1])
    with pytest.raises(InUse, match=rf"process {held[1]} on node7, .* surely gone, remove "):
        locked(tmp_path).__enter__()
    path.write_text("")
    with pytest.raises(InUse, match="another run that has just begun"):
        locked(tmp_path).__enter__()
    path.unlink()
    with locked(tmp_path):
        assert path.exists()


def mounted(folder, kind, options):
    point = str(folder).replace(" ", r"\040")
    root = "22 1 8:1 / / rw,relatime - ext4 /dev/root rw\n"
    return f"{root}30 22 0:50 / {point} rw - {kind} there:/ rw,{options}\n"


@pytest.mark.parametrize(
    ("kind", "options", "free"),
    [
        ("nfs4", "vers=4.2,local_lock=none", True),
        ("nfs", "vers=3,nolock,local_lock=all", False),
        ("nfs", "vers=3,local_lock=flock", False),
        ("lustre", "localflock", False),
        ("lustre", "flock", True),
        ("fuse.sshfs", "user_id=0", False),
        ("ext4", "errors=remount-ro", True),
    ],
)
def test_another_machines_lock_that_the_kernel_calls_free_counts_where_locks_are_shared(
    kind, options, free, tmp_path, monkeypatch, capsys
):
    folder = tmp_path / "my runs"
    folder.mkdir()
    write(folder / LOCK_NAME, "node7", 4321)
    (tmp_path / "mounts").write_text(mounted(folder, kind, options))
    monkeypatch.setattr(run_lock, "_MOUNTS", tmp_path / "mounts")
    if free:
        with locked(folder, Console(width=200)):
            assert "left by process 4321 on node7" in capsys.readouterr().out
    else:
        with pytest.raises(InUse, match=r"in use by process 4321 on node7.*surely gone, remove"):
            locked(folder).__enter__()


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b'{"host": "a", "pi',
        b"[" * 4096,
        b"\xff\x00" * 2000,
        b'{"host": "a", "pid": 1e999, "since": "", "began": null}',
        b'{"host": "a", "pid": -1, "since": "", "began": null}',
        b'{"host": "a", "pid": 99999999999999999999, "since": "", "began": null}',
        b'{"host": "\\u001b]0;x\\u0007", "pid": 1, "since": "", "began": null}',
        b'{"host": ["a"], "pid": {}, "since": 3, "began": "x"}',
        b'{"host": "a"}',
    ],
)
def test_a_lock_file_of_nonsense_that_nobody_holds_is_taken_over(said, tmp_path, capsys):
    (tmp_path / LOCK_NAME).write_bytes(said)
    with locked(tmp_path, Console(width=200)):
        assert json.loads((tmp_path / LOCK_NAME).read_text())["pid"] == os.getpid()
    assert "\x1b]" not in capsys.readouterr().out


def test_a_lock_file_that_is_a_link_is_refused_and_what_it_names_is_left(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "run").mkdir()
    for target in (victim, tmp_path / "nothing"):
        (tmp_path / "run" / LOCK_NAME).symlink_to(target)
        with pytest.raises(InUse, match=r"\.lock: Too many .*; remove the link"):
            locked(tmp_path / "run").__enter__()
        (tmp_path / "run" / LOCK_NAME).unlink()
    (tmp_path / "run" / LOCK_NAME).mkdir()
    with pytest.raises(InUse, match=r"\.lock: Is a directory; remove the folder"):
        locked(tmp_path / "run").__enter__()
    assert victim.read_text() == "precious"
    assert not (tmp_path / "nothing").exists()


@pytest.mark.slow
def test_a_full_disk_refuses_in_a_sentence_and_leaves_no_lock(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(InUse, match=r": No space left on device; make room"):
        locked(tmp_path / "run").__enter__()
    monkeypatch.undo()
    assert not (tmp_path / "run").exists()
    with locked(tmp_path / "run"):
        pass


@pytest.mark.slow
def test_a_second_job_of_two_processes_is_refused_as_one(held):
    folder, pid = held
    before = content(folder)
    command = [sys.executable, "-m", "tools.launch", "-n", "2", "--max-restarts", "3", "--"]
    command += ["python", "-m", "tests.helpers.parallel.train_hosts", str(folder), "--resume"]
    done = subprocess.run(
        command,
        env=environment(1),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == exits.REFUSED, done.stderr
    said = done.stdout + done.stderr
    for rank in (0, 1):
        assert any(
            line.startswith(f"[{rank}]") and f"in use by process {pid} on {HERE}" in line
            for line in said.splitlines()
        ), said
    assert "restarting" not in said
    assert content(folder) == before
