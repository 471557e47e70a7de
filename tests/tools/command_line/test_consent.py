"""Consent before a mixture's file may run Python: who is asked, and what the answer does."""

import io
import json
import sys

import pytest

from data.mixture.relabelled import Transform
from data.mixture.trust import always, remember, remembered
from models.config import to_json
from models.files.terminal import Console
from tests.helpers.tools.small_run import SMALL, one_device
from tools import train
from tools.command_line.consent import consent
from tools.recipes import training

PROGRAM = "def same(state, actions):\n    return state, actions\n"


class Typed(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def settings(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """(answer typed, whether alone, what `--trust` is) -> (consent, what was shown)."""
    (tmp_path / "mine.py").write_text(PROGRAM)
    transform = Transform.find(f"{tmp_path}/mine.py:same")

    def ask(answer, *, alone=True, trust=False, terminal=True):
        out = io.StringIO()
        monkeypatch.setattr(sys, "stdin", Typed(answer) if terminal else io.StringIO(answer))
        console = Console(file=out, force_terminal=terminal, color_system=None, width=400)
        agreed = consent(trust, alone, console)(tmp_path / "mixture[/red].json", transform)
        return agreed, out.getvalue()

    return ask


def test_a_user_at_a_terminal_is_asked_once_for_each_content(asked, tmp_path, capsys):
    agreed, shown = asked("y\n")
    assert agreed
    assert f"mixture[/red].json names 'same' of {tmp_path / 'mine.py'} as a transform" in shown
    assert asked("") == (True, "")
    assert asked("", alone=False) == (True, "")
    assert asked("", terminal=False) == (True, "")


@pytest.mark.parametrize("answer", ["\n", "n\n", "no\n", "", "yeah, whatever\n"])
def test_no_answer_but_yes_is_consent_and_a_no_is_asked_again(asked, answer, capsys):
    assert not asked(answer)[0]
    assert "as a transform" in asked(answer)[1]
    assert asked("yes\n")[0]


@pytest.mark.parametrize("place", [{"alone": False}, {"terminal": False}])
def test_who_cannot_be_asked_has_not_agreed(asked, place):
    assert asked("y\n", **place) == (False, "")


def test_the_option_agrees_without_a_question_and_is_not_remembered(asked):
    assert asked("", trust=True) == (True, "")
    assert asked("", terminal=False) == (False, "")


def test_settings_that_cannot_be_written_only_mean_another_question(asked, tmp_path, capsys):
    (tmp_path / "settings").write_text("no folder")
    assert asked("y\n")[0]
    assert "as a transform" in asked("n\n")[1]


@pytest.fixture
def mixture(tmp_path):
    (tmp_path / "mine.py").write_text(f"raise SystemExit('it ran')\n{PROGRAM}")
    file = tmp_path / "mixture.json"
    file.write_text(json.dumps({"datasets": [{"path": "absent", "transform": "mine.py:same"}]}))
    return file


@pytest.mark.parametrize("more", [(), ("--resume",)])
def test_training_is_refused_with_code_2_before_any_data_is_read(
    mixture, tmp_path, monkeypatch, capsys, more
):
    """A run that is resumed is no way around: its folder may be somebody else's too."""
    out = tmp_path / "run"
    if more:
        (out / "checkpoints").mkdir(parents=True)
        monkeypatch.setattr(training, "check_start", lambda *_: None)
        (out / "config.json").write_text(json.dumps(to_json(SMALL)))
    preset = tmp_path / "small.py"
    preset.write_text("from tests.helpers.tools.small_run import SMALL\n")
    typed = ["--preset", f"{preset}:SMALL", "--data", mixture, "--out", out, *more]
    monkeypatch.setattr(sys, "argv", ["train", *map(str, typed)])
    with one_device(), pytest.raises(SystemExit, match="2"):
        train.main()
    said = capsys.readouterr().err
    assert f"error: {mixture}: names 'same' of {tmp_path / 'mine.py'} as a transform" in said
    assert "--trust" in said
    assert not (out / "store").exists()


def test_with_the_option_training_goes_on_to_the_data(mixture, tmp_path):
    paths = train.Paths(str(mixture), tmp_path / "run", trust=True)
    with one_device(), pytest.raises(FileNotFoundError, match="absent"):
        train.run(paths, SMALL, Console(quiet=True))


def test_consent_to_everything_is_for_files_of_ones_own(mixture):
    transform = Transform.find(f"{mixture.parent}/mine.py:same")
    assert always(mixture, transform)
    assert not remembered(mixture, transform)
    remember(mixture, transform)
    assert remembered(mixture, transform)
