"""Selection of the checkpoints to keep when a later one is saved: the last few, one every so many
steps, and the best. It uses orbax's preservation policies.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orbax.checkpoint import v1 as ocp


@dataclass(frozen=True)
class Retention:
    """Keeps the `last` checkpoints, those of steps that `every` divides (0: none), the one whose
    value in `best` is lowest, and those of `pending` steps, whose value is not known yet. A step
    that is not in `best` has no value. Both collections may change during a run."""

    last: int = 3
    every: int = 0
    best: Mapping[int, float] = field(default_factory=dict)
    pending: Collection[int] = ()

    def __post_init__(self) -> None:
        if self.last < 1:
            raise ValueError(f"keep is {self.last}, but at least one checkpoint must be kept.")

    def best_of(self, steps: Sequence[int]) -> int | None:
        """The step, out of `steps`, whose value is lowest; the first if there are several, None if
        none has a value."""
        ranked = [step for step in steps if step in self.best and step not in self.pending]
        return min(ranked, key=lambda step: self.best[step], default=None)

    def stays(self, steps: Sequence[int]) -> set[int]:
        """The steps, out of `steps` (ascending), whose checkpoints are kept."""
        policies = ocp.training.preservation_policies
        best = self.best_of(steps)
        named = [step for step in steps if step == best or step in self.pending]
        rules: list[Any] = [policies.LatestN(self.last), policies.CustomSteps(named)]
        if self.every:
            rules.append(policies.EveryNSteps(self.every))
        saved = [
            ocp.training.CheckpointMetadata(step, Path(str(step)), metadata=None) for step in steps
        ]
        kept = policies.AnyPreservationPolicy(rules).should_preserve(
            saved, context=policies.PreservationContext()
        )
        return {step for step, stays in zip(steps, kept, strict=True) if stays}
