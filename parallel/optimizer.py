"""AdamW with warm-up, cosine decay and gradient clipping, from one config, for any parameter tree.

The schedule is apart from the transformation so that the learning rate can be logged.
"""

from dataclasses import dataclass

import optax


@dataclass(frozen=True)
class OptimizerConfig:
    """Hyperparameters of one run.

    The learning rate rises linearly over `warmup_steps`, then falls along a cosine to
    `final_fraction` of its peak at `decay_steps` (None: at the run's last step). `clip_norm` bounds
    the global gradient norm. `ema_decay` averages the parameters that are evaluated; it starts low
    and reaches its value as steps go by, so that short runs are not held at their initialisation.
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
