"""Improve a supervised policy by reinforcement learning in a suite.

    python -m tools.rl --checkpoint runs/mine --preset tabletop-ppo --out runs/mine-rl
    python -m tools.rl --checkpoint runs/mine --preset tabletop-grpo --out runs/mine-rl --resume
    python -m tools.rl --checkpoint runs/mine --preset metaworld-grpo --out runs/mine-rl \\
        --rollout.tasks push-v3 --learner-steps 200
    python -m tools.rl --checkpoint runs/mine --preset tabletop-ppo --out runs/mine-rl \\
        --population 4 --turn 25
    python -m tools.launch -n 2 -- python -m tools.rl --checkpoint runs/mine \\
        --preset tabletop-grpo --out runs/mine-rl

Any field of the preset can be given as an option; `--preset NAME --help` lists them. The run's
folder holds config.json, metrics.jsonl, TensorBoard events, closed_loop.jsonl, curves.svg,
timeline.json (for ui.perfetto.dev) and checkpoints that tools.evaluate and tools.serve read. The
folder of a population holds the members' folders (members/K), population.jsonl and a figure of all
members, population.svg; its checkpoints are those of the best member.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import tyro

from models.files.terminal import Console, guard_tracebacks, say
from parallel.hosts import inject
from parallel.hosts.distributed import host_index
from parallel.hosts.job import start
from parallel.hosts.stop import leave_at_once
from parallel.hosts.watchdog import Watchdog
from rl.config import RlConfig
from rl.population.population import PopulationConfig
from rl.step import planned_updates
from tools.command_line.ending import following, in_a_line
from tools.command_line.options import cli, current_options, with_value
from tools.command_line.process import Process
from tools.recipes.presets import given, shortened, take_preset
from tools.recipes.rl import ALONE, RlPaths, run
from tools.recipes.rl_presets import load_rl_preset

Parsed = tuple[RlPaths, RlConfig, PopulationConfig, Process]

_PROCESS = Process(stall_seconds=1200.0)


def parse(arguments: Sequence[str]) -> Parsed:
    """Options into paths, a preset with the user's changes, a population, and the process's
    place."""
    name, arguments = take_preset(arguments, "tabletop-ppo")
    preset = load_rl_preset(name)

    def command(
        paths: Annotated[RlPaths, tyro.conf.arg(name="")],
        config: Annotated[RlConfig, tyro.conf.arg(name="")] = preset,
        population: Annotated[PopulationConfig, tyro.conf.arg(name="")] = ALONE,
        process: Annotated[Process, tyro.conf.arg(name="")] = _PROCESS,
    ) -> Parsed:
        return paths, config, population, process

    arguments = current_options(with_value(arguments, "--resume", "True", warn=False), RlConfig)
    paths, config, population, process = cli(
        command,
        only_reads=True,
        args=arguments,
        description=__doc__,
        prog="python -m tools.rl --preset NAME",
    )
    learner, warmup = config.learner, "learner.optimizer.warmup-steps"
    updates = config.learner_steps * planned_updates(learner.epochs, learner.minibatches)
    optimizer = shortened(learner.optimizer, updates, arguments, "learner-steps", warmup)
    config = replace(config, learner=replace(learner, optimizer=optimizer))
    paths = replace(paths, preset=name, warmup_given=given(arguments, warmup))
    return paths, config, population, process


def main() -> None:
    """Command line."""
    with in_a_line():
        paths, config, population, process = parse(sys.argv[1:])
        if process.inject and any(one.kind == "nan" for one in inject.parse(process.inject)):
            raise ValueError(f"--inject is {process.inject}; nan is for tools.train alone.")
        start(process.coordinator, process.num_processes, process.process_id)
    with (
        Watchdog(paths.out, process.stall_seconds),
        in_a_line(
            "--resume continues from the last checkpoint, if there is one.", writing=paths.out
        ),
        leave_at_once(),
    ):
        inject.arm(process.inject, paths.out)
        result = run(paths, config, None, population)
    if result.finished and host_index() == 0:
        at, suite = paths.out, config.rollout.suite
        said = f"{at} is finished after {result.step} steps; {at / 'checkpoints'} holds the policy."
        say(Console(), said)
        family = ("--family", paths.family) if paths.family else ()
        where = (*family, "--suite", suite, "--out", at / "evaluation")
        say(Console(), following("evaluate", "--checkpoint", at, *where))
    if result.exit_code:
        sys.exit(result.exit_code)


if __name__ == "__main__":
    guard_tracebacks()
    main()
