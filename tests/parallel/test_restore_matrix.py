"""Saved by two processes of two devices each, restored by other numbers of either."""

import re
import shutil

import jax
import pytest

from models.checkpoints import own
from parallel import checkpoint
from parallel.mesh import MeshConfig, make_mesh
from tests.helpers.parallel import checkpoint_host as host

pytestmark = pytest.mark.slow


def run(*arguments):
    """Outputs of several processes."""
    children = host.start(*arguments)
    try:
        printed = [child.communicate(timeout=240) for child in children]
    finally:
        for child in children:
            child.kill()
    assert not any(child.returncode for child in children), printed
    return [out for out, _ in printed]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved")
    for output in run("save", directory, 2, 2, "fsdp=2", "tensor=2"):
        assert len(re.findall(r"^blocked \d", output, re.MULTILINE)) == 2
    return directory


@pytest.mark.parametrize(
    ("devices", "axes"),
    [
        (1, {}),
        (4, {"fsdp": 4}),
        (4, {"stage": 2, "context": 2}),
        (8, {"fsdp": 2, "tensor": 4}),
        (8, {"data": 2, "fsdp": 2, "stage": 2}),
    ],
)
def test_one_process_restores_what_two_saved(saved, devices, axes):
    mesh = make_mesh(MeshConfig(**axes), jax.devices()[:devices])
    for step in (1, 2):
        restored = checkpoint.restore(saved / str(step), host.abstract(mesh))
        assert host.differing(restored, mesh, step) == []
        assert own.read_json(saved / str(step), "position") == {"next": 10 * step}


def test_four_processes_set_a_damaged_step_aside_and_restore_the_one_before(saved, tmp_path):
    directory = shutil.copytree(saved, tmp_path / "copy")
    file = max((directory / "2" / "state").rglob("*"), key=lambda path: path.stat().st_size)
    flip(file, 8 * (file.stat().st_size // 2) + 3)
    outputs = run("restore", directory, 4, 2, "data=1", "fsdp=4", "tensor=2")
    said = f"Checkpoint 2 is damaged and was set aside as 2.damaged: {file} has digest "
    for output in outputs:
        assert said in output
        assert "restored 1 {'next': 10} []\nto act []\n" in output
    assert {path.name for path in directory.iterdir()} == {"1", "2.damaged"}


def test_arrays_saved_in_many_chunks_and_by_several_copies_restore(tmp_path, monkeypatch):
    monkeypatch.setattr(own, "_CHUNK_BYTES", 96)
    monkeypatch.setattr(own, "_SLICE_BYTES", 1)
    host.save(tmp_path, make_mesh(MeshConfig(data=2, stage=2, tensor=2)), (1,))
    mesh = make_mesh(MeshConfig(fsdp=2, context=4))
    assert host.differing(checkpoint.restore(tmp_path, host.abstract(mesh)), mesh, 1) == []


def test_a_comparison_of_bytes_sees_one_bit():
    mesh = make_mesh(devices=jax.devices()[:2])
    state = host.state(mesh, 1)
    assert host.differing(state, mesh, 1) == []
    assert "odd" in host.differing({"ema": {"odd": -state["ema"]["odd"]}}, mesh, 1)


def flip(file, bit):
    """Turns one bit of a file over."""
    with file.open("r+b") as opened:
        opened.seek(bit // 8)
        byte = opened.read(1)[0]
        opened.seek(bit // 8)
        opened.write(bytes([byte ^ 1 << bit % 8]))
