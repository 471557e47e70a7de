"""All commands under one name."""

import subprocess
import sys

import pytest

import tools.__main__ as main


@pytest.fixture
def typed(monkeypatch, capsys):
    def run(*words):
        monkeypatch.setattr(sys, "argv", ["chiliad", *words])
        main.main()
        return capsys.readouterr().out

    return run


def test_help_lists_every_command_with_what_it_is_for(typed, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    said = typed("--help")
    documented = {"train", "record", "evaluate", "serve", "data", "plan", "rl", "bench", "demo"}
    assert documented <= set(main.commands())
    for name, text in main.commands().items():
        assert text
        assert f"{name} " in said
    assert typed() == said


def test_the_list_of_commands_is_there_without_jax():
    script = (
        "import sys, tools.__main__ as main; sys.argv = ['chiliad']; main.main(); "
        "print(sorted({'jax', 'numpy', 'tyro'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert found.stdout.splitlines()[-1] == "[]", found.stderr


def test_a_command_gets_the_other_arguments(typed, capsys):
    with pytest.raises(SystemExit) as ended:
        typed("data", "validate", "nowhere/at-all")
    assert ended.value.code
    assert "nowhere/at-all" in "".join(capsys.readouterr())
    with pytest.raises(SystemExit) as ended:
        typed("rl-curves", "--help")
    assert ended.value.code == 0


def test_a_mistyped_command_is_told_the_nearest(typed, capsys):
    with pytest.raises(SystemExit) as ended:
        typed("trian")
    assert ended.value.code == 2
    assert "there is no command 'trian'; did you mean train?" in capsys.readouterr().err
