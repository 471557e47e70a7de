"""Commands on the results' pages start as they stand there. Benchmarks start in
tests/tools/bench/test_begun.py, and tests/test_guides_run.py runs all commands shrunk."""

import re

import pytest

from tests.helpers.guides.pages import RESULTS, ROOT
from tests.helpers.guides.starting import of_results, start

NOT_STARTED = {
    "tools.bench ": "a benchmark, or a command about all; tests/tools/bench starts them",
    "tools.bench.gpu": "a GPU; tests/tools/bench/test_gpu.py runs it shrunk",
    "tools.plan": "run whole by tests/test_guides_run.py",
    "tools.rl_curves": "run whole by tests/test_guides_run.py",
}
"""Beginnings of commands that are not started here, each with the reason."""

STARTED = dict.fromkeys(
    command
    for page in RESULTS
    for command in of_results(page)
    if not any(part in command for part in NOT_STARTED)
)


@pytest.mark.slow
@pytest.mark.parametrize("command", STARTED, ids=lambda command: command[16:90])
def test_a_command_starts_as_it_stands(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    start(command)


def test_every_target_of_make_on_a_page_is_there():
    targets = re.search(r"\.PHONY: (.*)", (ROOT / "Makefile").read_text())[1].split()
    for page in RESULTS:
        said = re.findall(r"(?:`|^ *)make ([a-z][\w-]*)", page.read_text(), re.MULTILINE)
        assert {*said} <= {*targets}, page.name
