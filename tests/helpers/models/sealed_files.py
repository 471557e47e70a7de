"""Sealed checkpoints whose JSON a test changes."""

import json
import shutil

import jax
import pytest

from models.checkpoints import digests
from models.config import to_json
from parallel.checkpoint import CheckpointWriter
from tests.helpers.models.tiny_policy import CONFIG, PROCESSOR, tiny_policy


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    out = tmp_path_factory.mktemp("sealed")
    assets = {"processor": to_json(PROCESSOR)}
    with CheckpointWriter(out / "checkpoints", {"model": to_json(CONFIG)}, assets) as writer:
        writer.save(1, {"ema": jax.device_put(tiny_policy().params)}, {})
    return out / "checkpoints" / "1"


def sealed(saved, out, name, change):
    """A copy whose JSON file `name` was changed, with digests that fit."""
    path = shutil.copytree(saved, out / "checkpoints" / "1")
    (file,) = (path / name).iterdir()
    content = json.loads(file.read_text())
    file.unlink()
    file.write_text(json.dumps(change(content)))
    (path / digests.NAME).unlink()
    digests.write_digests(path, digests.digest_files(path, digests.names(path)))
    assert not digests.damage(path)
    return path


def put(content, where, value):
    """`content` with the entry at "a.0.b" replaced, or removed if the value is `put`."""
    *parents, last = (int(key) if key.isdigit() else key for key in where.split("."))
    inner = content
    for key in parents:
        inner = inner[key]
    if value is put:
        del inner[last]
    else:
        inner[last] = value
    return content
