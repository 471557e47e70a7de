"""Batches a second from a dataset, beside LeRobot's DataLoader on the same files.

LeRobot's half (tools/bench/peers/lerobot.py) records the datasets and runs under a Python that has
it, with each of its backends and worker counts, of which the best counts. Rounds of ours and of
LeRobot's alternate and ratios are taken within a round, so other work on the machine slows both
alike; CPU-seconds are those of every thread and worker.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median, mode
from typing import Any, Literal, NamedTuple

from data import open_dataset
from data.frames import ACTION, STATE, Feed, Frames
from data.loader.loader import Loader, plan_source
from data.packing.plan import Plan
from data.statistics.scaling import normalizer
from data.store.convert import Encoding
from data.store.direct import open_direct
from data.store.store import cached_store
from models import Embodiment, PiConfig, Processor
from models.inputs.tokenizer import Tokenizer
from models.terminal import Console
from tools.bench.peer import asking

CACHE = Path.home() / ".cache/chiliad/bench"
_PEER = "LeRobot"
_BATCH, _HORIZON, _ROUNDS = 32, 50, 3
_WARM, _PEER_WARM, _PEER_BATCHES = 8, 4, 8
_MODEL = replace(PiConfig(), horizon=_HORIZON, state_input="token")


@dataclass(frozen=True)
class BenchedRow:
    """A row of the result: what is read, of which kind of dataset, and the ratios to reach."""

    name: str
    kind: str
    form: Encoding | Literal["straight"]
    batches: int
    ratio: float | None = None
    cpu_ratio: float | None = None


WORKS = (
    BenchedRow("JPEG frame store", "av1", "jpeg", 60, 4, 6),
    BenchedRow("raw frame store", "av1", "raw", 200, 15),
    BenchedRow("straight from AV1", "av1", "straight", 25, 1.5, 2.5),
    BenchedRow("straight from PNG in parquet", "png", "straight", 25, 50),
    BenchedRow("straight from H.264", "h264", "straight", 25),
    BenchedRow("straight from AV1 of 480 x 640", "av1_480", "straight", 8),
)


class ReadRate(NamedTuple):
    """Batches read: samples a second, and seconds of a processor for each sample."""

    rate: float
    cpu: float


Round = dict[str, dict[str, ReadRate]]
"""Readings of a round: by reader or dataset, and by options."""


def run(console: Console, peer: Path | None = None, cache: Path = CACHE) -> dict[str, Any]:
    """Samples a second over LeRobot's, `ratio` being that of the first row.

    Args:
      peer: a Python that has LeRobot.
      cache: holds the datasets and stores, some 900 MB, for the next run.

    Raises:
      ValueError: no peer is given.
      FileNotFoundError: there is no such Python.
    """
    if peer is None:
        raise ValueError(
            "The data benchmark needs --peer PYTHON, the Python of an environment that has "
            "LeRobot; the first lines of tools/bench/peers/lerobot.py say how to make one."
        )
    cache.mkdir(parents=True, exist_ok=True)
    with asking(peer, "lerobot", {"HF_HOME": str(cache / "huggingface")}) as ask:
        about = ask(run="about")
        kinds = list(dict.fromkeys(work.kind for work in WORKS))
        parts = [beside(ask, kind, about["backends"], cache, console) for kind in kinds]
    rows = [row for part in parts for row in part]
    first = rows[0]
    return {
        "ratio": first["ratio"],
        "ours": f"{first['ours']:.0f} samples/s from a {first['work']}",
        "other": f"{first['peer']:.0f} by LeRobot's DataLoader; {first['cpu_ratio']:.1f} times per "
        "CPU-second",
        "unit": "samples/s",
        "rows": rows,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "peer": about["versions"],
    }


def beside(
    ask: Callable[..., dict[str, Any]],
    kind: str,
    backends: Sequence[str],
    cache: Path,
    console: Console,
) -> list[dict[str, Any]]:
    """The rows of one dataset: LeRobot's rounds on it alternate with ours of every work."""
    root = cache / kind
    console.print(f"LeRobot records '{kind}', unless it has before", highlight=False)
    ask(run="make", root=str(root), kind=kind)
    works = [work for work in WORKS if work.kind == kind]
    options = product(backends, (0, 1, 2)) if kind == "av1" else product(backends[:1], (0, 2))
    calls: dict[str, dict[str, Callable[[int], ReadRate]]] = {
        _PEER: {
            f"{backend}, {workers} workers": peer_reader(ask, root, backend, workers)
            for backend, workers in options
        }
    }
    for work in works:
        frames = opened(root, work.form, cache)
        calls[work.name] = {
            f"{threads} threads": reader(frames, threads, work.batches) for threads in (1, 2)
        }
    rounds: list[Round] = []
    for number in range(_ROUNDS):
        console.print(f"'{kind}': round {number + 1} of {_ROUNDS}", highlight=False)
        rounds.append(
            {
                name: {option: call(number) for option, call in options.items()}
                for name, options in calls.items()
            }
        )
    found = [row(work, rounds) for work in works]
    for of in found:
        console.print(
            f"{of['work']}: {of['ours']:.0f} samples/s, LeRobot {of['peer']:.0f}; "
            f"{of['ratio']:.1f} times, {of['cpu_ratio']:.1f} times per CPU-second",
            highlight=False,
            soft_wrap=True,
        )
    return found


def row(work: BenchedRow, rounds: Sequence[Round]) -> dict[str, Any]:
    """Medians over the rounds, of which each side's best reading counts, in rate and in cost each;
    ratios are taken within a round. `options` are those that were fastest most often."""
    ours = [best(readings[work.name]) for readings in rounds]
    peer = [best(readings[_PEER]) for readings in rounds]
    return {
        "work": work.name,
        "ours": median(reading.rate for reading in ours),
        "peer": median(reading.rate for reading in peer),
        "ratio": median(a.rate / b.rate for a, b in zip(ours, peer, strict=True)),
        "cpu_ms": median(1000 * reading.cpu for reading in ours),
        "peer_cpu_ms": median(1000 * reading.cpu for reading in peer),
        "cpu_ratio": median(b.cpu / a.cpu for a, b in zip(ours, peer, strict=True)),
        "target": {"ratio": work.ratio, "cpu_ratio": work.cpu_ratio},
        "options": {side: fastest(rounds, side) for side in (work.name, _PEER)},
    }


def best(readings: dict[str, ReadRate]) -> ReadRate:
    """The highest rate and the lowest cost, whatever the options of each."""
    return ReadRate(max(r.rate for r in readings.values()), min(r.cpu for r in readings.values()))


def fastest(rounds: Sequence[Round], side: str) -> str:
    """The options whose rate was highest in most rounds."""
    return mode(max(r[side], key=lambda option: r[side][option].rate) for r in rounds)


def opened(root: Path, form: Encoding | Literal["straight"], cache: Path) -> Frames:
    """The dataset as a frame store of that encoding, or as it is."""
    if form == "straight":
        return open_direct(open_dataset(root), _MODEL.image_size, cache / "straight")
    return cached_store(open_dataset(root), _MODEL.image_size, form, cache / "stores")


def loading(frames: Frames) -> tuple[Feed, Processor, Plan]:
    """All that a run of π0.5 would load batches of 32 unpacked samples with."""
    feed = Feed(frames, 0, frames.cameras, tuple(range(_HORIZON)))
    texts = [wording for task in frames.prompts for wording in task]
    processor = Processor(
        image_size=_MODEL.image_size,
        state_dim=_MODEL.state_dim,
        action_dim=_MODEL.action_dim,
        horizon=_HORIZON,
        state_input=_MODEL.state_input,
        words=Tokenizer.build(texts, _MODEL.vocabulary).words,
        embodiments=(
            Embodiment(
                frames.name,
                frames.cameras,
                normalizer(frames.stats[STATE], STATE),
                normalizer(frames.stats[ACTION], ACTION),
            ),
        ),
    )
    source = plan_source(feed, processor)
    images, text = int(source.images.max()), int(source.text.max())
    needed = _MODEL.layout(prefix=0, samples=1, images=images).prefix_length(images, text)
    layout = _MODEL.layout(prefix=needed, samples=1, images=images, text=text)
    return feed, processor, Plan([source], layout, _BATCH)


def reader(frames: Frames, threads: int, batches: int) -> Callable[[int], ReadRate]:
    """Reads batches of ours, others in every round."""
    feed, processor, plan = loading(frames)

    def read(number: int) -> ReadRate:
        start = number * (batches + _WARM)
        with Loader([feed], processor, plan, start_step=start, threads=threads) as loader:
            for _ in range(_WARM):
                next(loader)
            cpu, begin = time.process_time(), time.perf_counter()
            samples = sum(sum(next(loader)[1].samples.values()) for _ in range(batches))
            seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        return ReadRate(samples / seconds, cpu / samples)

    return read


def peer_reader(
    ask: Callable[..., dict[str, Any]], root: Path, backend: str, workers: int
) -> Callable[[int], ReadRate]:
    """Has LeRobot read batches, others in every round."""
    slow = root.name == "png"
    batches, warm = (max(workers, 1),) * 2 if slow else (_PEER_BATCHES, _PEER_WARM)
    options = {"batch": _BATCH, "chunk": _HORIZON, "warm": warm}

    def read(number: int) -> ReadRate:
        found = ask(
            run="read", root=str(root), backend=backend, workers=workers, batches=batches,
            seed=number, **options,
        )  # fmt: skip
        return ReadRate(
            found["samples"] / found["seconds"], found["cpu_seconds"] / found["samples"]
        )

    return read
