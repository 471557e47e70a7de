"""A simulator's Python is found where the user says, beside the work, or here."""

import sys
from pathlib import Path

import pytest

from sim.processes.interpreters import interpreter


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CHILIAD_TOY_PYTHON", raising=False)
    return tmp_path


def python(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def test_the_variable_is_asked_first_then_the_folder_then_ourselves(here, monkeypatch):
    assert interpreter("toy", "json", "make toy") == Path(sys.executable)
    beside = python(here / ".venv-toy/bin/python")
    assert interpreter("toy", "json", "make toy") == beside
    named = python(here / "elsewhere/python")
    monkeypatch.setenv("CHILIAD_TOY_PYTHON", "elsewhere/python")
    assert interpreter("toy", "json", "make toy") == named


def test_an_interpreter_that_is_a_link_keeps_its_environment(here):
    link = here / ".venv-toy/bin/python"
    link.parent.mkdir(parents=True)
    link.symlink_to(sys.executable)
    assert interpreter("toy", "json", "make toy") == link


def test_a_suite_that_is_not_installed_comes_with_the_line_that_installs_it(here, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"needs the package no_such_toy.*\(make toy\)"):
        interpreter("toy", "no_such_toy", "make toy")
    monkeypatch.setenv("CHILIAD_TOY_PYTHON", "nowhere/python")
    with pytest.raises(
        FileNotFoundError, match=r"CHILIAD_TOY_PYTHON = nowhere/python is not a file"
    ):
        interpreter("toy", "json", "make toy")
