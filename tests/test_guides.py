"""Commands in the guides: each parses with the options that there are now."""

import argparse
import inspect
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator
from functools import cache, wraps
from pathlib import Path
from typing import Any, NoReturn

import pytest
import tyro

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
OURS = re.compile(r"(?:python -m tools\.(?P<module>[\w.]+)|chiliad (?P<name>[a-z-]+))(?:\s|$)")
ELSEWHERE: dict[str, str] = {}
"""Beginnings of commands that need not parse, each with the reason."""


class Parsed(BaseException):
    """End of a command whose parser has taken its arguments."""


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Fenced blocks of a page, each after its language."""
    return ((block[2], block[3]) for block in FENCED.finditer(page.read_text()))


def commands(page: Path) -> list[str]:
    """Our commands in a page, without comments; a command behind `--` is one, too."""
    text = "".join(block for _, block in blocks(page)).replace("\\\n", " ")
    lines = [re.sub(r"\s#.*", "", line).strip().removeprefix("$ ") for line in text.splitlines()]
    parts = [part for line in lines if OURS.match(line) for part in line.split(" -- ")]
    return [" ".join(part.split()) for part in parts if OURS.match(part)]


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
        return f"exit {end.code}"
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
    for page in PAGES:
        for language, text in blocks(page):
            if language == "python" and (name := re.match(r"# (\w+\.py)\n", text)):
                (folder / name[1]).write_text(text)
    (folder / "sight.py").write_text((ROOT / "tests" / "own_model.py").read_text())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(tyro, "cli", _ending(tyro.cli))
        app = tyro.extras.SubcommandApp
        patch.setattr(app, "command", _registering(app.command))
        parser = argparse.ArgumentParser
        patch.setattr(parser, "parse_args", _ending(parser.parse_args))
        yield


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


def test_commands_are_found_in_blocks_of_all_kinds():
    found = [command for page in PAGES for command in commands(page)]
    assert len(found) > 200
    assert "python -m tools.train --data PATH --mesh.fsdp 2" in found, "behind tools.launch"
    assert any(command.endswith("--private-key key.pem") for command in found), "over two lines"
    assert any(command.startswith("chiliad runs") for command in found)
    assert not any("#" in command for command in found)
