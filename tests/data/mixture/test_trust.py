"""A mixture's file runs no Python without consent to that very content."""

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest

from data.mixture.mixed import mix
from data.mixture.mixture import DatasetConfig, Mixture, read_mixture
from data.mixture.relabelled import Transform
from data.mixture.trust import always, remember, remembered
from tests.helpers.data.memory_frames import MemoryFrames

SETS = [MemoryFrames("first", cameras=("observation.images.front",))]
PROGRAM = """
from pathlib import Path

Path(__file__).with_name("ran").touch()


def same(state, actions):
    return state, actions
"""


@pytest.fixture(autouse=True)
def settings(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    return tmp_path / "settings/chiliad/trusted"


@pytest.fixture(params=["json", "toml"])
def mixture(request, tmp_path):
    (tmp_path / "mine.py").write_text(PROGRAM)
    file = tmp_path / f"mixture.{request.param}"
    if request.param == "json":
        file.write_text(json.dumps({"datasets": [{"path": "a", "transform": "mine.py:same"}]}))
    else:
        file.write_text('[[datasets]]\npath = "a"\ntransform = "mine.py:same"\n')
    return file


def test_a_file_that_names_a_transform_is_refused_and_nothing_runs(mixture, tmp_path):
    expected = rf"mixture\.\w+: names 'same' of {tmp_path}/mine\.py .*--trust"
    with pytest.raises(ValueError, match=expected):
        read_mixture(mixture)
    assert not (tmp_path / "ran").exists()


def test_reading_runs_nothing_even_with_consent(mixture, tmp_path):
    made = read_mixture(mixture, always)
    assert not (tmp_path / "ran").exists()
    mix(made, SETS, 4)
    assert (tmp_path / "ran").exists()


def test_consent_is_remembered_for_that_content_alone(mixture, tmp_path, settings):
    found = Transform.find(f"{tmp_path}/mine.py:same")
    remember(mixture, found)
    assert read_mixture(mixture).datasets[0].transform == f"{tmp_path}/mine.py:same"
    (note,) = settings.iterdir()
    assert note.name == hashlib.sha256(PROGRAM.encode()).hexdigest()
    assert settings.stat().st_mode & 0o077 == 0
    (tmp_path / "mine.py").write_text(PROGRAM + "\n")
    with pytest.raises(ValueError, match="--trust"):
        read_mixture(mixture)
    (tmp_path / "mine.py").write_text(PROGRAM)
    assert read_mixture(mixture)
    note.unlink()
    assert not remembered(mixture, found)


def test_a_program_swapped_after_consent_does_not_run(mixture, tmp_path):
    made = read_mixture(mixture, always)
    (tmp_path / "mine.py").write_text(PROGRAM.replace("ran", "swapped"))
    with pytest.raises(ValueError, match=r"mine\.py has changed"):
        mix(made, SETS, 4)
    assert not (tmp_path / "swapped").exists()


def test_a_program_swapped_within_a_run_does_not_run(mixture, tmp_path):
    """A worker process begins later than the run, and reads the file itself."""
    found = Transform.find(f"{tmp_path}/mine.py:same")
    (tmp_path / "mine.py").write_text(PROGRAM.replace("ran", "swapped"))
    with pytest.raises(ValueError, match=r"mine\.py has changed"):
        found(np.zeros((1, 2), np.float32), np.zeros((1, 4, 2), np.float32))
    assert not (tmp_path / "swapped").exists()


def test_a_mixture_may_say_the_content_that_it_means(tmp_path):
    (tmp_path / "mine.py").write_text(PROGRAM)
    dataset = {"path": "a", "transform": "mine.py:same", "transform_sha256": "0" * 64}
    (tmp_path / "mixture.json").write_text(json.dumps({"datasets": [dataset]}))
    with pytest.raises(ValueError, match=r"mixture\.json: transform_sha256 of .*mine\.py is 0000"):
        read_mixture(tmp_path / "mixture.json", always)
    dataset["transform_sha256"] = hashlib.sha256(PROGRAM.encode()).hexdigest()
    (tmp_path / "mixture.json").write_text(json.dumps({"datasets": [dataset]}))
    with pytest.raises(ValueError, match="--trust"):
        read_mixture(tmp_path / "mixture.json")


def test_a_mixture_made_in_python_needs_no_consent(tmp_path):
    (tmp_path / "mine.py").write_text(PROGRAM)
    made = Mixture((replace(DatasetConfig("a"), transform=f"{tmp_path}/mine.py:same"),))
    assert mix(made, SETS, 4).feeds[0].transform.function == "same"
