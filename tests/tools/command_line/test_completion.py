"""Completion in bash, by a script made of the commands' own help."""

import subprocess

import pytest

from tools.command_line import completion

HELP = {
    ("data",): ["--help", "edit", "view"],
    ("data", "edit"): ["--help", "--delete", "--out"],
    ("data", "view"): ["--help", "--episode"],
    ("train",): ["--help", "--data", "--data.encoding", "--out"],
}


@pytest.fixture
def complete(monkeypatch):
    monkeypatch.setattr(completion, "_listed", lambda *typed: HELP[typed])
    script = completion.bash_completion(["data", "train"])

    def completed(*typed: str) -> list[str]:
        words = " ".join(f"'{word}'" for word in ("chiliad", *typed))
        asked = f"COMP_WORDS=({words}); COMP_CWORD={len(typed)}; _chiliad"
        said = f"{script}\n{asked}; printf '%s\\n' \"${{COMPREPLY[@]}}\""
        run = subprocess.run(["bash", "-uc", said], capture_output=True, text=True, check=True)
        return run.stdout.split()

    return completed


def test_tab_completes_commands_subcommands_and_options(complete):
    assert complete("") == ["data", "train"]
    assert complete("tr") == ["train"]
    assert complete("--v") == ["--version"]
    assert complete("data", "") == ["edit", "view"]
    assert complete("data", "edit", "--d") == ["--delete"]
    assert complete("data", "edit", "PATH", "--delete", "3", "--o") == ["--out"]
    assert complete("train", "--data") == ["--data", "--data.encoding"]


def test_where_a_value_or_file_stands_nothing_is_offered_but_files(complete):
    assert complete("train", "--data", "") == []
    assert complete("data", "edit", "some/") == []
    assert complete("nosuch", "") == []


def test_words_are_read_from_the_boxes_of_a_real_commands_help():
    assert {"--help", "--suite", "--draw-every", "--resume"} <= set(completion._listed("record"))
    boxed = "\n".join(
        [
            "│ (required)                              │",
            "│   • edit   Delete, as told by           │",
            "│            --delete, and more           │",
            "│ -h, --help   show this                  │",
            "│ --flag, --no-flag                       │",
            "│              By --default it is off.    │",
        ]
    )
    assert completion.words_of(boxed) == ["edit", "--help", "--flag", "--no-flag"]


def test_a_command_without_help_is_an_error():
    with pytest.raises(ValueError, match=r"tools\.nosuch: `--help` failed"):
        completion._listed("nosuch")
