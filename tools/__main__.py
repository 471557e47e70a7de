"""All commands under one name, `chiliad` or `python -m tools`: lists them, or runs one.

    chiliad --help
    chiliad train --data PATH --preset tiny

The list is read from the commands' files, without importing them, so it needs no JAX and is there
at once.
"""

import ast
import runpy
import sys
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path

FOLDER = Path(__file__).parent
USAGE = "usage: chiliad [-h] [--version] COMMAND [OPTIONS]"


def commands() -> dict[str, str]:
    """The first paragraph of what each command says about itself, by its name."""
    files = {path.stem: path for path in FOLDER.glob("*.py") if not path.stem.startswith("_")}
    files |= {path.parent.name: path for path in FOLDER.glob("*/__main__.py")}
    texts = {name: files[name].read_text(encoding="utf-8") for name in sorted(files)}
    return {
        name: (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0].replace("\n", " ")
        for name, text in texts.items()
        if '__name__ == "__main__"' in text
    }


def main() -> None:
    """Runs the command that the first argument names, with the others as its own."""
    name, *options = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(_help())
    elif name == "--version":
        print(f"chiliad {version('chiliad')}")
    elif (module := name.replace("-", "_")) in commands():
        sys.argv = [f"chiliad {name}", *options]
        runpy.run_module(f"tools.{module}", run_name="__main__", alter_sys=True)
    else:
        near = get_close_matches(module, commands(), n=1)
        hint = f"did you mean {near[0]}?" if near else "`chiliad --help` lists them."
        print(f"{USAGE}\nerror: there is no command {name!a}; {hint}", file=sys.stderr)
        sys.exit(2)


def _help() -> str:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid("name", "text", padding=(0, 2))
    for name, text in commands().items():
        table.add_row(name, Text(text))
    console = Console()
    with console.capture() as captured:
        console.print(table)
    return (
        f"{USAGE}\n\n{captured.get()}\n`chiliad COMMAND --help` lists a command's options; "
        "`python -m tools.COMMAND` is the same."
    )


if __name__ == "__main__":
    main()
