"""Improve a supervised policy by reinforcement learning in a suite.

    python -m tools.rl --checkpoint runs/mine --preset tabletop-ppo --out runs/mine-rl
    python -m tools.rl --checkpoint runs/mine --preset tabletop-grpo --out runs/mine-rl --resume
    python -m tools.rl --checkpoint runs/mine --preset metaworld-grpo --out runs/mine-rl \\
        --rollout.tasks push-v3 --learner-steps 200
    python -m tools.rl --checkpoint runs/mine --preset tabletop-ppo --out runs/mine-rl \\
        --population 4 --turn 25

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
from parallel.hosts.stop import leave_at_once
from parallel.hosts.watchdog import Watchdog
from rl.config import RlConfig
from rl.population.population import PopulationConfig
from rl.step import planned_updates
from tools.command_line.ending import following, in_a_line
from tools.command_line.options import cli, current_options, with_value
from tools.recipes.presets import given, shortened, take_preset
from tools.recipes.rl import ALONE, RlPaths, run
from tools.recipes.rl_presets import load_rl_preset


def parse(arguments: Sequence[str]) -> tuple[RlPaths, RlConfig, PopulationConfig]:
    """Options into paths, a preset with the user's changes, and a population."""
    name, arguments = take_preset(arguments, "tabletop-ppo")
    preset = load_rl_preset(name)

    def command(
        paths: Annotated[RlPaths, tyro.conf.arg(name="")],
        config: Annotated[RlConfig, tyro.conf.arg(name="")] = preset,
        population: Annotated[PopulationConfig, tyro.conf.arg(name="")] = ALONE,
    ) -> tuple[RlPaths, RlConfig, PopulationConfig]:
        return paths, config, population

    arguments = current_options(with_value(arguments, "--resume", "True", warn=False), RlConfig)
    paths, config, population = cli(
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
    return paths, config, population


def main() -> None:
    """Command line."""
    with in_a_line():
        paths, config, population = parse(sys.argv[1:])
    with (
        Watchdog(paths.out, paths.stall_seconds),
        in_a_line(
            "--resume continues from the last checkpoint, if there is one.", writing=paths.out
        ),
        leave_at_once(),
    ):
        result = run(paths, config, Console(), population)
    if result.finished:
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
