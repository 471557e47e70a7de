"""Notebooks: each runs from its source, with smaller numbers, and shows what it claims; the files
with outputs are of these sources, executed from top to bottom, and small."""

import re

import nbformat
import pytest

from tests.helpers.notebooks import FOLDER, NAMES, ROOT, WIDGET, execute, read, tidy

pytestmark = pytest.mark.slow

SMALL = {
    "asynchronous_rl": {
        **{"EPISODES": 12, "STEPS": 2, "RL_STEPS": 2, "COMPARED": 2, "STARTS": 4},
        **{"GROUPS": 2, "GROUP": 2, "SLOTS": 4},
    },
    "fine_tune_and_debug": {"EPISODES": 12, "STEPS": 2, "OBSERVATIONS": 32},
    "mend_a_dataset": {"EPISODES": 12},
    "plan_a_cluster": {"PRESET": "tiny", "GPUS": 64, "REMATS": ("full",), "SIZES": (8, 64)},
    "vla_in_an_hour": {"EPISODES": 16, "STEPS": 2, "STARTS": 4},
}
MOST_BYTES = 600_000


def said(notebook: nbformat.NotebookNode) -> str:
    """All that cells printed or showed, as text."""
    texts = []
    for output in outputs(notebook):
        data = output.get("data", {})
        texts += [output.get("text", ""), data.get("text/plain", ""), data.get("text/html", "")]
    return "\n".join(texts)


def outputs(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


def cells(notebook: nbformat.NotebookNode) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def bars(notebook: nbformat.NotebookNode) -> str:
    """Text of all bars as they were in the end."""
    states = notebook.metadata.get("widgets", {}).values()
    models = [model["state"] for found in states for model in found["state"].values()]
    shown = [out for model in models for out in model.get("outputs", ())]
    text = "\n".join(out.get("data", {}).get("text/plain", "") for out in shown)
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def check_vla(notebook: nbformat.NotebookNode) -> None:
    text = said(notebook)
    assert "largest slope in the others:      0.0\n" in text
    assert not re.search(r"largest slope in its own picture: 0\n", text)
    assert "Policy of family" in text
    assert re.search(r"training .* 2/2 ", bars(notebook))


def check_mend(notebook: nbformat.NotebookNode) -> None:
    text = said(notebook)
    found, _, mended = text.partition("LeRobotDataset clean")
    assert "doubled" in found
    assert "plaese" in found
    assert "plaese" not in mended
    assert "times its usual size" in found
    assert "problems left: []\n" in text
    assert "idle frames among them: 0\n" in mended


def check_plan(notebook: nbformat.NotebookNode) -> None:
    assert "Prediction: " in said(notebook)
    assert "  50 Gbit/s: step " in said(notebook)


def check_fine_tune(notebook: nbformat.NotebookNode) -> None:
    text = said(notebook)
    assert text.count("<strong>Open loop</strong>") == 2
    assert "['assets', 'params']" in text
    assert re.search(r"training .* 2/2 ", bars(notebook))


def check_rl(notebook: nbformat.NotebookNode) -> None:
    text = said(notebook)
    assert re.search(r"before: [\d.]+ +after: [\d.]+", text)
    waited = re.findall(r"staleness (\d): the learner waited ([\d.]+) s", text)
    assert [bound for bound, _ in waited] == ["0", "1", "2"]
    assert float(waited[0][1]) > 0


CLAIMS = {
    "asynchronous_rl": check_rl,
    "fine_tune_and_debug": check_fine_tune,
    "mend_a_dataset": check_mend,
    "plan_a_cluster": check_plan,
    "vla_in_an_hour": check_vla,
}


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_and_shows_what_it_claims(name, tmp_path):
    notebook = read(name, SMALL[name])
    execute(notebook, tmp_path)
    drawing = sum("plt.show()" in cell.source for cell in notebook.cells)
    drawn = sum("image/png" in output.get("data", {}) for output in outputs(notebook))
    assert drawn == drawing > 0
    assert 'install "ipywidgets"' not in said(notebook)
    CLAIMS[name](notebook)


@pytest.mark.parametrize("name", NAMES)
def test_both_files_of_a_notebook_have_the_same_cells(name):
    path = FOLDER / f"{name}.ipynb"
    made = nbformat.read(path, as_version=4)
    assert cells(made) == cells(read(name)), f"{name}: run `make notebooks`."
    counts = [cell.execution_count for cell in made.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert all(output.output_type != "error" for output in outputs(made))
    assert all(WIDGET not in output.get("data", {}) for output in outputs(made))
    assert path.stat().st_size < MOST_BYTES
    assert str(ROOT) not in path.read_text()


def test_every_notebook_is_told_of_and_has_small_numbers():
    page = (ROOT / "docs" / "notebooks.md").read_text()
    assert NAMES
    for name in NAMES:
        assert f"../notebooks/{name}.ipynb" in page
        assert list(SMALL[name]) == [
            line.partition(" = ")[0]
            for cell in read(name).cells
            if "parameters" in cell.metadata.get("tags", ())
            for line in cell.source.splitlines()
        ]


def test_only_parameters_are_given_other_values():
    with pytest.raises(ValueError, match="assign STEP 0 times"):
        read("vla_in_an_hour", {"STEP": 1})
    assert "STEPS = 7" in "\n".join(
        source for _, source in cells(read("vla_in_an_hour", {"STEPS": 7}))
    )


def test_a_cell_that_raises_ends_the_notebook(tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")])
    with pytest.raises(Exception, match="ZeroDivisionError"):
        execute(notebook, tmp_path)


def test_bars_and_blank_output_are_no_part_of_a_made_file():
    shown = nbformat.v4.new_output("display_data", {WIDGET: {}, "text/plain": "Output()"})
    blank = nbformat.v4.new_output("display_data", {"text/html": "<pre></pre>", "text/plain": ""})
    kept = nbformat.v4.new_output("display_data", {"text/plain": "1"})
    card = nbformat.v4.new_output("display_data", {"text/html": "<b>1", "text/plain": "at 0x7f"})
    printed = nbformat.v4.new_output("stream", text="1")
    cell = nbformat.v4.new_code_cell("1", outputs=[shown, blank, kept, card, printed])
    notebook = nbformat.v4.new_notebook(cells=[cell], metadata={"widgets": {}})
    tidy(notebook)
    assert notebook.cells[0].outputs == [kept, card, printed]
    assert card.data == {"text/html": "<b>1"}
    assert "widgets" not in notebook.metadata


def test_notebooks_call_functions_and_no_command_lines():
    for name in NAMES:
        source = "\n".join(text for kind, text in cells(read(name)) if kind == "code")
        assert not re.search(r"subprocess|^!|^%|os\.system", source, re.MULTILINE)
