"""A kernel-by-kernel analysis of a compiled step: the cost of each kernel on a chip, the part of
the model that it belongs to, and the data moved, cast and sent besides the matrix products.

Works on the text of an optimised module. Parts are the names that the models give their code with
`jax.named_scope`; seconds are the planner's roofline (`parallel.planning.cluster.Chip`).
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal, cast

from parallel.planning.cluster import Chip, Cluster
from parallel.planning.communication import Collective, Kind, busy
from parallel.planning.hlo import (
    KINDS,
    CompiledCollective,
    Instruction,
    Program,
    callees,
    root,
)
from parallel.planning.lineage import CompiledCast, Lineage, argument_path

Phase = Literal["forward", "recomputed", "backward", "other"]
Work = Literal["product", "kernel", "reduce", "element-wise", "cast", "move", "fill", "call"]
"""Kinds of kernels: with a matrix product; hand-written, whose FLOPs the text does not show; with a
sum or a maximum; all other arithmetic; conversion to another dtype; moving data (copies,
transposes, slices); constants; library calls."""


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel of the program: the number of `times` that it runs in a step, the FLOPs of its
    matrix products, and the bytes that one run reads and writes. `scope` is the part of the model,
    `operations` the opcodes in it, and `compute`, `memory` and `start` are seconds of one run."""

    name: str
    scope: str
    phase: Phase
    work: Work
    operations: tuple[str, ...]
    times: int
    flops: int
    bytes: int
    compute: float
    memory: float
    start: float

    @property
    def seconds(self) -> float:
        """Seconds of all its runs: FLOPs or bytes, whichever takes longer, plus its start."""
        return self.times * (max(self.compute, self.memory) + self.start)

    @property
    def memory_bound(self) -> bool:
        """True if its bytes take longer than its FLOPs."""
        return self.memory > self.compute


@dataclass(frozen=True)
class CompiledLoop:
    """A loop, such as that over a stack's layers: the kernels of one iteration and their seconds,
    including the collectives that it waits for, and the part of the model that takes most of
    them."""

    scope: str
    phase: Phase
    trips: int
    kernels: int
    seconds: float


@dataclass(frozen=True)
class WireTime:
    """A collective and the seconds of one run that has its links to itself."""

    collective: CompiledCollective
    seconds: float


@dataclass(frozen=True)
class Explanation:
    """A step as one device runs it. `seconds`: its kernels one after the other, with collectives in
    parallel; `exposed`: the part in which only a collective runs. `loops_of_unknown_length` count
    as one iteration."""

    kernels: tuple[CompiledKernel, ...]
    loops: tuple[CompiledLoop, ...]
    casts: tuple[CompiledCast, ...]
    collectives: tuple[WireTime, ...]
    seconds: float
    exposed: float
    loops_of_unknown_length: tuple[str, ...]

    @property
    def flops(self) -> int:
        """FLOPs of matrix products; those in hand-written kernels do not appear in the text."""
        return sum(k.times * k.flops for k in self.kernels)

    @property
    def bytes(self) -> int:
        """Bytes that all kernels read and write."""
        return sum(k.times * k.bytes for k in self.kernels)

    @property
    def moved(self) -> list[CompiledKernel]:
        """Copies, transposes and slices outside other kernels, most bytes first."""
        found = (k for k in self.kernels if k.work == "move")
        return sorted(found, key=lambda k: -k.times * k.bytes)

    @property
    def slowest_memory_bound(self) -> list[CompiledKernel]:
        """Kernels that wait for memory, slowest first."""
        found = (k for k in self.kernels if k.memory_bound)
        return sorted(found, key=lambda k: -k.seconds)


def explain(program: Program, mesh: Mapping[str, int], cluster: Cluster) -> Explanation:
    """The program's kernels, loops, casts of its arguments and collectives.

    Args:
      mesh: sizes of the axes it was compiled for, slowest first.
      cluster: its chip and links determine the seconds.
    """
    reading = _Reading(program, cluster.chip)
    sent = [WireTime(c, _wire_seconds(c, mesh, cluster)) for c in program.collectives(mesh)]
    wire: dict[str, float] = defaultdict(float)
    for one in sent:
        wire[one.collective.instruction] += one.seconds
    clock = _Clock(reading, wire)
    seconds, exposed = clock.run(program.entry)
    return Explanation(
        kernels=tuple(k for name in reading.kernels for k in reading.kernels[name].values()),
        loops=tuple(clock.loops()),
        casts=tuple(reading.lineage.casts()),
        collectives=tuple(sent),
        seconds=seconds,
        exposed=exposed,
        loops_of_unknown_length=tuple(program.unknown_loops),
    )


def grouped(
    kernels: Sequence[CompiledKernel], by: Callable[[CompiledKernel], str]
) -> list[tuple[str, list[CompiledKernel]]]:
    """Kernels grouped by the name that `by` gives them, slowest group first."""
    groups: dict[str, list[CompiledKernel]] = defaultdict(list)
    for kernel in kernels:
        groups[by(kernel)].append(kernel)
    return sorted(groups.items(), key=lambda pair: -sum(k.seconds for k in pair[1]))


_NO_KERNEL = {
    "parameter", "constant", "bitcast", "get-tuple-element", "tuple", "while", "call",
    "conditional", "after-all", "partition-id", "replica-id", "opt-barrier", "add-dependency",
    "async-start", "async-update", *KINDS, *(f"{kind}-start" for kind in KINDS),
}  # fmt: skip
_VIEWS = {"bitcast", "reshape"}
_PARTS = {"slice", "dynamic-slice", "gather"}
_MOVES = {"copy", "copy-start", "transpose", "dynamic-update-slice", "pad", "concatenate",
          "broadcast", "reverse", *_PARTS, *_VIEWS}  # fmt: skip
_SILENT = {"parameter", "constant", "tuple", "get-tuple-element", "iota", "partition-id"}
_STEPS = {"while", "body", "cond", "closed_call", "checkpoint", "rematted_computation", "scan",
          "shard_map", "custom_vjp_call", "custom_jvp_call", "pjit", "core_call",
          "eval_jaxpr"}  # fmt: skip
_WRAPPED = re.compile(r"^(?:(?:transpose|jvp|vmap|checkpoint|remat)\()*([A-Za-z_]\w*)?\)*$")
_HAND_WRITTEN = 'custom_call_target="__gpu$xla.gpu.triton'


class _Reading:
    """A program's kernels by computation and name."""

    def __init__(self, program: Program, chip: Chip):
        self.program, self.chip, self.lineage = program, chip, Lineage(program)

    @cached_property
    def kernels(self) -> dict[str, dict[str, CompiledKernel]]:
        """Kernels by computation; the computation inside a fusion has none."""
        fusions = (x for _, x in self.lineage.callers.values() if x.opcode == "fusion")
        inside = {callee for x in fusions for callee, _ in callees(x)}
        return {
            name: {
                x.name: self._kernel(name, x, times)
                for x in self.program.computations[name]
                if x.opcode not in _NO_KERNEL and not x.opcode.endswith("-done")
            }
            for name, times in self.program.times.items()
            if name not in inside
        }

    def _kernel(self, computation: str, x: Instruction, times: int) -> CompiledKernel:
        within = callees(x)[0][0] if x.opcode == "fusion" else None
        body = self.program.computations[within] if within else [x]
        of = self._products[within or computation]
        products = [of[y.name] for y in body if y.name in of]
        names = self.lineage.by_name[computation]
        read, written = _traffic(x, body, [names[o] for o in x.operands if o in names])
        operations = tuple(dict.fromkeys(y.opcode for y in body if _counts(y)))
        source = self._source(computation, x, body)
        chip = self.chip
        rate = chip.bandwidth * chip.bandwidth_share
        return CompiledKernel(
            name=x.name,
            scope=scope(source) or self._owner(computation, x),
            phase=phase(source),
            work=_work(x, products, operations, read),
            operations=operations,
            times=times,
            flops=sum(flops for flops, _, _ in products),
            bytes=read + written,
            compute=sum(
                flops / (chip.peak(_DTYPES.get(dtype, dtype)) * chip.matmul_share)
                for flops, dtype, _ in products
            ),
            memory=(read + written) / rate,
            start=chip.kernel_seconds,
        )

    @cached_property
    def _products(self) -> dict[str, dict[str, tuple[int, str, bool]]]:
        """Matrix products by computation and instruction."""
        return {
            name: {x.name: product for x, product in self.program.products(name)}
            for name in self.program.times
        }

    def _source(self, computation: str, x: Instruction, body: Sequence[Instruction]) -> str:
        """JAX's name for a kernel: its own, that of the last op in it that has one, or, if XLA made
        the kernel, that of a kernel that reads its result."""
        readers = self._readers[computation]
        named = (y.source for y in (x, *reversed(body), *_read_by(x, readers)) if "/" in y.source)
        return next(named, x.source)

    @cached_property
    def _readers(self) -> dict[str, dict[str, list[Instruction]]]:
        return {name: _readers(body) for name, body in self.program.computations.items()}

    def _owner(self, computation: str, x: Instruction) -> str:
        """The first name in the path of the parameter that a kernel made by XLA reads."""
        for operand in x.operands:
            argument = self.lineage.origin(computation, operand)
            if argument is not None and "/" in (path := argument_path(argument)):
                return path.split("/")[0]
        return ""


class _Clock:
    """Two streams of a device: its kernels, and its collectives, each one after the other."""

    def __init__(self, reading: _Reading, wire: Mapping[str, float]):
        self.reading, self.wire = reading, wire
        self.program = reading.program
        self.known: dict[str, tuple[float, float]] = {}

    def run(self, computation: str) -> tuple[float, float]:
        """Seconds of one run, and the seconds of it in which only a collective ran."""
        if computation in self.known:
            return self.known[computation]
        now = busy_until = waited = 0.0
        ends: dict[str, float] = {}
        kernels = self.reading.kernels.get(computation, {})
        for x in self.program.computations[computation]:
            if x.name in self.wire:
                busy_until = max(busy_until, now) + self.wire[x.name]
                ends[x.name] = busy_until
                waits = not x.opcode.endswith("-start") or '"is_sync":true' in x.rest
            else:
                waits = x.opcode.endswith("-done")
            end = max((ends.get(name, 0.0) for name in (x.name, *x.operands)), default=0.0)
            if waits and end > now:
                waited += end - now
                now = end
            if x.name in kernels:
                now += kernels[x.name].seconds / kernels[x.name].times
            elif x.opcode != "fusion":
                for callee, trips in callees(x):
                    seconds, idle = self.run(callee)
                    now, waited = now + trips * seconds, waited + trips * idle
        self.known[computation] = now, waited
        return now, waited

    def loops(self) -> Iterator[CompiledLoop]:
        """Every loop of more than one iteration, in the order of the program."""
        for name in self.reading.kernels:
            for x in self.program.computations[name]:
                if x.opcode != "while":
                    continue
                ((body, trips),) = callees(x)
                kernels = list(self.reading.kernels[body].values())
                if trips > 1 and kernels:
                    whose = grouped(kernels, lambda k: f"{k.scope.split('/')[0]} {k.phase}")[0][0]
                    first, _, last = whose.rpartition(" ")
                    yield CompiledLoop(
                        first, cast(Phase, last), trips, len(kernels), self.run(body)[0]
                    )


def scope(source: str) -> str:
    """Names that the model gave the code of an op, such as "language/mlp": the op's name without
    JAX's transformations, functions and primitive."""
    parts = source.split(";")[0].split("/")[:-1]
    names = [m[1] for part in parts if (m := _WRAPPED.match(part)) and m[1]]
    names = [name for name in names if name not in _STEPS]
    return "/".join(b for a, b in pairwise(["", *names]) if a != b)


def phase(source: str) -> Phase:
    """The pass that an op belongs to, by its name."""
    if "rematted_computation" in source:
        return "recomputed"
    if "transpose(" in source:
        return "backward"
    return "forward" if "jvp(" in source else "other"


_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f8e4m3fn": "float8_e4m3fn",
           "f8e5m2": "float8_e5m2"}  # fmt: skip


def _work(x: Instruction, products: Sequence[object], operations: Sequence[str], read: int) -> Work:
    if products:
        return "product"
    if x.opcode == "custom-call":
        return "kernel" if _HAND_WRITTEN in x.rest else "call"
    others = set(operations) - _MOVES
    if others & {"reduce", "reduce-window", "sort", "scatter"}:
        return "reduce"
    if not read:
        return "fill"
    if not others:
        return "move"
    return "cast" if others == {"convert"} else "element-wise"


def _counts(x: Instruction) -> bool:
    """False for an op that makes an index or no numbers at all."""
    return x.opcode not in _SILENT and any(a.dims for a in x.shape)


def _traffic(
    x: Instruction, body: Sequence[Instruction], operands: Sequence[Instruction]
) -> tuple[int, int]:
    """Bytes that one run of a kernel reads and writes. Of an operand or a result that the kernel
    uses only a part of, that part counts; single numbers count as none."""
    if x.opcode != "fusion":
        part = operands[1] if x.opcode == "dynamic-update-slice" else x
        if part is not x or x.opcode in _PARTS:
            return _size(part), _size(part)
        return sum({o.name: _size(o) for o in operands}.values()), _size(x)
    names, readers = {y.name: y for y in body}, _readers(body)

    def read(y: Instruction) -> int:
        return min(sum(read_by(y, reader) for reader in readers[y.name]), _size(y))

    def read_by(y: Instruction, reader: Instruction) -> int:
        if reader.opcode in _VIEWS:
            return read(reader)
        if reader.operands[0] == y.name and reader.opcode in (*_PARTS, "dynamic-update-slice"):
            return _size(reader) if reader.opcode in _PARTS else 0
        return _size(y)

    def written(y: Instruction) -> int:
        if y.opcode == "tuple":
            return sum(written(names[o]) for o in y.operands)
        if y.opcode in _VIEWS and names[y.operands[0]].opcode == "dynamic-update-slice":
            return written(names[y.operands[0]])
        return _size(names[y.operands[1]] if y.opcode == "dynamic-update-slice" else y)

    return sum(read(y) for y in body if y.opcode == "parameter"), written(root(body))


def _size(x: Instruction) -> int:
    """Bytes of a result's arrays, without the workspace of a cuBLAS call and, for the start of a
    copy, without its source."""
    library = x.opcode == "custom-call" and len(x.shape) > 1 and x.shape[-1].dtype == "s8"
    kept = x.shape[:1] if x.opcode == "copy-start" else x.shape[:-1] if library else x.shape
    return sum(a.bytes for a in kept if a.dims)


def _readers(body: Sequence[Instruction]) -> dict[str, list[Instruction]]:
    found: dict[str, list[Instruction]] = defaultdict(list)
    for x in body:
        for operand in dict.fromkeys(x.operands):
            found[operand].append(x)
    return found


def _read_by(x: Instruction, readers: Mapping[str, list[Instruction]]) -> Iterator[Instruction]:
    """Kernels of the same computation that read a result."""
    for reader in readers.get(x.name, ()):
        if reader.opcode in ("bitcast", "get-tuple-element"):
            yield from _read_by(reader, readers)
        elif reader.opcode not in _NO_KERNEL:
            yield reader


def _wire_seconds(c: CompiledCollective, mesh: Mapping[str, int], cluster: Cluster) -> float:
    """Seconds of one run; for a collective along several axes, along each axis in turn."""
    whole = c.bytes * (c.group if c.kind == "all-gather" else 1)
    passed_on = c.kind in ("collective-permute", "collective-broadcast")
    kind = cast(Kind, "permute" if passed_on else c.kind)
    return math.fsum(max(busy(Collective(kind, a, whole, 1), mesh, cluster)) for a in c.axes)
