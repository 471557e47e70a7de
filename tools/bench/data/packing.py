"""Training the same samples packed end to end, and padded to the longest one a row each (as peers
do).

The samples are a mixture of one- and two-camera robots with prompts of 5 to 60 tokens. Steps of
both forms alternate in one run, so a drifting machine slows both alike; the figure is the median.
"""

import time
from dataclasses import replace
from statistics import median
from typing import Any

import jax
import numpy as np

from data.packing.packing import assign_rows, pack_kinds
from models import Layout, PackedBatch, Sample, pack
from models.pi.model import SHARDING_RULES
from models.terminal import Console, track
from parallel.mesh import MeshConfig, make_mesh
from parallel.step import abstract_state, init_state, make_train_step
from tools.recipes.presets import TINY, row_layout

_SAMPLES, _PER_ROW, _ROUNDS = 256, 6, 10


def mixture(count: int, seed: int = 0) -> list[Sample]:
    """Random samples for the tiny preset: 1 or 2 cameras, prompts of 5 to 60 tokens."""
    config, rng = TINY.model, np.random.default_rng(seed)
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


def packed(samples: list[Sample]) -> tuple[PackedBatch, float]:
    """The samples in full rows, and the share of prefix places used."""
    images, text = (np.array(n) for n in zip(*map(_cost, samples), strict=True))
    layout = row_layout(TINY.model, _PER_ROW, images, text)
    batch = pack(_rows(samples, layout), layout)
    return batch, float((np.asarray(batch.prefix_segment) > 0).mean())


def padded(samples: list[Sample]) -> tuple[PackedBatch, float]:
    """One sample a row, every row as long as the longest."""
    images, text = max(len(s.images) for s in samples), max(len(s.text) for s in samples)
    tokens = TINY.model.tokens_per_image
    layout = TINY.model.layout(
        prefix=images * tokens + text + 1, samples=1, images=images, text=text
    )
    batch = pack([[s] for s in samples], layout)
    return batch, float((np.asarray(batch.prefix_segment) > 0).mean())


def run(console: Console) -> dict[str, Any]:
    """Samples per second of a full training step, packed over padded."""
    model, mesh = TINY.model.build(), make_mesh(MeshConfig(), jax.devices()[:1])
    optimizer = replace(TINY.optimizer, decay_steps=1000)
    abstract = abstract_state(model, optimizer, SHARDING_RULES, mesh)
    step = make_train_step(model, optimizer, mesh, abstract)
    samples = mixture(_SAMPLES)
    forms = {"packed": packed(samples), "padded": padded(samples)}
    state = {name: init_state(model, optimizer, abstract, 0) for name in forms}
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for _ in track(range(_ROUNDS + 1), "Alternating steps", console=console):
        for name, (batch, _) in forms.items():
            start = time.perf_counter()
            state[name], metrics = step(state[name], batch, 0)
            jax.block_until_ready(metrics)
            seconds[name].append(time.perf_counter() - start)
    rates = {name: _SAMPLES / median(times[1:]) for name, times in seconds.items()}
    return {
        "ratio": rates["packed"] / rates["padded"],
        "ours": f"{rates['packed']:.1f} samples/s packed",
        "other": f"{rates['padded']:.1f} samples/s padded",
        "unit": "samples/s",
        "fill": {name: fill for name, (_, fill) in forms.items()},
        "samples": _SAMPLES,
    }


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
