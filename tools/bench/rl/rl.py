"""Asynchronous RL compared with synchronous RL: samples learnt per second in the modes of RL-VLA3's
ablation (arXiv 2602.05765), with the idle time of each attributed to its causes.

One policy architecture learns (a) in Meta-World's processes and (b) in MJX lanes. Policy and
learner share this machine's cores: colocated on one device, otherwise on two devices that XLA makes
of the cores.
"""

import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

import jax
from rich.table import Table

from models.files.terminal import Console
from sim.protocol import TRAIN_SEEDS, Slots
from sim.suites import load_suite
from tools.bench.attempt import tell
from tools.bench.rl.rl_modes import (
    MODES,
    BenchedPolicy,
    BenchedRun,
    Mode,
    run_colocated,
    run_mode,
)

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


def run(console: Console, load: BenchedRun | None = None) -> dict[str, Any]:
    """Samples a second; `ratio` is all three levels over synchronous colocated, in Meta-World (if
    it is not installed, in MJX lanes)."""
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # so whoever computes waits
    load = load or BenchedRun()
    figures: dict[str, Any] = {}
    try:
        # an untrained policy's episodes have 500 steps; cores are short, so batches are waited for
        rollout = replace(load.rollout, groups=2, slots=8, replan_steps=8, deadline=0.02)
        long = replace(load, rollout=rollout, steps=3, warm=2)
        figures["metaworld"] = in_suite(console, "metaworld", (_TASK,), long)
    except FileNotFoundError as missing:
        console.print(f"left out: {missing}")
        figures["metaworld"] = {"left out": str(missing)}
    figures["tabletop-lift"] = on_device(console, "tabletop-lift", load)
    rates = over_first(figures)
    console.print(table(rates))
    judged = next(iter(rates.values()))
    ours, other = judged[_LAST], judged[_FIRST]
    return {
        "ratio": ours["over first"],
        "ours": f"{ours['samples/s']:.1f} samples/s with all three levels",
        "other": f"{other['samples/s']:.1f} synchronous and colocated",
        "unit": "samples/s",
        "rates": rates,
        "all three over": {
            mode: {
                name: rows[_LAST]["samples/s"] / rows[mode]["samples/s"]
                for name, rows in rates.items()
            }
            for mode in MODES
        },
        "figures": figures,
        "rl-vla3": {name: dict(zip(MODES, row, strict=True)) for name, row in RL_VLA3.items()},
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }


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
        return _in_modes(console, name, BenchedPolicy(slots.spec, load), slots, seeds, MODES)


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
        rows = _in_modes(console, name, acting, slots, range(suite.first_seed), modes)
    assert suite.environment is not None
    env: Any = suite.environment(suite.tasks[0], load.picture)
    first = run_colocated(acting, env)
    console.print(f"{name}: {_FIRST}, {first['samples/s']:.1f} samples/s")
    return {_FIRST: first} | rows


def over_first(figures: Mapping[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """Samples a second of all modes, by what was run, also relative to the first mode's."""
    return {
        name: {
            mode: {
                "samples/s": rows[mode]["samples/s"],
                "over first": rows[mode]["samples/s"] / rows[_FIRST]["samples/s"],
            }
            for mode in MODES
        }
        for name, rows in figures.items()
        if "left out" not in rows
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
) -> dict[str, dict[str, Any]]:
    console.print(f"{name}: compiling")
    acting.warm()
    rows: dict[str, dict[str, Any]] = {}
    for mode, way in modes.items():
        rows[mode] = run_mode(acting, slots, way, seeds)
        console.print(f"{name}: {mode}, {rows[mode]['samples/s']:.1f} samples/s")
        tell(console, {"unit": "samples/s", "figures": {name: rows}})
    return rows
