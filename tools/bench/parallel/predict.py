"""Training steps of small π0.5s on this CPU, predicted from their jaxprs and then measured.

Some sizes calibrate the roofline (rates of products and bytes, start of a kernel); the others are
predicted without their measurements, as ratios of step times, because a plan ranks choices. Rounds
alternate between all sizes, and the fastest call counts: other work on the machine only ever adds.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from rich.table import Table
from scipy.optimize import nnls

from models import PackedBatch, Pi, PiConfig, Sample, pack
from models.files.terminal import Console, track
from models.layers.gemma import GemmaConfig
from models.layers.layers import Compute
from models.layers.siglip import SiglipConfig
from parallel.optimizer import OptimizerConfig
from parallel.planning.flops import CallCost, work
from tools.bench.models.stepper import stepper
from tools.bench.timing import Took, timed

_OPTIMIZER = OptimizerConfig(warmup_steps=10, decay_steps=100)
_ROUNDS, _CALLS = 6, 2


@dataclass(frozen=True)
class Size:
    """A model and how a batch of it is computed: `rows` in all, in `accumulation` parts."""

    width: int
    depth: int
    rows: int
    accumulation: int = 1

    def __str__(self) -> str:
        return f"width {self.width}, depth {self.depth}, rows {self.rows}/{self.accumulation}"

    @property
    def config(self) -> PiConfig:
        """π0.5 with the state as a token, f32."""
        w = self.width
        return PiConfig(
            vision=SiglipConfig(width=w, depth=self.depth, hidden=4 * w, heads=4, patch=8),
            language=GemmaConfig(w, self.depth, 4 * w, heads=4, kv_heads=1, head_dim=32),
            expert=GemmaConfig(w // 2, self.depth, 2 * w, heads=4, kv_heads=1, head_dim=32),
            image_size=48,
            vocabulary=1024,
            state_dim=8,
            action_dim=8,
            horizon=8,
            state_input="token",
            compute=Compute(dtype="float32"),
        )


CALIBRATION = (
    Size(64, 2, 8), Size(64, 4, 16), Size(64, 6, 8, 2), Size(128, 2, 4), Size(128, 6, 8),
    Size(128, 4, 16, 4), Size(256, 2, 8), Size(384, 2, 8),
)  # fmt: skip
HELD_OUT = (
    Size(64, 2, 32), Size(96, 3, 16), Size(128, 2, 16, 2), Size(192, 3, 8), Size(192, 5, 8),
    Size(256, 6, 8, 2), Size(256, 2, 16, 4), Size(320, 2, 8),
)  # fmt: skip


def batch(config: PiConfig, rows: int) -> PackedBatch:
    """Rows of two samples with two pictures and 12 words each."""
    rng = np.random.default_rng(0)
    layout = config.layout(prefix=172, samples=2, images=4)

    def sample(number: int) -> Sample:
        size = config.image_size
        return Sample(
            images=tuple(rng.integers(0, 256, (2, size, size, 3), np.uint8)),
            text=rng.integers(1, config.vocabulary, 12).astype(np.int32),
            state=rng.normal(size=config.state_dim).astype(np.float32),
            actions=rng.normal(size=(config.horizon, config.action_dim)).astype(np.float32),
            action_mask=np.ones((config.horizon, config.action_dim), bool),
            id=number,
        )

    return pack([[sample(2 * row), sample(2 * row + 1)] for row in range(rows)], layout)


def cost(size: Size) -> tuple[CallCost, float]:
    """Loss and gradient of one micro-batch, and bytes of the parameters."""
    model = Pi(size.config)
    part = batch(size.config, size.rows // size.accumulation)
    params = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    gradient = jax.value_and_grad(lambda p, b: model.loss(p, b, jax.random.key(0)), has_aux=True)
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    return work(gradient, params, part), float(held)


def features(size: Size) -> np.ndarray:
    """Terms that add up to a step's seconds, each with a rate to be calibrated."""
    found, held = cost(size)
    n = size.accumulation
    return np.array([n * found.flops, n * found.bytes, n * found.kernels, held, 1.0])


def measure(sizes: Sequence[Size], console: Console, rounds: int = _ROUNDS) -> dict[Size, Took]:
    """The fastest of all calls, by either clock."""
    calls = {}
    for s in track(sizes, "Compiling", console=console):
        rows = batch(s.config, s.rows)
        calls[s], _ = stepper(Pi(s.config), _OPTIMIZER, rows, accumulation=s.accumulation)
    for call in calls.values():
        jax.block_until_ready(call())
    best = {s: Took(np.inf, np.inf) for s in sizes}
    for _ in track(range(rounds), "Measuring", console=console):
        for (s, call), _ in itertools.product(calls.items(), range(_CALLS)):
            with timed() as took:
                jax.block_until_ready(call())
            best[s] = Took(min(best[s].wall, took.wall), min(best[s].cpu, took.cpu))
    return best


def run(console: Console, sizes: Sequence[Size] = CALIBRATION + HELD_OUT) -> dict[str, Any]:
    """Predicted over measured ratios of step times, of sizes that calibrated nothing.

    Ratios are to the first size that calibrated. `ratio` is the worst one, as far above or below 1
    as any of them.
    """
    measured = measure(sizes, console)
    costs = {size: features(size) for size in track(sizes, "Tracing", console=console)}
    known = [size for size in sizes if size in CALIBRATION]
    unknown = [size for size in sizes if size not in CALIBRATION]
    clocks: dict[str, dict[str, float]] = {}
    for clock in ("wall", "cpu"):
        seconds = {size: getattr(measured[size], clock) for size in sizes}
        rates = calibrate([costs[s] for s in known], [seconds[s] for s in known])
        first = known[0]
        clocks[clock] = {
            str(s): (costs[s] @ rates / (costs[first] @ rates)) / (seconds[s] / seconds[first])
            for s in unknown
        }
    table = Table("size", "s", "CPU s", "predicted over measured", "the same, CPU")
    for size in unknown:
        errors = (f"{clocks[clock][str(size)]:.3f}" for clock in clocks)
        table.add_row(str(size), f"{measured[size].wall:.3f}", f"{measured[size].cpu:.3f}", *errors)
    console.print(table)
    worst = {
        clock: max(ratios.values(), key=lambda r: abs(np.log(r)))
        for clock, ratios in clocks.items()
    }
    return {
        "ratio": worst["wall"],
        "cpu_ratio": worst["cpu"],
        "ours": "the worst predicted ratio of step times",
        "other": f"the measured, of {len(unknown)} sizes that calibrated nothing",
        "ratios": clocks,
        "measured": {str(size): vars(taken) for size, taken in measured.items()},
    }


def calibrate(costs: Sequence[np.ndarray], seconds: Sequence[float]) -> np.ndarray:
    """Seconds per unit of each feature, none below 0, by least squares of relative errors."""
    scaled = np.array([cost / taken for cost, taken in zip(costs, seconds, strict=True)])
    scale = scaled.max(axis=0)
    return nnls(scaled / scale, np.ones(len(scaled)))[0] / scale
