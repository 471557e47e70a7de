"""All commands under one name, `chiliad` or `python -m tools`: lists them, or runs one.

    chiliad --help
    chiliad train --data PATH --preset tiny
    chiliad --completion > ~/.local/share/bash-completion/completions/chiliad

The list is read from the commands' files, without importing them, so it needs no JAX and is there
at once.
"""

import ast
import runpy
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from shutil import get_terminal_size
from textwrap import wrap

from tools.command_line.help import asks_for_help, leave_out_what_computes

FOLDER = Path(__file__).parent
USAGE = "usage: chiliad [-h] [--version] [--completion] COMMAND [OPTIONS]"


def commands() -> dict[str, str]:
    """The first paragraph of each command's docstring, by the command's name."""
    files = {path.stem: path for path in FOLDER.glob("*.py") if not path.stem.startswith("_")}
    files |= {path.parent.name: path for path in FOLDER.glob("*/__main__.py")}
    texts = {name: files[name].read_text(encoding="utf-8") for name in sorted(files)}
    return {
        name: (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0].replace("\n", " ")
        for name, text in texts.items()
        if '__name__ == "__main__"' in text
    }


def main() -> None:
    """Runs the command that the first argument names, with the other arguments."""
    name, *options = sys.argv[1:] or ["--help"]
    known = commands()
    if name in ("-h", "--help"):
        print(_help(known))
    elif name == "--version":
        print(f"chiliad {version('chiliad')}")
    elif name == "--completion":
        from tools.command_line.completion import bash_completion

        print(bash_completion(known))
    elif (module := name.replace("-", "_")) in known:
        sys.argv = [f"chiliad {name}", *options]
        if asks_for_help(options):
            leave_out_what_computes()
        runpy.run_module(f"tools.{module}", run_name="__main__", alter_sys=True)
    else:
        from tools.command_line.commands import no_command

        dashed = [command.replace("_", "-") for command in known]
        hint = no_command(name, dashed, "`chiliad --help` lists them.")
        print(f"{USAGE}\nerror: {hint}", file=sys.stderr)
        sys.exit(2)


def _help(known: Mapping[str, str]) -> str:
    width = 2 + max(map(len, known))
    room = max(40, min(100, get_terminal_size().columns)) - width
    lines = [
        f"{name:{width}}" + f"\n{' ' * width}".join(wrap(text, room))
        for name, text in known.items()
    ]
    last = "`python -m tools.COMMAND` is the same as `chiliad COMMAND`; `--help` lists its options."
    return "\n".join([USAGE, "", *lines, "", last])


if __name__ == "__main__":
    main()
