"""Reading a compiled XLA program: its collectives, the mesh axes that they run along, the compute
that hides them, and the dtypes of its matrix products.

Works on an optimised module's text (`Compiled.as_text()`, openxla.org/xla/operation_semantics). A
loop's contents count by its known trip count, and of a conditional, the branch with the most
products; figures are for one device and one run.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

KINDS = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all",
    "collective-permute", "collective-broadcast",
)  # fmt: skip


@dataclass(frozen=True)
class CompiledCollective:
    """The operands of one dtype of one collective.

    `bytes`: bytes of the operands, on one device. `sent`: bytes that each device sends in a ring,
    in one run. `axes`: mesh axes along which the `group` devices of a group differ. `times`: how
    often the program runs it. `asynchronous`: other kernels may run meanwhile; between its start
    and its end stand `kernels`, with matrix products of `flops`. `source`: JAX's name for the op.
    `instruction`: its name in the program; if a collective combines several dtypes, the entries
    share that name.
    """

    kind: str
    dtype: str
    bytes: int
    sent: int
    group: int
    axes: tuple[str, ...]
    times: int
    asynchronous: bool
    kernels: int
    flops: int
    source: str
    instruction: str


@dataclass(frozen=True)
class CompiledMatmul:
    """One matrix product: multiplications and additions of one run, the dtype of its operands (the
    wider, if they differ), whether it has batch dimensions, and the functions it was written in,
    innermost first."""

    flops: int
    dtype: str
    batched: bool
    times: int
    functions: tuple[str, ...]


class HloArray(NamedTuple):
    """One array of an instruction's result."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def bits(self) -> int:
        """Bits of one number."""
        if self.dtype == "pred":
            return 8
        width = re.match(r"[a-z]+(\d+)", self.dtype)
        return int(width[1]) if width else 0

    @property
    def bytes(self) -> int:
        """Bytes of all of its numbers."""
        return math.prod(self.dims) * self.bits // 8


class Instruction(NamedTuple):
    """One line of a computation: its result's arrays, the names of its operands, the `text` between
    its parentheses and the `rest` behind them; `root` is the computation's result."""

    name: str
    shape: tuple[HloArray, ...]
    opcode: str
    operands: tuple[str, ...]
    text: str
    rest: str
    root: bool

    @property
    def source(self) -> str:
        """JAX's name for the op, or XLA's name if XLA made it."""
        name = re.search(r'op_name="([^"]*)"', self.rest)
        return name[1] if name else self.name

    @property
    def bytes(self) -> int:
        """Bytes of the result."""
        return sum(a.bytes for a in self.shape)


class Program:
    """The computations of a module's text."""

    def __init__(self, text: str):
        self.frames = _frames(text)
        self.computations: dict[str, list[Instruction]] = {}
        body: list[Instruction] = []
        for line in text.splitlines():
            if header := _HEADER.match(line):
                body = self.computations.setdefault(header["name"], [])
                self.entry = header["name"] if header["entry"] else getattr(self, "entry", "")
            elif instruction := _instruction(line):
                body.append(instruction)
        if not getattr(self, "entry", ""):
            raise ValueError(
                "The text has no ENTRY computation; give that of a compiled program, as "
                "`jitted.lower(...).compile().as_text()` returns it."
            )

    @cached_property
    def times(self) -> dict[str, int]:
        """Number of runs of each computation; a loop of unknown length counts as one."""
        times: dict[str, int] = defaultdict(int)

        def visit(name: str, count: int) -> None:
            times[name] += count
            for instruction in self.computations[name]:
                for callee, trips in self._runs(instruction):
                    visit(callee, count * trips)

        visit(self.entry, 1)
        return dict(times)

    @property
    def unknown_loops(self) -> list[str]:
        """Loops without a known trip count, of which only one iteration is counted."""
        running = (x for name in self.times for x in self.computations[name])
        return [x.name for x in running if x.opcode == "while" and not _TRIPS.search(x.rest)]

    def matmuls(self) -> list[CompiledMatmul]:
        """Every matrix product that runs: dots, including those in fusions, and cuBLAS calls."""
        found = []
        for name, times in self.times.items():
            for x, product in self.products(name):
                frame = re.search(r"stack_frame_id=(\d+)", x.rest)
                functions = self.frames.get(int(frame[1]), ()) if frame else ()
                found.append(CompiledMatmul(*product, times, functions))
        return found

    def collectives(self, mesh: Mapping[str, int]) -> list[CompiledCollective]:
        """Every collective that runs, on a mesh with these axis sizes, slowest axis first (the
        order of `jax.sharding.Mesh.shape`, and of its devices)."""
        found = []
        for name, times in self.times.items():
            body = self.computations[name]
            shapes = {x.name: x.shape for x in body}
            for at, x in enumerate(body):
                kind, started = _kind(x)
                if kind is None:
                    continue
                axes, group = _axes(x.rest, mesh)
                between = self._meanwhile(body, at) if started else []
                by_dtype: dict[str, int] = defaultdict(int)
                for operand in (a for o in x.operands for a in shapes[o]):
                    by_dtype[operand.dtype] += operand.bytes
                for dtype, size in by_dtype.items():
                    found.append(
                        CompiledCollective(
                            kind, dtype, size, _sent(kind, size, group), group, axes, times,
                            started and '"is_sync":true' not in x.rest,
                            len(between), sum(map(self._flops, between)), x.source, x.name,
                        )
                    )  # fmt: skip
        return found

    def kernels(self, target: str) -> int:
        """Number of the program's calls of kernels whose custom-call target contains `target`."""
        return sum(
            times * sum(f'custom_call_target="{target}' in x.rest for x in self.computations[name])
            for name, times in self.times.items()
        )

    def _meanwhile(self, body: list[Instruction], at: int) -> list[Instruction]:
        """The kernels between the start of an asynchronous collective and its end."""
        start, between = body[at], []
        for x in body[at + 1 :]:
            if start.name in x.operands and x.opcode.endswith("-done"):
                break
            if x.opcode in ("fusion", "custom-call", "while", "dot", "call", "conditional"):
                between.append(x)
        return between

    def products(self, name: str) -> Iterator[tuple[Instruction, tuple[int, str, bool]]]:
        """Matrix products in a computation: FLOPs, dtype, and True if they have batch
        dimensions."""
        body = self.computations[name]
        shapes = {x.name: x.shape for x in body}
        for x in body:
            if x.opcode == "dot" or (x.opcode == "custom-call" and _CUBLAS.search(x.rest)):
                left, right = (shapes[o][0] for o in x.operands[:2])
                inner = math.prod(left.dims[i] for i in _dimensions(x.rest, "lhs_contracting"))
                dtype = max((left, right), key=lambda a: a.bits).dtype
                batched = bool(_dimensions(x.rest, "lhs_batch"))
                yield x, (2 * math.prod(x.shape[0].dims) * inner, dtype, batched)

    def _flops(self, x: Instruction) -> int:
        """FLOPs of the matrix products in one run of a kernel, a loop or a called computation."""
        total = 0
        if x.opcode in ("dot", "custom-call") and x.name in self._flops_by_name:
            total = self._flops_by_name[x.name]
        for callee, trips in self._runs(x):
            total += trips * sum(map(self._flops, self.computations[callee]))
        return total

    def _runs(self, x: Instruction) -> list[tuple[str, int]]:
        """`callees` that one run of an instruction runs; of a conditional's branches, the one with
        the most FLOPs, or else with the largest results."""

        def cost(callee: tuple[str, int]) -> tuple[int, int]:
            body = self.computations[callee[0]]
            return sum(map(self._flops, body)), sum(y.bytes for y in body)

        found = callees(x)
        return [max(found, key=cost)] if x.opcode == "conditional" and found else found

    @cached_property
    def _flops_by_name(self) -> dict[str, int]:
        found = (p for name in self.computations for p in self.products(name))
        return {x.name: product[0] for x, product in found}


def root(body: Sequence[Instruction]) -> Instruction:
    """The instruction that gives a computation's result."""
    return next((x for x in body if x.root), body[-1])


def callees(x: Instruction) -> list[tuple[str, int]]:
    """Computations that an instruction runs, and how often; without those that a reduction applies
    to pairs of numbers."""
    if x.opcode not in ("while", "fusion", "call", "conditional", "async-start"):
        return []
    trips = _TRIPS.search(x.rest) if x.opcode == "while" else None
    names = _CALLS.findall(x.rest)
    for branches in _BRANCHES.findall(x.rest):
        names += [name.strip(" %") for name in branches.split(",")]
    return [(name, int(trips[1]) if trips else 1) for name in names]


_HEADER = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{\s*$")
_ASSIGNMENT = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_TRIPS = re.compile(r'"?known_trip_count"?:\{"?n"?:"?(\d+)')
_CUBLAS = re.compile(r'custom_call_target="__cublas')
_CALLS = re.compile(r"(?:body|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_REPLICAS = re.compile(r"replica_groups=(\{\{.*?\}\}|\{\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)")
_MESH = re.compile(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?)\))? \{(.*?)\}")
_PAIRS = re.compile(r"source_target_pairs=\{(\{.*?\})\}")


def _instruction(line: str) -> Instruction | None:
    assignment = _ASSIGNMENT.match(line)
    if not assignment:
        return None
    begin = assignment.end()
    at = _closing(line, begin) + 1 if line[begin] == "(" else line.index(" ", begin)
    opcode = _OPCODE.match(line, at)
    if not opcode:
        return None
    end = _closing(line, opcode.end() - 1)
    inside = line[opcode.end() : end]
    operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    dims = _ARRAY.findall(line[begin:at])
    shape = tuple(HloArray(kind, tuple(map(int, filter(None, d.split(","))))) for kind, d in dims)
    is_root, name = bool(assignment[1]), assignment[2]
    return Instruction(name, shape, opcode[1], operands, inside, line[end + 1 :], is_root)


def _closing(line: str, at: int) -> int:
    """Index at which the parenthesis that opens at `at` closes."""
    depth = 0
    for end in range(at, len(line)):
        depth += (line[end] == "(") - (line[end] == ")")
        if not depth:
            return end
    raise ValueError(f"A line of the program has an unclosed parenthesis: {line[:200]}")


def _kind(x: Instruction) -> tuple[str | None, bool]:
    """Kind of collective that an instruction is or starts, and True if it only starts it."""
    started = x.opcode.endswith("-start")
    kind = x.opcode.removesuffix("-start")
    return (kind, started) if kind in KINDS else (None, False)


def _sent(kind: str, size: int, group: int) -> int:
    """Bytes that each device of a ring sends for operands of `size` bytes."""
    if kind == "all-gather":
        return size * (group - 1)
    if kind in ("collective-permute", "collective-broadcast"):
        return size
    return size * (group - 1) // group * (2 if kind == "all-reduce" else 1)


def _dimensions(rest: str, which: str) -> list[int]:
    """Dimensions of a dot ("lhs_contracting_dims={1}") or, from JSON, of a cuBLAS call."""
    found = re.search(which + r'_dim(?:ension)?s"?[=:][{\[]([^}\]]*)', rest)
    return [int(i) for i in re.findall(r"\d+", found[1])] if found else []


def _axes(rest: str, mesh: Mapping[str, int]) -> tuple[tuple[str, ...], int]:
    """The mesh axes along which a collective's groups run, and devices in a group."""
    sizes = tuple(mesh.values())
    devices = math.prod(sizes)
    if pairs := _PAIRS.search(rest):
        groups = np.array([[int(i) for i in p] for p in re.findall(r"(\d+),(\d+)", pairs[1])])
    else:
        groups = _groups(rest, devices)
    places = np.stack(np.unravel_index(groups, sizes), -1)
    differs = (places != places[:, :1]).any((0, 1))
    return tuple(name for name, d in zip(mesh, differs, strict=True) if d), groups.shape[1]


def _groups(rest: str, devices: int) -> np.ndarray:
    """Device numbers, one row per group."""
    everyone = np.arange(devices)
    if named := _MESH.search(rest):
        return _mesh_groups(named[1], named[2], named[3], everyone)
    written = _REPLICAS.search(rest)
    if not written or written[1] == "{}":
        return everyone[None]
    if written[1].startswith("{"):
        rows = re.findall(r"\{([\d,]+)\}", written[1])
        return np.array([[int(i) for i in row.split(",")] for row in rows])
    shape, _, iota = written[1].partition("<=")
    return _iota(iota).reshape(_numbers(shape))


def _mesh_groups(axes: str, ids: str | None, grouped: str, everyone: np.ndarray) -> np.ndarray:
    """Groups written as axes of a mesh, such as mesh['a'=8,'b'=128] {'b'}. An entry may be a part
    of an axis: "'b':(2)4" is the 4 after the slowest 2."""
    names, sizes = zip(*re.findall(r"'([^']+)'=(\d+)", axes), strict=True)
    dims: list[list[int]] = [[int(size)] for size in sizes]
    taken = []
    for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", grouped):
        axis = names.index(name)
        if size:
            dims[axis] = [int(before), int(size), dims[axis][0] // (int(before) * int(size))]
        taken.append((axis, 1 if size else 0))
    starts = np.cumsum([0, *map(len, dims)])
    last = [int(starts[axis]) + part for axis, part in taken]
    order = everyone
    if ids:
        order = _iota(ids) if ids.startswith("[") else np.array(_numbers(ids))
    grid = order.reshape([size for parts in dims for size in parts])
    width = math.prod(grid.shape[i] for i in last)
    return np.moveaxis(grid, last, range(-len(last), 0)).reshape(-1, width)


def _iota(text: str) -> np.ndarray:
    """Numbers written as "[128,8]T(1,0)": counted up, reshaped, transposed."""
    shape, _, order = text.partition("T")
    dims = _numbers(shape)
    numbers = np.arange(math.prod(dims)).reshape(dims)
    return (numbers.transpose(_numbers(order)) if order else numbers).reshape(-1)


def _numbers(text: str) -> list[int]:
    return [int(i) for i in re.findall(r"\d+", text)]


def _frames(text: str) -> dict[int, tuple[str, ...]]:
    """Function names of each stack frame and its callers, from the tables at the text's head."""
    head = text[: text.find("\n%")] if "\n%" in text else text

    def table(name: str, pattern: str) -> dict[int, tuple[str, ...]]:
        section = re.search(rf"^{name}\n((?:\d+ .*\n)+)", head, re.M)
        rows = re.findall(rf"^(\d+) {pattern}", section[1], re.M) if section else []
        return {int(number): tuple(rest) for number, *rest in rows}

    names = table("FunctionNames", '"(.*)"')
    places = table("FileLocations", r"\{.*function_name_id=(\d+)")
    frames = table("StackFrames", r"\{file_location_id=(\d+)(?: parent_frame_id=(\d+))?")

    first = frames.get(1, ("", "0"))[1] == "1"  # parents are numbered from 1, that is from none

    def chain(number: int) -> tuple[str, ...]:
        place, parent = frames[number]
        (name,) = names[int(places[int(place)][0])]
        above = int(parent or 0) - first
        return (name, *(chain(above) if above in frames else ()))

    return {number: chain(number) for number in frames}
