"""The command that imports recordings: typed as in the guide, and mistakes are one sentence."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from data import open_dataset
from data.lerobot.importing import recording
from tests.helpers.data.aloha import write_aloha
from tools.data import app

GUIDE = Path(__file__).parents[3] / "docs/importing.md"


@pytest.fixture
def recordings(tmp_path):
    return write_aloha(tmp_path / "recordings/cube")


def command(*arguments):
    run = [sys.executable, "-m", "tools.data", "import", *map(str, arguments)]
    return subprocess.run(run, capture_output=True, text=True, check=False)


def test_the_guides_command_and_its_python_make_the_same_dataset(
    recordings, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    typed, _ = re.findall(r"^python -m tools.data (import .*)$", GUIDE.read_text(), re.MULTILINE)
    app.cli(args=shlex.split(typed))
    said = " ".join(capsys.readouterr().out.split())
    assert "datasets/cube: LeRobot v3.0, 2 episodes, 8 frames of 2 recordings." in said
    found = open_dataset("datasets/cube")
    assert found.prompts == (("transfer the cube",),)
    digest = found.digest
    shutil.rmtree("datasets")
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    exec(code, {})
    assert open_dataset("datasets/cube").digest == digest


def test_a_mistake_is_one_sentence_and_exits_with_an_error(recordings, tmp_path):
    found = command(recordings, "--layout", "aloha", "--out", tmp_path / "out")
    assert found.returncode == 1
    assert "the recording names no instruction; give it as --task" in found.stderr
    assert "Traceback" not in found.stderr
    assert not (tmp_path / "out").exists()


def test_an_error_of_a_later_recording_says_that_earlier_ones_are_kept(recordings, tmp_path):
    with h5py.File(recordings / "episode_1.hdf5", "a") as root:
        root["action"][2] = np.nan
    options = ["--layout", "aloha", "--task", "transfer", "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as ended:
        app.cli(args=["import", str(recordings), *options])
    assert re.search(
        r"episode_1\.hdf5, recording: Episode 1, column 'action', step 2: .* is not finite; .*"
        r"Finished episodes are kept; continue with --resume\.$",
        str(ended.value),
    )
    assert open_dataset(tmp_path / "out").num_episodes == 1


def test_a_missing_library_is_a_sentence_that_names_the_extra(recordings, tmp_path, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named '{name}'", name=name)

    monkeypatch.setattr(recording, "import_module", missing)
    options = ["--layout", "aloha", "--task", "transfer", "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as ended:
        app.cli(args=["import", str(recordings), *options])
    assert "An HDF5 file needs the package h5py" in str(ended.value)
    assert "pip install -e '.[import]'" in str(ended.value)


def test_a_full_disk_keeps_finished_episodes_and_resume_goes_on(recordings, tmp_path, monkeypatch):
    from data.lerobot.importing import importing

    options = ["--layout", "aloha", "--task", "transfer", "--out", str(tmp_path / "out")]
    real, calls = importing.write_video, []

    def full(path, *arguments):
        calls.append(path)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        real(path, *arguments)

    monkeypatch.setattr(importing, "write_video", full)
    with pytest.raises(SystemExit) as ended:
        app.cli(args=["import", str(recordings), *options])
    assert "No space left on device; make room." in str(ended.value)
    assert "continue with --resume" in str(ended.value)
    assert open_dataset(tmp_path / "out").num_episodes == 1
    app.cli(args=["import", str(recordings), *options, "--resume"])
    found = open_dataset(tmp_path / "out")
    assert found.column("observation.state")[:, 0].tolist() == [0] * 4 + [1] * 4
