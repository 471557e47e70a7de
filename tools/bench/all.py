"""Run every benchmark that a CPU can run, one after another, each in its own process.

    python -m tools.bench all --list         # lists them, and how long each takes
    python -m tools.bench all                # measures them, in about 21 hours
    python -m tools.bench all --quick        # only those that take at most five minutes
    python -m tools.bench all --keep         # then replaces the committed results
    python -m tools.bench all --again --peer pi05 OPENPI/bin/python data LEROBOT/bin/python

If a benchmark takes several Pythons, name it once with each.

Each result is written to runs/bench/NAME.json as soon as it is there, with the commit that made it,
the machine's load before it began and the seconds that it took. A benchmark that fails, or is ended
by a signal, writes nothing and does not stop the others; the next call runs it again. At the end, a
table shows what was measured beside the committed results (docs/results/data). With --keep, it
replaces these, and the pages' figures are rewritten from them. The image that rl draws is in the
repository's root. Rates are meaningful only on a machine that does nothing else. Benchmarks
that need a GPU: `python -m tools.bench.gpu`.
"""

import json
import os
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.table import Table

from models.files.terminal import Console, track
from parallel.runs.atomic import replace_text
from tools.bench import pages
from tools.bench.process import ended, last_json
from tools.command_line.ending import in_a_line
from tools.command_line.versions import commit

DATA = pages.ROOT / "docs" / "results" / "data"
"""Folder of the committed results."""
OUT = pages.ROOT / "runs" / "bench"
QUICK = 5
"""Largest number of minutes that a quick benchmark takes."""
_PATIENCE = 4
"""A benchmark is stopped after this many times its expected time, plus ten minutes."""


@dataclass(frozen=True)
class CpuBench:
    """A benchmark of `tools.bench`, and about how many minutes it takes on two cores, as its page
    says or as guessed from its rounds."""

    name: str
    minutes: float
    about: str
    peer: str = ""
    """Package of the other side, in an environment of its own, which the benchmark needs."""
    of: tuple[str, ...] = ()
    """Benchmark of which it is a part or another size, and the options that select it."""


BENCHES = (
    CpuBench("recipe", 1, "the recipe's scaling table, predicted"),
    CpuBench("packing", 2, "training steps packed and padded"),
    CpuBench("plan", 3, "how full rows are, compared with grain's packer"),
    CpuBench("attention", 3, "attention over packed rows"),
    CpuBench("serve", 3, "requests a second in batches and one at a time"),
    CpuBench("colocated", 4, "RL on one device"),
    CpuBench("sim", 4, "steps and images a second of each simulator"),
    CpuBench("libero", 1, "LIBERO's steps a second, compared with its own environment"),
    CpuBench("predict", 5, "predicted and measured training steps"),
    CpuBench("rl", 8, "the levels of asynchronous RL"),
    CpuBench("act", 10, "latency of acting, compared with openpi's", "openpi"),
    CpuBench("pi05", 5, "π0.5 compared with openpi", "openpi"),
    CpuBench("cameras", 10, "images of 480 x 640, compared with LeRobot's DataLoader", "LeRobot"),
    CpuBench("data", 10, "batches, compared with LeRobot's DataLoader", "LeRobot"),
    CpuBench("stats", 10, "statistics, compared with openpi's script", "openpi and LeRobot"),
    CpuBench(
        "pi05_real", 20, "layers of π0.5's released widths, compared with openpi's", "openpi",
        of=("pi05", "--width", "real"),
    ),
    CpuBench(
        "serve_real", 10, "a server's start with π0.5 as released (all of 24 GB)",
        of=("serve", "--width", "real"),
    ),
    CpuBench(
        "packing_real", 4, "training steps packed and padded, released widths",
        of=("packing", "--width", "real"),
    ),
    CpuBench("qlora", 60, "bytes of steps compiled for an H100"),
    CpuBench(
        "learn_reach", 90, "seconds and samples until a policy reaches",
        of=("learn", "--task", "tabletop-reach"),
    ),
    CpuBench(
        "learn_lift", 120, "seconds and samples until a policy lifts",
        of=("learn", "--task", "tabletop-lift"),
    ),
    CpuBench(
        "learn_door", 300, "seconds and samples until a policy opens Meta-World's door",
        of=("learn", "--task", "metaworld-door-open-v3"),
    ),
    CpuBench("families", 560, "success of each family after ten minutes of training", "LeRobot"),
)  # fmt: skip


@dataclass(frozen=True)
class BenchOutcome:
    """A benchmark that was begun or left out: seconds (none if it was not begun), and its
    outcome."""

    name: str
    said: str
    seconds: float | None = None
    failed: bool = False


def main(
    quick: bool = False,
    again: bool = False,
    listing: Annotated[bool, tyro.conf.arg(name="list")] = False,
    keep: bool = False,
    out: Path = OUT,
    peer: tuple[tuple[str, Path], ...] = (),
) -> None:
    """Measure everything that a CPU can.

    Args:
      quick: leave out benchmarks that take more than five minutes.
      again: also run benchmarks that have a result in --out.
      listing: only list the benchmarks, and how long each takes or took.
      keep: at the end, replace the committed results by those in --out, and rewrite the pages'
        figures.
      out: folder of the results.
      peer: names of benchmarks, each with the Python of an environment that has its other side.
    """
    console, peers = Console(), defaultdict[str, list[Path]](list)
    for name, python in peer:
        peers[name].append(python)
    if unknown := peers.keys() - {each.name for each in BENCHES if each.peer}:
        raise ValueError(
            f"--peer names {', '.join(unknown)}; expected benchmarks that compare with other code."
        )
    chosen = [each for each in BENCHES if not quick or each.minutes <= QUICK]
    if listing:
        console.print(listed(chosen, out))
        return
    with in_a_line(
        f"Finished results are kept in {out}; run the same command again to continue.", writing=out
    ):
        outcomes = measure(chosen, out, console, lambda each: command(each, peers), again)
        console.print(summary(outcomes))
        if keep:
            replace_committed(chosen, out)
            pages.main()
    if any(each.failed for each in outcomes):
        sys.exit(1)


def command(bench: CpuBench, peers: Mapping[str, Sequence[Path]]) -> list[str]:
    """Command that runs a benchmark; empty if it needs another side and none is given."""
    given = [str(python.absolute()) for python in peers.get(bench.name, ())]
    if bench.peer and not given:
        return []
    other = ["--peer", *given] if given else []
    return [sys.executable, "-m", "tools.bench", *(bench.of or [bench.name]), *other, "--json"]


def measure(
    benches: Sequence[CpuBench],
    out: Path,
    console: Console,
    words: Callable[[CpuBench], Sequence[str]],
    again: bool = False,
) -> list[BenchOutcome]:
    """Runs the benchmarks that have no result in `out` yet, each by its command, and keeps their
    results there. Says first how long that takes in total."""
    out.mkdir(parents=True, exist_ok=True)
    outcomes = []
    left = [
        each
        for each in benches
        if words(each) and (again or not (out / f"{each.name}.json").is_file())
    ]
    total = _time(60 * sum(each.minutes for each in left))
    console.print(f"Measuring {len(left)} benchmarks into {out}; in total about {total}.")
    for bench in track(benches, "Benchmarks", console=console):
        file = out / f"{bench.name}.json"
        if file.is_file() and not again:
            outcomes.append(BenchOutcome(bench.name, f"earlier: {_told(_read(file))}"))
        elif not (asked := words(bench)):
            said = f"skipped: give --peer {bench.name} PYTHON, a Python that has {bench.peer}"
            outcomes.append(BenchOutcome(bench.name, said))
        else:
            console.print(f"{bench.name}: {bench.about}, about {_time(60 * bench.minutes)}")
            outcomes.append(_measured(bench, asked, file))
            console.print(f"{bench.name}: {outcomes[-1].said}")
    return outcomes


def listed(benches: Sequence[CpuBench], out: Path) -> Table:
    """A table of benchmarks with the time that each took, if there is a result, or is expected to
    take."""
    total = _time(60 * sum(bench.minutes for bench in benches))
    table = Table(
        "benchmark", "what it measures", "about", "took", "needs", caption=f"In total about {total}"
    )
    for bench in benches:
        name = f"{bench.name}.json"
        took = _read(out / name).get("took", _read(DATA / name).get("took"))
        table.add_row(
            bench.name,
            bench.about,
            _time(60 * bench.minutes),
            "" if took is None else _time(took),
            bench.peer and f"--peer, with {bench.peer}",
        )
    return table


def summary(outcomes: Sequence[BenchOutcome]) -> Table:
    """Outcomes in a table, each beside the committed result."""
    table = Table("benchmark", "took", "measured", "committed")
    for each in outcomes:
        took = "" if each.seconds is None else _time(each.seconds)
        table.add_row(each.name, took, each.said, _told(_read(DATA / f"{each.name}.json")))
    return table


def replace_committed(benches: Sequence[CpuBench], out: Path) -> None:
    """Replaces the committed results by those that are in `out`."""
    for name in (f"{bench.name}.json" for bench in benches):
        if (out / name).is_file():
            shutil.copy(out / name, DATA / name)


def _measured(bench: CpuBench, asked: Sequence[str], file: Path) -> BenchOutcome:
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    of_run = {"commit": commit(), "load_before": round(os.getloadavg()[0], 1)}
    since = time.monotonic()
    limit = 60 * (_PATIENCE * bench.minutes + 10)
    result: dict[str, Any] = ended(asked, environment, limit, last_json)
    took = round(time.monotonic() - since, 1)
    if "error" in result or "ratio" not in result:
        first, *others = str(result.get("error", "it has no ratio")).strip().splitlines()
        said = " ".join(["failed:", first, *others[-1:]])
        return BenchOutcome(bench.name, said, took, failed=True)
    told = result | of_run | {"took": took}
    replace_text(file, json.dumps(told, indent=1, ensure_ascii=False) + "\n")
    return BenchOutcome(bench.name, _told(result), took)


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _told(result: Mapping[str, Any]) -> str:
    """A result in a line, "" if there is none."""
    if "ratio" not in result:
        return ""
    return f"{result['ratio']:.2f} times: {result.get('ours')}, {result.get('other')}"


def _time(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.0f} h"
