"""A population of RL runs (`tools.rl --population n`). Its members share one set of simulators,
opened once, and are evaluated in it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

from models import Policy
from models.files.terminal import Console, say
from models.robot_policy import RobotPolicy
from parallel.hosts import watchdog
from parallel.runs.run_folder import Run
from rl.config import RlConfig
from rl.host.loop import Stopped
from rl.host.placement import most_episodes
from rl.placements import place
from rl.population.evolution import PopulationResult, evolve
from rl.population.population import PopulationConfig
from sim.protocol import Slots
from sim.suite import Suite
from tools.recipes.closed_loop import acted, held_out, note, set_damaged_evaluations_aside
from tools.recipes.conditions import in_batches
from tools.recipes.rl_figures import write_curves, write_population

Params = Any


def run_population(
    policy: Policy,
    suite: Suite,
    tasks: tuple[str, ...],
    run: Run,
    config: RlConfig,
    population: PopulationConfig,
    console: Console,
) -> PopulationResult:
    """`rl.population.evolution.evolve` in a suite, with a figure of all members and one of each.

    Raises:
      ValueError, FileNotFoundError: as `evolve`, or policy, suite and config do not fit.
    """
    rollout, size = config.rollout, suite.edge(policy.model.config.edge)
    most = max(most_episodes(config), config.eval_episodes * len(tasks))
    count = suite.count(rollout.slots, most)
    for member in range(population.population):
        set_damaged_evaluations_aside(run.directory / "members" / str(member), console)
    with kept_open(suite, count) as (shared, close):
        slots = shared.open(tasks, count, size)
        batched = in_batches(policy, slots.count)
        RobotPolicy.in_suite(policy, slots.spec)

        def evaluate(
            step: int, params: Params, directories: Sequence[Path], should_stop: Callable[[], bool]
        ) -> float:
            def on_progress(ended: int, episodes: int) -> None:
                watchdog.alive()
                if should_stop():
                    raise Stopped

            watchdog.note("evaluating")
            start = time.perf_counter()
            copied = jax.tree.map(np.asarray, params)
            starts = held_out(suite, tasks, config.eval_episodes)
            found = acted(batched, copied, slots, starts, rollout.replan_steps, on_progress)
            for directory in directories:
                note(directory, step, time.perf_counter() - start, found)
            return found.success.value

        evolved = evolve(
            lambda chosen, directory: place(policy, shared, tasks, chosen, directory),
            policy.params,
            run,
            config,
            population,
            console,
            evaluate=evaluate,
            rebuild=close,
        )
    for member in range(population.population):
        write_curves(run.directory / "members" / str(member))
    path = write_population(run.directory)[0]
    say(console, f"Generations: {path}")
    if evolved.finished:
        best = run.directory / "members" / str(evolved.best)
        say(
            console,
            f"Member {evolved.best} is the best; {run.directory / 'checkpoints'} holds a copy "
            f"of its last checkpoint, and {best} everything else of it.",
        )
    return evolved


@contextmanager
def kept_open(suite: Suite, count: int) -> Iterator[tuple[Suite, Callable[[], None]]]:
    """The suite, in which everyone who opens slots for the same tasks gets the same `count` slots,
    and the same environment on a device; the slots close with the block. The returned function
    closes them at once; they are reopened when they are next used."""
    opened: list[_SharedSlots] = []

    @cache
    def slots(tasks: tuple[str, ...], size: int) -> Any:
        opened.append(_SharedSlots(lambda: suite.open(tasks, count, size)))
        return opened[-1]

    def close() -> None:
        for one in opened:
            one.end()

    same = suite.environment and cache(suite.environment)
    try:
        yield (
            replace(suite, open=lambda tasks, _, size: slots(tasks, size), environment=same),
            close,
        )
    finally:
        close()


class _SharedSlots:
    """`sim.protocol.Slots` that stay open when `close` is called, until `end` is called."""

    def __init__(self, make: Callable[[], Slots]) -> None:
        self._make = make
        self._slots: Slots | None = None

    def __getattr__(self, name: str) -> Any:
        if self._slots is None:
            self._slots = self._make()
        return getattr(self._slots, name)

    def close(self) -> None:
        """Does nothing: others continue to use the slots."""

    def end(self) -> None:
        slots, self._slots = self._slots, None
        if slots is not None:
            slots.close()
