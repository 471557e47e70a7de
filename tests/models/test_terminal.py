"""Foreign text at the terminal: as it is written, without the power to do anything there."""

import ast
import io
import logging
import re
import sys
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from models.files import terminal
from models.files.terminal import (
    Console,
    Progress,
    TextColumn,
    draws,
    guard_tracebacks,
    harmless,
    logger,
    track,
)

ROOT = Path(__file__).parents[2]
PACKAGES = ("models", "data", "parallel", "sim", "rl", "tools")
FOREIGN = "lift[/red] :smile: \x1b]52;c;cm0=\x07\x1b[2J\x9b31m\r\u202egnp\u2066\ud800"
SHOWN = r"lift[/red] :smile: \x1b]52;c;cm0=\x07\x1b[2J\x9b31m\r\u202egnp\u2066\ud800"

OWN = re.compile(r"\x1b\[(\?25[lh]|2K|1A)|\r(?=\x1b)")
"""Sequences that rich itself sends to draw a bar again."""


def spinning(console, text):
    with console.status(text):
        pass


def described(console, text):
    with Progress(console=console) as progress:
        progress.add_task(text, total=1)


def in_columns(console, text):
    columns = TextColumn("{task.description}"), TextColumn("{task.fields[status]}", "red")
    with Progress(*columns, console=console) as progress:
        progress.add_task("", status=text)


def tabled(console, text):
    table = Table(text, title=text, caption=text)
    table.add_row(text)
    table.add_row(Text(text, "red"))
    console.print(table)


WAYS = {
    "line": lambda console, text: console.print(text, soft_wrap=True),
    "styled": lambda console, text: console.print(Text(text, "red"), text, style="bold"),
    "object": lambda console, text: console.print({text: [text]}, Path(text)),
    "table": tabled,
    "status": spinning,
    "description": described,
    "columns": in_columns,
    "track": lambda console, text: list(track([1], text, console=console)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("drawn", [False, True])
def test_foreign_text_is_shown_as_it_is_written_and_does_nothing(way, drawn):
    out = io.StringIO()
    WAYS[way](Console(file=out, force_terminal=drawn, color_system=None, width=400), FOREIGN)
    shown = OWN.sub("", out.getvalue())
    assert shown == harmless(shown)
    shown.encode()
    if drawn or way != "status":
        assert "lift[/red] :smile: " in shown
        assert r"\x1b]52;c;cm0=\x07" in shown


def test_only_tabs_and_newlines_stay_controls():
    assert harmless(FOREIGN) == SHOWN
    assert harmless("two\n\tlines: Ø 日本 שלום 🤖") == "two\n\tlines: Ø 日本 שלום 🤖"
    controls = [chr(c) for c in (*range(32), *range(127, 160))]
    assert [c for c in controls if harmless(c) == c] == ["\t", "\n"]
    assert harmless(harmless(FOREIGN)) == SHOWN


def test_columns_of_a_table_are_as_wide_as_what_is_shown():
    out = io.StringIO()
    table = Table("Task", "Next")
    for text in (FOREIGN, "push"):
        table.add_row(text, "end")
    Console(file=out, width=400).print(table)
    lines = [line for line in out.getvalue().splitlines() if line]
    assert len({len(line) for line in lines}) == 1


def test_styles_of_ours_reach_a_terminal_that_has_them():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="standard")
    console.print(Text("damaged", "red"))
    assert out.getvalue() == "\x1b[31mdamaged\x1b[0m\n"


def test_a_log_is_harmless_in_every_handler(caplog):
    log = logger("tests.models.files.terminal")
    log.warning("the client said %s", FOREIGN)
    try:
        raise ValueError(FOREIGN)
    except ValueError:
        log.exception("a request failed")
    first, second = caplog.records
    assert first.getMessage() == f"the client said {SHOWN}"
    written = logging.Formatter().format(second)
    assert "Traceback" in written
    assert f"ValueError: {SHOWN}" in written


def test_a_traceback_that_ends_a_process_is_harmless(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr("threading.excepthook", None)
    guard_tracebacks()
    try:
        raise RuntimeError(FOREIGN)
    except RuntimeError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback (most recent call last):")
    assert shown.endswith(f"RuntimeError: {SHOWN}\n")


def sources():
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if name != "models/files/terminal.py" and not name.startswith(
                ("tools/bench/peers/", "sim/simulators/")
            ):
                yield name, ast.parse(path.read_text())


def test_there_is_one_console_and_one_kind_of_bar():
    """Rich's own read markup and pass controls on."""
    kept = {
        "rich.console": {"Console"},
        "rich.progress": {"Progress", "TextColumn", "SpinnerColumn", "track"},
    }
    found = []
    for name, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found += [f"{name}: {a.name}" for a in node.names if a.name.startswith("rich")]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rich"):
                taken = {a.name for a in node.names}
                wrong = taken & kept.get(node.module, set())
                if node.module in ("rich", "rich.markup", "rich.prompt", "rich.logging"):
                    wrong = taken
                found += [f"{name}: {one}" for one in wrong]
            elif isinstance(node, ast.Attribute) and node.attr in ("from_markup", "from_ansi"):
                found.append(f"{name}: {node.attr}")
    assert not found


def test_what_goes_around_the_console_is_harmless_too():
    """`print`, the sentence that a command ends with, and logs: constants, JSON or `harmless`.

    Left out: a launcher passes its processes' lines on; `tools` itself says a path, and
    its list of commands what was typed, as ASCII before anything is imported; `make gpu` escapes by
    itself, where rich may be lacking; what is exported runs without us
    and says numbers; the other logs hold what the user typed."""
    prints = {
        "parallel/hosts/supervisor.py",
        "parallel/hosts/inject.py",
        "tools/__init__.py",
        "tools/__main__.py",
        "tools/bench/gpu.py",
        "tools/export/run.py",
    }
    logs = {"data/lake/on_ray.py"}
    found = []
    for name, tree in sources():
        for node in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            called = ast.unparse(node.func)
            wrong = {
                "print": name not in prints
                and _to_terminal(node)
                and not all(map(_tame, node.args)),
                "sys.exit": any(isinstance(a, ast.JoinedStr) for a in node.args),
                "traceback.print_exception": True,
                "traceback.print_exc": True,
                "logging.getLogger": name not in logs,
            }
            found += [f"{name}:{node.lineno}"] if wrong.get(called) else []
    assert not found


def _to_terminal(printing):
    files = {k.arg: ast.unparse(k.value) for k in printing.keywords}
    return files.get("file", "sys.stdout") in ("sys.stdout", "sys.stderr")


def _tame(shown):
    if isinstance(shown, ast.Call):
        return ast.unparse(shown.func) in ("harmless", "json.dumps")
    return isinstance(shown, ast.Constant)


def test_every_command_guards_its_tracebacks():
    commands = {
        name: ast.unparse(tree)
        for name, tree in sources()
        if name.startswith("tools/") and "__name__ == '__main__'" in ast.unparse(tree)
    }
    assert len(commands) > 12
    left = {"__main__.py", "bench/gpu.py"}
    left.add("export/run.py")  # is copied to where we are not
    left = {f"tools/{name}" for name in left}
    assert {n for n, text in commands.items() if "guard_tracebacks()" not in text} == left


def test_bars_are_drawn_on_terminals_and_in_notebooks_with_widgets(monkeypatch):
    shown = Console(force_terminal=True, file=io.StringIO())
    piped = Console(file=io.StringIO())
    notebook = Console(force_jupyter=True, file=io.StringIO())
    assert draws(shown)
    assert not draws(piped)
    assert draws(notebook)
    assert not Progress(console=notebook).disable
    monkeypatch.setattr(terminal, "find_spec", lambda name: None)
    assert not draws(notebook)
    assert Progress(console=notebook).disable
    assert not Progress(console=shown).disable
    assert Progress(console=Console(quiet=True)).disable
