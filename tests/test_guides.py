"""Guides and the code agree: each command in them parses with the options that there are now, and
each message of ours that they explain is one that the code has."""

import argparse
import ast
import inspect
import re
import runpy
import shlex
import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, NoReturn

import pytest
import tyro

from tests.helpers.guides.pages import OURS, PAGES, ROOT, commands, forget_families, own_files

ELSEWHERE = {
    "python -m tools.demo --seed S": "S stands for a number",
}
"""Beginnings of commands that need not parse, each with the reason."""
PACKAGES = ("models", "data", "parallel", "sim", "rl", "tools", "client")
TROUBLES = ROOT / "docs" / "troubleshooting.md"
THEIRS = "## Python, JAX, drivers and the system"
"""Heading of the messages that are not ours."""


class Parsed(BaseException):
    """End of a command whose parser has taken its arguments."""


def fault(command: str) -> str:
    """An empty text if the command's parser takes its arguments, else what it says."""
    found = OURS.match(command)
    assert found is not None
    module = found["module"] or found["name"].replace("-", "_")
    if module == "launch":
        command += " -- true"
    before = sys.argv
    sys.argv = [f"tools.{module}", *shlex.split(command[found.end() :])]
    try:
        runpy.run_module(f"tools.{module}", run_name="__main__", alter_sys=True)
    except Parsed:
        return ""
    except SystemExit as end:
        return f"exit {end.code}" if end.code else ""  # 0 of --help
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        sys.argv = before
    return "it ran without parsing"


def _ending(parse: Callable[..., Any]) -> Callable[..., NoReturn]:
    """The parser, raising Parsed in place of what it would call or return."""

    @wraps(parse)
    def ended(first: Any, *others: Any, **options: Any) -> NoReturn:
        parse(_instead(first) if inspect.isfunction(first) else first, *others, **options)
        raise Parsed

    return ended


def _instead(function: Callable[..., Any]) -> Callable[..., NoReturn]:
    @wraps(function)
    def parsed(*_: Any, **__: Any) -> NoReturn:
        raise Parsed

    return parsed


def _registering(register: Callable[..., Any]) -> Callable[..., Any]:
    """`SubcommandApp.command`, for commands that raise Parsed when they are called."""

    def command(app: Any, function: Any = None, **options: Any) -> Any:
        if function is not None:
            return register(app, _instead(function), **options)
        return lambda function: register(app, _instead(function), **options) and function

    return command


@pytest.fixture(scope="module", autouse=True)
def only_parsing(tmp_path_factory):
    """Commands that end when their arguments are parsed, in a folder with the files that the guides
    have users write."""
    folder = tmp_path_factory.mktemp("guides")
    for name, text in own_files().items():
        (folder / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(tyro, "cli", _ending(tyro.cli))
        app = tyro.extras.SubcommandApp
        patch.setattr(app, "command", _registering(app.command))
        parser = argparse.ArgumentParser
        patch.setattr(parser, "parse_args", _ending(parser.parse_args))
        yield
    forget_families(folder)


@cache
def _fault(command: str) -> str:
    return fault(command)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_parse(page, capsys):
    wrong = []
    for command in commands(page):
        if not command.startswith(tuple(ELSEWHERE)) and (said := _fault(command)):
            wrong.append(f"{command}\n{said}\n{''.join(capsys.readouterr())}")
        elif "warning: " in (old := capsys.readouterr().err):
            wrong.append(f"{command}\n{old}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "command",
    [
        "python -m tools.train --data PATH --preset tiny --trainer.stepz 3",
        "python -m tools.train --data PATH --preset tinier",
        "python -m tools.train --preset tiny",
        "python -m tools.rl --checkpoint RUN --preset tabletop-ppo --out RUN --learner.epoch 3",
        "python -m tools.data stat PATH",
        "python -m tools.bench.gpu --parts fp8",
        "python -m tools.evaluate --data PATH --checkpoint RUN --out RUN --suite tabletop",
        "chiliad serve --checkpoint RUN --ports 8000",
        "chiliad runs list RUN --sort",
        "chiliad no-such-command",
    ],
)
def test_a_command_with_an_option_that_is_not_there_is_found(command):
    assert fault(command)


def test_every_exception_is_needed():
    found = [command for page in PAGES for command in commands(page)]
    for beginning in ELSEWHERE:
        assert all(fault(c) for c in found if c.startswith(beginning))
        assert any(c.startswith(beginning) for c in found)


def test_commands_are_found_wherever_they_stand():
    found = [command for page in PAGES for command in commands(page)]
    assert len(found) > 200
    assert "python -m tools.train --data PATH --mesh.fsdp 2" in found, "behind tools.launch"
    assert any(command.endswith("--private-key key.pem") for command in found), "over two lines"
    assert any(command.startswith("chiliad runs") for command in found)
    assert any("--process-id 0" in command for command in found), "indented, without a fence"
    assert "python -m tools.bench serve --json" in found, "in prose"
    assert not any("#" in command for command in found)


@cache
def messages() -> str:
    """All texts in our code, one a line, with `…` for what is filled in."""
    texts = []
    for file in (file for package in PACKAGES for file in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(text.replace("\n", " ") for text in texts)


def said(message: str) -> bool:
    """True if our code has such a message; `…` stands for anything."""
    return bool(re.search(".*?".join(map(re.escape, message.split("…"))), messages()))


def test_messages_that_are_explained_are_those_of_the_code():
    ours, theirs, others = TROUBLES.read_text().partition(THEIRS)
    explained = re.findall(r"^\| `([^`]+)`", ours, re.MULTILINE)
    assert theirs
    assert len(explained) >= 25
    assert len(re.findall(r"^\| `", others, re.MULTILINE)) >= 8
    assert not [message for message in explained if not said(message)]


def test_a_message_that_nobody_says_is_found():
    assert said("is not a tracker; give …, optionally followed by :PROJECT")
    assert not said("is not a tracker; take …, optionally followed by :PROJECT")
