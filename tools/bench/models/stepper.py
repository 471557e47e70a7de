"""Training steps to call repeatedly, and the programs that they run."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from models.model import rules_of
from parallel.mesh import make_mesh
from parallel.optimizer import OptimizerConfig
from parallel.step import Trainable, abstract_state, init_state, make_train_step


def stepper(
    model: Trainable,
    optimizer: OptimizerConfig,
    batch: Any,
    mesh: Mesh | None = None,
    accumulation: int = 1,
) -> tuple[Callable[[], Any], Any]:
    """A training step, and its compiled program; see `steppers`."""
    calls, programs = steppers({"": (model, batch)}, optimizer, mesh, accumulation)
    return calls[""], programs[""]


def steppers(
    cases: Mapping[str, tuple[Trainable, Any]],
    optimizer: OptimizerConfig,
    mesh: Mesh | None = None,
    accumulation: int = 1,
    params: Any = None,
) -> tuple[dict[str, Callable[[], Any]], dict[str, Any]]:
    """Training steps of models on their batches, which update one state in turn, and their
    compiled programs.

    Args:
      mesh: the first device's if None.
      params: parameters to begin with, which are copied; random ones if None.
    """
    mesh = mesh or make_mesh(devices=jax.devices()[:1])
    first, _ = next(iter(cases.values()))
    abstract = abstract_state(first, optimizer, rules_of(first), mesh)
    state = init_state(first, optimizer, abstract, 0)
    if params is not None:
        placed = jax.tree.map(lambda x: x.sharding, abstract.params)
        own, average = (jax.device_put(params, placed, may_alias=False) for _ in range(2))
        state = replace(state, params=own, ema=average)
    programs = {}
    for name, (model, batch) in cases.items():
        step: Any = make_train_step(model, optimizer, mesh, abstract, accumulation)
        programs[name] = step.lower(state, batch, 0).compile()

    def call(name: str) -> Any:
        nonlocal state
        state, metrics = programs[name](state, cases[name][1], 0)
        return metrics

    return {name: partial(call, name) for name in cases}, programs


def held_bytes(compiled: Any) -> int:
    """Bytes that a compiled program holds at once: arguments, results that take no argument's
    place, and temporaries."""
    sizes = compiled.memory_analysis()
    kept = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return sizes.argument_size_in_bytes + kept + sizes.temp_size_in_bytes
