"""Shares of a mixture's sources in the draws of some steps of a plan, beside the shares that their
weights intend."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from data.packing.plan import Plan

_ALIKE = 0.0005


class Share(NamedTuple):
    """A source's part of the samples, of the prefix places that they take, and of the samples
    according to its weight."""

    name: str
    samples: float
    places: float
    intended: float


def shares(plan: Plan, steps: Sequence[int]) -> list[Share]:
    """Shares of all sources in these steps together."""
    lengths, number = plan.layout.prefix_length(*plan.kinds), len(plan.sources)
    samples, places, intended = np.zeros((3, number))
    for step in steps:
        drawn = plan.draws(step)
        samples += np.bincount(drawn.source, minlength=number)
        places += np.bincount(drawn.source, lengths[drawn.kind], minlength=number)
        intended += plan.intended(step)
    parts = (samples / samples.sum(), places / places.sum(), intended / len(steps))
    return [
        Share(source.name, *map(float, own))
        for source, *own in zip(plan.sources, *parts, strict=True)
    ]


def share_facts(plan: Plan, step: int, every: int) -> dict[str, float]:
    """Shares for a run's log: at each `every`-th step, those of the steps since the previous one.
    Empty at other steps and for a single source."""
    if step % every or len(plan.sources) < 2:
        return {}
    return {
        f"{what}/{share.name}": value
        for share in shares(plan, range(max(0, step - every + 1), step + 1))
        for what, value in (
            ("share", share.samples),
            ("share_of_places", share.places),
            ("share_intended", share.intended),
        )
    }


def told_shares(plan: Plan, first: int, last: int) -> str:
    """Text line about the shares of the first `first` steps, and about those intended at a run's
    last step where they differ."""
    found = zip(shares(plan, range(first)), plan.intended(last).tolist(), strict=True)
    parts = (
        f"{share.name} {share.samples:.1%} of the samples, {share.places:.1%} of the places "
        f"(intended: {share.intended:.1%} of the samples"
        + f", {later:.1%} at the end" * (abs(later - share.intended) > _ALIKE)
        + ")"
        for share, later in found
    )
    return f"In the first {first} steps: {'; '.join(parts)}."
