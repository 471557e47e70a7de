"""AdamW with warm-up, cosine decay and gradient clipping, from one config, for any parameter tree.

The schedule is apart from the transformation so that the learning rate can be logged.
"""

import re
from dataclasses import dataclass
from typing import Any

import jax
import optax

from models.fp8 import is_history
from models.sharding import path_name


@dataclass(frozen=True)
class OptimizerConfig:
    """Hyperparameters of one run.

    The learning rate rises linearly over `warmup_steps`, then falls along a cosine to
    `final_fraction` of its peak at `decay_steps` (None: at the run's last step). `clip_norm` bounds
    the global gradient norm. `ema_decay` averages the parameters that are evaluated; it starts low
    and reaches its value as steps go by, so that short runs are not held at their initialisation.
    Parameters whose path ("expert/layers/mlp/up/kernel") matches the regex `freeze` keep their
    values and cost neither gradients nor moments; `(?<!lora_[ab])$` trains LoRA's factors alone.
    """

    learning_rate: float = 1e-4
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 1e-6
    warmup_steps: int = 100
    decay_steps: int | None = None
    final_fraction: float = 0.1
    clip_norm: float = 1.0
    ema_decay: float = 0.99
    freeze: str = ""


def make_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Learning rate as a function of the steps already taken.

    Raises:
      ValueError: `decay_steps` is unset or not above `warmup_steps`, or a value is out of range.
    """
    _check(config)
    assert config.decay_steps is not None
    return optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / (config.warmup_steps + 1),
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=config.decay_steps,
        end_value=config.learning_rate * config.final_fraction,
    )


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Clipping, then AdamW on the schedule; raises ValueError as `make_schedule` does."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            make_schedule(config),
            b1=config.b1,
            b2=config.b2,
            eps=config.eps,
            weight_decay=config.weight_decay,
        ),
    )


def select(config: OptimizerConfig, params: Any) -> tuple[Any, Any]:
    """Two trees of bool: what needs a gradient, and of that what the optimizer updates (not the
    histories of float8 scales, which are replaced).

    Raises:
      ValueError: `freeze` is no regex, matches no parameter, or all of them.
    """
    try:
        frozen = re.compile(config.freeze) if config.freeze else None
    except re.error as error:
        raise ValueError(f"optimizer.freeze is {config.freeze!r}, no regex: {error}.") from error
    moving = jax.tree_util.tree_map_with_path(
        lambda path, _: is_history(path) or not (frozen and frozen.search(path_name(path))), params
    )
    trained = jax.tree_util.tree_map_with_path(
        lambda path, moves: moves and not is_history(path), moving
    )
    share = jax.tree.leaves(trained)
    if frozen and (all(jax.tree.leaves(moving)) or not any(share)):
        raise ValueError(
            f"optimizer.freeze is {config.freeze!r}, which matches "
            f"{'every' if not any(share) else 'no'} parameter; a path is like "
            f"{path_name(jax.tree_util.tree_flatten_with_path(params)[0][0][0])}."
        )
    return moving, trained


def _check(config: OptimizerConfig) -> None:
    if config.decay_steps is None or not 0 <= config.warmup_steps < config.decay_steps:
        raise ValueError(
            f"optimizer.warmup_steps is {config.warmup_steps} and decay_steps "
            f"{config.decay_steps}; warm-up must end before the decay does."
        )
    if config.learning_rate <= 0 or config.clip_norm <= 0:
        raise ValueError(
            f"optimizer.learning_rate is {config.learning_rate} and clip_norm {config.clip_norm}; "
            f"both must be above 0."
        )
    if not 0 <= config.ema_decay < 1:
        raise ValueError(
            f"optimizer.ema_decay is {config.ema_decay}; it must be at least 0 (no averaging) "
            f"and below 1."
        )
