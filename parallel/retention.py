"""Selection of the checkpoints to keep when a later one is saved: the last few, one every so many
steps, and the best. It uses orbax's preservation policies.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orbax.checkpoint import v1 as ocp


@dataclass(frozen=True)
class Retention:
    """Keeps the `last` checkpoints, those of steps that `every` divides (0: none), and the one
    whose value in `best` is lowest; a step that is not in `best` has no value."""

    last: int = 3
    every: int = 0
    best: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.last < 1:
            raise ValueError(f"keep is {self.last}, but at least one checkpoint must be kept.")

    def stays(self, steps: Sequence[int]) -> set[int]:
        """The steps, out of `steps` (ascending), whose checkpoints are kept."""
        policies = ocp.training.preservation_policies
        rules: list[Any] = [policies.LatestN(self.last)]
        if self.every:
            rules.append(policies.EveryNSteps(self.every))
        if ranked := [step for step in steps if step in self.best]:
            lowest = min(ranked, key=lambda step: self.best[step])
            rules.append(policies.CustomSteps([lowest]))
        saved = [
            ocp.training.CheckpointMetadata(step, Path(str(step)), metadata=None) for step in steps
        ]
        kept = policies.AnyPreservationPolicy(rules).should_preserve(
            saved, context=policies.PreservationContext()
        )
        return {step for step, stays in zip(steps, kept, strict=True) if stays}
