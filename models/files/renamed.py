"""Fields of configs that had other names before: files that were saved with them still load, and
options are taken by both spellings for one release."""

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
}
"""Name of a config's class and the field's name before → its name now."""


def current(kind: type, value: dict[str, Any], where: str) -> dict[str, Any]:
    """The saved fields of a config of class `kind` by the names that they have now.

    Raises:
      ValueError: a field is there by its old name and by its new one.
    """
    names = [RENAMED.get((kind.__name__, name), name) for name in value]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{where} gives {twice} twice, by an old name and by the new one.")
    return dict(zip(names, value.values(), strict=True))


def old_paths(kind: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Old and new path (`rollout.execute`, `rollout.replan_steps`) of each field in a tree of
    configs that has been renamed."""
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        return
    old = {new: before for (owner, before), new in RENAMED.items() if owner == kind.__name__}
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if field.name in old:
            yield ".".join((*path, old[field.name])), ".".join((*path, field.name))
        yield from old_paths(hints[field.name], (*path, field.name))
