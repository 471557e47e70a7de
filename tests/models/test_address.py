"""Paths and URLs: what each names, and those that name nothing, or another place than meant."""

import re
from pathlib import Path

import pytest

from data.files.folder import open_folder
from models.checkpoints.remote import local
from models.files.address import Address, parse, whole
from models.files.bucket import Bucket
from models.files.hub import HubPlace
from models.files.terminal import Console
from parallel.shell import opened
from tests.helpers.models.buckets import memory_bucket
from tools.command_line.push import PushOptions, push


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("runs/mine", Address("file", "runs/mine")),
        ("/runs/s3:/odd", Address("file", "/runs/s3:/odd")),
        ("mixture::of/two", Address("file", "mixture::of/two")),
        ("notes: first", Address("file", "notes: first")),
        ("file:///a/b", Address("file", "/a/b")),
        (Path("file:///a/b"), Address("file", "/a/b")),
        ("s3://bucket", Address("s3", "bucket")),
        ("S3://bucket/runs/mine/", Address("s3", "bucket/runs/mine")),
        (Path("s3://bucket/run"), Address("s3", "bucket/run")),
        (Path("hf://org/name@main"), Address("hf", "org/name@main")),
    ],
)
def test_an_address_is_the_place_that_was_typed(given, address):
    assert parse(given) == address


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "A path or URL is empty; is a variable in it unset?"),
        ("s3://", "s3://: has an empty bucket; is a variable unset? Give s3://bucket/folder."),
        (Path("s3://"), "s3:: is no whole URL; give s3://bucket/folder"),
        ("gs:///runs/mine", "gs:///runs/mine: has an empty bucket; is a variable unset?"),
        ("s3:// /runs", "s3:// /runs: has an empty bucket;"),
        ("memory://", "memory://: has an empty bucket;"),
        ("s3://bucket//mine", "s3://bucket//mine: has an empty name between two slashes;"),
        ("s3://bucket//", "s3://bucket//: has an empty name between two slashes;"),
        ("s3://bucket/a/../b", "s3://bucket/a/../b: has '.' or '..' in it"),
        ("s3:bucket/mine", "s3:bucket/mine: is no whole URL; give s3://bucket/folder"),
        ("file://runs/mine", "file://runs/mine: is a relative URL; give file:///folder, or a path"),
        ("hf://", "hf://: has an empty bucket; is a variable unset? Give hf://organisation/name."),
        ("simplecache::s3://bucket", "chained fsspec URLs and reference:// are not supported"),
    ],
)
def test_a_url_that_names_no_place_is_refused_wherever_it_is_read(url, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def mirrored(url):
        with opened(tmp_path / "run", False, Console(quiet=True), str(url)):
            pass

    readers = [parse, open_folder, local, lambda url: Bucket(str(url)).list(), mirrored]
    readers += [HubPlace.parse] if str(url).startswith("hf") else []
    for read in readers:
        with pytest.raises(ValueError, match=re.escape(said)):
            read(url)
    assert {path.name for path in tmp_path.rglob("*")} <= {"run", ".lock"}


def test_a_whole_path_has_no_dots_and_keeps_links(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    monkeypatch.chdir(tmp_path / "a")
    assert whole("x") == tmp_path / "a/x"
    assert whole("../x/y") == tmp_path / "x/y"
    assert whole(tmp_path / "link/x") == tmp_path / "link/x"
    assert parse("../x").url == f"file://{tmp_path}/x"


def test_replacing_a_whole_bucket_is_refused_and_removes_nothing(tmp_path):
    (tmp_path / "a.txt").write_text("mine")
    with memory_bucket() as files:
        files.pipe("/bucket/theirs.txt", b"theirs")
        before = set(files.store)
        with pytest.raises(ValueError, match="memory://bucket/ is a whole bucket, and --replace "):
            push(
                tmp_path,
                ["a.txt"],
                "memory://bucket/",
                "card",
                PushOptions(replace=True),
                kind="model",
            )
        assert set(files.store) == before
