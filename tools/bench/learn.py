"""Time to success: seconds and samples until a policy trained from scratch acts well, by optimizer,
chunks, packing and precision (the measure of AlgoPerf, arXiv 2306.07179).

Of a method's learning rates, the best is chosen first, by the error of its actions on held-out
episodes. Then all settings run with the same seeds; a run's checkpoints act, in order, on starts of
no published figure until one succeeds often enough. Results of runs are kept for the next call.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from models import load_policy
from models.config import to_json
from models.files.terminal import Console, track
from parallel.monitor.metrics import read_metrics
from parallel.runs.atomic import replace_text
from sim.protocol import Start
from sim.results import Evaluation
from sim.suites import load_suite
from tools.bench.data.data import CACHE
from tools.recipes import training
from tools.recipes.closed_loop import held_out
from tools.recipes.conditions import Condition
from tools.recipes.presets import RowsConfig, RunConfig, load_preset
from tools.recipes.recording import RecordConfig, record_dataset

VALIDATION = 1_500_000_000
"""First seed of the validation starts."""
_TUNED_BY = 1000
"""Seed of the runs that choose learning rates."""
_BLOCK = 16
"""Smallest number of episodes after which failures are counted."""


@dataclass(frozen=True)
class Setting:
    """A change of the preset, and the learning rates to choose from; the preset's own if none."""

    change: Callable[[RunConfig], RunConfig]
    rates: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ShownTask:
    """A suite with a single task or a choice of its tasks, of which there are demonstrations."""

    suite: str
    episodes: int
    tasks: tuple[str, ...] = ()
    image_size: int = 48
    replan_steps: int = 4

    @property
    def name(self) -> str:
        """Suite and tasks, as the command calls it."""
        return "-".join((self.suite.rpartition(":")[2], *self.tasks))

    def recorded(self, cache: Path) -> Path:
        """The folder of the demonstrations, of which those are recorded that are not there."""
        out = cache / "learn" / f"{self.name}-{self.episodes}-{self.image_size}"
        size, resume = self.image_size, out.is_dir()
        record_dataset(
            RecordConfig(out, self.suite, self.tasks, self.episodes, image_size=size, resume=resume)
        )
        return out


@dataclass(frozen=True, kw_only=True)
class LearntTask(ShownTask):
    """A task, and how long a run may take."""

    steps: int
    preset: str = "tiny"
    success: float = 0.9


class LearnResult(NamedTuple):
    """Samples and seconds of the first checkpoint that succeeded often enough; None if none did."""

    samples: int | None
    seconds: float | None
    error: float
    """Mean squared error of held-out actions at the end, relative to that of always giving the mean
    action."""


def _model(**changes: Any) -> Callable[[RunConfig], RunConfig]:
    return lambda preset: replace(preset, model=preset.model.changed(**changes))


def _computing(**changes: Any) -> Callable[[RunConfig], RunConfig]:
    return lambda preset: replace(preset, model=preset.model.computing(**changes))


def _optimizer(**changes: Any) -> Callable[[RunConfig], RunConfig]:
    return lambda preset: replace(preset, optimizer=replace(preset.optimizer, **changes))


def _padded(preset: RunConfig) -> RunConfig:
    """The preset with as many samples per step, each in a row of its own."""
    number = preset.rows.number * preset.rows.samples
    return replace(preset, rows=RowsConfig(number=number, samples=1))


BASELINE = "AdamW"
_ADAMW_RATES = (3e-3, 6e-3, 1.2e-2)
SETTINGS = {
    BASELINE: Setting(_optimizer(name="adamw"), _ADAMW_RATES),
    "Muon": Setting(_optimizer(name="muon"), (6e-3, 1.2e-2, 2.4e-2)),
    "AdamW, float8 moments": Setting(_optimizer(name="adamw_fp8"), _ADAMW_RATES),
    "Adafactor": Setting(_optimizer(name="adafactor"), (1.5e-3, 3e-3, 6e-3)),
    "schedule-free AdamW": Setting(
        _optimizer(name="schedule_free", schedule="constant"), _ADAMW_RATES
    ),
    "the preset": Setting(lambda preset: preset),
    "one chunk": Setting(_model(chunks=1)),
    "six chunks": Setting(_model(chunks=6)),
    "padded rows": Setting(_padded),
    "bfloat16": Setting(_computing(dtype="bfloat16")),
    "float8": Setting(_computing(fp8="current")),
}


@dataclass(frozen=True)
class LearnSizes:
    """Size of the comparison."""

    seeds: int = 5
    checks: int = 8
    starts: int = 64
    tasks: tuple[LearntTask, ...] = (
        LearntTask(suite="tabletop-reach", episodes=1024, steps=800),
        LearntTask(suite="tabletop-lift", episodes=2048, steps=2400),
        LearntTask(
            suite="metaworld", episodes=50, steps=1200, tasks=("door-open-v3",), replan_steps=8
        ),
    )
    settings: Mapping[str, Setting] = field(default_factory=lambda: SETTINGS)


def run(
    console: Console, task: str, cache: Path = CACHE, sizes: LearnSizes | None = None
) -> dict[str, Any]:
    """Median seconds and samples to success of every setting on a task, with the range over the
    seeds; `ratio` is AdamW's median over the quickest setting's.

    Raises:
      ValueError: there is no such task.
    """
    sizes = sizes or LearnSizes()
    tasks = {each.name: each for each in sizes.tasks}
    if task not in tasks:
        raise ValueError(f"--task is '{task}'; choose one of {', '.join(tasks)}.")
    rows = {
        name: _row(tasks[task], name, setting, sizes, cache, console)
        for name, setting in sizes.settings.items()
    }
    usual, best = rows[BASELINE], min(rows, key=lambda name: rows[name]["seconds"] or math.inf)
    both = usual["seconds"], rows[best]["seconds"]
    return {
        "ratio": both[0] / both[1] if all(both) else math.nan,
        "ours": f"{both[1]} s with {best}",
        "other": f"{both[0]} s with {BASELINE}",
        "unit": "seconds to success",
        "task": task,
        "success": tasks[task].success,
        "rows": rows,
        "seeds": sizes.seeds,
        "starts": sizes.starts,
    }


def trained(preset: RunConfig, dataset: Path, folder: Path, console: Console) -> None:
    """Trains in `folder`, on from where an earlier call was stopped.

    Raises:
      KeyboardInterrupt: a signal stopped the run.
    """
    resume = (folder / "config.json").is_file()
    paths = training.Paths(str(dataset), folder, resume=resume)
    if not training.run(paths, preset, console).finished:
        raise KeyboardInterrupt


def succeeds(
    evaluate: Callable[..., Evaluation], starts: Sequence[Start], task: LearntTask, block: int
) -> bool:
    """True if enough episodes succeed, of those that the simulator did not lose. They run in blocks
    until too many have failed, as failures last longest."""
    most = len(starts) - math.ceil(task.success * len(starts))
    successes = trials = 0
    for begin in range(0, len(starts), block):
        acts = evaluate(starts[begin : begin + block], task.replan_steps, clips=0).success
        successes, trials = successes + acts.successes, trials + acts.trials
        if trials - successes > most:
            return False
    return successes / trials >= task.success


def _row(
    task: LearntTask,
    name: str,
    setting: Setting,
    sizes: LearnSizes,
    cache: Path,
    console: Console,
) -> dict[str, Any]:
    dataset = task.recorded(cache)
    preset = setting.change(load_preset(task.preset))
    presets = [
        replace(preset, optimizer=replace(preset.optimizer, learning_rate=rate))
        for rate in setting.rates or (preset.optimizer.learning_rate,)
    ]
    if len(presets) > 1:
        tried = [_found(task, each, _TUNED_BY, dataset, sizes, cache, console) for each in presets]
        presets = [min(zip(tried, presets, strict=True), key=lambda pair: pair[0].error)[1]]
    (chosen,) = presets
    runs = [
        _found(task, chosen, seed, dataset, sizes, cache, console)
        for seed in track(range(sizes.seeds), f"{task.name}: {name}", console=console)
    ]
    return {
        "learning_rate": chosen.optimizer.learning_rate,
        "tuning_runs": len(setting.rates),
        "reached": sum(run.samples is not None for run in runs),
        **_spread("seconds", [run.seconds for run in runs]),
        **_spread("samples", [run.samples for run in runs]),
        "error": median(run.error for run in runs),
    }


def _spread(name: str, values: Sequence[float | None]) -> dict[str, Any]:
    """The median and the range, which holds the true median with probability 1 - 2^(1 - n) for n
    values; None for what was never reached."""
    known = [math.inf if value is None else value for value in values]
    found = [None if math.isinf(x) else x for x in (median(known), min(known), max(known))]
    return {name: found[0], f"{name}_range": found[1:]}


def _found(
    task: LearntTask,
    preset: RunConfig,
    seed: int,
    dataset: Path,
    sizes: LearnSizes,
    cache: Path,
    console: Console,
) -> LearnResult:
    """A run's result, kept from an earlier benchmark if its preset was the same."""
    every = max(1, task.steps // sizes.checks)
    trainer = replace(
        preset.trainer, train_steps=task.steps, eval_every=task.steps, save_every=every,
        keep=sizes.checks + 1, seed=seed,
    )  # fmt: skip
    preset = replace(preset, trainer=trainer)
    told = json.dumps([to_json(preset), str(task), sizes.starts], sort_keys=True)
    folder = cache / "learn" / f"run-{hashlib.sha256(told.encode()).hexdigest()[:16]}"
    kept = folder / "result.json"
    if not kept.is_file():
        trained(preset, dataset, folder, console)
        replace_text(kept, json.dumps(_judged(task, folder, sizes)._asdict()))
    return LearnResult(**json.loads(kept.read_text()))


def _judged(task: LearntTask, folder: Path, sizes: LearnSizes) -> LearnResult:
    lines = [line for line in read_metrics(folder) if "loss" in line]
    samples = list(accumulate(int(line["samples"]) for line in lines))
    seconds = list(accumulate(line["step_seconds"] for line in lines[1:]))  # the first compiles
    (last,) = (line for line in read_metrics(folder) if "val_action_mse" in line)
    error = last["val_action_mse"] / last["val_mean_action_mse"]
    suite = load_suite(task.suite)
    tasks = task.tasks or suite.tasks
    starts = held_out(replace(suite, first_seed=VALIDATION), tasks, sizes.starts)
    steps = sorted(int(path.name) for path in (folder / "checkpoints").iterdir())
    count = suite.count(None, len(starts))
    with closing(suite.open(tasks, count, suite.edge(task.image_size))) as slots:
        for step in steps:
            policy = load_policy(folder / "checkpoints" / str(step))
            acting = Condition("learnt", policy).batched(count)
            if succeeds(partial(acting.evaluate, slots), starts, task, max(count, _BLOCK)):
                return LearnResult(samples[step - 1], round(seconds[step - 2], 3), error)
    return LearnResult(None, None, error)
