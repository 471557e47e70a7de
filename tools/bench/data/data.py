"""Batches per second from a dataset, compared with LeRobot's DataLoader on the same files.

LeRobot's half (tools/bench/peers/lerobot.py) runs under a Python that has LeRobot, perhaps several
versions, with each of its backends and worker counts; the best one counts. Our rounds and LeRobot's
alternate, and ratios are taken within a round, so other work on the machine slows both alike.
CPU-seconds are those of every thread and worker.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
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
from models.files.terminal import Console
from models.inputs.tokenizer import Tokenizer
from tools.bench.peer import asking, no_peer
from tools.bench.timing import timed

CACHE = Path.home() / ".cache/chiliad/bench"
Form = Encoding | Literal["straight", "straight, exact"]
"""A frame store of that encoding, or the dataset as it is, with its pictures downscaled to within
one grey level of a store's, or equal to the last bit."""
Ask = Callable[..., dict[str, Any]]
_BATCH, _HORIZON, _ROUNDS = 32, 50, 3
_WARM, _PEER_WARM, _PEER_BATCHES = 8, 4, 8
_MODEL = replace(PiConfig(), horizon=_HORIZON, state_input="token")


@dataclass(frozen=True)
class BenchedRow:
    """A row of the result: what is read, of which kind of dataset, and the ratios to reach."""

    name: str
    kind: str
    form: Form
    batches: int
    ratio: float | None = None
    cpu_ratio: float | None = None


WORKS = (
    BenchedRow("JPEG frame store", "av1", "jpeg", 60, 4, 6),
    BenchedRow("raw frame store", "av1", "raw", 200, 15),
    BenchedRow("straight from AV1", "av1", "straight", 25, 1.5, 2.5),
    BenchedRow("straight from PNG in parquet", "png", "straight", 25, 50),
    BenchedRow("straight from H.264", "h264", "straight", 25),
)


class ReadRate(NamedTuple):
    """Batches read: samples a second, and seconds of a processor for each sample."""

    rate: float
    cpu: float


Round = dict[str, dict[str, ReadRate]]
"""Readings of a round: by reader or dataset, and by options."""


@dataclass(frozen=True)
class LeRobotPeer:
    """A LeRobot in an environment of its own: its name and version, the script that answers for it,
    and what it can decode with."""

    name: str
    ask: Ask
    backends: tuple[str, ...]
    versions: Mapping[str, str]


def compare(
    works: Sequence[BenchedRow],
    name: str,
    console: Console,
    peer: Sequence[Path] = (),
    cache: Path = CACHE,
) -> dict[str, Any]:
    """Samples per second relative to LeRobot's; `ratio` is that of the first row and the first
    peer.

    Args:
      peer: Pythons of environments with LeRobot; the first one records the datasets.
      cache: holds the datasets and stores, some 900 MB, for the next run.

    Raises:
      ValueError: no peer is given.
      FileNotFoundError: there is no such Python.
    """
    if not peer:
        raise no_peer(name, "LeRobot", "tools/bench/peers/lerobot.py")
    cache.mkdir(parents=True, exist_ok=True)
    load = os.getloadavg()[0]
    with ExitStack() as stack:
        asked = [
            stack.enter_context(asking(each, "lerobot", {"HF_HOME": str(cache / "huggingface")}))
            for each in peer
        ]
        others = [lerobot_peer(ask) for ask in asked]
        kinds = dict.fromkeys(work.kind for work in works)
        parts = [beside(works, kind, others, cache, console) for kind in kinds]
    rows = [row for part in parts for row in part]
    first, other = rows[0], rows[0]["peers"][others[0].name]
    return {
        "ratio": other["ratio"],
        "ours": f"{first['ours']:.0f} samples/s, {first['work']}",
        "other": f"{other['rate']:.0f} by {others[0].name}'s DataLoader; "
        f"{other['cpu_ratio']:.1f} times per CPU-second",
        "unit": "samples/s",
        "rows": rows,
        "cores": os.cpu_count(),
        "load": load,
        "peer": {each.name: each.versions for each in others},
    }


run = partial(compare, WORKS, "data")


def lerobot_peer(ask: Ask) -> LeRobotPeer:
    """The LeRobot that a script answers for."""
    about = ask(run="about")
    versions = about["versions"]
    return LeRobotPeer(f"LeRobot {versions['lerobot']}", ask, tuple(about["backends"]), versions)


def beside(
    works: Sequence[BenchedRow],
    kind: str,
    peers: Sequence[LeRobotPeer],
    cache: Path,
    console: Console,
) -> list[dict[str, Any]]:
    """The rows of one dataset: rounds of every LeRobot alternate with our rounds of every work."""
    root = cache / kind
    console.print(f"{peers[0].name} records '{kind}' (unless already recorded)", highlight=False)
    peers[0].ask(run="make", root=str(root), kind=kind)
    works = [work for work in works if work.kind == kind]
    calls: dict[str, dict[str, Callable[[int], ReadRate]]] = {}
    for peer in peers:
        full = product(peer.backends, (0, 1, 2))
        options = full if kind == "av1" else product(peer.backends[:1], (0, 2))
        calls[peer.name] = {
            f"{backend}, {workers} workers": peer_reader(peer.ask, root, backend, workers)
            for backend, workers in options
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
    found = [row(work, rounds, [peer.name for peer in peers]) for work in works]
    for of in found:
        for name, other in of["peers"].items():
            console.print(
                f"{of['work']}: {of['ours']:.0f} samples/s, {name} {other['rate']:.0f}; "
                f"{other['ratio']:.1f} times, {other['cpu_ratio']:.1f} times per CPU-second",
                highlight=False,
                soft_wrap=True,
            )
    return found


def row(work: BenchedRow, rounds: Sequence[Round], peers: Sequence[str]) -> dict[str, Any]:
    """Medians over the rounds; in each round, a side's best reading counts, for rate and cost
    separately. Ratios are taken within a round. `options` are those that were fastest most
    often."""
    ours = [best(readings[work.name]) for readings in rounds]
    return {
        "work": work.name,
        "ours": median(reading.rate for reading in ours),
        "cpu_ms": median(1000 * reading.cpu for reading in ours),
        "options": fastest(rounds, work.name),
        "peers": {name: _beside(ours, rounds, name) for name in peers},
        "target": {"ratio": work.ratio, "cpu_ratio": work.cpu_ratio},
    }


def _beside(ours: Sequence[ReadRate], rounds: Sequence[Round], name: str) -> dict[str, Any]:
    theirs = [best(readings[name]) for readings in rounds]
    pairs = list(zip(ours, theirs, strict=True))
    return {
        "rate": median(reading.rate for reading in theirs),
        "ratio": median(a.rate / b.rate for a, b in pairs),
        "ratios": sorted(a.rate / b.rate for a, b in pairs),
        "cpu_ms": median(1000 * reading.cpu for reading in theirs),
        "cpu_ratio": median(b.cpu / a.cpu for a, b in pairs),
        "options": fastest(rounds, name),
    }


def best(readings: dict[str, ReadRate]) -> ReadRate:
    """The highest rate and the lowest cost, whatever the options of each."""
    return ReadRate(max(r.rate for r in readings.values()), min(r.cpu for r in readings.values()))


def fastest(rounds: Sequence[Round], side: str) -> str:
    """The options whose rate was highest in most rounds."""
    return mode(max(r[side], key=lambda option: r[side][option].rate) for r in rounds)


def opened(root: Path, form: Form, cache: Path) -> Frames:
    """The dataset as a frame store of that encoding, or as it is."""
    dataset, size = open_dataset(root), _MODEL.image_size
    if form in ("jpeg", "raw"):
        return cached_store(dataset, size, form, cache / "stores")
    return open_direct(dataset, size, cache / "straight", exact=form == "straight, exact")


def loading(frames: Frames) -> tuple[Feed, Processor, Plan]:
    """Everything with which a run of π0.5 would load batches of 32 unpacked samples."""
    feed = Feed(frames, 0, frames.cameras, tuple(range(_HORIZON)))
    texts = [wording for task in frames.prompts for wording in task]
    scales = normalizer(frames.stats[STATE], STATE), normalizer(frames.stats[ACTION], ACTION)
    robot = Embodiment(frames.name, frames.cameras, *scales)
    processor = _MODEL.processor([robot], Tokenizer.build(texts, _MODEL.vocabulary))
    source = plan_source(feed, processor)
    images, text = int(source.images.max()), int(source.text.max())
    needed = _MODEL.layout(prefix=0, samples=1, images=images).prefix_length(images, text)
    layout = _MODEL.layout(prefix=needed, samples=1, images=images, text=text)
    return feed, processor, Plan([source], layout, _BATCH)


def reader(frames: Frames, threads: int, batches: int) -> Callable[[int], ReadRate]:
    """Reads batches with our loader, different ones in every round."""
    feed, processor, plan = loading(frames)

    def read(number: int) -> ReadRate:
        start = number * (batches + _WARM)
        with Loader([feed], processor, plan, start_step=start, threads=threads) as loader:
            for _ in range(_WARM):
                next(loader)
            with timed() as took:
                samples = sum(sum(next(loader)[1].samples.values()) for _ in range(batches))
        return ReadRate(samples / took.wall, took.cpu / samples)

    return read


def peer_reader(ask: Ask, root: Path, backend: str, workers: int) -> Callable[[int], ReadRate]:
    """Has LeRobot read batches, different ones in every round."""
    slow = root.name == "png"
    batches, warm = (2 * max(workers, 1),) * 2 if slow else (_PEER_BATCHES, _PEER_WARM)
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
