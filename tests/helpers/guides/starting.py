"""Commands of the results' pages as they stand, in this process, until their work would begin:
options are read, suites, tasks and presets found, and sizes checked. Simulators are not opened,
checkpoints that other commands make are a policy of random weights, and of a training run the
shapes of its state, rows and step are worked out."""

import contextlib
import functools
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import jax
import jaxtyping
import pytest

import models
from models import Policy, pack
from models.model import groups_of, rules_of
from parallel.mesh import MeshConfig, make_mesh
from parallel.optimizer import with_groups
from parallel.step import abstract_state
from sim import suites
from sim.benchmarks import libero, metaworld
from sim.suite import Suite
from tests.helpers.guides.pages import blocks, commands
from tools.bench.data.plan import mixture
from tools.bench.models.random_policy import random_policy
from tools.recipes import conditions, evaluation, recording, rl, training
from tools.recipes import policy as loading
from tools.recipes.presets import TINY, RunConfig

_TARGETS = 64
_LIBERO = {
    f"libero_{name}": {"tasks": [f"task {k}" for k in range(10)], "episodes": 50}
    for name in ("spatial", "object", "goal", "goal_lan", "goal_object", "goal_swap", "goal_task")
}
"""LIBERO's suites as its package describes them."""
_SET = re.compile(r'(\w+)="(python -m tools\.[^"]*)"')


class Begun(BaseException):
    """The work of a command would begin now."""


def of_results(page: Path) -> list[str]:
    """Commands of a page; those that a loop makes of a variable, for the loop's first value."""
    text = "\n".join(text for _, text in blocks(page))
    looped = [
        f"{said[2]} {rest}"
        for said in _SET.finditer(text)
        for rest in re.findall(rf"^ *\${said[1]} (.*)$", text, re.MULTILINE)
    ]
    return [re.sub(r"\$seed|\bS$", "0", command) for command in (*commands(page), *looped)]


def start(command: str) -> None:
    """Runs a command in the current folder until its work would begin. The test fails, with what
    the command said, if it ends before."""
    words, begun = shlex.split(re.sub(r"^(\w+=\S+ )*", "", command)), list[bool]()

    def begin(*_: Any, **__: Any) -> Any:
        begun.append(True)
        raise Begun

    with pytest.MonkeyPatch.context() as patch, TemporaryFile("w+") as said:
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        patch.setattr(sys, "argv", words[2:])
        for module, name, instead in _bounds(begin):
            patch.setattr(module, name, instead)
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                runpy.run_module(words[2], run_name="__main__", alter_sys=True)
        except Begun:
            pass
        except SystemExit as end:
            print(end.code, file=said)
        said.seek(0)
        if not begun:
            told = said.read()
            pytest.fail(f"{command} ended before its work began:\n{told}", pytrace=False)


def _bounds(begin: Callable[..., Any]) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Functions of modules, each with the one that takes its place; `begin` is called where work
    would begin."""

    def load_suite(name: str) -> Suite:
        suite = _suite(name)
        return replace(suite, open=begin, cheaper=suite.cheaper and (lambda *_: load_suite(name)))

    def train(paths: training.Paths, config: RunConfig, *_: Any) -> None:
        optimizer = replace(config.optimizer, learning_rate=1e-3, decay_steps=1000)
        _shapes(config.model, optimizer, config.rows)
        begin()

    def policy(*_: Any, **__: Any) -> Policy:
        return _policy()

    for each in (suites, recording, evaluation, conditions, rl):
        yield each, "load_suite", load_suite
    for each in (loading, rl):
        yield each, "load", policy
    for each in (libero, metaworld):
        yield each, "interpreter", lambda *_: Path(sys.executable)
    yield libero, "_describe", lambda python, name: _LIBERO[name]
    yield models, "load_policy", policy
    yield evaluation._Acting, "of", lambda *_: _Acting(_policy(), "a run", "a run", None, {})
    yield rl, "_assets", lambda *_: {}
    yield rl, "ClosedLoop", begin
    yield training, "_run", train


_Acting, _suite = evaluation._Acting, suites.load_suite


@functools.cache
def _policy() -> Policy:
    return random_policy(TINY.model.changed(horizon=16, rtc_max_delay=8), ["lift"])


@functools.cache
def _shapes(model: Any, optimizer: Any, rows: Any) -> None:
    """Works out the shapes of a training state, and of the loss on rows of a mixture of robots."""
    if model.cross_entropies and not model.targets:
        model = model.changed(targets=_TARGETS)
    config = RunConfig(model=model, optimizer=optimizer, rows=rows)
    layout = config.layout(mixture(3000, config))
    built, mesh = model.build(), make_mesh(MeshConfig(data=1), jax.devices()[:1])
    optimizer = with_groups(optimizer, groups_of(built))
    state = abstract_state(built, optimizer, rules_of(built), mesh)
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((rows.number, *x.shape[1:]), x.dtype), pack([[]], layout)
    )
    jax.eval_shape(built.loss, state.params, batch, jax.random.key(0))
