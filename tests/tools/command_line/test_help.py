"""Help of every command, made without JAX."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

import tools.__main__ as main
from models.formats import formats
from tests.helpers.tools.help_text import help_of
from tools.command_line.completion import words_of
from tools.command_line.help import asks_for_help
from tools.recipes.presets import presets
from tools.recipes.rl_presets import RL_PRESETS

MORE = {
    "bench": [["all"], ["pages"]],
    "evaluate": [["--data", "PATH"]],
    "rl": [["--preset", name] for name in RL_PRESETS],
    "train": [
        ["--preset", name] for name in {type(p.model): n for n, p in presets().items()}.values()
    ],
}
"""Words that change a command's help, besides subcommands; of presets, one of each family."""


def without_jax(typed: Sequence[Sequence[str]]) -> list[str]:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.helpers.tools.help_text", json.dumps(typed)],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    texts, imported = json.loads(ran.stdout)
    assert not imported
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("command", main.commands())
def test_help_is_what_tyro_says_with_everything_imported_but_made_without_jax(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    said = help_of([command])
    assert "--help" in said
    typed = [[command, word] for word in words_of(said) if word[0] != "-"]
    typed += [[command, *more] for more in MORE.get(command, [])]
    assert without_jax([[command], *typed]) == [said, *map(help_of, typed)]


def test_options_of_other_codes_stand_under_the_formats_that_take_them():
    boxes = [box.partition(" options ") for box in help_of(["convert-checkpoint"]).split("╭─ ")[2:]]
    shown = {(of, x) for names, _, box in boxes for of in names.split(", ") for x in words_of(box)}
    asked = {(known.name, name) for known in formats() for name in known.asks}
    assert shown == {(of, f"--{name}") for of, name in asked if name != "robot"}


def test_help_fits_its_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    (found,) = without_jax([["record"]])
    assert found == help_of(["record"])
    assert max(len(line) for line in found.splitlines() if line[:1] == "│") == 60


def test_help_breaks_where_the_terminal_ends_and_not_where_its_source_does(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert "folder is lost resumes from this copy" in help_of(["train"])  # two source lines


def test_python_m_imports_no_jax_for_help():
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "tools.data", "edit", "--help"],
        capture_output=True,
        text=True,
    )
    assert "--delete" in ran.stdout
    assert "tools.datasets.edit" in ran.stderr
    assert "jax.version" not in ran.stderr


@pytest.mark.slow
def test_a_script_with_help_of_its_own_that_imports_a_command_gets_jax(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text("import tools.recipes.presets, jax; print(jax.numpy.arange(3).sum())")
    env = os.environ | {"PYTHONPATH": os.getcwd()}
    ran = subprocess.run(
        [sys.executable, script, "--help"], env=env, capture_output=True, text=True
    )
    assert ran.stdout == "3\n", ran.stderr


def test_a_command_never_runs_without_what_it_computes_with():
    script = (
        "from tools.command_line.help import leave_out_what_computes; leave_out_what_computes(); "
        "import tyro; tyro.cli(lambda: None, args=[]); print('ran')"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ran.returncode == 1
    assert "taken for the value of an option" in ran.stderr
    assert not ran.stdout


def test_what_asks_for_help():
    assert asks_for_help(["--data", "PATH", "--help"])
    assert asks_for_help(["-h", "--", "python"])
    assert not asks_for_help(["--data", "PATH"])
    assert not asks_for_help(["-n", "2", "--", "python", "-m", "tools.train", "--help"])
    assert not asks_for_help(["--preset", "mine.py:MINE", "--help"]), "its Python may use JAX"
