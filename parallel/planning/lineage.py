"""Traces arguments of a compiled program to where they are read, through loops, fusions and
gathers, so that casts of weights can be counted.

Works on `parallel.planning.hlo.Program`; an array is traced as long as its numbers are unchanged,
in any order and in part or whole.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from parallel.planning.hlo import Instruction, Program, callees, root


@dataclass(frozen=True)
class CompiledCast:
    """Conversions of one argument of the program to a narrower dtype: their number in a step and
    the bytes that they write. `whole` is the bytes of the whole argument in that dtype."""

    argument: str
    dtype: str
    times: int
    bytes: int
    whole: int


class Lineage:
    """The origins of a program's arrays."""

    def __init__(self, program: Program):
        self.program = program
        self.by_name = {
            name: {x.name: x for x in body} for name, body in program.computations.items()
        }

    @cached_property
    def callers(self) -> dict[str, tuple[str, Instruction]]:
        """For each computation, the instruction that runs it and the computation that contains the
        instruction."""
        return {
            callee: (name, x)
            for name in self.program.times
            for x in self.program.computations[name]
            for callee, _ in callees(x)
        }

    def casts(self) -> Iterator[CompiledCast]:
        """Conversions of the program's arguments to narrower dtypes, inside or outside fusions,
        most bytes first."""
        times: Counter[tuple[str, str]] = Counter()
        written: Counter[tuple[str, str]] = Counter()
        whole: dict[tuple[str, str], int] = {}
        for name, runs in self.program.times.items():
            for x in self.program.computations[name]:
                if x.opcode != "convert" or not x.shape[0].dims:
                    continue
                argument = self.origin(name, x.operands[0])
                if argument is None or x.shape[0].bits >= argument.shape[0].bits:
                    continue
                key = argument_path(argument), x.shape[0].dtype
                times[key] += runs
                written[key] += runs * x.bytes
                whole[key] = argument.bytes * x.shape[0].bits // argument.shape[0].bits
        for key, size in written.most_common():
            yield CompiledCast(*key, times[key], size, whole[key])

    def origin(self, computation: str, name: str, index: int | None = None) -> Instruction | None:
        """The program's argument whose numbers (or a part of them, in any order) form a result;
        None if the result is computed.

        Args:
          index: index of the array in a result of several arrays.
        """
        x = self.by_name[computation].get(name)
        if x is None:
            return None
        if x.opcode == "parameter":
            return x if computation == self.program.entry else self._given(computation, x, index)
        if x.opcode == "get-tuple-element":
            return self.origin(computation, x.operands[0], _index(x))
        if x.opcode == "tuple":
            return None if index is None else self.origin(computation, x.operands[index])
        if x.opcode == "while":
            return self._carried(computation, x, index)
        if x.opcode in ("fusion", "call"):
            ((body, _),) = callees(x)
            return self.origin(body, root(self.program.computations[body]).name, index)
        if x.opcode in ("all-gather-start", "all-gather") and index is not None:
            return self.origin(computation, x.operands[index])
        if x.opcode in _CARRIED or x.opcode.startswith("all-gather"):
            return self.origin(computation, x.operands[0], index)
        return None

    def _given(self, computation: str, x: Instruction, index: int | None) -> Instruction | None:
        """`origin` of a computation's parameter."""
        if computation not in self.callers:
            return None
        where, caller = self.callers[computation]
        if caller.opcode == "while":
            return self._carried(where, caller, index)
        if caller.opcode in ("fusion", "call"):
            return self.origin(where, caller.operands[int(x.text)], index)
        return None

    def _carried(
        self, computation: str, loop: Instruction, index: int | None
    ) -> Instruction | None:
        """`origin` of a value that a loop carries, if every iteration leaves it unchanged."""
        (body,) = (name for name, _ in callees(loop))
        turned, names = root(self.program.computations[body]), self.by_name[body]
        if index is None or turned.opcode != "tuple":
            return None
        x = names[turned.operands[index]]
        while x.opcode in ("copy", "bitcast"):
            x = names[x.operands[0]]
        same = x.opcode == "get-tuple-element" and names[x.operands[0]].opcode == "parameter"
        if not same or _index(x) != index:
            return None
        return self.origin(computation, loop.operands[0], index)


def argument_path(argument: Instruction) -> str:
    """Keys of an argument in its tree, such as "language/layers/mlp/up/kernel"; if it has none, its
    name. HLO text writes state.params[\\'language\\']."""
    return "/".join(re.findall(r"\['(\w+)", argument.source.replace("\\'", "'"))) or (
        argument.source
    )


_CARRIED = {"bitcast", "reshape", "copy", "transpose", "slice", "dynamic-slice", "opt-barrier"}


def _index(x: Instruction) -> int:
    found = re.search(r"index=(\d+)", x.rest)
    assert found, x
    return int(found[1])
