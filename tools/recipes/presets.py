"""Configuration of a run, and the presets that the families ship.

A preset is one `RunConfig`. Users keep theirs in a file of their own, `--preset
path/to/file.py:NAME`; any field can be changed on the command line.
"""

import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from jaxtyping import Int

from data.packing.packing import fit_layout
from data.packing.plan import PlanSource, typical_costs
from models import Layout, Scaling
from models.attention.ring import RUN
from models.families.presets import ModelPreset
from models.files import built_in
from models.files.bounds import LARGEST_CREW, check_least, check_size, check_sizes
from models.files.own_file import load
from models.files.terminal import Console, harmless, say
from models.inputs.augment import AugmentConfig
from models.model import ModelConfig
from parallel.mesh import MeshConfig
from parallel.optimizer import OptimizerConfig, ends_with_the_run
from parallel.trainer import TrainerConfig

Preset = TypeVar("Preset")

_SLACK = 1.2


@dataclass(frozen=True)
class RowsConfig:
    """`number` rows make a batch; each has room for `samples` samples of average length."""

    number: int = 8
    samples: int = 4

    def __post_init__(self) -> None:
        check_sizes("rows", self, "number", "samples")


@dataclass(frozen=True)
class DataConfig:
    """Settings for reading the data.

    `encoding`: format of the images in the frame store. "direct" makes no store and decodes the
    dataset's own images at every step; those that are downscaled are within one grey level of a raw
    store's. "direct-exact" equals a raw store to the last bit, but takes longer. `holdout`: share
    of episodes kept for validation, never trained on. `workers`: processes that prepare batches,
    with `threads` threads each (None: one for every core, up to 8); with 0, only the threads of
    this process prepare them. `skip_unreadable`: leave out and count what cannot be read, instead
    of ending the run. `state_scaling`, `action_scaling`: statistics by which states and actions are
    scaled, unless a mixture says otherwise for a robot.
    """

    encoding: Literal["jpeg", "raw", "direct", "direct-exact"] = "jpeg"
    holdout: float = 0.1
    workers: int = 0
    threads: int | None = None
    skip_unreadable: bool = False
    state_scaling: Scaling = "quantile"
    action_scaling: Scaling = "quantile"


@dataclass(frozen=True)
class ClosedLoopConfig:
    """Evaluation in simulation during training, every `trainer.eval_every` steps; off without a
    suite.

    The policy acts from `episodes` starts of each of the suite's `tasks` (default: all), in `slots`
    episodes at a time (default: a number that suits the suite). It executes `replan_steps` steps of
    each chunk.
    """

    suite: str = ""
    tasks: tuple[str, ...] = ()
    episodes: int = 16
    slots: int | None = None
    replan_steps: int = 4


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides a training run besides its data."""

    model: ModelConfig
    rows: RowsConfig = field(default_factory=RowsConfig)
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    closed_loop: ClosedLoopConfig = field(default_factory=ClosedLoopConfig)

    def __post_init__(self) -> None:
        data, loop = self.data, self.closed_loop
        least = {
            "data.holdout": (data.holdout, 0),
            "data.workers": (data.workers, 0),
            "data.threads": (1 if data.threads is None else data.threads, 1),
            "closed_loop.episodes": (loop.episodes, 1),
            "closed_loop.slots": (1 if loop.slots is None else loop.slots, 1),
            "closed_loop.replan_steps": (loop.replan_steps, 1),
        }
        check_least(least)
        most = {"workers": data.workers, "threads": data.threads or 1}
        for name, count in most.items():
            check_size(f"data.{name}", count, LARGEST_CREW, least=0)
        if data.holdout >= 1:
            raise ValueError(f"data.holdout is {data.holdout}; give a share below 1.")

    def layout(self, sources: Sequence[PlanSource]) -> Layout:
        """Row sizes that about `rows.samples` average samples of the mixture fill best."""
        images, text = typical_costs(sources)
        return row_layout(self.model, self.rows.samples, images, text, self.mesh.context)


def row_layout(
    model: ModelConfig,
    samples: int,
    images: Int[np.ndarray, " n"],
    text: Int[np.ndarray, " n"],
    context: int = 1,
) -> Layout:
    """Row sizes that about `samples` samples of this kind fill best.

    Args:
      images, text: images and text tokens of typical samples, each as often as it is drawn.
      context: devices that share a row's prefix, each in whole runs of places.
    """
    costs = model.layout(prefix=0, samples=0, images=0).prefix_length(images, text)
    prefix = max(int(costs.max()), round(samples * float(costs.mean()) * _SLACK))
    slots = samples + max(1, samples // 4)
    largest = model.layout(prefix=prefix, samples=slots, images=0, targets=model.targets)
    fitted = fit_layout(images, text, largest)
    whole = RUN * context if context > 1 else 1
    return replace(fitted, prefix=fitted.prefix + -fitted.prefix % whole)


@cache
def presets() -> dict[str, RunConfig]:
    """The shipped presets by name, as the families bring them."""
    brought = [import_module(module).PRESETS for module in built_in.PRESETS]
    return {name: _run(preset) for known in brought for name, preset in known.items()}


def __getattr__(name: str) -> RunConfig:
    """A shipped preset as a constant of this module: `PI05_QLORA` is "pi05-qlora"."""
    preset = presets().get(name.lower().replace("_", "-")) if name.isupper() else None
    if preset is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return preset


def _run(preset: ModelPreset) -> RunConfig:
    config = RunConfig(preset.model)
    changed = {
        section: replace(getattr(config, section), **values)
        for section, values in preset.settings.items()
    }
    return replace(config, **changed)


def load_preset(name: str) -> RunConfig:
    """A shipped preset by name, or `path/to/file.py:NAME` for a `RunConfig` in a user's file.

    Raises:
      ValueError: there is no preset of that name, or the name in the file is no RunConfig.
      FileNotFoundError: the file is missing.
    """
    return find_preset(name, presets(), RunConfig)


def find_preset(name: str, shipped: Mapping[str, Preset], kind: type[Preset]) -> Preset:
    """One of the shipped presets, or `path/to/file.py:NAME`; raises as `load_preset`."""
    if name in shipped:
        return shipped[name]
    if not name.rpartition(":")[0]:
        raise ValueError(
            f"Unknown preset '{name}'; choose one of {sorted(shipped)} or give "
            f"path/to/file.py:NAME for your own {kind.__name__}."
        )
    return load(name, kind, "preset")


def take_preset(arguments: Sequence[str], default: str) -> tuple[str, list[str]]:
    """The name after --preset, and the other arguments.

    Raises:
      ValueError: there is no name after it.
    """
    left = [part for argument in arguments for part in _split(argument)]
    if "--preset" not in left:
        return default, left
    at = left.index("--preset")
    if at + 1 == len(left):
        raise ValueError(f"--preset needs a name, such as {default}.")
    name = left[at + 1]
    del left[at : at + 2]
    return name, left


def shortened(
    optimizer: OptimizerConfig, updates: int, arguments: Sequence[str], length: str, option: str
) -> OptimizerConfig:
    """A preset's optimizer for a run of `updates` updates. If the user gave the run's length, a
    warm-up of more than half of it becomes a tenth, with a line on stderr, unless the user gave it
    too.

    Args:
      arguments: command line with the user's options.
      length: option of the run's length.
      option: option of the warm-up.
    """
    ends, warmup = optimizer.decay_steps or updates, optimizer.warmup_steps
    if optimizer.decay_steps:
        length = option.replace("warmup", "decay")
    chosen = given(arguments, option) or not given(arguments, length)
    if chosen or ends < 1 or 2 * warmup <= ends:
        return optimizer
    shorter = ends // 10
    said = (
        f"The preset's warm-up of {warmup} steps is shortened to {shorter}, a tenth of the {ends} "
        f"updates asked for; --{option} sets another."
    )
    print(harmless(said), file=sys.stderr)
    return replace(optimizer, warmup_steps=shorter)


def warmed_as_begun(
    optimizer: OptimizerConfig, begun: OptimizerConfig, console: Console
) -> OptimizerConfig:
    """The optimizer with the warm-up of a run that began with `begun`."""
    if begun.warmup_steps != optimizer.warmup_steps:
        said = f"The run continues with the warm-up of {begun.warmup_steps} steps that it began"
        say(console, f"{said} with.")
    return replace(optimizer, warmup_steps=begun.warmup_steps)


def given(arguments: Sequence[str], option: str) -> bool:
    """True if a command line gives this option."""
    return any(word.partition("=")[0].replace("_", "-") == f"--{option}" for word in arguments)


def check_same(path: Path, saved: Any, config: Any, free: Set[str], where: str = "") -> None:
    """Refuses to resume with another config (JSON) than the one saved at `path`, except for the
    fields in `free`, which do not change what is learnt.

    Raises:
      ValueError: another field differs.
    """
    if isinstance(saved, dict) and isinstance(config, dict):
        for name in sorted(set(saved) | set(config)):
            if f"{where}{name}" not in free:
                check_same(path, saved.get(name), config.get(name), free, f"{where}{name}.")
    elif saved != config:
        raise ValueError(
            f"{path}: {where[:-1]} is {saved}, but {config} was asked for; resume with the same "
            f"preset and options, or start a new run in another folder."
        )


def check_more_steps(
    path: Path, saved: int, steps: int, optimizer: OptimizerConfig, prefix: str = ""
) -> None:
    """Refuses to resume with another number of steps than the one saved at `path` if that would
    change the learning rate of steps already made.

    Args:
      prefix: prefix of the names of the optimizer's options.

    Raises:
      ValueError: the schedule ends with the run.
    """
    if steps != saved and ends_with_the_run(optimizer):
        raise ValueError(
            f"{path}: the run has {saved} steps, but {steps} were asked for, and its "
            f"{optimizer.schedule} schedule falls until the last, so the steps made so far would "
            f"have had other learning rates; resume with {saved}, or begin a new run with --init "
            f"or --checkpoint. A run whose --{prefix}optimizer.decay-steps is given from the "
            f"start, or whose schedule is constant or rsqrt, can be resumed with more steps."
        )


def _split(argument: str) -> list[str]:
    name, equals, value = argument.partition("=")
    return [name, value] if name == "--preset" and equals else [argument]
