"""Every command that takes a checkpoint refuses sealed nonsense in one sentence."""

import pytest

from models.files.terminal import Console
from models.load import trained_preparation
from rl.config import RlConfig
from tests.helpers.models.sealed_files import put, saved, sealed
from tools import convert_checkpoint, evaluate, rl, serve
from tools.recipes.presets import TINY

__all__ = ["saved"]
QUIET = Console(quiet=True)
COMMANDS = {
    "serve": lambda path, out: serve.load(serve.ServeConfig(path)),
    "rl": lambda path, out: rl.run(rl.RlPaths(path, out / "run"), RlConfig(), QUIET),
    "evaluate": lambda path, out: evaluate.run(
        evaluate.EvaluateConfig(path, suite="tabletop-lift", out=out / "run"), QUIET
    ),
    "convert": lambda path, out: convert_checkpoint.main(path, out / "run", "openpi"),
    "train --init": lambda path, out: trained_preparation(path, TINY.model),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("where", "value", "why"),
    [
        ("embodiments.0.actions.scale.0", 0.0, r"actions: scale\[0\] is 0.0"),
        ("embodiments.0.name", "../../../victim", "is named '../../../victim'"),
    ],
)
def test_a_command_refuses_a_sealed_checkpoint_of_nonsense(
    command, where, value, why, saved, tmp_path
):
    path = sealed(saved, tmp_path, "assets", lambda c: put(c, f"processor.{where}", value))
    out = tmp_path / "a" / "b" / "c" / "d"
    out.mkdir(parents=True)
    with pytest.raises((ValueError, SystemExit), match=why):
        COMMANDS[command](path, out)
    assert not list(out.iterdir())
    assert not (tmp_path / "victim").exists()
