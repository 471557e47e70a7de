"""AdamW (also with float8 moments, or schedule-free), Muon, Adafactor or a user's own method, from
one config, for any parameter tree.

A learning rate is one schedule times a factor for the parameter's group; a factor of 0 freezes. The
schedule is separate from the transformation so that the learning rate can be logged.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from optax.contrib import schedule_free, schedule_free_eval_params

from models.files.own_file import by_name, check_choice
from models.layers.batch_norm import is_frozen, is_running
from models.layers.float8.fp8 import is_history
from models.sharding import axes_of, path_name
from parallel import moments
from parallel.muon import scale_by_muon_and_adam

SCHEDULE_FREE = "schedule_free"
_LARGEST_WHOLE = 4096
"""Largest number of elements of an array in the optimizer's state that every device may hold
whole."""


@dataclass(frozen=True)
class OptimizerConfig:
    """Hyperparameters of the optimizer.

    `name`: the method. "adamw" is AdamW; "adamw_fp8" is AdamW with moments that take 2 bytes per
    parameter, not 8. "muon" (Jordan 2024) orthogonalises the momentum of the parameters whose path
    contains a match of the regex `matrices`, with 4 bytes for each of them, and is AdamW for the
    others. "adafactor" (arXiv 1804.04235, as modified for ViT-G, arXiv 2106.04560) factors the
    second moment: learning rates are as for Adam, the momentum of `b1` is in bfloat16, and `b2`
    caps the decay. It takes 2 bytes per parameter, and next to nothing with `b1` 0. "schedule_free"
    (arXiv 2405.15682) is AdamW for a "constant" schedule: gradients are taken `b1` of the way from
    the newest parameters to the average of all so far, and this average is evaluated instead of
    that of `ema_decay`. `path/to/file.py:function` runs your file; the function turns this config
    into the optax transformation between clipping and weight decay, such as
    `lambda c: optax.scale_by_lion(c.b1, c.b2)`.

    The learning rate rises linearly over `warmup_steps`. Then "cosine" and "linear" fall to
    `final_fraction` of the peak at `decay_steps` (None: at the run's last step), "constant" stays
    at the peak, and "rsqrt" falls with the inverse square root of the steps taken.

    `rate_factors` are pairs of a regex and a factor of the learning rate, such as ("^vision", 0.1).
    Each parameter takes the factor of the first regex that matches anywhere in its path
    ("expert/layers/mlp/up/kernel"), and each must have a match; no pairs mean a factor of 1 for
    all. "@name" stands for the model's own group of parameters of that name (`with_groups`).
    Parameters with factor 0 keep their values and cost neither gradients nor moments.
    `weight_decay` applies to parameters whose path contains a match of the regex `decayed`; if that
    is empty, to all.

    `clip_norm` bounds the global gradient norm. `ema_decay` averages the parameters that are
    evaluated. It starts low and reaches its value as steps go by, so that short runs are not held
    at their initialisation. Parameters with factor 0 need no average and are kept in
    `frozen_dtype`.
    """

    name: str = "adamw"
    learning_rate: float = 1e-4
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 1e-6
    decayed: str = ""
    matrices: str = r"(layers|blocks)/.*kernel$"
    schedule: Literal["cosine", "linear", "constant", "rsqrt"] = "cosine"
    warmup_steps: int = 100
    decay_steps: int | None = None
    final_fraction: float = 0.1
    rate_factors: tuple[tuple[str, float], ...] = ()
    clip_norm: float = 1.0
    ema_decay: float = 0.99
    frozen_dtype: Literal["float32", "bfloat16"] = "float32"


def make_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Learning rate as a function of the steps already taken, without the groups' factors.

    Raises:
      ValueError: `decay_steps` is unset or not above `warmup_steps`, or a value is out of range.
    """
    _check(config)
    assert config.decay_steps is not None
    peak, warmup = config.learning_rate, config.warmup_steps
    final, steps, begin = config.final_fraction, config.decay_steps - warmup, max(warmup, 1)
    after = {
        "cosine": optax.cosine_decay_schedule(peak, steps, final),
        "linear": optax.linear_schedule(peak, peak * final, steps),
        "constant": optax.constant_schedule(peak),
        "rsqrt": lambda step: peak * jnp.sqrt(begin / (begin + jnp.maximum(step, 0))),
    }[config.schedule]
    rise = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    return optax.join_schedules([rise, after], [warmup])


def ends_with_the_run(config: OptimizerConfig) -> bool:
    """True if the learning rate falls until the run's last step, so that a run with another number
    of steps has a different schedule from its first step."""
    return config.decay_steps is None and config.schedule in ("cosine", "linear")


def with_groups(
    config: OptimizerConfig, groups: Mapping[str, str], prefix: str = ""
) -> OptimizerConfig:
    """The config with each "@name" of `rate_factors` replaced by a regex.

    Args:
      groups: by name, a regex that the paths of a group's parameters begin with.
      prefix: path of the model's parameters in the tree to train, such as "policy/".

    Raises:
      ValueError: there is no group of that name.
    """

    def regex(pattern: str) -> str:
        if not pattern.startswith("@"):
            return pattern
        if pattern[1:] not in groups:
            raise ValueError(
                f"optimizer.rate_factors names a group '{pattern}', but the model has "
                f"{', '.join(f'@{name}' for name in groups)}."
            )
        return f"^{prefix}({groups[pattern[1:]]})"

    return replace(
        config, rate_factors=tuple((regex(name), factor) for name, factor in config.rate_factors)
    )


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Gradient clipping, then the method with its schedule.

    Raises:
      ValueError: as `make_schedule`, or a user's function does not return an optax transformation.
      FileNotFoundError: its file is missing.
    """
    schedule = make_schedule(config)

    def decayed(params: Any) -> Any:
        return _map(lambda path, _: bool(re.search(config.decayed, path)), params)

    def scaled(updates: Any, _: Any) -> Any:
        return _map(lambda path, update: update * _rate(config, path), updates)

    steps = optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        _method(config),
        optax.add_decayed_weights(config.weight_decay, decayed if config.decayed else None),
        optax.scale_by_learning_rate(schedule),
        optax.stateless(scaled) if config.rate_factors else optax.identity(),
    )
    return schedule_free(steps, schedule, config.b1) if config.name == SCHEDULE_FREE else steps


def own_average(config: OptimizerConfig, state: Any, params: Any) -> Any | None:
    """The average of the parameters that the method itself keeps and that is to be evaluated; None
    for methods without one."""
    if config.name != SCHEDULE_FREE:
        return None
    return schedule_free_eval_params(state._replace(b1=config.b1), params)


def at_step(state: Any, step: Any) -> Any:
    """The optimizer's state with the schedule at `step`; moments and their counts stay."""

    def scheduled(part: Any) -> bool:
        return isinstance(part, optax.ScaleByScheduleState)

    return jax.tree.map(
        lambda part: part._replace(count=step) if scheduled(part) else part,
        state,
        is_leaf=scheduled,
    )


def select(config: OptimizerConfig, params: Any) -> tuple[Any, Any]:
    """Two trees of bool: the parameters that need a gradient, and those of them that the optimizer
    updates (not the histories of float8 scales and running statistics, which are replaced).
    Parameters of a `FrozenBatchNorm` are in neither and need no factor.

    Raises:
      ValueError: `rate_factors` gives no factor to some parameters (all are listed), freezes all
        parameters, or has a regex that decides for none; or `decayed` matches no parameter.
    """
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    names = [path_name(path) for path, _ in flat if not (_is_record(path) or is_frozen(path))]
    deciding = {name: _deciding(config, name) for name in names}
    missing = [name for name, pair in deciding.items() if pair is None]
    if config.rate_factors and missing:
        raise ValueError(
            f"Every parameter needs a factor from optimizer.rate_factors, but {len(missing)} of "
            f"{len(names)} match none: {', '.join(missing)}; end with '. 1' to train the rest or "
            f"'. 0' to freeze it."
        )
    idle = [pair[0] for pair in config.rate_factors if pair not in deciding.values()]
    regexes = [config.decayed, config.matrices if config.name == "muon" else ""]
    idle += [regex for regex in regexes if not any(re.search(regex, name) for name in names)]
    if idle:
        raise ValueError(
            f"optimizer.rate_factors, decayed or matrices has {idle[0]!r}, which applies to no "
            f"parameter; a parameter's path looks like {names[0]}, and if several regexes match "
            f"it, the first applies."
        )
    moving = jax.tree_util.tree_map_with_path(
        lambda path, _: (
            _is_record(path) or (not is_frozen(path) and _rate(config, path_name(path)) > 0)
        ),
        params,
    )
    trained = jax.tree_util.tree_map_with_path(
        lambda path, moves: moves and not _is_record(path), moving
    )
    if not any(jax.tree.leaves(trained)):
        raise ValueError(
            f"optimizer.rate_factors is {config.rate_factors}, which freezes every parameter; give "
            f"the parameters to be trained a factor above 0."
        )
    return moving, trained


def state_shardings(state: Any, params: Any, placed: Any, mesh: Mesh) -> Any:
    """Shardings of an optimizer's state (ShapeDtypeStructs): an array that belongs to a parameter
    is split like it, in the dimensions that it shares with the parameter and that divide evenly;
    small arrays that belong to none are replicated.

    Args:
      params: ShapeDtypeStructs of the parameters that the optimizer updates.
      placed: their NamedShardings, in the same tree structure.

    Raises:
      ValueError: over several devices, a large array belongs to no parameter.
    """
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    owners = {
        path: (leaf.shape, sharding.spec)
        for (path, leaf), sharding in zip(flat, jax.tree.leaves(placed), strict=True)
    }

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        ends = range(len(path), 0, -1)
        parts = (path[start:end] for end in ends for start in range(end))
        owner = next((owners[part] for part in parts if part in owners), None)
        if owner is None and leaf.size > _LARGEST_WHOLE and mesh.size > 1:
            raise ValueError(
                f"The optimizer's state holds {path_name(path)}, of shape {leaf.shape}, which "
                f"belongs to no parameter and cannot be sharded over {mesh.size} devices; keep the "
                f"state in trees of arrays like the parameters, or train on one device."
            )
        spec = PartitionSpec() if owner is None else _inherited(leaf.shape, *owner, mesh)
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(place, state)


def _inherited(
    shape: tuple[int, ...], whole: tuple[int, ...], spec: PartitionSpec, mesh: Mesh
) -> PartitionSpec:
    """The spec for an array that derives from one of shape `whole`: it has as many dimensions, the
    last perhaps shorter, or lacks some of them."""
    entries = list(zip(whole, (*spec, *[None] * (len(whole) - len(spec))), strict=True))
    kept: list[Any] = []
    for i, size in enumerate(shape):
        while len(entries) > len(shape) - i and entries[0][0] != size:
            entries.pop(0)
        axes = entries.pop(0)[1] if entries else None
        kept.append(axes if size % math.prod(mesh.shape[n] for n in axes_of(axes)) == 0 else None)
    return PartitionSpec(*kept)


def _adafactor(config: OptimizerConfig) -> optax.GradientTransformation:
    steps = [
        optax.scale_by_factored_rms(
            epsilon=config.eps**2,
            min_dim_size_to_factor=32,
            decay_rate_fn=lambda step, rate: jnp.minimum(1 - (step + 1.0) ** -rate, config.b2),
        ),
        optax.clip_by_block_rms(1.0),
    ]
    if config.b1:
        steps.append(optax.ema(config.b1, debias=False, accumulator_dtype=jnp.bfloat16))
    return optax.chain(*steps)


_METHODS = {
    "adamw": lambda c: optax.scale_by_adam(c.b1, c.b2, c.eps),
    "adamw_fp8": lambda c: moments.scale_by_adam(c.b1, c.b2, c.eps),
    "adafactor": _adafactor,
    "muon": lambda c: scale_by_muon_and_adam(c.matrices, c.b1, c.b2, c.eps),
    SCHEDULE_FREE: lambda c: optax.scale_by_rms(
        c.b2, c.eps, eps_in_sqrt=False, bias_correction=True
    ),
}


def _method(config: OptimizerConfig) -> optax.GradientTransformation:
    made = by_name(config.name, _METHODS, "optimizer.name")(config)
    if not isinstance(made, optax.GradientTransformation):
        raise ValueError(
            f"optimizer.name is '{config.name}', whose function returns {type(made).__name__}; it "
            f"must return an optax.GradientTransformation, such as optax.scale_by_adam()."
        )
    return made


def _map(function: Callable[[str, Any], Any], tree: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, x: function(path_name(path), x), tree)


def _is_record(path: tuple[Any, ...]) -> bool:
    return is_history(path) or is_running(path)


def _deciding(config: OptimizerConfig, path: str) -> tuple[str, float] | None:
    """The pair of `rate_factors` whose regex is the first that matches in the path."""
    return next((pair for pair in config.rate_factors if re.search(pair[0], path)), None)


def _rate(config: OptimizerConfig, path: str) -> float:
    return (_deciding(config, path) or ("", 1.0))[1]


def _check(config: OptimizerConfig) -> None:
    check_choice(config.name, _METHODS, "optimizer.name")
    if config.decay_steps is None or not 0 <= config.warmup_steps < config.decay_steps:
        raise ValueError(
            f"optimizer.warmup_steps is {config.warmup_steps} and decay_steps "
            f"{config.decay_steps}; warm-up must end before the decay does."
        )
    for name in ("b1", "b2"):
        if not 0 <= (rate := getattr(config, name)) < 1:
            raise ValueError(
                f"optimizer.{name} is {rate}; a decay of moments is at least 0 and below 1."
            )
    if config.eps <= 0 or config.weight_decay < 0:
        raise ValueError(
            f"optimizer.eps is {config.eps} and weight_decay {config.weight_decay}; the first must "
            "be above 0, the second at least 0."
        )
    if config.learning_rate <= 0 or config.clip_norm <= 0:
        raise ValueError(
            f"optimizer.learning_rate is {config.learning_rate} and clip_norm {config.clip_norm}; "
            f"both must be above 0."
        )
    if config.name == SCHEDULE_FREE and not 0 < config.b1 < 1:
        raise ValueError(
            f"optimizer.b1 is {config.b1}; with 'schedule_free' it must be above 0 and below 1, as "
            f"gradients are taken between the newest parameters (0) and their average (1)."
        )
    if not 0 <= config.ema_decay < 1:
        raise ValueError(
            f"optimizer.ema_decay is {config.ema_decay}; it must be at least 0 (no averaging) "
            f"and below 1."
        )
    for pattern, factor in (*config.rate_factors, (config.decayed, 1.0), (config.matrices, 1.0)):
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"optimizer.rate_factors, decayed or matrices has {pattern!r}, which is not a "
                f"regular expression: {error}."
            ) from error
        if not 0 <= factor < math.inf:
            raise ValueError(
                f"optimizer.rate_factors has {factor} for {pattern!r}; a factor must be at least 0."
            )
