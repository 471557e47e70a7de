"""A compiled step's kernels as tables and as JSON: by part of the model, by kind of work and by
loop, with the data moved, cast and sent (`parallel.planning.explain`)."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from models.files.terminal import Console
from parallel.planning.explain import CompiledKernel, Explanation, WireTime, grouped

_PHASES = ("forward", "recomputed", "backward", "other")
_SHOWN = 5e-5
"""Seconds from which a part is in the table; JSON has all parts."""
_TOP = 12
"""Rows of a list of single kernels."""


def as_json(found: Explanation, top: int = _TOP) -> dict[str, Any]:
    """The report, with up to `top` entries in each list of single kernels; seconds, bytes and FLOPs
    are for one device in one step."""
    return {
        "seconds": found.seconds,
        "exposed_seconds": found.exposed,
        "kernels": sum(k.times for k in found.kernels),
        "flops": found.flops,
        "bytes": found.bytes,
        "memory_bound_seconds": sum(k.seconds for k in found.slowest_memory_bound),
        "scopes": _groups(grouped(found.kernels, _scope)),
        "work": _groups(grouped(found.kernels, lambda k: k.work)),
        "loops": [vars(loop) for loop in found.loops],
        "memory_bound": [_kernel(k) for k in found.slowest_memory_bound[:top]],
        "moved_bytes": sum(k.times * k.bytes for k in found.moved),
        "moved": [_kernel(k) for k in found.moved[:top]],
        "cast_bytes": sum(c.bytes for c in found.casts),
        "casts": [vars(c) for c in found.casts],
        "collectives": [_sent(s) for s in _longest(found.collectives)],
        "loops_of_unknown_length": list(found.loops_of_unknown_length),
    }


def show(found: Explanation, console: Console, top: int = _TOP) -> None:
    """Prints the report."""
    report = as_json(found, top)
    console.print(
        f"The program as a GPU runs it: {report['kernels']:,} kernels, "
        f"{found.flops / 1e12:,.1f} TFLOP and {found.bytes / 1e9:,.1f} GB in "
        f"{found.seconds * 1e3:,.1f} ms, of which {report['memory_bound_seconds'] * 1e3:,.1f} in "
        f"memory-bound kernels and {found.exposed * 1e3:,.1f} waiting for collectives alone.",
        highlight=False,
    )
    for title, groups in (
        ("By part of the model", report["scopes"]),
        ("By kind of work", report["work"]),
    ):
        console.print(_group_table(title, groups))
    console.print(_loop_table(found))
    console.print(_kernel_table("Slowest memory-bound kernels", report["memory_bound"]))
    gigabytes = report["moved_bytes"] / 1e9
    title = f"Largest copies, transposes and slices outside fusions; {gigabytes:,.1f} GB in all"
    console.print(_kernel_table(title, report["moved"]))
    console.print(_cast_table(found, top))
    console.print(_collective_table(found, top))
    for name in found.loops_of_unknown_length:
        console.print(f"{name} is a loop of unknown length; it is counted as one iteration.")


def _scope(kernel: CompiledKernel) -> str:
    return kernel.scope or "(no name)"


def _groups(found: Sequence[tuple[str, Sequence[CompiledKernel]]]) -> dict[str, dict[str, Any]]:
    return {name: _group(kernels) for name, kernels in found}


def _group(kernels: Sequence[CompiledKernel]) -> dict[str, Any]:
    phases = dict.fromkeys(_PHASES, 0.0)
    for k in kernels:
        phases[k.phase] += k.seconds
    return {
        "kernels": sum(k.times for k in kernels),
        "flops": sum(k.times * k.flops for k in kernels),
        "bytes": sum(k.times * k.bytes for k in kernels),
        "seconds": sum(k.seconds for k in kernels),
        "memory_bound_seconds": sum(k.seconds for k in kernels if k.memory_bound),
        **{f"{phase}_seconds": seconds for phase, seconds in phases.items()},
    }


def _kernel(kernel: CompiledKernel) -> dict[str, Any]:
    names = ("name", "scope", "phase", "work", "operations", "times", "bytes", "seconds")
    return {name: getattr(kernel, name) for name in names} | {"scope": _scope(kernel)}


def _longest(sent: Sequence[WireTime]) -> list[WireTime]:
    return sorted(sent, key=lambda s: -s.collective.times * s.seconds)


def _sent(one: WireTime) -> dict[str, Any]:
    c = one.collective
    return {
        "kind": c.kind,
        "dtype": c.dtype,
        "axes": c.axes,
        "times": c.times,
        "sent": c.sent,
        "seconds": c.times * one.seconds,
        "asynchronous": c.asynchronous,
        "kernels_meanwhile": c.kernels,
        "source": c.source,
    }


def _table(title: str, left: int, *headings: str) -> Table:
    """A table whose first `left` columns are text."""
    table = Table(title=title, box=SIMPLE, padding=(0, 1, 0, 0), title_justify="left")
    for number, heading in enumerate(headings):
        table.add_column(heading, no_wrap=True, justify="left" if number < left else "right")
    return table


def _group_table(title: str, groups: Mapping[str, dict[str, Any]]) -> Table:
    table = _table(title, 1, "", "kernels", "TFLOP", "GB", "ms", "memory", *_PHASES)
    for name, group in groups.items():
        if group["seconds"] < _SHOWN:
            continue
        table.add_row(
            name,
            f"{group['kernels']:,}",
            f"{group['flops'] / 1e12:,.2f}" if group["flops"] else "",
            f"{group['bytes'] / 1e9:,.1f}",
            *(
                f"{group[key] * 1e3:,.1f}"
                for key in ("seconds", "memory_bound_seconds", *(f"{p}_seconds" for p in _PHASES))
            ),
        )
    return table


def _loop_table(found: Explanation) -> Table:
    table = _table("Loops", 2, "", "", "iterations", "kernels each", "ms each")
    for loop in found.loops:
        ms = f"{loop.seconds * 1e3:.2f}"
        table.add_row(loop.scope, loop.phase, str(loop.trips), str(loop.kernels), ms)
    return table


def _kernel_table(title: str, kernels: Sequence[dict[str, Any]]) -> Table:
    table = _table(title, 3, "", "", "", "times", "MB each", "ms")
    for k in kernels:
        size, ms = f"{k['bytes'] / 1e6:,.1f}", f"{k['seconds'] * 1e3:.2f}"
        table.add_row(k["scope"], k["phase"], k["name"], str(k["times"]), size, ms)
    return table


def _cast_table(found: Explanation, top: int) -> Table:
    size = sum(c.bytes for c in found.casts) / 1e9
    title = f"Largest casts of arguments to narrower dtypes; {size:,.2f} GB written in all"
    table = _table(title, 2, "", "to", "casts", "MB", "times whole")
    for c in found.casts[:top]:
        often = f"{c.bytes / c.whole:.2f}"
        table.add_row(c.argument, c.dtype, str(c.times), f"{c.bytes / 1e6:,.1f}", often)
    return table


def _collective_table(found: Explanation, top: int) -> Table:
    table = _table("Slowest collectives", 3, "", "", "axes", "times", "MB sent", "ms", "meanwhile")
    for one in _longest(found.collectives)[:top]:
        c = one.collective
        table.add_row(
            c.kind,
            c.dtype,
            "+".join(c.axes),
            str(c.times),
            f"{c.times * c.sent / 1e6:,.1f}",
            f"{c.times * one.seconds * 1e3:.2f}",
            f"{c.kernels} kernels" if c.asynchronous else "nothing",
        )
    return table
