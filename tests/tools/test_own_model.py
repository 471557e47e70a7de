"""docs/own_model.md is the file that commands are tested with; what it types can be typed."""

import re
import shlex
from functools import partial, wraps
from pathlib import Path

import jax
import numpy as np
import tyro

from parallel.planning.random_batch import random_batch
from tests.own_model import SightConfig
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


def test_the_guides_model_takes_as_many_steps_as_its_config_says():
    config = SightConfig(width=16, image_size=32, euler_steps=1)
    model, batch = config.build(), random_batch(config, rows=1, samples=1)
    params, noise = model.init(jax.random.key(0)), np.ones_like(batch.actions)
    start = model.field(params, batch)(noise[:, :, None], np.ones((1, 1, 1), np.float32))
    expected = noise - start.velocity[:, :, 0]
    np.testing.assert_allclose(model.sample_actions(params, batch, noise), expected, atol=1e-6)
    longer = config.changed(euler_steps=4).build().sample_actions(params, batch, noise)
    assert np.abs(longer - expected).max() > 1e-4
