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
    ("ModelConfig", "steps"): "euler_steps",
    ("FlowConfig", "steps"): "euler_steps",
    ("TrainerConfig", "steps"): "train_steps",
    ("RlConfig", "steps"): "learner_steps",
    ("DemoConfig", "steps"): "train_steps",
}
"""(Name of a config's class or of one that it extends, old name of a field) → the field's current
name."""
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


def old_paths(kind: Any) -> Iterator[tuple[str, str]]:
    """Old and new path (`rollout.execute`, `rollout.replan_steps`) of each renamed field in a tree
    of configs."""
    for owner, name, path in _fields(kind, ()):
        for old, new in _renamed(owner).items():
            if new == name:
                yield ".".join((*path, old)), ".".join((*path, new))


def old_values(kind: Any) -> Iterator[tuple[str, dict[str, str]]]:
    """Path of each field with renamed values in a tree of configs, with the old and new values."""
    for owner, name, path in _fields(kind, ()):
        if values := VALUES.get((owner.__name__, name)):
            yield ".".join((*path, name)), values


def _renamed(kind: type) -> dict[str, str]:
    """Old and new names of a config's fields; none that a user's own class still has."""
    mine = {field.name for field in dataclasses.fields(kind)}
    found: dict[str, str] = {}
    for one in kind.__mro__:
        for (name, old), new in RENAMED.items():
            if name == one.__name__ and old not in mine:
                found.setdefault(old, new)
    return found


def _fields(kind: Any, path: tuple[str, ...]) -> Iterator[tuple[type, str, tuple[str, ...]]]:
    """Each field of a tree of configs: its config, its name, and the path to that config."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            yield kind, field.name, path
            yield from _fields(hints[field.name], (*path, field.name))
