"""Renamed fields of configs: files that were saved with the old names still load, and options
accept both spellings for one release."""

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any

RENAMED: dict[tuple[str, str], str] = {
    ("OptimizerConfig", "rates"): "rate_factors",
    ("ObjectiveConfig", "trace"): "gae_lambda",
    ("RolloutConfig", "execute"): "replan_steps",
    ("RolloutConfig", "tickets"): "groups",
    ("ColocatedConfig", "lanes"): "envs",
    ("ColocatedConfig", "fragment"): "unroll",
    ("ClosedLoopConfig", "execute"): "replan_steps",
    ("EvaluateConfig", "execute"): "replan_steps",
    ("RecordConfig", "execute"): "replan_steps",
    ("LatencyConfig", "execute"): "replan_steps",
    ("FlowConfig", "steps"): "euler_steps",
    ("TrainerConfig", "steps"): "train_steps",
    ("RlConfig", "steps"): "learner_steps",
    ("DemoConfig", "steps"): "train_steps",
}
"""(Name of a config's class, old name of a field) → the field's current name. A model's config may
have further ones in `renamed`."""
VALUES: dict[tuple[str, str], dict[str, str]] = {("DataConfig", "encoding"): {"none": "direct"}}
"""(Name of a config's class, name of a field) → its old values, each with its current name."""


def current(kind: type, value: dict[str, Any], where: str) -> dict[str, Any]:
    """The saved fields of a config of class `kind`, by their current names.

    Raises:
      ValueError: a field has both its old name and its new one.
    """
    new = _renamed(kind)
    names = [new.get(name, name) for name in value]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"{where} gives {twice} twice, under an old name and under the new one; give only the "
            "new one."
        )
    renamed = dict(zip(names, value.values(), strict=True))
    for name, given in renamed.items():
        if isinstance(given, str):
            renamed[name] = VALUES.get((kind.__name__, name), {}).get(given, given)
    return renamed


def old_paths(config: Any) -> Iterator[tuple[str, str]]:
    """Old and new path (`rollout.execute`, `rollout.replan_steps`) of each renamed field in a tree
    of configs, given by its class or as one."""
    for owner, name, path in _fields(config, ()):
        for old, new in _renamed(owner).items():
            if new == name:
                yield ".".join((*path, old)), ".".join((*path, new))


def old_values(config: Any) -> Iterator[tuple[str, dict[str, str]]]:
    """Path of each field with renamed values in a tree of configs, with the old and new values."""
    for owner, name, path in _fields(config, ()):
        if values := VALUES.get((owner.__name__, name)):
            yield ".".join((*path, name)), values


def _renamed(kind: type) -> dict[str, str]:
    """Old and new names of a config's fields; none that a user's own class still has."""
    mine = {field.name for field in dataclasses.fields(kind)}
    known = {old: new for (name, old), new in RENAMED.items() if name == kind.__name__}
    known |= getattr(kind, "renamed", {})
    return {old: new for old, new in known.items() if old not in mine}


def _fields(config: Any, path: tuple[str, ...]) -> Iterator[tuple[type, str, tuple[str, ...]]]:
    """Each field of a tree of configs: its config's class, its name, and the path to that."""
    if dataclasses.is_dataclass(config):
        kind = config if isinstance(config, type) else type(config)
        parts = typing.get_type_hints(kind) if kind is config else vars(config)
        for field in dataclasses.fields(kind):
            yield kind, field.name, path
            yield from _fields(parts[field.name], (*path, field.name))
