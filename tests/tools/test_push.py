"""Checkpoints and datasets put on the hub and into buckets, and runs that live there: real clients
against a hub and an S3 on localhost."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data import open_dataset
from models import load_policy
from models.checkpoints import own
from models.files.bucket import Bucket
from models.files.terminal import Console
from parallel.runs.mirror import whole_steps
from tests.helpers.models.buckets import memory_bucket, s3_bucket
from tests.helpers.models.hub import Repository, writable_hub
from tests.helpers.tools.small_run import SMALL, losses, one_device, write_dataset
from tools import checkpoint as checkpoint_tool
from tools import data as data_tool
from tools.command_line.push import PushOptions, licence
from tools.recipes.training import Paths, run

pytestmark = pytest.mark.slow

LICENSED = PushOptions(license="apache-2.0")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "set")


@pytest.fixture(scope="module")
def trained(dataset, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "mine"
    with one_device():
        run(Paths(str(dataset), out), SMALL)
    return out


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with writable_hub(tmp_path / "hub", monkeypatch) as served:
        yield served


@pytest.fixture
def memory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with memory_bucket() as files:
        yield files


def same_weights(one, other) -> None:
    for a, b in zip(np_leaves(one), np_leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


def np_leaves(path) -> list[np.ndarray]:
    import jax

    return [np.asarray(x) for x in jax.tree.leaves(own.restore_params(Path(path)))]


def test_a_pushed_checkpoint_acts_and_has_a_card_and_no_optimizer_state(trained, hub):
    checkpoint_tool.push_command(trained, "hf://me/mine", "hf://me/set", options=LICENSED)
    made = hub.repositories["models/me/mine"]
    assert made.private
    card = made.main["README.md"].decode()
    assert card.startswith('---\nlicense: "apache-2.0"\n')
    assert 'datasets: ["me/set"]' in card
    assert "| Steps trained | 8 |" in card
    assert 'load_policy("hf://me/mine")' in card
    held = sum(map(len, made.main.values()))
    assert held < 0.5 * sum(p.stat().st_size for p in (trained / "checkpoints/8").rglob("*"))
    same_weights("hf://me/mine", trained)
    assert load_policy("hf://me/mine").processor == load_policy(trained).processor


def test_a_repository_that_holds_something_is_left_alone_unless_told(trained, hub):
    hub.add("models/me/mine", {"theirs.txt": b"precious"})
    with pytest.raises(ValueError, match=r"holds 1 files already, such as 'theirs\.txt'"):
        checkpoint_tool.push_command(trained, "hf://me/mine", options=LICENSED)
    assert hub.repositories["models/me/mine"].main == {"theirs.txt": b"precious"}
    branch = replace(LICENSED, revision="v2")
    with pytest.raises(ValueError, match=r"holds 1 files"):
        checkpoint_tool.push_command(trained, "hf://me/mine", options=branch)
    told = replace(branch, replace=True)
    checkpoint_tool.push_command(trained, "hf://me/mine", options=told)
    assert hub.repositories["models/me/mine"].main == {"theirs.txt": b"precious"}
    same_weights("hf://me/mine@v2", trained)
    checkpoint_tool.push_command(trained, "hf://me/mine", options=replace(LICENSED, replace=True))
    assert "theirs.txt" not in hub.repositories["models/me/mine"].main


def test_a_hub_that_refuses_says_how_to_log_in(trained, hub):
    hub.refuses = True
    with pytest.raises(OSError, match=r"hf://me/mine: the hub refused .*hf auth login"):
        checkpoint_tool.push_command(trained, "hf://me/mine", options=LICENSED)


def test_a_whole_checkpoint_in_a_bucket_keeps_its_optimizer_state(trained, memory):
    url = "memory://bucket/mine"
    checkpoint_tool.push_command(trained, url, whole=True, options=LICENSED)
    size = sum(x.size for n, x in Bucket(url).list().items() if n != "README.md")
    files = (p for p in (trained / "checkpoints/8").rglob("*") if p.is_file())
    assert size == sum(p.stat().st_size for p in files)
    same_weights(url, trained)
    with pytest.raises(ValueError, match=r"holds .* files already"):
        checkpoint_tool.push_command(trained, url, options=LICENSED)
    checkpoint_tool.push_command(trained, url, options=replace(LICENSED, replace=True))
    same_weights(url, trained)


def test_what_a_bucket_holds_is_removed_only_once_what_replaces_it_is_there(
    trained, memory, monkeypatch
):
    url = "memory://bucket/mine"
    bucket = Bucket(url)
    for name in ("notes.txt", "old/weights.bin", "digests.json"):
        bucket.write(name, b"theirs")

    def fails(*_):
        raise OSError("the connection was lost")

    with monkeypatch.context() as patched:
        patched.setattr(Bucket, "put", fails)
        with pytest.raises(OSError, match="connection was lost"):
            checkpoint_tool.push_command(trained, url, options=replace(LICENSED, replace=True))
    assert set(bucket.list()) == {"notes.txt", "old/weights.bin"}, "whole no more, but there"
    checkpoint_tool.push_command(trained, url, options=replace(LICENSED, replace=True))
    assert not {"notes.txt", "old/weights.bin"} & bucket.list().keys()
    same_weights(url, trained)


def test_a_file_that_has_a_new_folders_name_is_replaced(trained, tmp_path):
    url = f"file://{tmp_path}/bucket"
    Bucket(url).write("checkpoints", b"theirs")
    checkpoint_tool.push_command(trained, url, options=replace(LICENSED, replace=True))
    same_weights(url, trained)


def test_what_is_pushed_has_a_licence():
    with pytest.raises(ValueError, match=r"Give --license, such as apache-2.0"):
        licence(PushOptions(), Console(file=None, force_terminal=False))


def test_a_pushed_dataset_reads_the_same_and_has_lerobots_tag_and_card(dataset, hub, tmp_path):
    shutil.copytree(dataset, tmp_path / "set")
    (tmp_path / "set/secret.txt").write_text("mine")
    data_tool.push_command(tmp_path / "set", "hf://me/set", LICENSED)
    made: Repository = hub.repositories["datasets/me/set"]
    assert made.private
    assert "secret.txt" not in made.main
    assert made.find("v3.0") == made.refs["main"]
    card = made.main["README.md"].decode()
    assert '"LeRobot"' in card
    assert '"data_files": "data/*/*.parquet"' in card
    assert "- push (6 episodes)" in card
    assert open_dataset("hf://me/set").digest == open_dataset(dataset).digest
    assert open_dataset("hf://me/set").lengths.tolist() == open_dataset(dataset).lengths.tolist()


def test_a_folder_that_is_no_dataset_is_not_pushed(tmp_path, hub):
    with pytest.raises(FileNotFoundError, match="give the folder of a LeRobot dataset"):
        data_tool.push_command(tmp_path, "hf://me/set", LICENSED)
    assert not hub.repositories


def test_a_run_whose_disk_is_lost_goes_on_from_s3_with_the_same_losses(
    dataset, trained, tmp_path, monkeypatch
):
    """The same command each time: begun, stopped after its save at 6, its folder gone, gone on."""
    out, paths = tmp_path / "mine", Paths(str(dataset), tmp_path / "mine", resume=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with s3_bucket("runs", monkeypatch) as bucket, one_device():
        url = f"{bucket}/mine"
        paths = replace(paths, mirror=url)
        run(paths, SMALL)
        assert whole_steps(Bucket(url)) == [3, 6, 8]
        same_weights(url, trained)
        Bucket(url).remove(["checkpoints/8/digests.json"])  # as if killed on the way there
        shutil.rmtree(out)
        run(paths, SMALL)
        assert losses(out) == losses(trained)
        assert whole_steps(Bucket(url)) == [3, 6, 8]
        assert load_policy(url).processor == load_policy(trained).processor
        checkpoint_tool.push_command(out, f"{bucket}/released", options=LICENSED)
        same_weights(f"{bucket}/released", trained)
        with pytest.raises(FileNotFoundError, match=r"is empty or not there|no such bucket"):
            load_policy("s3://nobodys/run")


def test_fine_tuning_begins_from_a_policy_on_the_hub(dataset, trained, hub, tmp_path):
    checkpoint_tool.push_command(trained, "hf://me/mine", options=LICENSED)
    short = replace(SMALL, trainer=replace(SMALL.trainer, train_steps=3, eval_every=0))
    with one_device():
        run(Paths(str(dataset), tmp_path / "on", init=Path("hf://me/mine")), short)
        run(Paths(str(dataset), tmp_path / "here", init=trained), short)
    same_weights(tmp_path / "on", tmp_path / "here")
