"""Folders of a user's own that are named as ours are."""

import subprocess
import sys

import pytest


def run(folder, *options):
    return subprocess.run(
        [sys.executable, *options, "-m", "tools.launch", "--help"],
        cwd=folder,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("name", ["models", "data"])
def test_a_package_in_the_working_directory_that_hides_ours_is_named(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("raise SystemExit('imported')")
    ended = run(tmp_path)
    assert ended.returncode == 1
    said = f"'{tmp_path / name / '__init__.py'}' hides Chiliad's own package '{name}'"
    assert said in ended.stderr
    assert "python -P -m" in ended.stderr


def test_folders_without_python_hide_nothing(tmp_path):
    """Many keep their datasets in a folder data/."""
    for name in ("models", "data", "tools"):
        (tmp_path / name).mkdir()
    assert run(tmp_path).returncode == 0
    script = [sys.executable, "-c", "from data import open_dataset; from models import load_policy"]
    assert subprocess.run(script, cwd=tmp_path).returncode == 0


def test_python_can_leave_the_working_directory_out(tmp_path):
    for name in ("models", "tools"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('imported')")
    assert run(tmp_path, "-P").returncode == 0
