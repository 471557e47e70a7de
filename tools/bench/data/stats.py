"""Normalisation statistics of a dataset, compared with openpi's own computation of them.

openpi decodes every picture and collates every action chunk to look at states and actions; ours
reads those columns from the parquet. openpi's half (tools/bench/peers/openpi_stats.py) first
records 20 episodes of 100 frames with LeRobot, two 224 x 224 AV1 cameras.
"""

import os
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from data import open_dataset
from data.frames import ACTION, STATE
from data.statistics.stats import Stats, compute
from models.files.terminal import Console
from tools.bench.data.data import CACHE
from tools.bench.peer import asking, no_peer
from tools.bench.timing import timed

_HORIZON, _ROUNDS = 50, 30


def run(console: Console, peer: Path | None = None, cache: Path = CACHE) -> dict[str, Any]:
    """Frames per second over openpi's.

    Args:
      peer: a Python that has openpi and LeRobot.
      cache: holds the dataset, some 10 MB, for the next run.

    Raises:
      ValueError: no peer is given.
      FileNotFoundError: there is no such Python.
    """
    if peer is None:
        raise no_peer("stats", "openpi and LeRobot", "tools/bench/peers/openpi_stats.py")
    root = cache / "av1"
    root.parent.mkdir(parents=True, exist_ok=True)
    with asking(peer, "openpi_stats", {"HF_HOME": str(cache / "huggingface")}) as ask:
        about = ask(run="about")["versions"]
        console.print("LeRobot records a dataset (unless already recorded)")
        ask(run="make", root=str(root), kind="av1")
        console.print("openpi reads it")
        theirs = ask(run="stats", root=str(root), horizon=_HORIZON)
    ours, exact = measure(root)
    other = {key: theirs["frames"] / theirs[key] for key in ("seconds", "cpu_seconds")}
    return {
        "ratio": ours["frames/s"] / other["seconds"],
        "cpu_ratio": ours["frames/CPU-s"] / other["cpu_seconds"],
        "ours": f"{ours['frames/s']:,.0f} frames/s",
        "other": f"{other['seconds']:,.0f} by openpi's loader and histograms",
        "unit": "frames/s",
        "figures": {
            "ours": ours,
            "openpi": {"frames/s": other["seconds"], "frames/CPU-s": other["cpu_seconds"]},
        },
        "openpi_off": deviations(exact, theirs["statistics"]),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "peer": about,
    }


def measure(root: Path) -> tuple[dict[str, float], dict[str, Stats]]:
    """Frames a second and a CPU-second, and the statistics of states and actions."""
    took = []
    for _ in range(_ROUNDS):
        with timed() as one:
            dataset = open_dataset(root)
            stats = compute(dataset, names=(STATE, ACTION))
        took.append((one.wall, one.cpu))
    seconds, cpu_seconds = (median(times) for times in zip(*took, strict=True))
    frames = int(dataset.lengths.sum())
    return {"frames/s": frames / seconds, "frames/CPU-s": frames / cpu_seconds}, stats


def deviations(exact: dict[str, Stats], theirs: dict[str, dict[str, list]]) -> dict[str, float]:
    """Largest differences of openpi's numbers from the exact ones, in standard deviations."""
    names = {"state": STATE, "actions": ACTION}
    return {
        f"{key} {field}": float(
            np.max(np.abs(np.array(value) - exact[names[key]][field]) / exact[names[key]]["std"])
        )
        for key, of_key in theirs.items()
        for field, value in of_key.items()
    }
