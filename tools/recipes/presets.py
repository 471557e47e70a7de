"""Configuration of a run, and the presets the project ships.

A preset is one `RunConfig`. Users keep theirs in a file of their own, `--preset
path/to/file.py:NAME`; any field can be changed on the command line.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from jaxtyping import Int

from data.packing.packing import fit_layout
from data.packing.plan import PlanSource, typical_costs
from models import Layout, PiConfig, Scaling
from models.attention.ring import RUN
from models.families.groot.model import GrootConfig
from models.families.pi.fast.model import Pi0FastConfig
from models.files.own_file import load
from models.inputs.augment import AugmentConfig
from models.layers.dit import TransformerConfig
from models.layers.gemma import GEMMA_2B, GEMMA_300M, GemmaConfig
from models.layers.layers import Compute, Lora
from models.layers.qwen3 import QwenConfig
from models.layers.siglip import SiglipConfig
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


TINY = RunConfig(
    model=PiConfig(
        vision=SiglipConfig(width=64, depth=1, hidden=128, heads=4, patch=8),
        language=GemmaConfig(width=64, depth=2, hidden=128, heads=2, kv_heads=1, head_dim=32),
        expert=GemmaConfig(width=32, depth=2, hidden=64, heads=2, kv_heads=1, head_dim=32),
        image_size=48,
        vocabulary=512,
        state_dim=8,
        action_dim=8,
        horizon=8,
        state_input="token",
        film=True,
        chunks=3,
        compute=Compute(dtype="float32"),
    ),
    rows=RowsConfig(number=16, samples=2),
    data=DataConfig(encoding="raw"),
    optimizer=OptimizerConfig(
        name="muon",
        learning_rate=6e-3,
        b2=0.98,
        weight_decay=1e-3,
        warmup_steps=100,
        ema_decay=0.98,
    ),
    trainer=TrainerConfig(steps=3000, save_every=500, eval_every=500),
)
"""π0.5's architecture with small numbers: learns from pixels on two CPU cores in minutes."""

_ADAMW = replace(TINY.optimizer, name="adamw", learning_rate=1.5e-3)
_TINY: Any = TINY.model

TABLETOP = replace(
    TINY,
    model=_TINY.changed(film_order=True, state_dim=16),
    trainer=replace(TINY.trainer, steps=12_000, save_every=1000, eval_every=2000),
)
"""`TINY` for all tasks of the tabletop's gripper and of the arm; in some of their prompts, the
order of the words matters (docs/results/tabletop.md)."""

METAWORLD = replace(
    TINY,
    model=_TINY.changed(
        vision=replace(_TINY.vision, width=128, hidden=256, patch=12, stem=4),
        language=replace(_TINY.language, width=128, hidden=256, heads=4),
        expert=replace(_TINY.expert, width=64, hidden=128, heads=4),
        image_size=96,
        horizon=16,
    ),
    optimizer=replace(TINY.optimizer, learning_rate=4e-3),
    trainer=replace(TINY.trainer, steps=10000, save_every=2000, eval_every=2000),
)
"""`TINY` for many of Meta-World's tasks at once: wider, two cameras, larger pictures that are read
through a stem, longer chunks (docs/results/metaworld.md)."""

LIBERO_TINY = replace(
    TINY,
    model=_TINY.changed(
        vision=replace(_TINY.vision, patch=12, stem=4),
        expert=replace(_TINY.expert, width=64, hidden=128),
        image_size=96,
        horizon=16,
    ),
    data=replace(TINY.data, holdout=0.03),
    optimizer=replace(TINY.optimizer, learning_rate=2e-3),
    trainer=replace(TINY.trainer, steps=8000, save_every=2000, eval_every=2000),
)
"""`TINY` for a LIBERO suite's ten tasks: two cameras, larger pictures that are read through a stem,
longer chunks (docs/results/libero.md)."""

PI05 = RunConfig(
    model=PiConfig(
        vision=SiglipConfig(remat="full"),
        language=replace(GEMMA_2B, remat="full"),
        expert=replace(GEMMA_300M, remat="full"),
    ),
    rows=RowsConfig(number=16, samples=4),
    augment=AugmentConfig(crop=0.95, rotation=5, brightness=0.3, contrast=0.4, saturation=0.5),
    optimizer=OptimizerConfig(learning_rate=2.5e-5, weight_decay=1e-10, warmup_steps=1000),
    trainer=TrainerConfig(steps=30_000, eval_every=1000),
)
"""π0.5 as released, to fine-tune: `--init` takes the released weights."""

PI0 = replace(
    PI05,
    model=PI05.model.changed(state_input="suffix", time="input"),
    data=DataConfig(state_scaling="z-score", action_scaling="z-score"),
)
"""π0 as released, to fine-tune."""

PI0_FAST = replace(
    PI05,
    model=Pi0FastConfig(
        vision=SiglipConfig(remat="full"), language=replace(GEMMA_2B, remat="full"), horizon=10
    ),
)
"""π0-FAST as released, to fine-tune; `--fast` takes the released tokenizer's folder."""

PI0_FAST_TINY = replace(
    TINY,
    model=Pi0FastConfig(
        vision=SiglipConfig(width=64, depth=1, hidden=128, heads=4, patch=8),
        language=GemmaConfig(width=64, depth=3, hidden=128, heads=2, kv_heads=1, head_dim=32),
        image_size=48,
        vocabulary=1536,
        state_dim=8,
        action_dim=8,
        horizon=8,
        steps=64,
        writing="plain",
        compute=Compute(dtype="float32"),
    ),
    optimizer=_ADAMW,
)
"""π0-FAST's architecture with small numbers."""

GROOT = replace(
    PI05,
    model=GrootConfig(
        vision=SiglipConfig(remat="full"),
        language=QwenConfig(remat="full"),
        adapter=replace(GrootConfig().adapter, remat="full"),
        dit=replace(GrootConfig().dit, remat="full"),
    ),
    data=DataConfig(state_scaling="min-max", action_scaling="min-max"),
    optimizer=replace(PI05.optimizer, learning_rate=1e-4, weight_decay=1e-5),
)
"""GR00T-N1.5 at its released sizes. Samples are prepared as for our other models, not as NVIDIA's
processor does (docs/presets.md)."""

_ADAPTERS = (("lora_[ab]$", 1.0), (r"^(action|state|time)_", 1.0), (".", 0.0))
"""Adapters and the small layers around the action expert learn; all else is frozen."""
_LORA = Lora(16, 16.0)

_PI05: Any = PI05.model
PI05_QLORA = replace(
    PI05,
    model=_PI05.changed(
        vision=replace(_PI05.vision, lora=_LORA),
        language=replace(_PI05.language, attention_lora=_LORA, mlp_lora=_LORA),
        expert=replace(_PI05.expert, attention_lora=_LORA, mlp_lora=_LORA),
        compute=Compute(quantized=PiConfig.quantizable, quantized_kind="nf4"),
    ),
    rows=RowsConfig(number=4, samples=4),
    optimizer=replace(
        PI05.optimizer, learning_rate=1e-4, rate_factors=_ADAPTERS, frozen_dtype="bfloat16"
    ),
)
"""π0.5 on one GPU of 24 GB: adapters in every stack, trained on a frozen base in 4 bits
(docs/qlora.md)."""

_GROOT: Any = GROOT.model
GROOT_QLORA = replace(
    GROOT,
    model=_GROOT.changed(
        vision=replace(_GROOT.vision, lora=_LORA),
        language=replace(_GROOT.language, lora=_LORA),
        adapter=replace(_GROOT.adapter, lora=_LORA),
        dit=replace(_GROOT.dit, lora=_LORA),
        compute=Compute(quantized=GrootConfig.quantizable, quantized_kind="nf4"),
    ),
    rows=RowsConfig(number=4, samples=4),
    optimizer=replace(GROOT.optimizer, rate_factors=_ADAPTERS, frozen_dtype="bfloat16"),
)
"""`GROOT` in the same way; the tables of state encoders and action decoders stay f32, and learn."""

GROOT_TINY = replace(
    TINY,
    model=GrootConfig(
        vision=SiglipConfig(width=64, depth=1, hidden=128, heads=4, patch=8),
        language=QwenConfig(width=64, depth=2, hidden=128, heads=2, kv_heads=1, head_dim=32),
        adapter=TransformerConfig(depth=1, heads=2, head_dim=32),
        dit=TransformerConfig(depth=4, heads=2, head_dim=32),
        image_size=48,
        vocabulary=512,
        image_token=511,
        embodiments=8,
        state_dim=8,
        action_dim=8,
        horizon=8,
        future_tokens=4,
        positions=16,
        hidden=64,
        chunks=3,
        film=True,
        compute=Compute(dtype="float32"),
    ),
    optimizer=_ADAMW,
)
"""GR00T's architecture with small numbers."""

PRESETS = {
    "tiny": TINY,
    "tabletop": TABLETOP,
    "metaworld": METAWORLD,
    "libero-tiny": LIBERO_TINY,
    "pi05": PI05,
    "pi05-qlora": PI05_QLORA,
    "pi0": PI0,
    "pi0-fast": PI0_FAST,
    "pi0-fast-tiny": PI0_FAST_TINY,
    "groot": GROOT,
    "groot-qlora": GROOT_QLORA,
    "groot-tiny": GROOT_TINY,
}


def load_preset(name: str) -> RunConfig:
    """A shipped preset by name, or `path/to/file.py:NAME` for a `RunConfig` in a user's file.

    Raises:
      ValueError: there is no preset of that name, or the name in the file is no RunConfig.
      FileNotFoundError: the file is missing.
    """
    return find_preset(name, PRESETS, RunConfig)


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
