"""A run's checkpoints in a bucket: whole or not taken for whole, and gone on from when the disk is
lost."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from models.checkpoints import own
from models.files.bucket import Bucket
from models.files.terminal import Console
from parallel.checkpoint import CheckpointWriter
from parallel.runs.mirror import Mirror, begin, put_logs, whole_steps
from tests.helpers.models.buckets import memory_bucket

URL = "memory://bucket/runs/mine"


@pytest.fixture
def memory():
    with memory_bucket() as files:
        yield files


@pytest.fixture
def console(tmp_path):
    with (tmp_path / "said").open("w") as file:
        yield Console(file=file, width=1000)


def save(directory, *steps, mirror=None, keep=3):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text('{"a": 1}')
    (directory / "metrics.jsonl").write_text('{"step": 0}\n')
    put, held = (mirror.put, mirror.held) if mirror else (lambda step: None, tuple)
    folder = directory / "checkpoints"
    with CheckpointWriter(folder, {"a": 1}, {}, keep, on_saved=put, held=held) as writer:
        for step in steps:
            writer.save(step, {"ema": {"w": jnp.full((3,), step, jnp.float32)}}, {})


def said(tmp_path, console):
    console.file.flush()
    return (tmp_path / "said").read_text()


def test_a_lost_disk_costs_nothing_that_was_saved(memory, tmp_path, console):
    out = tmp_path / "run"
    with Mirror(URL, out, 3, console) as mirror:
        save(out, 2, 4, mirror=mirror)
        mirror.finish(4)
    shutil.rmtree(out)
    assert begin(URL, out, True, console)
    np.testing.assert_array_equal(own.restore_params(out)["w"], np.full(3, 4))
    assert (out / "metrics.jsonl").read_text() == '{"step": 0}\n'
    assert json.loads((out / "saved.json").read_text()) == {"step": 4}
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["4"]
    assert "Copied step 4 from memory://bucket/runs/mine" in said(tmp_path, console)


def test_evaluations_that_end_after_the_last_checkpoint_are_brought_back_too(tmp_path, console):
    out, url = tmp_path / "run", str(tmp_path / "second disk")
    with Mirror(url, out, 3, console) as mirror:
        save(out, 2, mirror=mirror)
        mirror._background.submit(int).result()
        (out / "closed_loop.jsonl").write_text("in time\n")
        mirror.finish(2)
    assert (tmp_path / "second disk/closed_loop.jsonl").read_text() == "in time\n"
    (out / "closed_loop.jsonl").write_text("late\n")
    put_logs(url, out)
    shutil.rmtree(out)
    assert begin(url, out, True, console)
    assert (out / "closed_loop.jsonl").read_text() == "late\n"


def test_a_copy_that_broke_off_is_not_taken_for_a_whole_one(memory, tmp_path, console, monkeypatch):
    out, put = tmp_path / "run", MemoryFileSystem.put_file

    def cut(fs, path, to):
        if "/checkpoints/4/state/" in to:
            raise RuntimeError("connection reset")
        put(fs, path, to)

    with Mirror(URL, out, 3, console) as mirror:
        save(out, 2, mirror=mirror)
        mirror.finish(2)
        monkeypatch.setattr(MemoryFileSystem, "put_file", cut)
        save(out, 4, mirror=mirror)
        with pytest.raises(OSError, match=r"Step 4 is saved in .* but did not arrive in memory:.*"):
            mirror.finish(4)
    assert "warning: step 4 did not arrive" in said(tmp_path, console)
    assert whole_steps(Bucket(URL)) == [2]
    shutil.rmtree(out)
    assert begin(URL, out, True, console)
    assert own.steps(out / "checkpoints") == [2]


def test_a_copy_that_failed_is_tried_again_at_the_end(memory, tmp_path, console, monkeypatch):
    out = tmp_path / "run"
    with Mirror(URL, out, 3, console) as mirror:
        with monkeypatch.context() as patch:
            patch.setattr(MemoryFileSystem, "put_file", None)
            save(out, 2, mirror=mirror)
            mirror._background.submit(int).result()
        assert whole_steps(Bucket(URL)) == []
        mirror.finish(2)
    assert whole_steps(Bucket(URL)) == [2]


def test_the_mirror_keeps_as_many_as_the_run_and_none_of_a_history_given_up(
    memory, tmp_path, console
):
    out = tmp_path / "run"
    with Mirror(URL, out, 2, console) as mirror:
        for step in (2, 4, 6, 8):
            save(out, step, mirror=mirror, keep=2)
            mirror.finish(step)
        assert whole_steps(Bucket(URL)) == [6, 8]
        save(out, 5, mirror=mirror, keep=2)
        mirror.finish(5)
    assert whole_steps(Bucket(URL)) == [5]


def test_a_checkpoint_that_is_being_copied_stays_on_disk(tmp_path):
    with CheckpointWriter(tmp_path, {}, {}, keep=1, held=lambda: {2}) as writer:
        for step in (1, 2, 3, 4):
            writer.save(step, {"ema": {"w": jnp.zeros(1)}}, {})
    assert own.steps(tmp_path) == [2, 4]


def test_a_run_in_the_mirror_is_not_begun_over(memory, tmp_path, console):
    out = tmp_path / "run"
    with Mirror(URL, out, 3, console) as mirror:
        save(out, 2, mirror=mirror)
        mirror.finish(2)
    with pytest.raises(ValueError, match="holds a run already, saved at step 2; continue with"):
        begin(URL, tmp_path / "other", False, console)


def test_a_run_that_is_nowhere_begins_and_says_so(memory, tmp_path, console):
    assert not begin(URL, tmp_path / "run", True, console)
    assert "holds a run; starting one at step 0" in said(tmp_path, console)


def test_an_older_disk_goes_on_from_the_newer_mirror(memory, tmp_path, console):
    out, old = tmp_path / "run", tmp_path / "old"
    with Mirror(URL, out, 3, console) as mirror:
        save(out, 2, mirror=mirror)
        mirror.finish(2)
        shutil.copytree(out, old)
        save(out, 4, mirror=mirror)
        mirror.finish(4)
    assert begin(URL, old, True, console)
    assert own.steps(old / "checkpoints") == [2, 4]


def test_a_damaged_copy_is_refused_and_leaves_the_folder_as_it_was(memory, tmp_path, console):
    out = tmp_path / "run"
    with Mirror(URL, out, 3, console) as mirror:
        save(out, 2, mirror=mirror)
        mirror.finish(2)
    name = next(name for name in Bucket(URL).list() if "/state/" in name and "/d/" in name)
    content = bytearray(Bucket(URL).read(name))
    content[0] ^= 1
    Bucket(URL).write(name, bytes(content))
    with pytest.raises(ValueError, match="is damaged"):
        begin(URL, tmp_path / "new", True, console)
    assert own.steps(tmp_path / "new/checkpoints") == []


@pytest.mark.parametrize("damaged", ["/d/", "digests.json", "_METADATA"])
def test_a_damaged_newest_copy_is_passed_over_for_the_newest_whole_one(
    memory, tmp_path, console, damaged
):
    out = tmp_path / "run"
    with Mirror(URL, out, 3, console) as mirror:
        for step in (2, 4, 6):
            save(out, step, mirror=mirror)
            mirror.finish(step)
    name = next(x for x in Bucket(URL).list() if x.startswith("checkpoints/6/") and damaged in x)
    Bucket(URL).write(name, Bucket(URL).read(name)[:-1])
    assert begin(URL, tmp_path / "new", True, console)
    assert own.steps(tmp_path / "new/checkpoints") == [4]
    assert f"step 6 was passed over: {URL}/checkpoints/6/ is damaged" in said(tmp_path, console)
    shutil.rmtree(out / "checkpoints/6")
    assert begin(URL, out, True, console)
    assert own.steps(out / "checkpoints") == [2, 4]


def test_the_hub_is_no_mirror_and_a_folder_is(tmp_path, console):
    with pytest.raises(ValueError, match="checkpoint push"):
        begin("hf://org/name", tmp_path / "run", True, console)
    out, disk = tmp_path / "run", str(tmp_path / "second disk")
    with Mirror(disk, out, 3, console) as mirror:
        save(out, 2, mirror=mirror)
        mirror.finish(2)
    shutil.rmtree(out)
    assert begin(disk, out, True, console)
