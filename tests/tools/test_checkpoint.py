import json
import shutil
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from models.checkpoints import digests, own
from models.checkpoints.sources import open_safetensors
from parallel import checkpoint
from parallel.mesh import make_mesh
from parallel.monitor.metrics import MetricsWriter
from tools.checkpoint import main

MESH = make_mesh(devices=jax.devices()[:1])


def weights(seed):
    rng = np.random.default_rng(seed)
    return {
        "up": {"kernel": rng.normal(size=(6, 4)).astype(np.float32)},
        "down": {
            "kernel": rng.normal(size=(4, 6)).astype(ml_dtypes.bfloat16),
            "codes": rng.normal(size=(4, 6)).astype(ml_dtypes.float8_e4m3fn),
        },
        "steps": np.int32(seed),
    }


def save(run, steps, **config):
    with checkpoint.CheckpointWriter(run / "checkpoints", config, {"words": ["a"]}) as writer:
        for step in steps:
            writer.save(step, {"ema": jax.device_put(weights(step))}, {})


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved")
    save(directory, (5, 10), model={"width": 4}, rate=1.0)
    with MetricsWriter(directory) as writer:
        writer.write(9, {"loss": 0.125})
    return directory


@pytest.fixture
def run(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "run")


@pytest.fixture
def command(monkeypatch, capsys):
    def type_in(*arguments):
        monkeypatch.setattr(sys, "argv", ["checkpoint", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        try:
            main()
            status = 0
        except SystemExit as error:
            status = error.code
        return status, capsys.readouterr().out

    return type_in


def damage(path):
    file = path / "position" / "data.json"
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content + b" ")
    return file


def test_the_list_tells_complete_from_damaged_set_aside_and_unfinished(run, command):
    folder = run / "checkpoints"
    shutil.copytree(folder / "5", folder / "3.damaged")
    shutil.copytree(folder / "5", folder / ".20.saving")
    shutil.copytree(folder / "5", folder / "7")
    damage(folder / "7")
    shutil.copytree(folder / "5", folder / "8")
    (folder / "8" / digests.NAME).unlink()
    status, said = command("ls", run)
    assert status == 0
    rows = {line.split()[0]: line for line in said.splitlines() if "kB" in line}
    assert list(rows) == ["3.damaged", "5", "7", "8", "10", ".20.saving"]
    ends = ["set aside", "complete", "damaged", "no digests", "complete", "unfinished"]
    for row, end in zip(rows.values(), ends, strict=True):
        assert row.rstrip().endswith(end)
    assert "0.125" in rows["10"]
    assert "0.125" not in rows["5"]


def test_verifying_names_the_damaged_file_and_fails(run, command):
    assert command("verify", run)[0] == 0
    file = damage(run / "checkpoints" / "5")
    assert command("verify", run)[0] == 0
    for arguments in ((run, "--all"), (run / "checkpoints" / "5",)):
        status, said = command("verify", *arguments)
        assert status == 1
        assert f"{file} has 3 bytes, but was saved with 2." in said
    assert "10: good (" in command("verify", run, "--all")[1]


def test_a_difference_is_measured_array_by_array_and_in_the_config(run, tmp_path, command):
    folder = run / "checkpoints"
    assert command("diff", folder / "5", folder / "5") == (
        0,
        "0 of 4 arrays and 0 fields of the config differ.\n",
    )
    save(tmp_path / "other", (10,), model={"width": 8}, rate=1.0)
    status, said = command("diff", run, tmp_path / "other")
    assert status == 1
    assert "config model.width: 4 → 8" in said
    assert "0 of 4 arrays and 1 fields of the config differ." in said
    status, said = command("diff", folder / "5", folder / "10")
    assert status == 1
    assert "4 of 4 arrays and 0 fields of the config differ." in said
    first, second = (weights(step)["up"]["kernel"] for step in (5, 10))
    largest = np.abs(first - second).max()
    row = next(line.split() for line in said.splitlines() if "ema/up/kernel" in line)
    assert row == [
        "ema/up/kernel",
        *("float32", "6×4") * 2,
        f"{largest:.3g}",
        f"{largest / np.abs(first).max():.3g}",
    ]


def test_nan_in_one_of_two_checkpoints_and_other_shapes_differ(tmp_path, command):
    kernel = np.ones((3, 2), np.float32)
    poisoned = kernel.copy()
    poisoned[1, 1] = np.nan
    trees = {
        "a": {"x": kernel, "y": poisoned, "z": kernel},
        "b": {"x": poisoned, "y": poisoned, "z": kernel[:2]},
    }
    for name, tree in trees.items():
        with checkpoint.CheckpointWriter(tmp_path / name, {}, {}) as writer:
            writer.save(0, {"ema": jax.device_put(tree)}, {})
    said = command("diff", tmp_path / "a", tmp_path / "b")[1]
    rows = {line.split()[0]: line.split()[1:] for line in said.splitlines() if " ema/" in line}
    assert rows == {
        "ema/x": ["float32", "3×2", "float32", "3×2", "nan", "nan"],
        "ema/z": ["float32", "3×2", "float32", "2×2", "nan", "nan"],
    }


@pytest.mark.parametrize("limit", [100, 10**9])
def test_an_export_holds_the_same_bytes_under_the_hubs_names(run, tmp_path, command, limit):
    out = tmp_path / "out"
    assert command("export", run, out, "--shard-bytes", limit)[0] == 0
    source, expected = open_safetensors(out), weights(10)
    assert (out / "model.safetensors.index.json").exists() == (limit == 100)
    assert {name: np.asarray(x).tobytes() for name, x in source.arrays.items()} == {
        "up.kernel": expected["up"]["kernel"].tobytes(),
        "down.kernel": expected["down"]["kernel"].tobytes(),
        "down.codes": expected["down"]["codes"].tobytes(),
        "steps": expected["steps"].tobytes(),
    }
    for file in out.glob("*.safetensors"):
        with safe_open(file, "np") as opened:
            assert opened.metadata()["step"] == "10"
            assert json.loads(opened.metadata()["config"])["model"] == {"width": 4}
            kinds = {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118
        assert kinds.items() <= {
            ("up.kernel", "F32"),
            ("down.kernel", "BF16"),
            ("down.codes", "F8_E4M3"),
            ("steps", "I32"),
        }
    assert json.loads((out / "assets.json").read_text()) == {"words": ["a"]}
    status, _ = command("export", run, out)
    assert "already holds safetensors" in status
    assert (
        "has no 'params' parameters"
        in command("export", run, tmp_path / "p", "--which", "params")[0]
    )


def test_a_damaged_checkpoint_is_neither_compared_nor_exported(run, tmp_path, command):
    damage(run / "checkpoints" / "10")
    for arguments in (("diff", run / "checkpoints" / "5", run), ("export", run, tmp_path / "out")):
        status, _ = command(*arguments)
        assert "10 is damaged and was not loaded" in status
    assert not (tmp_path / "out").exists()


def test_sealing_accepts_a_checkpoint_without_digests_once(run, command):
    path = run / "checkpoints" / "10"
    (path / digests.NAME).unlink()
    assert command("verify", run)[0] == 1
    assert command("seal", run)[0] == 0
    assert command("verify", run)[0] == 0
    assert own.read_json(run, "assets") == {"words": ["a"]}
    assert "already has digests" in command("seal", run)[0]


def test_a_folder_without_checkpoints_is_an_error(tmp_path, command):
    assert "holds no checkpoints" in command("ls", tmp_path)[0]
    assert "holds no complete checkpoint" in command("verify", tmp_path)[0]
