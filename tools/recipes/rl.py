"""A run of RL from a checkpoint, or a population of them, with evaluation on the way.

Call `run` from a notebook or a script; `python -m tools.rl` is its command line.
"""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import tyro

from models import Policy
from models.checkpoints import own
from models.config import from_json, model_config, to_json
from models.files.address import parse
from models.files.terminal import Console, say
from parallel.evaluations import check_judged
from parallel.hooks import Hook
from parallel.hosts import exits
from parallel.hosts.distributed import host_count, host_index
from parallel.hosts.job import first_host_first, restarts
from parallel.hosts.watchdog import note
from parallel.runs.mirror import put_logs
from parallel.runs.retention import Retention
from parallel.runs.run_folder import CONFIG_NAME, Run, RunFolder, read_config
from parallel.shell import Resume, opened
from parallel.trackers.trackers import check_trackers
from rl.checks import check_named, check_policy, learnt_tasks, one_group
from rl.config import RlConfig
from rl.environment import FIELD
from rl.placements import place
from rl.population.evolution import PopulationResult
from rl.population.population import (
    PopulationConfig,
    check_population,
    configured,
    read_generations,
    set_damaged_generations_aside,
    turn_of,
)
from rl.run import RlResult, improve
from sim.suites import load_suite
from tools.recipes.closed_loop import ClosedLoop
from tools.recipes.policy import PolicyOptions, load, own_checkpoint
from tools.recipes.presets import ClosedLoopConfig, check_more_steps, check_same, warmed_as_begun
from tools.recipes.rl_figures import write_curves
from tools.recipes.rl_population import run_population
from tools.recipes.rl_presets import learner_of

ALONE = PopulationConfig()
_FREE = {
    "begun_from",
    "model.euler_steps",
    *(f"rl.{name}" for name in ("learner_steps", "eval_every", "save_every", "profile")),
    *(f"rl.{name}" for name in ("keep", "keep_every", "keep_best")),
}
"""Settings that a resumed run may change, as what it learns stays the same; its steps only if the
schedule does not end with them. The model's Euler steps are `flow.euler_steps`, but early runs
kept those of the policy that they started from."""


@dataclass(frozen=True)
class RlPaths:
    """Paths of the policy and of results."""

    checkpoint: Path
    """Policy to improve: a run or one of its checkpoints, or any other checkpoint that
    models.load_policy reads and that comes with its preparation."""
    out: Path
    """Folder of the run."""
    resume: Resume = False
    """Resume from the run's last checkpoint, as in tools.train."""
    mirror: str | None = None
    """Folder (s3://…, gs://…) to copy the run's checkpoints to, as in tools.train."""
    family: Path | None = None
    """Python file that defines the model's family, if it is not one of ours; the file is run."""
    ray_address: str | None = None
    """Address of the Ray cluster for placement "disaggregated": host:port, or "auto" for the one
    that this machine belongs to; default: a cluster of this machine only."""
    options: Annotated[PolicyOptions, tyro.conf.arg(name="")] = field(default_factory=PolicyOptions)
    track: tuple[str, ...] = ()
    """Trackers that also get the metrics, as in tools.train; see docs/trackers.md."""
    preset: Annotated[str, tyro.conf.Suppress] = ""
    """Name of the preset that the config was made of, for people."""
    warmup_given: Annotated[bool, tyro.conf.Suppress] = field(default=True, compare=False)
    """The user chose the warm-up; without it, a resumed run keeps its own."""


def run(
    paths: RlPaths,
    config: RlConfig,
    console: Console | None = None,
    population: PopulationConfig = ALONE,
) -> RlResult | PopulationResult:
    """Trains to the end (or until a signal) and leaves everything in the run's folder.

    Raises:
      ValueError, FileNotFoundError: something does not fit; nothing has been written then.
    """
    note("preparing")
    console = console or Console(quiet=host_index() != 0)
    from_json(RlConfig, json.loads(json.dumps(to_json(config))))  # refuses what is no number
    check_trackers(paths.track)
    resume: Resume = paths.resume or ("auto" if restarts() else False)
    size = f"an update takes {config.learner.micro} decisions at a time"
    remedies = (
        f"fewer of them (--learner.micro, now {config.learner.micro})",
        "fewer episodes at a time (--rollout.slots)",
        "a policy with adapters on a frozen base (docs/qlora.md)",
    )
    with (
        exits.in_memory(size, remedies),
        opened(paths.out, resume, console, paths.mirror) as folder,
    ):
        return _run(paths, config, console, population, folder)


def _run(
    paths: RlPaths,
    config: RlConfig,
    console: Console,
    population: PopulationConfig,
    folder: RunFolder,
) -> RlResult | PopulationResult:
    check_named(config)
    together = replace(population, population=0) != ALONE or population.population not in (0, 1)
    if together:
        check_population(population, config)
        if host_count() > 1:
            raise ValueError(
                f"a population takes turns on one machine, but this job has {host_count()} "
                f"processes; start one (--num-processes 1)."
            )
        if paths.track:
            raise ValueError(
                "--track follows one run, but a population's members have metrics of their own; "
                "leave it out (members/K/metrics.jsonl and TensorBoard have them)."
            )
        if config.placement == "disaggregated":
            raise ValueError(
                "placement is 'disaggregated', but a population's members share simulators in "
                "this process; choose 'host' or 'colocated'."
            )
        if config.held_out_tasks:
            raise ValueError(
                "held_out_tasks are evaluated beside one run, but a population evaluates what its "
                "members learn; leave them out, and evaluate the best member with tools.evaluate."
            )
    else:
        check_judged(config.keep_best, 0, config.eval_every, config.save_every, prefix="")
    suite = load_suite(config.rollout.suite)
    tasks = learnt_tasks(suite, config.rollout.tasks, config.held_out_tasks)
    tasks = one_group(suite, tasks) if together else tasks
    suite.judged(config.eval_episodes)
    policy = load(paths.checkpoint, paths.options, solver="euler", family=paths.family)
    check_policy(policy, config)
    model = policy.model.config.changed(euler_steps=config.flow.euler_steps).build()
    params = jax.tree.map(lambda x: np.asarray(x, np.float32), policy.params)
    policy = replace(policy, model=model, params=params)
    config = replace(config, learner=learner_of(config, policy.model))
    content = {
        "model": to_json(policy.model.config),
        "rl": to_json(config),
        "begun_from": parse(paths.checkpoint).absolute,
    }
    if together:
        chosen = replace(population, turn=turn_of(population, config))
        content["population"] = to_json(chosen)
    if folder.resume:
        saved = first_host_first(lambda: read_config(paths.out, console))
        if saved is not None:
            saved.pop(FIELD, None)  # in the config of a checkpoint
            saved["model"] = to_json(model_config(saved["model"]))
            if together and "rl" in saved:
                set_damaged_generations_aside(paths.out, console)
                saved["rl"] = _before_tuning(saved["rl"], paths.out)
            if "rl" in saved:
                begun = from_json(RlConfig, saved["rl"], CONFIG_NAME)
                saved["rl"] = to_json(begun)
                if not paths.warmup_given:
                    learner = config.learner
                    warmed = warmed_as_begun(learner.optimizer, begun.learner.optimizer, console)
                    config = replace(config, learner=replace(learner, optimizer=warmed))
                    content["rl"] = to_json(config)
            check_same(paths.out / CONFIG_NAME, saved, json.loads(json.dumps(content)), _FREE)
            before, optimizer = saved["rl"]["learner_steps"], config.learner.optimizer
            check_more_steps(
                paths.out / CONFIG_NAME, before, config.learner_steps, optimizer, "learner."
            )
    origin = {"preset": paths.preset, "data": config.rollout.suite}
    made = Run(folder, content, _assets(paths.checkpoint, policy), origin)
    if together:
        evolved = run_population(policy, suite, tasks, made, config, population, console)
        _say_stopped(evolved, config, console)
        return evolved
    acting = ClosedLoopConfig(
        suite=config.rollout.suite,
        tasks=(*tasks, *config.held_out_tasks),
        episodes=config.eval_episodes,
        slots=config.rollout.slots,
        replan_steps=config.rollout.replan_steps,
    )
    with ClosedLoop(acting, policy, paths.out, console, config.held_out_tasks) as loop:
        judged = (loop.scores, loop.pending) if config.keep_best else ({}, ())
        keep = Retention(config.keep, config.keep_every, *judged)
        improved = improve(
            lambda: place(policy, suite, tasks, config, paths.out, paths.ray_address),
            made,
            config,
            console,
            keep=keep,
            hooks=[
                Hook(config.eval_every, lambda at, params, _: loop.evaluate(at, params), ends=True)
            ],
            track=paths.track,
        )
        if not improved.finished:
            loop.abandon()
    _say_stopped(improved, config, console)
    if host_index() != 0:
        return improved
    curves = write_curves(paths.out)
    say(console, f"Curves: {curves[0]}")
    checkpoints = paths.out / "checkpoints"
    if (best := keep.best_of(own.steps(checkpoints))) is not None:
        rate = 1 - keep.best[best]
        say(
            console,
            f"The best checkpoint is {checkpoints / str(best)}: it succeeded from {rate:.1%} of "
            f"held-out starts.",
        )
    if paths.mirror is not None:
        put_logs(paths.mirror, paths.out)
    return improved


def _before_tuning(config: Any, directory: Path) -> Any:
    """The config with the hyperparameters that a population's first member began with."""
    generations = read_generations(directory)
    if not generations:
        return config
    begun = generations[0].hyperparameters[0]
    return json.loads(json.dumps(to_json(configured(from_json(RlConfig, config), begun))))


def _say_stopped(ended: RlResult | PopulationResult, config: RlConfig, console: Console) -> None:
    if not ended.finished:
        say(
            console,
            f"Stopped after step {ended.step} of {config.learner_steps}; continue with --resume.",
        )


def _assets(checkpoint: Path, policy: Policy) -> Any:
    """The policy's processor; for a run of ours, all assets of its checkpoints."""
    if (found := own_checkpoint(checkpoint)) is not None:
        return own.read_json(found, "assets")
    return {"processor": to_json(policy.processor)}
