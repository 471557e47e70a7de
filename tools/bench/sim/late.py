"""Success and smoothness of policies whose chunks come late, by delay and by how a chunk continues
the one before (docs/results/chunking.md).

    python -m tools.bench.sim.late --plain runs/plain0 runs/plain1 runs/plain2 \\
        --trained runs/rtc0 runs/rtc1 runs/rtc2 --out runs/late

`none` and `guided` act with the runs of --plain, `trained` with those of --trained. A policy
observes again every `replan_steps` steps, or as soon as its last chunk is available, whichever is
later. Finished episodes are kept in a journal for each delay, so the same command resumes.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from matplotlib.figure import Figure

from models import Policy, load_policy
from models.flow.realtime_chunking import Chunking
from models.terminal import Console, guard_tracebacks
from sim.journal import Journal
from sim.results import Episode, Evaluation
from sim.statistics import Rate
from sim.suites import load_suite
from tools.command_line.ending import in_a_line
from tools.recipes.conditions import Condition, evaluate_all


@dataclass(frozen=True)
class LateConfig:
    """Runs, delays and number of starts."""

    plain: tuple[Path, ...]
    """Runs trained without delays, one for each seed."""
    trained: tuple[Path, ...]
    """Runs trained with --model.rtc-max-delay, as many."""
    out: Path
    """Folder for the journals, late.json and late.svg."""
    suite: str = "tabletop-lift"
    delays: tuple[int, ...] = (0, 2, 4, 6, 8)
    replan_steps: int = 4
    episodes: int = 128
    """Starts for each run, delay and way of continuing."""


def run(config: LateConfig, console: Console) -> list[dict[str, Any]]:
    """A row for each delay and way of continuing, over all runs, with the success of each run."""
    suite, rows = load_suite(config.suite), []
    ways = _policies(config)
    for delay in config.delays:
        replan = max(config.replan_steps, delay)
        wanted = [
            Condition(
                f"{way} {i}", policy, clips=0, checkpoint=str(paths[i].resolve()), delay=delay
            )
            for way, (paths, policies) in ways.items()
            for i, policy in enumerate(policies)
        ]
        journal = Journal(config.out / f"delay{delay}.jsonl")
        found = evaluate_all(
            suite,
            wanted,
            console,
            episodes=config.episodes,
            replan_steps=replan,
            journal=journal,
        )
        for way, (paths, _) in ways.items():
            runs = [found[f"{way} {i}"] for i in range(len(paths))]
            rows.append(_row(delay, replan, way, runs))
    (config.out / "late.json").write_text(json.dumps(rows, indent=2) + "\n")
    draw(rows, config.out / "late.svg")
    return rows


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Success with its interval and each run's, jump and roughness, by delay."""
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    panels = figure.subplots(1, 3)
    for number, way in enumerate(dict.fromkeys(row["chunking"] for row in rows)):
        own, colour = [row for row in rows if row["chunking"] == way], f"C{number}"
        delays = [row["delay"] for row in own]
        rates = [row["success"] for row in own]
        panels[0].plot(delays, [100 * r["rate"] for r in rates], color=colour, label=way)
        low, high = ([100 * rate[end] for rate in rates] for end in ("low", "high"))
        panels[0].fill_between(delays, low, high, color=colour, alpha=0.15)
        for run in zip(*(row["success_by_run"] for row in own), strict=True):
            panels[0].plot(delays, [100 * x for x in run], ".", color=colour, markersize=4)
        for panel, what in zip(panels[1:], ("jump", "roughness"), strict=True):
            panel.plot(delays, [row[what] for row in own], color=colour)
    for panel, title in zip(panels, ("success, %", "jump", "roughness"), strict=True):
        panel.set(title=title, xlabel="delay, steps")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


def _policies(config: LateConfig) -> dict[Chunking, tuple[Sequence[Path], list[Policy]]]:
    """Policies of each way of continuing, which share compiled programs."""
    found: dict[Chunking, tuple[Sequence[Path], list[Policy]]] = {}
    ways: dict[Chunking, tuple[Path, ...]] = {
        "none": config.plain,
        "guided": config.plain,
        "trained": config.trained,
    }
    for way, paths in ways.items():
        first, *others = (replace(load_policy(path), chunking=way) for path in paths)
        found[way] = paths, [first, *(first.varied(params=p.params) for p in others)]
    return found


def _row(delay: int, replan: int, way: str, runs: Sequence[Evaluation]) -> dict[str, Any]:
    episodes = [episode for found in runs for episode in found.episodes]
    return {
        "delay": delay,
        "replan_steps": replan,
        "chunking": way,
        "success": Rate.of(episode.success for episode in episodes).to_json(),
        "success_by_run": [found.success.value for found in runs],
        "jump": float(np.mean(np.concatenate([jumps(e, delay, replan) for e in episodes]))),
        "roughness": float(np.mean([found.roughness for found in runs])),
        "length": float(np.mean([found.mean_length for found in runs])),
    }


def jumps(episode: Episode, delay: int, replan_steps: int) -> np.ndarray:
    """Mean |difference| over the action's dims at each switch from one chunk to the next: between
    the last action of the old and the first of the new that was not committed, in its units."""
    at = np.arange(replan_steps + delay, len(episode.actions), replan_steps)
    actions = episode.actions.astype(np.float64)
    return np.abs(actions[at] - actions[at - 1]).mean(-1)


def main() -> None:
    """Command line."""
    config = tyro.cli(LateConfig, prog="python -m tools.bench.sim.late", description=__doc__)
    console = Console()
    with in_a_line(
        "Finished episodes are kept; run the same command again to continue.", writing=config.out
    ):
        for row in run(config, console):
            rate = row["success"]
            console.print(
                f"delay {row['delay']} {row['chunking']}: {rate['rate']:.1%} "
                f"({rate['low']:.1%} to {rate['high']:.1%}), jump {row['jump']:.3f}, "
                f"roughness {row['roughness']:.4f}"
            )


if __name__ == "__main__":
    guard_tracebacks()
    main()
