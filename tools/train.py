"""Train a policy on a dataset or a mixture: validate, normalise, pack, train, and measure on
held-out episodes.

    python -m tools.train --data PATH --preset tiny
    python -m tools.train --data MIXTURE.json --preset tiny
    python -m tools.train --data PATH --preset tiny --out runs/mine --resume
    python -m tools.train --data PATH --preset tiny --out runs/mine --trainer.train-steps 200
    python -m tools.train --data PATH --preset pi05 --init checkpoints/pi05_base \\
        --tokenizer paligemma_tokenizer.model

Any field of the preset can be given as an option; `--preset NAME --help` lists them. The run's
folder holds config.json, metrics.jsonl, TensorBoard events, the frame store and checkpoints.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import tyro

from data.files.folder import open_folder
from data.mixture.mixture import read_mixture
from data.store.convert import DESCRIPTION
from models.files.built_in import CONFIGS
from models.files.terminal import Console, guard_tracebacks, harmless, say
from parallel.hosts import exits, inject
from parallel.hosts.distributed import host_index
from parallel.hosts.job import start
from parallel.hosts.stop import leave_at_once
from parallel.hosts.watchdog import Watchdog
from tools.command_line.ending import following
from tools.command_line.options import cli, current_options, with_value
from tools.command_line.process import ALONE, Process
from tools.recipes.presets import RunConfig, given, load_preset, shortened, take_preset
from tools.recipes.training import Paths, run, summary


def parse(arguments: Sequence[str]) -> tuple[Paths, RunConfig, Process]:
    """Options into paths, a preset with the user's changes, and the process's place."""
    name, arguments = take_preset(arguments, "tiny")
    preset = load_preset(name)

    def command(
        paths: Annotated[Paths, tyro.conf.arg(name="")],
        config: Annotated[RunConfig, tyro.conf.arg(name="")] = preset,
        process: Annotated[Process, tyro.conf.arg(name="")] = ALONE,
    ) -> tuple[Paths, RunConfig, Process]:
        return paths, config, process

    arguments = current_options(with_value(arguments, "--resume", "True", warn=False), preset)
    paths, config, process = cli(
        command,
        only_reads=True,
        args=arguments,
        description=__doc__,
        prog="python -m tools.train --preset NAME",
    )
    trainer = config.trainer
    steps, length, warmup = trainer.train_steps, "trainer.train-steps", "optimizer.warmup-steps"
    optimizer = shortened(config.optimizer, steps, arguments, length, warmup)
    judged = given(arguments, "trainer.eval-every") or trainer.keep_best or trainer.patience
    if given(arguments, length) and not judged:
        trainer = replace(trainer, eval_every=min(trainer.eval_every, steps))
    config = replace(config, optimizer=optimizer, trainer=trainer)
    paths = replace(paths, preset=name, warmup_given=given(arguments, warmup))
    return paths, config, process


def main() -> None:
    """Command line."""
    try:
        paths, config, process = parse(sys.argv[1:])
        folder = paths.folder
        start(process.coordinator, process.num_processes, process.process_id)
    except (ValueError, FileNotFoundError) as error:
        print(harmless(f"error: {error}"), file=sys.stderr)
        sys.exit(exits.REFUSED)
    except KeyboardInterrupt:
        print("Interrupted while starting.", file=sys.stderr)
        sys.exit(exits.INTERRUPTED)
    with Watchdog(folder, process.stall_seconds), leave_at_once():
        inject.arm(process.inject, folder)
        result = run(paths, config)
    if result.finished and host_index() == 0:
        say(Console(), summary(paths, result))
        say(Console(), _next(paths, config))
    if result.exit_code:
        sys.exit(result.exit_code)


def _next(paths: Paths, config: RunConfig) -> str:
    """The line with the next command: evaluation in the run's suite, else on its dataset; serving
    if its data is a frame store or several datasets."""
    folder, suite = paths.folder, config.closed_loop.suite
    policy: tuple[str | Path, ...] = ("--checkpoint", folder)
    if config.model.family not in CONFIGS:
        policy += ("--family", paths.preset.rpartition(":")[0])
    if suite:
        return following("evaluate", *policy, "--suite", suite, "--out", folder / "evaluation")
    datasets = read_mixture(paths.data).datasets
    if len(datasets) > 1 or open_folder(datasets[0].path).exists(DESCRIPTION):
        return following("serve", *policy)
    form = ("--data-format", paths.data_format) if paths.data_format else ()
    out = folder / "open_loop"
    return following("evaluate", *policy, "--data", paths.data, *form, "--out", out)


if __name__ == "__main__":
    guard_tracebacks()
    main()
