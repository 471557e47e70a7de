"""Samples per second from the way the recipe's authors began to ours, one change at a time,
compared with their own ladder (arXiv 2603.11101), for π0.5 and GR00T.

Pictures, tokens of a picture, prompt limit, chunks and heads' inputs are as released; widths and
depths are small. Every rung trains on the same samples in the same steps, and the benchmark stops
if a loss differs. Loading alone, computing alone and both together are timed in rounds in which all
rungs take turns, so that a drifting machine slows them alike. `--peer` is the Python of an
environment that has LeRobot, whose DataLoader then reads the same files in every round.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure
from rich.table import Table

from models import PackedBatch, PiConfig
from models.attention.attention import Implementation
from models.families.groot.model import GrootConfig
from models.files.terminal import Console, track
from models.layers.dit import TransformerConfig
from models.layers.gemma import GemmaConfig
from models.layers.layers import Compute
from models.layers.qwen3 import QwenConfig
from models.layers.siglip import SiglipConfig
from models.model import rules_of
from parallel.mesh import MeshConfig, make_mesh
from parallel.optimizer import OptimizerConfig
from parallel.step import abstract_state, init_state, make_train_step, state_from
from tools.bench.data.data import CACHE, ReadRate
from tools.bench.ladder.dataset import make
from tools.bench.ladder.rungs import RUNGS, LaidRung, laid, opened
from tools.bench.peer import asking
from tools.bench.timing import timed

FIGURE = Path("ladder.svg")
"""Path of the figure, in the folder that the benchmark is run in."""
TOLERANCE = 1e-5
"""Largest relative difference of a step's loss from the first rung's."""
RECIPE = {
    "an epoch of GR00T-N1.5 on 1,024 GPUs, 15 h to 22 min": 15 * 60 / 22,
    "π0.5: dynamic padding and the absent camera pruned": 1.65,
    "packing, of Qwen2.5-VL": 1.88,
}
"""The recipe's own ratios; its packing was measured on a vision-language model alone."""

BenchedModel = PiConfig | GrootConfig

_VISION = SiglipConfig(width=64, depth=1, hidden=256, heads=2)
_COMPUTE = Compute("float32")
MODELS: dict[str, BenchedModel] = {
    "π0.5": PiConfig(
        vision=_VISION,
        language=GemmaConfig(64, 1, 512, heads=1, kv_heads=1, head_dim=32),
        expert=GemmaConfig(32, 1, 128, heads=1, kv_heads=1, head_dim=32),
        vocabulary=1024,
        compute=_COMPUTE,
    ),
    "GR00T-N1.5": GrootConfig(
        vision=_VISION,
        language=QwenConfig(64, 1, 192, heads=2, kv_heads=1, head_dim=32),
        adapter=TransformerConfig(depth=1, heads=2, head_dim=32),
        dit=TransformerConfig(depth=2, heads=2, head_dim=32),
        vocabulary=1024,
        image_token=1023,
        hidden=64,
        compute=_COMPUTE,
    ),
}
"""Real in tokens, slots, prompts and chunks; narrow enough for two cores."""
_OPTIMIZER = OptimizerConfig(learning_rate=2.5e-5, warmup_steps=1000, decay_steps=30_000)
_SEED, _NOISE = 0, 0.05


@dataclass(frozen=True)
class LadderSizes:
    """A dataset of `episodes` episodes of `frames` frames, with `samples` samples per step. A
    reading takes `loaded` batches if loading is timed alone, otherwise `trained`, after `warm`
    batches that are not timed."""

    episodes: int = 16
    frames: int = 40
    picture: int = 256
    samples: int = 8
    loaded: int = 8
    trained: int = 3
    warm: int = 2
    rounds: int = 3


class LadderReading(NamedTuple):
    """A rung's rates and costs in a round: of loading alone, of computing alone, of both."""

    loading: ReadRate
    computing: ReadRate
    together: ReadRate


@dataclass(frozen=True)
class PreparedRung:
    """A rung ready to be timed: its training step, the batches of its timed steps, their mean loss
    at the first parameters and how `far` one of them is from the first rung's."""

    laid: LaidRung
    train: Callable[[PackedBatch], None]
    kept: tuple[PackedBatch, ...]
    loss: float
    far: float


def run(
    console: Console,
    peer: Path | None = None,
    cache: Path = CACHE,
    figure: Path = FIGURE,
    sizes: LadderSizes | None = None,
    models: Mapping[str, BenchedModel] = MODELS,
) -> dict[str, Any]:
    """Samples per second of every rung for every model, and a figure; `ratio` is the last rung over
    the first for the first model, with loading and computing together.

    Args:
      peer: a Python that has LeRobot; without one its reading is left out, and the result says so.
      cache: holds the dataset and its frame store, some 250 MB, for the next run.

    Raises:
      ValueError: a rung's loss is not the first one's.
      FileNotFoundError: there is no such Python.
    """
    sizes = LadderSizes() if sizes is None else sizes
    name = f"ladder-{sizes.episodes}x{sizes.frames}-{sizes.picture}"
    root = make(cache / name, sizes.episodes, sizes.frames, sizes.picture)
    with ExitStack() as stack:
        ask = None
        if peer is not None:
            home = {"HF_HOME": str(cache / "huggingface")}
            ask = stack.enter_context(asking(peer, "lerobot", home))
        found = {}
        for name, config in models.items():
            found[name] = climbed(name, config, root, cache, sizes, console, ask)
            console.print(table(name, found[name]))
        about = ask(run="about")["versions"] if ask else None
    draw(found, figure)
    first = next(iter(found.values()))["rungs"]
    return {
        "ratio": first[-1]["together"]["over_first"],
        "ours": f"{first[-1]['together']['samples/s']:.1f} samples/s, packed from a frame store",
        "other": f"{first[0]['together']['samples/s']:.1f} as the recipe's authors began",
        "unit": "samples/s",
        "models": found,
        "recipe": RECIPE,
        "sizes": asdict(sizes),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg(),
        "peer": about or "LeRobot was not there; --peer names a Python that has it",
        "figure": str(figure),
    }


def climbed(
    name: str,
    config: BenchedModel,
    root: Path,
    cache: Path,
    sizes: LadderSizes,
    console: Console,
    ask: Callable[..., dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """All rungs of a model: medians over the rounds, in which they take turns."""
    rungs = prepared(config, root, cache, sizes, console)
    rounds, peer = [], []
    for number in track(range(sizes.rounds), f"{name}: rounds", console=console):
        rounds.append([reading(rung, sizes) for rung in rungs])
        if ask is not None:
            peer.append(lerobots(ask, root, config.horizon, sizes, number))
    return {
        "sizes": widths(config),
        "loss_difference": max(rung.far for rung in rungs),
        "rungs": [
            row(rungs[i], [each[i] for each in rounds], [each[0] for each in rounds])
            for i in range(len(rungs))
        ],
        "lerobot_loading": _spread(peer) if peer else None,
    }


def prepared(
    config: BenchedModel, root: Path, cache: Path, sizes: LadderSizes, console: Console
) -> list[PreparedRung]:
    """Every rung with its step compiled for the batches that will be timed.

    Raises:
      ValueError: a loss on these batches, at the parameters that training begins with, differs
        from the first rung's by more than 1e-5 of it.
    """
    frames = opened(root, config.image_size, cache)
    steps: dict[Implementation, Any] = {}
    rungs: list[PreparedRung] = []
    expected = np.zeros(0)
    for rung in track(RUNGS, "Compiling, comparing losses", console=console):
        if rung.attention not in steps:
            compute = replace(config.compute, attention=rung.attention)
            steps[rung.attention] = trainer(replace(config, compute=compute))
        of, (loss, train) = laid(rung, config, frames, sizes.samples), steps[rung.attention]
        with of.batches() as batches:
            steps_timed = islice(batches, sizes.warm, sizes.warm + sizes.trained)
            kept = tuple(jax.device_put(tuple(steps_timed)))
        losses = np.array([loss(batch) for batch in kept])
        expected = expected if rungs else losses
        far = difference(rung.name, losses, expected)
        rungs.append(PreparedRung(of, train, kept, float(losses.mean()), far))
    return rungs


def difference(name: str, losses: Float[np.ndarray, " n"], first: Float[np.ndarray, " n"]) -> float:
    """The largest difference of a rung's losses from the first rung's, relative to these.

    Raises:
      ValueError: it is more than 1e-5.
    """
    far = float(np.abs(losses / first - 1).max())
    if not far <= TOLERANCE:
        raise ValueError(
            f"On the rung '{name}' a loss differs from the first rung's by {far:.1e} of it, "
            f"expected at most {TOLERANCE:.0e}; speeds of different computations cannot be "
            "compared."
        )
    return far


def trainer(
    config: BenchedModel,
) -> tuple[Callable[[PackedBatch], float], Callable[[PackedBatch], None]]:
    """Two functions: a batch's loss at the first parameters, `stirred`, by the training step
    itself; and that step from the last state on, which ends when the device is done."""
    model, mesh = config.build(), make_mesh(MeshConfig(), jax.devices()[:1])
    abstract = abstract_state(model, _OPTIMIZER, rules_of(model), mesh)
    step = make_train_step(model, _OPTIMIZER, mesh, abstract)
    drawn = init_state(model, _OPTIMIZER, abstract, _SEED).params
    first = state_from(stirred(drawn), _OPTIMIZER, abstract)
    state = jax.tree.map(jnp.copy, first)

    def loss(batch: PackedBatch) -> float:
        return float(step(jax.tree.map(jnp.copy, first), batch, _SEED)[1]["loss"])

    def train(batch: PackedBatch) -> None:
        nonlocal state
        state, metrics = step(state, batch, _SEED)
        jax.block_until_ready(metrics)

    return loss, train


def stirred(params: Any) -> Any:
    """The parameters with noise. Models begin with gates of 0, so that no loss depends on pictures
    or prompt, and none could show that a rung reads them wrongly."""
    draw = np.random.default_rng(_SEED)
    return jax.tree.map(
        lambda p: p + jnp.asarray(_NOISE * draw.standard_normal(p.shape, np.float32)), params
    )


def reading(rung: PreparedRung, sizes: LadderSizes) -> LadderReading:
    """The rung's rates, on the same steps in every round."""
    warm, trained = sizes.warm, sizes.trained

    def rate(batches: Iterable[PackedBatch], use: Callable[[PackedBatch], None]) -> ReadRate:
        with timed() as took:
            samples = sizes.samples * sum(1 for _ in map(use, batches))
        return ReadRate(samples / took.wall, took.cpu / samples)

    with rung.laid.batches() as batches:
        rate(islice(batches, warm), _nothing)
        loading = rate(islice(batches, sizes.loaded), _nothing)
    computing = rate(rung.kept, rung.train)
    with rung.laid.batches() as batches:
        rate(islice(batches, warm), rung.train)
        together = rate(islice(batches, trained), rung.train)
    return LadderReading(loading, computing, together)


def lerobots(
    ask: Callable[..., dict[str, Any]], root: Path, chunk: int, sizes: LadderSizes, seed: int
) -> float:
    """Samples a second that LeRobot's DataLoader loads, in this process or in two others, whichever
    is faster."""
    found = [
        ask(
            run="read", root=str(root), backend=ask(run="about")["backends"][0], workers=workers,
            batch=sizes.samples, chunk=chunk, warm=2, batches=max(sizes.loaded // 4, 1), seed=seed,
        )
        for workers in (0, 2)
    ]  # fmt: skip
    return max(reading["samples"] / reading["seconds"] for reading in found)


def row(
    rung: PreparedRung, readings: Sequence[LadderReading], first: Sequence[LadderReading]
) -> dict[str, Any]:
    """Medians over the rounds of samples per second, with their range, and of CPU-milliseconds per
    sample; ratios to the first rung are taken within a round.

    `elsewhere`: rate of both together if computing took none of the cores that load: the slower of
    the two or, without reading ahead, one after the other.
    """
    ahead, batch = rung.laid.rung.ahead, rung.kept[0]
    loading, computing, _ = (median(r.rate for r in of) for of in zip(*readings, strict=True))
    timed = {
        name: {
            "samples/s": median(r.rate for r in of),
            "range": [min(r.rate for r in of), max(r.rate for r in of)],
            "over_first": median(r.rate / b.rate for r, b in zip(of, began, strict=True)),
            "cpu_ms": median(1000 * r.cpu for r in of),
            "cpu_over_first": median(b.cpu / r.cpu for r, b in zip(of, began, strict=True)),
        }
        for name, of, began in zip(
            LadderReading._fields,
            zip(*readings, strict=True),
            zip(*first, strict=True),
            strict=True,
        )
    }
    return {
        **asdict(rung.laid.rung),
        **timed,
        "elsewhere": min(loading, computing) if ahead else 1 / (1 / loading + 1 / computing),
        "rows": list(batch.prefix_segment.shape),
        "fill": float(np.mean([np.mean(b.prefix_segment > 0) for b in rung.kept])),
        "loss": rung.loss,
    }


def widths(config: BenchedModel) -> dict[str, Any]:
    """The model's sizes, and how many parameters that makes."""
    params = jax.eval_shape(config.build().init, jax.random.key(0))
    count = sum(int(np.prod(p.shape)) for p in jax.tree.leaves(params))
    return {"parameters": count, "tokens_per_image": config.tokens_per_image, **asdict(config)}


def draw(found: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Rates of each rung, a panel for each model; beside them our gains and the recipe's."""
    figure = Figure(figsize=(5 * len(found) + 3, 4.4), layout="constrained")
    *panels, last = figure.subplots(1, len(found) + 1)
    names = [rung.name for rung in RUNGS]
    for axes, (name, family) in zip(panels, found.items(), strict=True):
        for what, mark in (("loading", "s:"), ("computing", "^:"), ("together", "o-")):
            rates = [rung[what]["samples/s"] for rung in family["rungs"]]
            low, high = zip(*(rung[what]["range"] for rung in family["rungs"]), strict=True)
            (line,) = axes.semilogx(rates, range(len(names)), mark, label=what, markersize=5)
            axes.fill_betweenx(range(len(names)), low, high, color=line.get_color(), alpha=0.15)
        if family["lerobot_loading"]:
            axes.plot(family["lerobot_loading"]["median"], 0, "kx", label="LeRobot's loading")
        axes.set(title=name, xlabel="samples/s (two cores)")
        axes.set_yticks(range(len(names)), names if axes is panels[0] else [""] * len(names))
        axes.invert_yaxis()
        axes.grid(alpha=0.3)
    panels[0].legend(frameon=False, fontsize=8)
    ours = {name: gains(family["rungs"]) for name, family in found.items()} | {
        "the recipe's": list(RECIPE.values())
    }
    places, height = np.arange(len(RECIPE)), 0.8 / len(ours)
    for number, ((name, ratios), grey) in enumerate(
        zip(ours.items(), np.linspace(0.2, 0.8, len(ours)), strict=True)
    ):
        bars = last.barh(places + number * height, ratios, height, label=name, color=str(grey))
        last.bar_label(bars, [f"{ratio:.2f}" for ratio in ratios], padding=2, fontsize=8)
    last.set_xscale("log")
    last.set_yticks(places + height, ["loading", "pruned,\nlongest", "packed"])
    last.set(title="times cheaper", xlabel="CPU-seconds; the recipe's: time", xlim=(0.5, 900))
    last.invert_yaxis()
    last.legend(frameon=False, fontsize=8)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def gains(rungs: Sequence[Mapping[str, Any]]) -> list[float]:
    """Ratios that correspond to the recipe's, in CPU-seconds per sample, which other work on the
    machine does not enter: of loading alone, from the first rung to the frame store; and of
    computing alone, by pruning and shorter prompts, and by packing with its attention."""
    at = {name: number for number, name in enumerate(rung.name for rung in RUNGS)}
    stored, longest = at["frame store"], at["batch's longest prompt"]

    def gain(what: str, before: int, after: int) -> float:
        return rungs[before][what]["cpu_ms"] / rungs[after][what]["cpu_ms"]

    return [
        gain("loading", 0, stored),
        gain("computing", stored, longest),
        gain("computing", longest, len(rungs) - 1),
    ]


def table(name: str, family: Mapping[str, Any]) -> Table:
    """Samples per second of each rung, then CPU-milliseconds per sample."""
    parts = LadderReading._fields
    shown = Table(name, *parts, "over first", *(f"{n}, CPU ms" for n in parts), "rows", "fill")
    for rung in family["rungs"]:
        shown.add_row(
            rung["name"],
            *(f"{rung[n]['samples/s']:,.1f}" for n in parts),
            f"{rung['together']['over_first']:.2f}",
            *(f"{rung[n]['cpu_ms']:,.1f}" for n in parts),
            " × ".join(map(str, rung["rows"])),
            f"{rung['fill']:.0%}",
        )
    if family["lerobot_loading"]:
        shown.add_row("LeRobot's DataLoader", f"{family['lerobot_loading']['median']:,.1f}")
    return shown


def _nothing(batch: PackedBatch) -> None:
    """Leaves a batch as it was loaded."""


def _spread(rates: Sequence[float]) -> dict[str, Any]:
    return {"median": median(rates), "range": [min(rates), max(rates)]}
