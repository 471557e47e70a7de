"""Cost of a function, computed from its jaxpr: matrix products with their sizes, bytes moved,
kernels started, bytes alive at once.

Products are counted exactly, including recomputation under `jax.checkpoint`. Bytes follow a model
of XLA's fusion, which no backend follows exactly: element-wise chains cost one pass over their
inputs and outputs; products, loops and sorts read and write their operands.
"""

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from models.attention.target import compiling_for
from models.inputs.packed_batch import PackedBatch
from models.layers.functional import fill, only
from models.layers.recomputation import without_recomputation
from parallel.optimizer import OptimizerConfig, select
from parallel.step import Trainable


class Matmul(NamedTuple):
    """`batch` products of [m, k] with [k, n], with operands of `dtype` and `out` bytes per entry of
    the result."""

    batch: int
    m: int
    n: int
    k: int
    dtype: str
    out: int = 4

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """Operands and result, once each."""
        read = (self.m + self.n) * self.k * np.dtype(self.dtype).itemsize
        return self.batch * (read + self.m * self.n * self.out)


@dataclass
class CallCost:
    """Cost of one call.

    `matmuls`: how often each product runs. `inner`: FLOPs, by dtype, of products inside
    hand-written kernels, whose operands are on the chip. `bytes`: bytes moved by everything except
    the products of `matmuls`. `kernels`: number of kernels started. `peak`: bytes alive at once,
    besides the arguments.
    """

    matmuls: Counter[Matmul] = field(default_factory=Counter)
    inner: Counter[str] = field(default_factory=Counter)
    bytes: float = 0.0
    kernels: float = 0.0
    peak: float = 0.0

    @property
    def flops(self) -> float:
        """FLOPs of all matrix products."""
        return sum(self.flops_by_dtype.values())

    @property
    def flops_by_dtype(self) -> dict[str, float]:
        """FLOPs of all matrix products, by the dtype of their operands."""
        found = Counter[str](self.inner)
        for matmul, times in self.matmuls.items():
            found[matmul.dtype] += matmul.flops * times  # type: ignore[assignment]
        return {dtype: float(flops) for dtype, flops in found.items()}

    def add(self, other: "CallCost", times: float = 1) -> None:
        """Adds a cost that occurs `times` times; the caller must account for its peak."""
        for matmul, often in other.matmuls.items():
            self.matmuls[matmul] += often * times  # type: ignore[assignment]
        for dtype, flops in other.inner.items():
            self.inner[dtype] += flops * times  # type: ignore[assignment]
        self.bytes += other.bytes * times
        self.kernels += other.kernels * times


def work(function: Callable[..., Any], *args: Any, trips: float = 1) -> CallCost:
    """Cost of `function(*args)`; `args` are trees of arrays or ShapeDtypeStructs.

    Args:
      trips: how often the body of a `while` loop runs if its length depends on data (a scan's is
        known).
    """
    return of_jaxpr(jax.make_jaxpr(function)(*args).jaxpr, trips)


def gradient_work(
    model: Trainable, optimizer: OptimizerConfig, batch: PackedBatch, trips: float = 1
) -> CallCost:
    """Cost of the loss of a batch and of its gradient for the trainable parameters.

    Args:
      batch: arrays or ShapeDtypeStructs.
      trips: as in `work`.
    """
    params = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    moving = select(optimizer, params)[0]
    trained, fixed = only(params, moving), only(params, jax.tree.map(operator.not_, moving))

    def loss(trained: Any, fixed: Any, batch: PackedBatch) -> Any:
        return model.loss(fill(trained, fixed), batch, jax.random.key(0))

    gradient = jax.value_and_grad(loss, has_aux=True)
    return work(gradient, trained, fixed, batch, trips=trips)


def own_work(
    model: Trainable, optimizer: OptimizerConfig, batch: PackedBatch, trips: float = 1
) -> CallCost:
    """`gradient_work` of the model itself; MFU counts these FLOPs. Nothing is recomputed, whatever
    the layers keep, and attention is counted as on a CPU, since kernels for a GPU pad their heads
    and blocks."""
    with without_recomputation(), compiling_for("cpu"):
        return gradient_work(model, optimizer, batch, trips)


def of_jaxpr(jaxpr: Jaxpr, trips: float = 1) -> CallCost:
    """`work` of a jaxpr."""
    walk = _Walk(trips)
    inputs = [_Buffer(_size(var.aval), None) for var in jaxpr.invars]
    constants = [_Buffer(0, None) for _ in jaxpr.constvars]
    outputs = walk.run(jaxpr, constants, inputs)
    for value in outputs:
        walk.settle(value)
        walk.touch(value)
    walk.total.peak = walk.peak()
    return walk.total


class _Buffer:
    """Bytes in memory, from the tick at which they are written to the last tick at which they are
    read; those of arguments (born None) belong to the caller."""

    def __init__(self, size: float, born: int | None):
        self.size, self.born, self.last = size, born, born or 0


class _Virtual:
    """A value that fuses into its readers until something needs it in memory: its size and the
    buffers that it is computed from."""

    def __init__(self, size: float, sources: Iterable[_Buffer], shape_only: bool):
        self.size, self.sources = size, dict.fromkeys(sources)
        self.view = shape_only and len(self.sources) == 1
        self.settled: _Buffer | None = None


_Value = _Buffer | _Virtual
_VIEWS = {"reshape", "transpose", "squeeze", "expand_dims", "bitcast_convert_type", "copy",
          "stop_gradient", "sharding_constraint", "optimization_barrier", "rev"}  # fmt: skip
_PARTS = {"slice", "dynamic_slice", "split", "unstack"}
_ROOTS = {
    "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax",
    "argmin", "cumsum", "cumlogsumexp", "cummax", "cumprod", "concatenate", "pad", "sort", "top_k",
    "gather", "scatter", "scatter-add", "scatter_add", "dynamic_update_slice", "random_bits",
}  # fmt: skip
_INDEXED = {"gather": 2, "dynamic_update_slice": 2, "scatter": 2, "scatter-add": 3}
"""Times that these operations move the data that they extract or insert, instead of reading a whole
operand."""


class _Walk:
    def __init__(self, trips: float):
        self.trips, self.tick, self.total = trips, 0, CallCost()
        self.buffers: list[_Buffer] = []
        self.bursts: list[tuple[int, float]] = []

    def run(self, jaxpr: Jaxpr, constants: list[Any], inputs: list[Any]) -> list[_Value]:
        values: dict[Any, _Value] = dict(zip(jaxpr.constvars, constants, strict=True))
        values.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> _Value:
            return _Buffer(0, None) if isinstance(atom, Literal) else values[atom]

        for equation in jaxpr.eqns:
            self.tick += 1
            arguments = [read(atom) for atom in equation.invars]
            results = self.step(equation, arguments)
            values.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def step(self, equation: Any, arguments: list[_Value]) -> list[_Value]:
        name, params = equation.primitive.name, equation.params
        if name == "scan":
            return self.scan(equation, arguments)
        if name in ("while", "cond"):
            return self.branch(equation, arguments)
        if name == "pallas_call":
            return self.kernel(equation, arguments)
        inner = _bodies(params)
        if inner:
            body = inner[0]
            closed = body.jaxpr if isinstance(body, ClosedJaxpr) else body
            fixed = [_Buffer(0, None) for _ in closed.constvars]
            return self.run(closed, fixed, arguments[len(arguments) - len(closed.invars) :])
        if name in ("dot_general", "conv_general_dilated"):
            matmul = (_product if name == "dot_general" else _convolution)(equation)
            for value in arguments:
                self.touch(self.settle(value))
            self.total.add(CallCost(Counter([matmul]), kernels=1.0))
            return [self.new(_size(equation.outvars[0].aval))]
        sizes = [_size(var.aval) for var in equation.outvars]
        if name in _INDEXED:
            index = {"gather": -1, "dynamic_update_slice": 1}.get(name, 2)
            moved = sizes[0] if index < 0 else _size(equation.invars[index].aval)
            for value in arguments:
                self.touch(self.settle(value))
            self.total.add(CallCost(bytes=_INDEXED[name] * moved, kernels=1.0))
            return [self.new(size) for size in sizes]
        if name in _PARTS:
            for value in arguments:
                self.touch(value)
            return [_Virtual(s, [self.part(arguments[0], s)], True) for s in sizes]
        sources = [source for value in arguments for source in _sources(value)]
        fused = [_Virtual(size, sources, name in _VIEWS) for size in sizes]
        if name in _ROOTS:
            return [self.settle(value) for value in fused]
        return list(fused)

    def scan(self, equation: Any, arguments: list[_Value]) -> list[_Value]:
        params = equation.params
        for value in arguments:
            self.touch(self.settle(value))
        body = params["jaxpr"].jaxpr
        once = of_jaxpr(body, self.trips)
        self.total.add(once, params["length"])
        sizes = [_size(var.aval) for var in equation.outvars]
        carried = sum(sizes) - _stacked(equation.outvars, body.outvars)
        stacked = sum(sizes) - carried + _stacked(equation.invars, body.invars)
        if params["unroll"] < params["length"]:  # each turn slices out its part and inserts its own
            self.total.add(CallCost(bytes=2 * stacked, kernels=params["length"]))
        self.bursts.append((self.tick, max(once.peak - carried, 0)))
        return [self.new(size) for size in sizes]

    def branch(self, equation: Any, arguments: list[_Value]) -> list[_Value]:
        for value in arguments:
            self.touch(self.settle(value))
        parts = [of_jaxpr(body.jaxpr, self.trips) for body in _bodies(equation.params)]
        most = max(parts, key=lambda part: (part.flops, part.bytes))
        self.total.add(most, self.trips if equation.primitive.name == "while" else 1)
        self.bursts.append((self.tick, most.peak))
        return [self.new(_size(var.aval)) for var in equation.outvars]

    def kernel(self, equation: Any, arguments: list[_Value]) -> list[_Value]:
        """Counts a Pallas kernel: products once for each cell of its grid, arrays once."""
        for value in arguments:
            self.touch(self.settle(value))
        sizes = [_size(var.aval) for var in equation.outvars]
        moved = sum(sizes) + sum(v.size for v in arguments)
        self.total.add(CallCost(bytes=moved, kernels=1.0))
        cells = math.prod(n for n in equation.params["grid_mapping"].grid if isinstance(n, int))
        for matmul, times in of_jaxpr(equation.params["jaxpr"], self.trips).matmuls.items():
            self.total.inner[matmul.dtype] += matmul.flops * times * cells
        return [self.new(size) for size in sizes]

    def new(self, size: float) -> _Buffer:
        buffer = _Buffer(size, self.tick)
        self.buffers.append(buffer)
        return buffer

    def part(self, value: _Value, size: float) -> _Buffer:
        """A part of a value; reading it costs only the part's own size."""
        if isinstance(value, _Virtual) and value.settled is None and not value.view:
            self.settle(value)
        return _Buffer(size, None)

    def settle(self, value: _Value) -> _Value:
        """Writes a fused value to memory, unless it is only a view of a buffer there."""
        if isinstance(value, _Buffer) or value.view or value.settled is not None:
            return value
        read = sum(source.size for source in value.sources)
        if not value.sources or not read:
            value.settled = _Buffer(0, None)  # a constant, created where it is used
            return value
        for source in value.sources:
            source.last = self.tick
        self.total.add(CallCost(bytes=read + value.size, kernels=1.0))
        value.settled = self.new(value.size)
        value.sources = {value.settled: None}
        return value

    def touch(self, value: _Value) -> None:
        for source in _sources(value):
            source.last = self.tick

    def peak(self) -> float:
        """The most bytes alive at any tick."""
        change: Counter[int] = Counter()
        for buffer in self.buffers:
            assert buffer.born is not None
            change[buffer.born] += buffer.size  # type: ignore[assignment]
            change[buffer.last + 1] -= buffer.size  # type: ignore[assignment]
        burst: Counter[int] = Counter()
        for tick, size in self.bursts:
            burst[tick] += size  # type: ignore[assignment]
        alive, most = 0.0, 0.0
        for tick in sorted(change.keys() | burst.keys()):
            alive += change[tick]
            most = max(most, alive + burst[tick])
        return most


def _sources(value: _Value) -> list[_Buffer]:
    return [value] if isinstance(value, _Buffer) else list(value.sources)


def _bodies(params: dict[str, Any]) -> list[Any]:
    """The programs inside an equation; for a custom derivative, only those that run."""
    found: list[Any] = []
    for name, value in params.items():
        if name in ("jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd", "cond_jaxpr"):
            continue
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, Jaxpr | ClosedJaxpr):
                found.append(item)
    return found


def _stacked(outer: Sequence[Any], inner: Sequence[Any]) -> float:
    """Bytes of a loop's arrays that have one axis more than the part that each turn gets."""
    pairs = zip(outer, inner, strict=True)
    return sum(_size(var.aval) for var, part in pairs if var.aval.ndim > part.aval.ndim)


def _size(aval: Any) -> float:
    if not hasattr(aval, "shape"):
        return 0.0
    itemsize = getattr(aval.dtype, "itemsize", 4)
    return float(math.prod(aval.shape) * itemsize)


def _product(equation: Any) -> Matmul:
    left, right = (var.aval for var in equation.invars[:2])
    (left_k, _), (left_b, _) = equation.params["dimension_numbers"]
    batch = math.prod(left.shape[d] for d in left_b)
    k = math.prod(left.shape[d] for d in left_k)
    m = math.prod(left.shape) // max(batch * k, 1)
    n = math.prod(right.shape) // max(batch * k, 1)
    wide = min((left.dtype, right.dtype), key=lambda dtype: -dtype.itemsize)
    return Matmul(batch, m, n, k, str(wide), equation.outvars[0].aval.dtype.itemsize)


def _convolution(equation: Any) -> Matmul:
    """The matrix product whose every output entry sums over a window of the input's channels."""
    kernel, out = equation.invars[1].aval, equation.outvars[0].aval
    spec = equation.params["dimension_numbers"]
    channels = out.shape[spec.out_spec[1]]
    window = math.prod(kernel.shape) // kernel.shape[spec.rhs_spec[0]]
    places = math.prod(out.shape) // channels
    return Matmul(1, places, channels, window, str(kernel.dtype), out.dtype.itemsize)
