"""Training steps on the same samples packed and padded, compared with the places that packing
saves: rows of many lengths with 3 to 90 % of padding, as in figures 14 and 15 of the thousand-GPU
recipe (arXiv 2603.11101).

If only the language model's layers had a cost, packing would save as much time as places. Costs of
a step that do not depend on its rows (the optimizer, a program's start) make the saving smaller.
Attention makes it larger: a row costs the square of its samples' lengths, not of its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from models import PackedBatch, Pi, PiConfig, Sample, pack
from models.families.pi.model import SHARDING_RULES
from models.terminal import Console, track
from parallel.mesh import MeshConfig, make_mesh
from parallel.optimizer import OptimizerConfig
from parallel.step import abstract_state, init_state, make_train_step
from tools.bench.models.attention import alternate

_SEED = 0
_MOST = 2**25
"""More numbers of the language model's width at once, 16,384 places of the released one, need more
than 24 GB: the gradients of more are accumulated."""


@dataclass(frozen=True)
class Padding:
    """A number of prefix places in padded rows of equal length; `padding` is the share of them that
    is padding."""

    places: int
    padding: float
    rounds: int
    samples: int = 16


CASES = (
    *(Padding(2048, share, 2) for share in (0.03, 0.3, 0.6, 0.9)),
    *(Padding(8192, share, 1) for share in (0.3, 0.6, 0.9)),
    Padding(16384, 0.9, 1),
    *(Padding(32768, share, 1) for share in (0.3, 0.6, 0.9)),
)
TINY_CASES = (Padding(256, 0.5, 1),)


def rows(console: Console, config: PiConfig, cases: tuple[Padding, ...]) -> list[dict[str, Any]]:
    """Places, padding and `compared` of each case."""
    found = []
    for case in track(cases, "Padded and packed", console=console):
        told = compared(config, OptimizerConfig(), forms(case, config), case.rounds)
        shares = {"asked_padding": case.padding, "rounds": case.rounds, "samples": case.samples}
        found.append(shares | told)
    return found


def forms(case: Padding, config: PiConfig) -> dict[str, PackedBatch]:
    """Samples of one picture and much text, each in a row of its own, and all in one row without
    padding, or in as many as have their gradients accumulated."""
    rng, longest = np.random.default_rng(_SEED), case.places // case.samples
    shape, size = (config.horizon, config.action_dim), config.image_size
    other = config.layout(prefix=0, samples=1, images=1, text=0).prefix_length(1, 0)
    samples = [
        Sample(
            images=(rng.integers(0, 256, (size, size, 3), dtype=np.uint8),),
            text=rng.integers(1, config.vocabulary, length - other).astype(np.int32),
            state=rng.normal(size=config.state_dim).astype(np.float32),
            actions=rng.normal(size=shape).astype(np.float32),
            action_mask=np.ones(shape, bool),
            id=i,
        )
        for i, length in enumerate(lengths(longest, case.samples, case.padding, other + 1))
    ]

    def packed(rows: list[list[Sample]]) -> PackedBatch:
        text = max(sum(len(each.text) for each in row) for row in rows)
        layout = config.layout(prefix=0, samples=len(rows[0]), images=len(rows[0]), text=text)
        return pack(rows, replace(layout, prefix=text + len(rows[0]) * other))

    return {
        "packed": packed(_dealt(samples, other, config)),
        "padded": packed([[s] for s in samples]),
    }


def lengths(longest: int, samples: int, padding: float, least: int) -> Int[np.ndarray, " samples"]:
    """Lengths of the longest sample and of the others, which are spread evenly so that rows of the
    longest length have this share of padding, as far as whole lengths allow.

    Raises:
      ValueError: the padding is so large that the others would be shorter than `least`, or so small
        that they would be longer than the longest.
    """
    mean = ((1 - padding) * samples - 1) * longest / (samples - 1)
    if not least <= mean <= longest:
        raise ValueError(
            f"padding is {padding} of {samples} rows of {longest}; the other samples would have "
            f"{mean:.1f} places each, expected {least} to {longest}."
        )
    spread = min(mean - least, longest - mean)
    others = mean + spread * np.linspace(-1, 1, samples - 1)
    return np.concatenate([[longest], np.rint(others)]).astype(np.int64)


def compared(
    config: PiConfig, optimizer: OptimizerConfig, forms: Mapping[str, PackedBatch], rounds: int
) -> dict[str, Any]:
    """Median seconds of alternating training steps on the forms "packed" and "padded", their ratio
    (within a round, then the median), the share of time saved, and prefix places.

    `of_places_saved` is that ratio over the ratio of the places: 1 if a step's time falls as much
    as its places.
    """
    seconds = alternate(trainers(config, optimizer, forms), rounds)
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


def trainers(
    config: PiConfig, optimizer: OptimizerConfig, batches: Mapping[str, PackedBatch]
) -> dict[str, Callable[[], Any]]:
    """Training steps on each batch, which update one state in turn."""
    model, mesh = Pi(config), make_mesh(MeshConfig(), jax.devices()[:1])
    optimizer = replace(optimizer, decay_steps=1000)
    abstract = abstract_state(model, optimizer, SHARDING_RULES, mesh)
    state = init_state(model, optimizer, abstract, _SEED)

    def call(step: Callable[..., Any], batch: PackedBatch) -> Any:
        nonlocal state
        state, metrics = step(state, batch, _SEED)
        return metrics

    def trainer(batch: PackedBatch) -> Callable[[], Any]:
        rows, places = batch.prefix_segment.shape
        parts = micro_batches(rows, places, config)
        step = make_train_step(model, optimizer, mesh, abstract, parts)
        return partial(call, step, jax.device_put(batch))

    return {name: trainer(batch) for name, batch in batches.items()}


def micro_batches(rows: int, places: int, config: PiConfig) -> int:
    """Smallest number of equal micro-batches of `rows` rows of `places` places that are small
    enough, or of single rows."""
    most = max(1, _MOST // (places * config.language.width))
    return next(parts for parts in range(-(-rows // most), rows + 1) if rows % parts == 0)


def _dealt(samples: list[Sample], other: int, config: PiConfig) -> list[list[Sample]]:
    """Rows of about the same length, each small enough for a micro-batch: the longest samples
    first, to one row after another and back. Each sample has `other` places besides its text."""
    places = sum(len(sample.text) + other for sample in samples)
    count = -(-places * config.language.width // _MOST)
    if count == 1:
        return [samples]
    ranked = sorted(samples, key=lambda sample: -len(sample.text))
    turns = np.resize([*range(count), *reversed(range(count))], len(samples))
    return [
        [s for s, turn in zip(ranked, turns, strict=True) if turn == row] for row in range(count)
    ]
