"""π0.5's and GR00T's training steps compiled for eight H100s, layers as a loop and one after the
other: the plan, and what the program's own kernels would take (`parallel.planning.explain`).

Nothing runs: seconds and MFU are predicted, by the planner's constants. Needs the extra `plan`.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from models.files.terminal import Console
from parallel.planning.deviceless import devices
from parallel.planning.explain import explain
from tools.bench.attempt import tell
from tools.plan import Machines, PlannedRun, compiled, describe, explained_step, plan

GPUS = 8
PRESETS = ("pi05", "groot")
WAYS = {"loop": False, "unrolled": True}
_PROGRAM = ("step_seconds", "mfu", "kernels", "memory_bound_seconds", "exposed_seconds")
_LEAST = 0.1
"""Milliseconds from which a group of kernels is reported."""


def run(console: Console) -> dict[str, Any]:
    """The programs by preset and way; `ratio` is π0.5's MFU unrolled over that with loops.

    Raises:
      ImportError: the compiler is not installed (extra `plan`).
    """
    devices()
    found: dict[str, Any] = {preset: {} for preset in PRESETS}
    table = Table("preset", "layers", "plan's MFU", "program's", "kernels", "GB", "GiB held")
    for preset, programs in found.items():
        for way, unroll in WAYS.items():
            console.print(f"{preset}, layers {way}: compiling")
            programs[way] = made = compiled_program(PlannedRun(preset=preset, unroll=unroll))
            tell(console, found)
            predicted, program = made["plan"]["mfu"], made["program"]
            figures = (program["kernels"], program["gb"], made["gib"])
            table.add_row(
                preset, way, *(f"{mfu:.1%}" for mfu in (predicted, program["mfu"])),
                *(f"{figure:,.0f}" for figure in figures),
            )  # fmt: skip
        for kind in ("scopes", "work"):
            _keep_alike([made[kind] for made in programs.values()])
    console.print(table)
    ours, other = (found["pi05"][way]["program"]["mfu"] for way in ("unrolled", "loop"))
    return {
        "ratio": ours / other,
        "ours": f"{ours:.1%} MFU predicted of π0.5's step, layers one after the other",
        "other": f"{other:.1%}, layers as a loop",
        **found,
    }


def compiled_program(run: PlannedRun) -> dict[str, Any]:
    """The fastest plan of a run, its compiled program, and what that program's kernels take, per
    device and step."""
    task, cluster, (best, *_) = plan(run, Machines(gpus=GPUS), ("bf16",), ("none", "dots", "full"))
    step = compiled(run, task, cluster, best.choice)
    report = explained_step(explain(step.program, step.mesh, cluster), best)
    told = describe(run, cluster, best)
    samples = task.rows * task.samples
    return {
        **{name: told[name] for name in ("mesh", "accumulation", "remat")},
        "rows": task.rows,
        "samples": samples,
        "plan": {
            **{name: told[name] for name in ("step_seconds", "mfu", "samples_per_second")},
            "samples_per_gpu": samples / told["step_seconds"] / GPUS,
        },
        "program": {
            "samples_per_gpu": samples / report["step_seconds"] / GPUS,
            **{name: report[name] for name in _PROGRAM},
            "tflop": report["flops"] / 1e12,
            "gb": report["bytes"] / 1e9,
            "cast_gb": report["cast_bytes"] / 1e9,
        },
        "gib": step.memory.peak / 2**30,
        "cpu_minutes": step.seconds / 60,
        "scopes": _told(report["scopes"]),
        "work": _told(report["work"]),
        "loops": [
            {**{name: loop[name] for name in ("scope", "phase", "trips", "kernels")},
             "ms": loop["seconds"] * 1e3}
            for loop in report["loops"]
        ],
    }  # fmt: skip


def _told(groups: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    return {
        name: {
            "kernels": group["kernels"],
            "tflop": group["flops"] / 1e12,
            "gb": group["bytes"] / 1e9,
            "ms": group["seconds"] * 1e3,
            "memory_ms": group["memory_bound_seconds"] * 1e3,
        }
        for name, group in groups.items()
    }


def _keep_alike(programs: Sequence[dict[str, dict[str, float]]]) -> None:
    """Keeps each program's groups of kernels that take some time in one of the programs, the
    longest first."""
    took = defaultdict[str, float](float)
    for groups in programs:
        for name, group in groups.items():
            took[name] = max(took[name], group["ms"])
    told = sorted((name for name in took if took[name] >= _LEAST), key=lambda name: -took[name])
    nothing = dict.fromkeys(("kernels", "tflop", "gb", "ms", "memory_ms"), 0.0)
    for groups in programs:
        kept = {name: groups.get(name, nothing) for name in told}
        groups.clear()
        groups.update(kept)
