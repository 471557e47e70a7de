"""Record, validate, train, evaluate and report in one command.

    python -m tools.demo
    python -m tools.demo --task reach

Each stage is also a separate command; the demo only runs them in order and times them.
"""

import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from models import load_policy
from models.config import to_json
from models.files.terminal import Console, Progress, guard_tracebacks
from parallel.hosts import exits
from parallel.mesh import make_mesh
from parallel.runs.run_lock import LOCK_NAME, locked
from parallel.trainer import check_start
from sim.report.report import write_report
from sim.suites import load_suite
from tools.command_line.ending import in_a_line
from tools.command_line.options import cli, current_options
from tools.recipes import training
from tools.recipes.conditions import BESIDE, conditions, evaluate_all
from tools.recipes.evaluation import report_of
from tools.recipes.presets import RunConfig, load_preset
from tools.recipes.recording import RECORDINGS, RecordConfig, record_dataset

_SCALE = {"lift": (2048, 2400), "reach": (1024, 800), "push": (2048, 2400)}


@dataclass(frozen=True)
class DemoConfig:
    """Task, sizes and output folder of the demo."""

    task: Literal["lift", "reach", "push"] = "lift"
    """Task to learn; reach takes a third of the time."""
    out: Path = Path("runs/demo")
    """Output folder; replaced if an earlier demo made it."""
    episodes: int | None = None
    """Number of demonstrations; default: the task's own."""
    train_steps: int | None = None
    """Number of training steps; default: the task's own."""
    evaluations: int = 256
    """Held-out starts per condition."""
    seed: int = 0
    """Seed of demonstrations, initial parameters and all random draws, but not of the held-out
    starts, which stay the same."""


def run(config: DemoConfig, console: Console) -> dict[str, object]:
    """Runs every stage and returns what summary.json says."""
    with locked(config.out, console):
        return _run(config, console)


def _run(config: DemoConfig, console: Console) -> dict[str, object]:
    seconds: dict[str, float] = {}

    @contextmanager
    def stage(name: str, says: str) -> Iterator[None]:
        console.rule(f"{len(seconds) + 1}. {says}")
        start = time.perf_counter()
        yield
        seconds[name] = round(time.perf_counter() - start, 1)

    usual = _SCALE[config.task]
    episodes = usual[0] if config.episodes is None else config.episodes
    steps = usual[1] if config.train_steps is None else config.train_steps
    dataset = config.out / "dataset"
    preset = load_preset("tiny")
    half = max(1, steps // 2)
    trainer = replace(
        preset.trainer, train_steps=steps, eval_every=half, save_every=half, seed=config.seed
    )
    preset = replace(preset, trainer=trainer)
    _check(config, preset, episodes)
    _make_room(config)

    with (
        stage("record", f"Recording {episodes} scripted demonstrations of '{config.task}'"),
        Progress(console=console, transient=True) as progress,
    ):
        recorded = record_dataset(
            RecordConfig(
                out=dataset, suite=f"tabletop-{config.task}", episodes=episodes, seed=config.seed
            ),
            progress.bar("Recording"),
        )
    console.print(f"{dataset}: a LeRobot v3.0 dataset of {recorded['frames']} frames.")
    with stage("train", f"Training the tiny VLA for {steps} steps on packed batches"):
        trained = training.run(training.Paths(str(dataset), config.out), preset, console)
    if not trained.finished:
        stopped = trained.exit_code == exits.UNFINISHED
        raise exits.Terminated if stopped else KeyboardInterrupt
    with stage("evaluate", f"Evaluating on {config.evaluations} held-out starts"):
        policy = load_policy(config.out)
        suite = load_suite(f"tabletop-{config.task}")
        wanted = conditions(policy, BESIDE)
        results = evaluate_all(suite, wanted, console, episodes=config.evaluations)
    with stage("report", "Writing the report"):
        report = report_of(suite.name, results, config.out, to_json(preset), dict(seconds))
        write_report(config.out / "report.html", report)
    named = results["wrong prompt"].named
    summary: dict[str, object] = {
        "task": config.task,
        "seed": config.seed,
        "episodes": config.evaluations,
        "demonstrations": {name: recorded[name] for name in ("tried", "kept", "frames")},
        "success": results["trained"].success.value,
        "success_interval": results["trained"].success.interval,
        "untrained_success": results["untrained"].success.value,
        "expert_success": results["expert"].success.value,
        "wrong_prompt_success": results["wrong prompt"].success.value,
        "wrong_prompt_named_success": named.value if named else None,
        "blank_image_success": results["blank image"].success.value,
        "fill": report.fill["prefix places"],
        "seconds": seconds,
    }
    (config.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    console.rule("Done")
    console.print(f"Success: {results['trained'].success}")
    console.print(f"Report:  {(config.out / 'report.html').resolve()}")
    return summary


def _check(config: DemoConfig, preset: RunConfig, episodes: int) -> None:
    """Refuses, before anything is removed or recorded, what training would refuse later."""
    if episodes < 1 or config.evaluations < 1:
        raise ValueError(
            f"episodes is {episodes} and evaluations {config.evaluations}; both must be at least 1."
        )
    mesh = make_mesh(preset.mesh)
    if not 0 <= config.seed < RECORDINGS:
        raise ValueError(f"seed is {config.seed}; choose one of 0 … {RECORDINGS - 1}.")
    check_start(preset.rows.number, mesh, preset.trainer, preset.optimizer)


def _make_room(config: DemoConfig) -> None:
    """Removes what an earlier demo left; refuses a folder that is not a demo's."""
    mark = config.out / "demo.json"
    there = [path for path in config.out.iterdir() if path.name != LOCK_NAME]
    if there and not mark.is_file():
        raise ValueError(
            f"{config.out} exists and is not the folder of an earlier demo; choose another --out."
        )
    for path in there:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    mark.write_text(json.dumps({"task": config.task}) + "\n")


def main() -> None:
    """Command line."""
    config = cli(
        DemoConfig,
        args=current_options(sys.argv[1:], DemoConfig),
        prog="python -m tools.demo",
        description=__doc__,
    )
    with in_a_line(
        "The demo cannot be resumed, even if a line above mentions --resume; run it again from "
        "the start.",
        config.out,
    ):
        run(config, Console())


if __name__ == "__main__":
    guard_tracebacks()
    main()
