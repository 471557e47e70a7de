"""docs/own_model.md is the file that commands are tested with; what it types can be typed."""

import re
import shlex
from functools import partial, wraps
from pathlib import Path

import tyro

from tools import evaluate, plan, quantize, rl, serve, train

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "own_model.md").read_text()
FILE = ROOT / "tests" / "own_model.py"


def options_of(main, given):
    """Arguments that a command's function would be called with."""
    return tyro.cli(wraps(main)(lambda *args, **kwargs: (args, kwargs)), args=given)


PARSED = {
    "train": train.parse,
    "rl": rl.parse,
    "evaluate": lambda given: tyro.cli(evaluate.EvaluateConfig, args=given),
    "serve": lambda given: tyro.cli(serve.ServeConfig, args=given),
    "quantize": partial(options_of, quantize.main),
    "plan": partial(options_of, plan.main),
}


def test_the_guide_is_the_whole_file():
    code = "\n".join(re.findall(r"```python\n(.*?)```", GUIDE, re.S))
    lines = [[line for line in text.splitlines() if line] for text in (code, FILE.read_text())]
    assert lines[0] == lines[1]
    assert len(FILE.read_text().splitlines()) <= 150


def test_the_guides_commands_can_be_typed():
    typed = re.findall(r"^python -m tools\.(\w+) (.*)$", GUIDE, re.M)
    assert {name for name, _ in typed} == set(PARSED)
    for name, given in typed:
        PARSED[name](shlex.split(given.replace("sight.py:", f"{FILE}:")))
