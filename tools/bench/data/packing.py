"""Training on the same samples packed end to end, and padded to the longest with one sample per row
(as peers do).

The samples are a mixture of one- and two-camera robots with prompts of 5 to 60 tokens. Steps of
both forms alternate in one run, so a drifting machine slows both alike; the figure is the median.
"""

from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import Any

import jax
import numpy as np

from data.packing.packing import assign_rows, pack_kinds
from models import Layout, PackedBatch, Pi, PiConfig, Sample, pack
from models.files.terminal import Console
from parallel.optimizer import OptimizerConfig
from tools.bench.models.attention import alternate
from tools.bench.models.pi05 import CONFIG, Width, wide
from tools.bench.models.stepper import steppers
from tools.recipes.presets import TINY, row_layout

_SMALL: Any = TINY.model
_SAMPLES, _PER_ROW, _ROUNDS = 256, 6, 10
_WIDE_SAMPLES, _WIDE_ROUNDS = 12, 3


def run(console: Console, tiny: bool = False, width: Width = "small") -> dict[str, Any]:
    """Samples per second of a full training step, packed over padded, and `of_places_saved`: that
    ratio over the ratio of the places.

    Args:
      tiny: real widths with small pictures and short rows, and a round of each.
      width: of the layers, "small" (the preset `tiny`) or "real" (two of each of pi05's stacks).
    """
    config, optimizer, count, rounds = _SMALL, TINY.optimizer, _SAMPLES, _ROUNDS
    if width == "real":
        config = replace(wide(2), image_size=28 if tiny else CONFIG.image_size)
        optimizer, count, rounds = OptimizerConfig(), _WIDE_SAMPLES, 1 if tiny else _WIDE_ROUNDS
    samples = mixture(count, config=config)
    console.print("Timing steps on the mixture, packed and padded in turn")
    forms = {"packed": packed(samples, config), "padded": padded(samples, config)}
    found = compared(config, optimizer, forms, rounds)
    rates = {name: f"{count / took:.2f}" for name, took in found["seconds"].items()}
    return found | {
        "ours": f"{rates['packed']} samples/s packed",
        "other": f"{rates['padded']} samples/s padded",
        "unit": "samples/s",
        "samples": count,
    }


def compared(
    config: PiConfig, optimizer: OptimizerConfig, forms: Mapping[str, PackedBatch], rounds: int
) -> dict[str, Any]:
    """Median seconds of alternating training steps on the forms "packed" and "padded", their ratio
    (within a round, then the median), the share of time saved, and prefix places.

    `of_places_saved` is that ratio over the ratio of the places: 1 if a step's time falls as much
    as its places.
    """
    model, optimizer = Pi(config), replace(optimizer, decay_steps=1000)
    cases = {name: (model, jax.device_put(batch)) for name, batch in forms.items()}
    seconds = alternate(steppers(cases, optimizer)[0], rounds)
    places = {name: batch.prefix_segment.size for name, batch in forms.items()}
    ratio = median(b / a for a, b in zip(seconds["packed"], seconds["padded"], strict=True))
    return {
        "ratio": ratio,
        "time_saved": 1 - 1 / ratio,
        "of_places_saved": ratio * places["packed"] / places["padded"],
        "seconds": {name: median(took) for name, took in seconds.items()},
        "places": places,
        "fill": {n: float((np.asarray(b.prefix_segment) > 0).mean()) for n, b in forms.items()},
    }


def mixture(count: int, seed: int = 0, config: PiConfig = _SMALL) -> list[Sample]:
    """Random samples: 1 or 2 cameras, prompts of 5 to 60 tokens."""
    rng = np.random.default_rng(seed)
    shape = (config.horizon, config.action_dim)
    picture = (config.image_size, config.image_size, 3)
    return [
        Sample(
            images=tuple(rng.integers(0, 256, (rng.integers(1, 3), *picture), dtype=np.uint8)),
            text=rng.integers(1, config.vocabulary, rng.integers(5, 61)).astype(np.int32),
            state=rng.normal(size=config.state_dim).astype(np.float32),
            actions=rng.normal(size=shape).astype(np.float32),
            action_mask=np.ones(shape, bool),
            id=i,
        )
        for i in range(count)
    ]


def packed(samples: list[Sample], config: PiConfig = _SMALL) -> PackedBatch:
    """The samples in full rows."""
    images, text = (np.array(n) for n in zip(*map(_cost, samples), strict=True))
    layout = row_layout(config, _PER_ROW, images, text)
    return pack(_rows(samples, layout), layout)


def padded(samples: list[Sample], config: PiConfig = _SMALL) -> PackedBatch:
    """One sample per row, every row as long as the longest."""
    images, text = max(len(s.images) for s in samples), max(len(s.text) for s in samples)
    row = config.layout(prefix=0, samples=1, images=images, text=text)
    layout = replace(row, prefix=row.prefix_length(images, text))
    return pack([[s] for s in samples], layout)


def _cost(sample: Sample) -> tuple[int, int]:
    return len(sample.images), len(sample.text)


def _rows(samples: list[Sample], layout: Layout) -> list[list[Sample]]:
    costs = np.array([_cost(s) for s in samples]).T
    kinds, kind, counts = np.unique(costs, axis=1, return_inverse=True, return_counts=True)
    packing = pack_kinds(kinds[0], kinds[1], counts, layout)
    rows: list[list[Sample]] = [[] for _ in range(packing.rows)]
    for sample, row in zip(samples, assign_rows(packing, kind), strict=True):
        rows[row].append(sample)
    return rows
