"""Let a trained policy act in simulation on held-out starts, beside its controls, and write a
report.

    python -m tools.evaluate --checkpoint runs/mine --suite tabletop-lift --out runs/mine/evaluation
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.progress import Progress

from models import Policy, load_policy
from models.config import to_json
from parallel.checkpoint import find
from parallel.metrics import read_metrics
from sim.evaluate import Evaluation, evaluate, evaluate_expert
from sim.experts import expert
from sim.report import Report, write_report
from sim.tabletop import EVAL_SEEDS, Tabletop
from sim.tasks import TASKS
from tools.runs import load_config, versions


@dataclass(frozen=True)
class EvaluateConfig:
    """What to evaluate, where, and for how long."""

    checkpoint: Path
    """Run directory or one of its checkpoints."""
    out: Path
    """Folder for evaluation.json and report.html."""
    suite: str = "tabletop-lift"
    """tabletop-lift, -reach, -push, -stack or -drawer."""
    episodes: int = 128
    """Held-out starts per condition."""
    execute: int = 4
    """Steps acted of each chunk before the policy looks again."""
    steps: int = 10
    """Euler steps of the flow sampler."""


def make_environment(suite: str, image_size: int) -> Tabletop:
    """The environment a suite's name stands for; its pictures have the model's size.

    Raises:
      ValueError: no such suite.
    """
    family, _, task = suite.partition("-")
    if family != "tabletop" or task not in TASKS:
        names = [f"tabletop-{task}" for task in TASKS]
        raise ValueError(f"Unknown suite '{suite}'; choose one of {names}.")
    return Tabletop(task, image_size=image_size)


def conditions(
    policy: Policy, env: Tabletop, episodes: int, execute: int, console: Console
) -> dict[str, Evaluation]:
    """The policy, the same network untrained, the expert and two controls, on the same starts."""
    seeds = range(EVAL_SEEDS.start, EVAL_SEEDS.start + episodes)
    untrained = replace(policy, params=jax.jit(policy.model.init)(jax.random.key(0)))

    act = partial(evaluate, env, seeds=seeds, execute=execute)
    wanted: dict[str, Callable[..., Evaluation]] = {
        "trained": partial(act, policy.act),
        "untrained": partial(act, untrained.act, clips=2),
        "expert": partial(evaluate_expert, env, expert, seeds, clips=2),
        "wrong prompt": partial(act, policy.act, prompt_goal="other", clips=2),
        "blank image": partial(act, policy.act, blank=True, clips=2),
    }
    results = {}
    with Progress(console=console, transient=True) as progress:
        for name, measure in wanted.items():
            task = progress.add_task(f"Evaluating: {name}", total=episodes)
            results[name] = measure(
                progress=lambda ended, _, task=task: progress.update(task, completed=ended)
            )
            console.print(f"  {name}: {results[name].success}")
    return results


def run(config: EvaluateConfig, console: Console) -> dict[str, Evaluation]:
    """Evaluates a checkpoint and writes its report.

    Raises:
      ValueError, FileNotFoundError: no such suite or checkpoint, or they do not fit each other.
    """
    policy = load_policy(config.checkpoint, steps=config.steps)
    env = make_environment(config.suite, policy.model.config.image_size)
    _check_fits(policy, env)
    results = conditions(policy, env, config.episodes, config.execute, console)
    config.out.mkdir(parents=True, exist_ok=True)
    summary = {name: result.to_json() for name, result in results.items()}
    (config.out / "evaluation.json").write_text(json.dumps(summary, indent=2))
    trained = load_config(config.checkpoint)
    write_report(
        config.out / "report.html",
        report_of(config.suite, results, find(config.checkpoint).parent.parent, to_json(trained)),
    )
    console.print(f"Report: {config.out / 'report.html'}")
    return results


def _check_fits(policy: Policy, env: Tabletop) -> None:
    if policy.processor is None:
        raise ValueError(
            "The checkpoint came without a processor (scales and tokenizer), so it cannot act in "
            "a suite; train it on the suite's data first."
        )
    robot = policy.processor.embodiments[policy.embodiment]
    theirs = (env.cameras, len(env.state_names), len(env.action_names))
    ours = (robot.cameras, len(robot.state.offset), len(robot.actions.offset))
    if ours != theirs:
        raise ValueError(
            f"The policy was trained on '{robot.name}' with (cameras, state dims, action dims) = "
            f"{ours}, but {env.name} has {theirs}; evaluate it on a suite of its own robot."
        )


def report_of(
    suite: str,
    results: dict[str, Evaluation],
    directory: Path,
    config: dict[str, object],
    seconds: dict[str, float] | None = None,
) -> Report:
    """A report on evaluations together with the training metrics of the run in `directory`; one
    that was moved without them has none."""
    metrics = read_metrics(directory)
    fills = [row["fill"] for row in metrics if "fill" in row]
    return Report(
        title=f"{suite}: closed-loop success on held-out starts",
        task=suite,
        evaluations=results,
        metrics=metrics,
        fill={"prefix places": float(np.mean(fills))} if fills else {},
        seconds=seconds or {},
        config=config,
        versions=versions(),
    )


def main() -> None:
    """Command line."""
    try:
        run(
            tyro.cli(EvaluateConfig, prog="python -m tools.evaluate", description=__doc__),
            Console(),
        )
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
