"""Progress of a run: a bar where one can be drawn, elsewhere a line now and then."""

import io

import pytest

from models.files import terminal
from models.files.terminal import Console
from parallel.monitor.progress import StepBar


def shown(console: Console) -> str:
    with StepBar(console, "training", 0, 2) as bar:
        bar.show(1, "loss 2")
        bar.show(2, "loss 1")
    return console.export_text()


@pytest.mark.parametrize("options", [{}, {"force_jupyter": True}], ids=["file", "notebook"])
def test_what_cannot_draw_is_told_the_last_step_in_a_line(options, monkeypatch):
    monkeypatch.setattr(terminal, "find_spec", lambda name: None)
    console = Console(record=True, file=io.StringIO(), **options)
    assert shown(console) == "step 2 of 2: loss 1\n"


def test_a_terminal_is_shown_a_bar_that_ends_with_the_last_step():
    console = Console(record=True, file=io.StringIO(), force_terminal=True, width=120)
    text = shown(console)
    assert "2/2" in text
    assert "loss 1" in text
    assert "step 2 of 2" not in text
