"""Success of a small policy of each family after the same ten minutes of training, samples a second
and milliseconds for an answer. ACT and Diffusion also train beside LeRobot's own step, at the same
sizes and with as many threads.

A run takes as many steps as ten minutes hold at the pace that a short run had before, without
compilation, saving and evaluation. So only the paces need a machine that does nothing else. All
tasks and families are learnt once before the next seed begins, and what was found is kept for the
next call.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import jax
from matplotlib.figure import Figure

from data.dataset import open_dataset
from models import load_policy
from models.config import to_json
from models.files.terminal import Console, track
from models.model import ModelConfig, groups_of
from parallel.monitor.metrics import read_metrics
from parallel.optimizer import with_groups
from parallel.planning.random_batch import random_batch
from parallel.runs.atomic import replace_text
from sim.statistics import Rate
from sim.suites import load_suite
from tools.bench.attempt import tell
from tools.bench.data.data import CACHE
from tools.bench.learn import ShownTask, trained
from tools.bench.models.act import latency
from tools.bench.models.random_policy import random_policy
from tools.bench.models.stepper import stepper
from tools.bench.peer import asking, no_peer
from tools.bench.timing import timed
from tools.recipes.closed_loop import held_out
from tools.recipes.conditions import Condition
from tools.recipes.presets import RunConfig, load_preset

FAMILIES = {
    "ACT": "act-tiny",
    "Diffusion": "diffusion-tiny",
    "SmolVLA": "smolvla-tiny",
    "π0.5": "tiny",
    "GR00T-N1.5": "groot-tiny",
}
"""Presets by the families' usual names."""
_SAMPLES, _ACTS = 8, 30
_CORES = os.cpu_count() or 1


@dataclass(frozen=True)
class FamilySizes:
    """Size of the comparison: `minutes` and `seeds` of each run, `pace` of the steps that tell how
    many fit, `starts` by task, and `rounds` of training steps beside LeRobot's."""

    minutes: float = 10.0
    seeds: int = 3
    pace: int = 60
    rounds: int = 12
    families: Mapping[str, str] = field(default_factory=lambda: FAMILIES)
    tasks: tuple[tuple[ShownTask, int], ...] = (
        (ShownTask(suite="tabletop-lift", episodes=2048), 256),
        *(
            (ShownTask(suite="metaworld", episodes=50, tasks=(name,), replan_steps=8), 64)
            for name in ("door-open-v3", "push-v3")
        ),
    )


def run(
    console: Console,
    peer: Path | None = None,
    cache: Path = CACHE,
    sizes: FamilySizes | None = None,
    out: Path = Path("families.svg"),
) -> dict[str, Any]:
    """Figures of every family on every task, and a plot of the success, `out`. `ratio` is the
    smaller of the two ratios of our training step to LeRobot's.

    Args:
      peer: a Python that has LeRobot.

    Raises:
      ValueError: no peer is given.
    """
    sizes = sizes or FamilySizes()
    if peer is None:
        file = "tools/bench/peers/lerobot_step.py"
        raise no_peer("families", "LeRobot 0.6.1 with its extra diffusion", file)
    steps = beside_lerobot(console, peer, sizes.rounds)
    worst = min(steps.values(), key=lambda row: row["ratio"])
    found = {
        "ratio": worst["ratio"],
        "ours": f"{worst['samples/s']:.1f} samples/s in training",
        "other": f"{worst['lerobot_samples/s']:.1f} by LeRobot",
        "unit": "samples/s",
        "threads": _CORES,
        "minutes": sizes.minutes,
        "steps": steps,
        "models": {name: _model(preset) for name, preset in sizes.families.items()},
    }
    for rows in learnt(console, cache, sizes):
        found["tasks"] = rows
        tell(console, found)
    draw(found["tasks"], sizes.minutes).savefig(out)
    return found


def beside_lerobot(console: Console, peer: Path, rounds: int) -> dict[str, dict[str, Any]]:
    """Samples a second of a training step of both sides, in alternating rounds of one batch in
    memory, and the median over the rounds of ours over theirs. LeRobot's parameters are fewer by
    the statistics of frozen norms, which it does not count.
    """
    found = {}
    with asking(peer, "lerobot_step") as ask:
        for name, config in _beside().items():
            console.print(f"{name}: a training step beside LeRobot's")
            optimizer = load_preset(name).optimizer
            model, batch = config.build(), random_batch(config, _SAMPLES, 1)
            groups = with_groups(replace(optimizer, decay_steps=10**6), groups_of(model))
            step, _ = stepper(model, groups, batch)
            about = ask(run="make", policy=name, samples=_SAMPLES, threads=_CORES)
            took = []
            for _ in range(rounds + 2):
                with timed() as ours:
                    jax.block_until_ready(step())
                took.append((ours.wall, ask(run="step")["seconds"]))
            ours_s, other_s = (median(each) for each in zip(*took[2:], strict=True))
            found[name] = {
                "ratio": median(b / a for a, b in took[2:]),
                "samples/s": _SAMPLES / ours_s,
                "lerobot_samples/s": _SAMPLES / other_s,
                "parameters": _size(config),
                "lerobot_parameters": about["parameters"],
                "versions": about["versions"],
            }
            jax.clear_caches()
    return found


def learnt(
    console: Console, cache: Path, sizes: FamilySizes
) -> Iterator[dict[str, dict[str, dict[str, Any]]]]:
    """By task and family, what was found after each more run. What is quick or needs a quiet
    machine comes first: all demonstrations, then the pace of every family on every task.
    """
    courses = {
        (task.name, family): _course(preset, task, starts, dataset, sizes.minutes, cache)
        for task, starts in sizes.tasks
        for dataset in (task.recorded(cache),)
        for family, preset in sizes.families.items()
    }
    paces = {}
    for name, course in track(courses.items(), "Paces", console=console):
        console.print(f"{name[1]} on {name[0]}: the pace of a step")
        paces[name] = _pace(course, sizes.pace, console)
    every = list(product(range(sizes.seeds), courses.items()))
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for seed, (name, course) in track(every, "Families learn", console=console):
        console.print(f"{name[1]} learns {name[0]}, seed {seed}")
        steps = max(2, math.floor(60 * sizes.minutes / paces[name]["step_seconds"]))
        ran = paces[name] | _learnt(course, seed, steps, console)
        runs.setdefault(name, []).append(ran)
        rows: dict[str, dict[str, dict[str, Any]]] = {}
        for (task, family), each in runs.items():
            rows.setdefault(task, {})[family] = _summed(each)
        yield rows


def draw(tasks: Mapping[str, Mapping[str, Mapping[str, Any]]], minutes: float) -> Figure:
    """Success by task and family: bars of the median over the seeds, and a dot for each seed."""
    figure = Figure(figsize=(3.2 * len(tasks) + 1.2, 2.8), layout="constrained")
    for axes, (task, rows) in zip(
        figure.subplots(1, len(tasks), sharey=True, squeeze=False)[0], tasks.items(), strict=True
    ):
        names = list(rows)
        for at, row in enumerate(rows.values()):
            rates = [100 * each / row["starts"] for each in row["successes"]]
            axes.barh(at, 100 * row["success"], color="#9db8d9")
            axes.plot(rates, [at] * len(rates), "o", color="#24425f", markersize=4, clip_on=False)
        axes.set(title=task, xlim=(0, 100), xlabel=f"% success after {minutes:g} minutes")
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
    return figure


@dataclass(frozen=True)
class _Course:
    """A family's preset, a task from so many starts, its demonstrations, and the folder of what is
    kept of runs."""

    preset: RunConfig
    task: ShownTask
    starts: int
    dataset: Path
    folder: Path


def _course(
    name: str, task: ShownTask, starts: int, dataset: Path, minutes: float, cache: Path
) -> _Course:
    """The course of a preset. A change of the preset, the task or the length is another folder."""
    preset = load_preset(name)
    preset = replace(preset, model=_seeing(preset.model, len(open_dataset(dataset).cameras)))
    told = json.dumps([to_json(preset), str(task), starts, minutes], sort_keys=True)
    folder = cache / "families" / hashlib.sha256(told.encode()).hexdigest()[:16]
    return _Course(preset, task, starts, dataset, folder)


def _seeing(config: ModelConfig, cameras: int) -> ModelConfig:
    """The config with places for so many cameras, where a family has a number of them."""
    fixed = getattr(config, "cameras", cameras)
    return config.changed(cameras=cameras) if fixed < cameras else config


def _pace(course: _Course, steps: int, console: Console) -> dict[str, Any]:
    """Seconds of a training step, and samples a second, of a run of so many steps."""
    kept, run = course.folder / "pace.json", course.folder / "pace"
    if not kept.is_file():
        trained(_lasting(course.preset, steps, 0), course.dataset, run, console)
        lines = _steps(run)[steps // 2 :]
        seconds, samples = (fmean(x[name] for x in lines) for name in ("step_seconds", "samples"))
        replace_text(kept, json.dumps({"step_seconds": seconds, "samples/s": samples / seconds}))
        jax.clear_caches()
    return json.loads(kept.read_text())


def _learnt(course: _Course, seed: int, steps: int, console: Console) -> dict[str, Any]:
    """Steps, samples and successes of a run."""
    run = course.folder / f"seed{seed}"
    kept = run.with_suffix(".json")
    if not kept.is_file():
        trained(_lasting(course.preset, steps, seed), course.dataset, run, console)
        success = _acted(run / "checkpoints" / str(steps), course.task, course.starts)
        found = {
            "steps": steps,
            "samples": sum(int(line["samples"]) for line in _steps(run)),
            "successes": success.successes,
            "starts": success.trials,
        }
        replace_text(kept, json.dumps(found))
        jax.clear_caches()
    return json.loads(kept.read_text())


def _acted(checkpoint: Path, task: ShownTask, starts: int) -> Rate:
    """Success of a checkpoint from held-out starts."""
    suite = load_suite(task.suite)
    tasks, count = task.tasks or suite.tasks, suite.count(None, starts)
    acting = Condition("learnt", load_policy(checkpoint)).batched(count)
    with closing(suite.open(tasks, count, suite.edge(task.image_size))) as slots:
        starts_of = held_out(suite, tasks, starts)
        return acting.evaluate(slots, starts_of, task.replan_steps, clips=0).success


def _lasting(preset: RunConfig, steps: int, seed: int) -> RunConfig:
    """The preset with a run of that many steps; its warm-up is at most a tenth of them."""
    warmup = min(preset.optimizer.warmup_steps, steps // 10)
    every = max(1, math.ceil(steps / 4))
    trainer = replace(
        preset.trainer, train_steps=steps, eval_every=steps, save_every=every, keep=1, seed=seed
    )
    optimizer = replace(preset.optimizer, warmup_steps=warmup)
    return replace(preset, trainer=trainer, optimizer=optimizer)


def _steps(run: Path) -> list[dict[str, Any]]:
    """Metrics of each step."""
    return [line for line in read_metrics(run) if "loss" in line]


def _summed(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A family's figures on a task over its seeds: medians, and the range of the success."""
    rates = [run["successes"] / run["starts"] for run in runs]
    return {
        "success": median(rates),
        "success_range": [min(rates), max(rates)],
        "successes": [run["successes"] for run in runs],
        **{
            name: median(run[name] for run in runs)
            for name in ("starts", "steps", "samples", "samples/s")
        },
    }


def _model(preset: str) -> dict[str, Any]:
    """Parameters of a preset, and the milliseconds from an observation to its chunk."""
    cameras = ("base", "wrist")
    config = _seeing(load_preset(preset).model, len(cameras))
    policy = random_policy(config, ("lift", "the", "red", "block"), cameras)
    return {"preset": preset, "parameters": _size(config), **latency(policy, 1, _ACTS)}


def _beside() -> dict[str, ModelConfig]:
    """Models as `peers/lerobot_step.py` builds them, by LeRobot's names."""
    act, diffusion = (load_preset(name).model for name in ("act", "diffusion"))
    sizes = {"image_size": (96, 96), "cameras": 2, "state_dim": 6, "action_dim": 6}
    narrow = {"width": 128, "heads": 4, "hidden": 512, "encoder_depth": 2, "vae_depth": 2}
    steps = {"horizon": 20, "n_action_steps": 20}
    return {
        "act": act.changed(**sizes, **narrow, **steps),
        "diffusion": diffusion.changed(
            **sizes,
            horizon=16,
            action_steps=8,
            separate=False,
            unet=replace(diffusion.unet, widths=(64, 128, 256)),  # type: ignore[attr-defined]
            resnet=replace(diffusion.resnet, norm="group"),  # type: ignore[attr-defined]
        ),
    }


def _size(config: ModelConfig) -> int:
    shapes = jax.eval_shape(config.build().init, jax.random.key(0))
    return sum(
        x.size for x in jax.tree.leaves(shapes) if jax.numpy.issubdtype(x.dtype, jax.numpy.floating)
    )
