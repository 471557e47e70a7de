"""Executes notebooks; the files with outputs beside the sources are written by

python -m tests.helpers.notebooks            # all of them, or those that are named
"""

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.py")))
SECONDS = 1800
"""Time that a cell may take."""
WIDGET = "application/vnd.jupyter.widget-view+json"


def read(name: str, values: Mapping[str, Any] | None = None) -> nbformat.NotebookNode:
    """A notebook's source, with other values of names that its cell "parameters" assigns.

    Raises:
      ValueError: it does not assign one of them.
    """
    notebook = jupytext.read(FOLDER / f"{name}.py")
    for at, cell in enumerate(notebook.cells):
        cell.id = f"cell-{at}"
    if values:
        (at,) = (
            i for i, c in enumerate(notebook.cells) if "parameters" in c.metadata.get("tags", ())
        )
        lines = notebook.cells[at].source.splitlines()
        for key, value in values.items():
            found = [i for i, line in enumerate(lines) if line.startswith(f"{key} = ")]
            if len(found) != 1:
                raise ValueError(f"{name}: its parameters assign {key} {len(found)} times.")
            lines[found[0]] = f"{key} = {value!r}"
        notebook.cells[at].source = "\n".join(lines)
    return notebook


def execute(notebook: nbformat.NotebookNode, folder: Path) -> None:
    """Executes the cells in a process of its own whose working directory is `folder`, with the
    devices that the machine has; what they put out is then in them.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell raises.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    alone = [flag for flag in flags if "force_host_platform_device_count" not in flag]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": " ".join(alone)}
    environment.pop("MPLBACKEND", None)
    where = {"metadata": {"path": str(folder)}}
    client = NotebookClient(
        notebook, timeout=SECONDS, kernel_name="python3", resources=where, coalesce_streams=True
    )
    client.execute(env=environment)


def tidy(notebook: nbformat.NotebookNode) -> None:
    """Leaves what a page shows: bars, which need a running process, blank lines, times of execution
    and what stands for HTML where there is none go."""
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if _is_shown(output)]
            for output in cell.outputs:
                if "text/html" in output.get("data", {}):
                    output.data.pop("text/plain")


def _is_shown(output: nbformat.NotebookNode) -> bool:
    data = output.get("data", {"text/plain": "printed"})
    return WIDGET not in data and bool(data.get("text/plain", "-").strip())


def make(name: str) -> Path:
    """Executes a notebook as it is, and writes the file with outputs."""
    notebook, path = read(name), FOLDER / f"{name}.ipynb"
    with tempfile.TemporaryDirectory() as folder:
        execute(notebook, Path(folder))
    tidy(notebook)
    nbformat.write(notebook, path)
    return path


if __name__ == "__main__":
    for name in sys.argv[1:] or NAMES:
        print(make(name), flush=True)
