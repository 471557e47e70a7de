"""A traced program (a jaxpr) as an ONNX graph, primitive by primitive.

We have our own writer because jax2onnx 0.15 to 0.17.1 require an older orbax-checkpoint than the
one that reads checkpoints. Loops stay loops (`Scan`), stacked weights stay stacked, and values that
depend on no input are computed here; a primitive without a rule in `onnx_rules` is refused by name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import jax
import numpy as np
import onnx
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from onnx import TensorProto, helper, numpy_helper

OPSET = 18
"""Version of ONNX's operators: the first with reductions over given axes and scatters that take the
maximum."""
_FOLDED = 2**18
"""Largest number of elements of a value that is computed here because it depends on no input."""
_ALIGNMENT = 4096


@dataclass(frozen=True)
class Node:
    """A value that the graph computes or is given."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype


Value = Node | np.ndarray
"""A value of the graph, or one that is known."""
Rule = Callable[..., Value | Sequence[Value]]
"""Writes a primitive: rule(writer, equation, *operands) gives its results."""


@dataclass
class Writer:
    """A graph under construction, or the body of a loop in `outer`, whose values it may read."""

    rules: Mapping[str, Rule]
    outer: "Writer | None" = None
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    _known: dict[tuple[Any, ...], str] = field(default_factory=dict)
    _numbers: Any = field(default_factory=count)

    @property
    def root(self) -> "Writer":
        """The outermost graph, which holds all constants."""
        return self if self.outer is None else self.outer.root

    def name(self, hint: str) -> str:
        """A name that no other value has."""
        return f"{hint}_{next(self.root._numbers)}"

    def read(self, value: Value) -> str:
        """The name of a value that is used; a known one becomes a constant."""
        if isinstance(value, Node):
            self.root.used.add(value.name)
            return value.name
        array, root = np.ascontiguousarray(value).reshape(np.shape(value)), self.root
        key = str(array.dtype), array.shape, array.tobytes()
        if key not in root._known:
            root._known[key] = self.name("constant")
            root.constants[root._known[key]] = array
        return root._known[key]

    def add(
        self, kind: str, operands: Sequence[Value], shape: Sequence[int], dtype: Any, **how: Any
    ) -> Node:
        """Adds a node; returns its only result."""
        found = Node(self.name(kind), tuple(shape), np.dtype(dtype))
        self.node(kind, [self.read(x) for x in operands], [found.name], **how)
        return found

    def node(self, kind: str, inputs: Sequence[str], outputs: Sequence[str], **how: Any) -> None:
        """Adds a node."""
        self.nodes.append(helper.make_node(kind, inputs, outputs, **how))

    def jaxpr(
        self, jaxpr: Jaxpr, consts: Sequence[Value], operands: Sequence[Value]
    ) -> list[Value]:
        """Adds a traced program; returns its results.

        Raises:
          ValueError: one of its primitives has no rule.
        """
        known: dict[Any, Value] = dict(zip(jaxpr.constvars, consts, strict=True))
        known |= dict(zip(jaxpr.invars, operands, strict=True))

        def value(atom: Any) -> Value:
            return (
                np.asarray(atom.val, getattr(atom.aval, "dtype", None))
                if isinstance(atom, Literal)
                else known[atom]
            )

        for equation in jaxpr.eqns:
            found = self._results(equation, [value(x) for x in equation.invars])
            known |= dict(zip(equation.outvars, found, strict=True))
        return [value(x) for x in jaxpr.outvars]

    def closed(self, closed: ClosedJaxpr, operands: Sequence[Value]) -> list[Value]:
        """`jaxpr` for a program that comes with its constants."""
        return self.jaxpr(closed.jaxpr, [np.asarray(x) for x in closed.consts], operands)

    def _results(self, equation: Any, operands: list[Value]) -> list[Value]:
        name = equation.primitive.name
        for key in ("jaxpr", "call_jaxpr"):
            inner = equation.params.get(key)
            if name in _CALLS and inner is not None:
                if isinstance(inner, ClosedJaxpr):
                    return self.closed(inner, operands)
                return self.jaxpr(inner, [], operands)
        small = sum(int(np.prod(x.aval.shape)) for x in equation.outvars) <= _FOLDED
        if small and name not in _LOOPS and not any(isinstance(x, Node) for x in operands):
            found = equation.primitive.bind(*operands, **equation.params)
            found = found if equation.primitive.multiple_results else [found]
            return [np.asarray(x) for x in found]
        if name not in self.rules:
            raise ValueError(
                f"The policy's program uses JAX's '{name}', for which there is no ONNX rule; "
                "export it with --to stablehlo, or add a rule to tools/export/onnx_rules.py."
            )
        written: Any = self.rules[name](self, equation, *operands)
        return written if isinstance(written, list) else [written]

    def graph(
        self, name: str, inputs: Sequence[Node], outputs: Sequence[tuple[str, Value]]
    ) -> onnx.GraphProto:
        """The graph of what was added. Each output becomes a value of its own with the given name,
        because an output may be neither an input nor a value of the surrounding graph."""
        infos = []
        for given, value in outputs:
            self.node("Identity", [self.read(value)], [given])
            infos.append(helper.make_tensor_value_info(given, kind(value.dtype), value.shape))
        declared = [helper.make_tensor_value_info(x.name, kind(x.dtype), x.shape) for x in inputs]
        return helper.make_graph(self.nodes, name, declared, infos)


_CALLS = {
    "jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2", "custom_jvp_call",
    "custom_vjp_call",
}  # fmt: skip
_LOOPS = {"scan", "while", "cond"}


def kind(dtype: Any) -> int:
    """ONNX's number for a dtype."""
    return helper.np_dtype_to_tensor_dtype(np.dtype(dtype))


def model_of(
    act: Callable[..., Any],
    weights: Mapping[str, Any],
    inputs: Mapping[str, jax.ShapeDtypeStruct],
    output: str,
    rules: Mapping[str, Rule],
) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """The model that computes `act(weights, inputs)`, and the weights and constants that it refers
    to by name, which are not part of it yet.

    Raises:
      ValueError: as `Writer.jaxpr`.
    """
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in weights.items()}
    traced = jax.make_jaxpr(act)(shapes, dict(inputs))
    leaves = jax.tree.leaves(({name: name for name in shapes}, {name: name for name in inputs}))
    writer = Writer(rules)
    operands = [
        Node(name, x.aval.shape, x.aval.dtype)
        for name, x in zip(leaves, traced.jaxpr.invars, strict=True)
    ]
    (found,) = writer.closed(traced, operands)
    given = {x.name: x for x in operands}
    graph = writer.graph("act", [given[name] for name in inputs], [(output, found)])
    opsets = [helper.make_opsetid("", OPSET)]
    model = helper.make_model(graph, opset_imports=opsets, producer_name="chiliad", ir_version=9)
    read = {name: weight for name, weight in weights.items() if name in writer.used}
    return model, {**read, **writer.constants}


def write(model: onnx.ModelProto, path: Any, arrays: Mapping[str, Any], beside: str) -> None:
    """Writes a model to `path` and its arrays to the file `beside` it, one at a time, each at the
    start of a page, so that a runtime can map them into memory."""
    with open(path.parent / beside, "wb") as file:
        for name, array in arrays.items():
            file.write(bytes(-file.tell() % _ALIGNMENT))
            host, begin = np.asarray(array), file.tell()
            if host.size <= 64:
                model.graph.initializer.append(numpy_helper.from_array(host, name))
                continue
            file.write(np.ascontiguousarray(host).tobytes())
            tensor = TensorProto(name=name, data_type=kind(host.dtype), dims=host.shape)
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (("location", beside), ("offset", begin), ("length", host.nbytes)):
                tensor.external_data.add(key=key, value=str(value))
            model.graph.initializer.append(tensor)
    path.write_bytes(model.SerializeToString())
