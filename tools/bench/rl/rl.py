"""Asynchronous RL compared with synchronous RL: samples learnt per second in the modes of RL-VLA3's
ablation (arXiv 2602.05765), with the idle time of each attributed to its causes.

One policy architecture learns (a) in Meta-World's processes, (b) in MJX lanes, (c) in environments
that only wait, for as long as Meta-World was measured to take or by a distribution, as if they ran
on machines of their own, and (d) in simulated time with up to 1024 workers. The simulation is
validated with (c): each of those runs is simulated from the times that its parts took. Policy and
learner share this machine's cores: colocated on one device, otherwise on two devices that XLA makes
of the cores.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import jax
from matplotlib.figure import Figure
from rich.table import Table

from models.terminal import Console
from rl.simulated.events import MODES, Mode, Workload, simulate
from rl.simulated.latency import Latencies, LogNormal, Stragglers, measure
from rl.simulated.points import Points
from rl.simulated.synthetic import Synthetic
from sim.protocol import TRAIN_SEEDS, Slots, Start
from sim.suites import load_suite
from tools.bench.attempt import tell
from tools.bench.rl.rl_modes import (
    BenchedPolicy,
    BenchedRun,
    Ran,
    attributed,
    run_colocated,
    run_mode,
)

WORKERS = (8, 16, 32, 64, 128, 256, 512, 1024)
FIGURE = Path("rl_workers.svg")
"""Path of the figure, in the folder that the benchmark is run in."""
_TASK = "reach-v3"
_FIRST, *_, _LAST = MODES

RL_VLA3 = {
    "LIBERO, pi0.5, 8 GPUs": (289.23, 162.75, 229.68, 369.56, 383.40),
    "LIBERO, pi0.5, 32 GPUs": (703.85, 457.23, 737.46, 1041.36, 1120.91),
    "LIBERO, GR00T N1.5, 8 GPUs": (371.80, 220.81, 243.57, 434.20, 439.64),
    "LIBERO, GR00T N1.5, 32 GPUs": (1125.62, 729.98, 951.33, 1620.39, 1592.40),
    "ManiSkill, pi0, 8 GPUs": (132.56, 60.64, 126.65, 69.07, 71.61),
    "ManiSkill, pi0, 32 GPUs": (370.26, 257.21, 436.32, 275.36, 280.07),
}
"""Environment steps a second of the modes, in their order (v1, Table 1)."""


def run(console: Console, load: BenchedRun | None = None, figure: Path = FIGURE) -> dict[str, Any]:
    """Samples a second; `ratio` is all three levels over synchronous colocated, in environments
    that wait as long as Meta-World takes (if it is not installed, by a log-normal distribution)."""
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # so whoever computes waits
    load = load or BenchedRun()
    usual = Latencies(LogNormal(0.05, 0.4), LogNormal(0.1, 0.4))
    waiting = {
        "log-normal": usual,
        "stragglers": Latencies(Stragglers(usual.chunk, 0.03, 10), usual.reset),
    }
    figures: dict[str, Any] = {}
    try:
        waiting = {"measured": measured(load)} | waiting
        # an untrained policy's episodes have 500 steps; cores are short, so batches are waited for
        rollout = replace(load.rollout, groups=2, slots=8, replan_steps=8, deadline=0.02)
        long = replace(load, rollout=rollout, steps=3, warm=2)
        figures["metaworld"] = in_suite(console, "metaworld", (_TASK,), long)
    except FileNotFoundError as missing:
        console.print(f"left out: {missing}")
        figures["metaworld"] = {"left out": str(missing)}
    figures["tabletop-lift"] = on_device(console, "tabletop-lift", load)
    workload: Workload | None = None
    for name, latencies in waiting.items():
        rows, ran = in_waiting(console, name, latencies, load)
        figures[name] = rows
        if workload is None:  # of parts that never share a core
            alone = ran["synchronous disaggregated"]
            workload = replace(
                alone.workload,
                latencies=latencies,
                staleness=load.rollout.staleness,
                prepare=alone.prepared_alone,
                tell=0.0,  # which is these worlds' own computing, not that of a machine elsewhere
            )
    assert workload is not None
    console.print(f"Simulating {WORKERS[0]} … {WORKERS[-1]} workers")
    simulated = in_simulated_time(workload)
    draw(simulated, figure)
    rates = over_first(figures, simulated)
    console.print(table(rates))
    judged = rates[next(iter(waiting))]
    ours, other = judged[_LAST], judged[_FIRST]
    errors = [row["error"] for name in waiting for row in figures[name].values()]
    return {
        "ratio": ours["over first"],
        "ours": f"{ours['samples/s']:.1f} samples/s with all three levels",
        "other": f"{other['samples/s']:.1f} synchronous and colocated",
        "unit": "samples/s",
        "latencies": next(iter(waiting)),
        "rates": rates,
        "all three over": {
            mode: {
                name: rows[_LAST]["samples/s"] / rows[mode]["samples/s"]
                for name, rows in rates.items()
            }
            for mode in MODES
        },
        "figures": figures,
        "simulated": simulated,
        "simulation's largest error": max(errors, key=abs),
        "rl-vla3": {name: dict(zip(MODES, row, strict=True)) for name, row in RL_VLA3.items()},
        "figure": str(figure),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }


def measured(load: BenchedRun) -> Latencies:
    """Measures one process of Meta-World: latencies of a chunk and of a reset.

    Raises:
      FileNotFoundError: it is not installed.
    """
    with closing(load_suite("metaworld").open((_TASK,), 1, load.picture)) as slots:
        starts = [Start(_TASK, seed) for seed in range(10)]
        return Latencies(*measure(slots, starts, replan_steps=load.rollout.replan_steps))


def in_suite(
    console: Console, name: str, tasks: tuple[str, ...], load: BenchedRun
) -> dict[str, dict[str, Any]]:
    """All modes in a suite's own slots.

    Raises:
      FileNotFoundError: the suite is not installed.
    """
    suite = load_suite(name)
    seeds = TRAIN_SEEDS if name == "metaworld" else range(suite.first_seed)
    count = load.rollout.slots or 1
    with closing(suite.open(tasks or suite.tasks, count, load.picture)) as slots:
        return _rows(_in_modes(console, name, BenchedPolicy(slots.spec, load), slots, seeds, MODES))


def on_device(console: Console, name: str, load: BenchedRun) -> dict[str, dict[str, Any]]:
    """All modes with environments that are simulated on the device, as many as suit it. Synchronous
    and colocated is then `rl.device.colocated`: no threads, and nothing leaves the device."""
    suite = load_suite(name)
    envs = suite.slots or 1
    tickets = envs // load.rollout.group
    rollout = replace(load.rollout, groups=tickets, slots=envs)
    wide = replace(load, rollout=rollout, micro=envs)
    modes = {mode: way for mode, way in MODES.items() if mode != _FIRST}
    with closing(suite.open(suite.tasks, envs, load.picture)) as slots:
        acting = BenchedPolicy(slots.spec, wide)
        ran = _in_modes(console, name, acting, slots, range(suite.first_seed), modes)
    assert suite.environment is not None
    env: Any = suite.environment(suite.tasks[0], load.picture)
    first = run_colocated(acting, env)
    console.print(f"{name}: {_FIRST}, {first['samples/s']:.1f} samples/s")
    return {_FIRST: first} | _rows(ran)


def in_waiting(
    console: Console, name: str, latencies: Latencies, load: BenchedRun
) -> tuple[dict[str, dict[str, Any]], dict[str, Ran]]:
    """All modes in environments that only wait, each with `simulated`, the samples per second that
    the discrete-event model predicts from the same costs, and its relative `error`; and the
    runs."""
    cameras = ("observation.images.corner", "observation.images.wrist")
    world = Points(cameras, load.picture, 4, 4, speed=0.05, max_steps=load.max_steps)
    with closing(Synthetic(latencies, load.rollout.slots or 1, world=world)) as slots:
        acting = BenchedPolicy(slots.spec, load)
        ran = _in_modes(console, f"waiting, {name}", acting, slots, range(1_000_000), MODES)
    rows = {}
    for mode, found in ran.items():
        rate = expected(found, mode, load)
        error = rate / found.samples_per_second - 1
        rows[mode] = {**found.row(), "simulated": rate, "error": error}
    return rows, ran


def expected(ran: Ran, mode: str, load: BenchedRun, runs: int = 8) -> float:
    """Samples per second that the simulation predicts for a run, as the mean over `runs` random
    draws. Here, policy and learner have a device each in every mode, with the costs of the run."""
    way = MODES[mode]._replace(disaggregated=True)
    updates = load.warm + load.steps
    rates = [
        simulate(ran.workload, way, updates=updates, warm=load.warm, seed=seed).samples_per_second
        for seed in range(runs)
    ]
    return fmean(rates)


def in_simulated_time(
    workload: Workload, workers: Sequence[int] = WORKERS, updates: int = 6
) -> dict[str, dict[str, Any]]:
    """All modes, by number of slots. Tickets and devices grow with the slots, from one device each
    for policy and learner at the measured workload. In colocated modes, both devices do both."""
    rows: dict[str, dict[str, Any]] = {}
    for count in workers:
        scaled = replace(
            workload,
            slots=count,
            tickets=max(workload.tickets * count // workload.slots, 1),
            inference_devices=max(count // workload.slots, 1),
            learner_devices=max(count // workload.slots, 1),
        )
        rows[str(count)] = {}
        for name, mode in MODES.items():
            found = simulate(scaled, mode, updates=updates, warm=2)
            rows[str(count)][name] = {
                "env-steps/s": found.steps_per_second,
                "samples/s": found.samples_per_second,
                "lag": found.lag,
                **attributed(found.use),
            }
    return rows


def draw(simulated: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Each mode's samples a second over those of the first, over the number of workers."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for mode in MODES:
        gains = [row[mode]["over first"] for row in over_first({}, simulated).values()]
        axes.semilogx([int(n) for n in simulated], gains, "o-", label=mode, markersize=4)
    axes.set(xlabel="environment workers", ylabel=f"samples/s over {_FIRST}", ylim=(0, None))
    axes.set_xticks([int(n) for n in simulated], list(simulated))
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def over_first(
    figures: Mapping[str, Any], simulated: Mapping[str, Any]
) -> dict[str, dict[str, dict[str, float]]]:
    """Samples a second of all modes, by what was run and by number of simulated workers, also
    relative to the first mode's."""
    ran = {name: rows for name, rows in figures.items() if "left out" not in rows}
    return {
        name: {
            mode: {
                "samples/s": rows[mode]["samples/s"],
                "over first": rows[mode]["samples/s"] / rows[_FIRST]["samples/s"],
            }
            for mode in MODES
        }
        for name, rows in (ran | {f"{n} workers": rows for n, rows in simulated.items()}).items()
    }


def table(rates: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Table:
    """Rates that `over_first` gives; RL-VLA3's steps below."""
    shown = Table("", *MODES)
    told = {name: [row["samples/s"] for row in rows.values()] for name, rows in rates.items()}
    for name, row in (told | {f"RL-VLA3: {n} (steps/s)": r for n, r in RL_VLA3.items()}).items():
        shown.add_row(name, *(f"{rate:,.1f} ({rate / row[0]:.2f})" for rate in row))
    return shown


def _in_modes(
    console: Console,
    name: str,
    acting: BenchedPolicy,
    slots: Slots,
    seeds: range,
    modes: Mapping[str, Mode],
) -> dict[str, Ran]:
    console.print(f"{name}: compiling")
    acting.warm()
    ran = {}
    for mode, way in modes.items():
        ran[mode] = run_mode(acting, slots, way, seeds)
        console.print(f"{name}: {mode}, {ran[mode].samples_per_second:.1f} samples/s")
        tell(console, {"unit": "samples/s", "figures": {name: _rows(ran)}})
    return ran


def _rows(ran: Mapping[str, Ran]) -> dict[str, dict[str, Any]]:
    return {mode: found.row() for mode, found in ran.items()}
