"""ONNX's operators for JAX's primitives, one rule each; see `onnx_writer`.

Shapes are static, so every rule knows them, and axes that JAX numbers freely (products, gathers)
are brought into the order that ONNX's operators expect.
"""

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import numpy as np
from jax.lax import GatherScatterMode

from tools.export.onnx_writer import Node, Rule, Value, Writer, kind


def _like(equation: Any, at: int = 0) -> tuple[tuple[int, ...], np.dtype]:
    aval = equation.outvars[at].aval
    return aval.shape, aval.dtype


def _plain(operator: str, w: Writer, equation: Any, *x: Value, **how: Any) -> Node:
    return w.add(operator, x, *_like(equation), **how)


def _in_turn(first: str, then: str, w: Writer, equation: Any, *x: Value) -> Node:
    return _plain(then, w, equation, _plain(first, w, equation, *x))


def _same(w: Writer, equation: Any, *x: Value) -> list[Value]:
    return list(x)


def _bool(w: Writer, equation: Any, *x: Value, logical: str, bitwise: str) -> Node:
    shape, dtype = _like(equation)
    return w.add(logical if dtype == np.bool_ else bitwise, x, shape, dtype)


def _reshaped(w: Writer, x: Value, shape: Sequence[int]) -> Value:
    if x.shape == tuple(shape):
        return x
    if isinstance(x, np.ndarray):
        return x.reshape(shape)
    return w.add("Reshape", [x, np.array(shape, np.int64)], shape, x.dtype)


def _transposed(w: Writer, x: Value, order: Sequence[int]) -> Value:
    if list(order) == sorted(order):
        return x
    if isinstance(x, np.ndarray):
        return x.transpose(order)
    return w.add("Transpose", [x], [x.shape[i] for i in order], x.dtype, perm=list(order))


def _cast(w: Writer, x: Value, dtype: Any) -> Value:
    if x.dtype == dtype:
        return x
    if isinstance(x, np.ndarray):
        return x.astype(dtype)
    return w.add("Cast", [x], x.shape, dtype, to=kind(dtype))


def _broadcast(w: Writer, equation: Any, x: Value) -> Value:
    shape, axes = equation.params["shape"], equation.params["broadcast_dimensions"]
    kept = dict(zip(axes, x.shape, strict=True))
    placed = _reshaped(w, x, [kept.get(i, 1) for i in range(len(shape))])
    if placed.shape == tuple(shape):
        return placed
    return w.add("Expand", [placed, np.array(shape, np.int64)], shape, x.dtype)


def _iota(w: Writer, equation: Any) -> Value:
    shape, axis = equation.params["shape"], equation.params["dimension"]
    line = np.arange(shape[axis], dtype=equation.params["dtype"])
    line = line.reshape([-1 if i == axis else 1 for i in range(len(shape))])
    return w.add("Expand", [line, np.array(shape, np.int64)], shape, line.dtype)


def _reduced(operator: str, w: Writer, equation: Any, x: Value) -> Value:
    (shape, dtype), axes = _like(equation), np.array(equation.params["axes"], np.int64)
    if not len(axes):
        return x
    if dtype == np.bool_:
        found = w.add(operator, [_cast(w, x, np.int32), axes], shape, np.int32, keepdims=0)
        return _cast(w, found, np.bool_)
    return w.add(operator, [x, axes], shape, dtype, keepdims=0)


def _extreme(operator: str, w: Writer, equation: Any, x: Value) -> Value:
    (axis,) = equation.params["axes"]
    shape, dtype = _like(equation)
    return _cast(w, w.add(operator, [x], shape, np.int64, axis=axis, keepdims=0), dtype)


def _round(w: Writer, equation: Any, x: Value) -> Node:
    if equation.params["rounding_method"] != jax.lax.RoundingMethod.TO_NEAREST_EVEN:
        raise ValueError("ONNX can only round halves to even numbers; export to stablehlo.")
    return _plain("Round", w, equation, x)


def _finite(w: Writer, equation: Any, x: Value) -> Node:
    odd = [_plain(operator, w, equation, x) for operator in ("IsNaN", "IsInf")]
    return _in_turn("Or", "Not", w, equation, *odd)


def _select(w: Writer, equation: Any, which: Value, *cases: Value) -> Node:
    (shape, dtype), (no, yes) = _like(equation), cases[:2]
    if len(cases) > 2:
        raise ValueError("ONNX can choose between only two cases; export to stablehlo.")
    which = _cast(w, which, np.bool_)
    if dtype != np.bool_:
        return w.add("Where", [which, yes, no], shape, dtype)
    neither = w.add("Not", [which], which.shape, dtype)
    both = [w.add("And", pair, shape, dtype) for pair in ((which, yes), (neither, no))]
    return w.add("Or", both, shape, dtype)


def _sliced(w: Writer, x: Value, begin: Any, end: Any, step: Any, shape: Any) -> Node:
    axes = np.arange(len(x.shape))
    limits = [y if isinstance(y, Node) else np.asarray(y, np.int64) for y in (begin, end, axes)]
    return w.add("Slice", [x, *limits, np.asarray(step, np.int64)], shape, x.dtype)


def _slice(w: Writer, equation: Any, x: Value) -> Node:
    p = equation.params
    step = p["strides"] or [1] * len(x.shape)
    return _sliced(w, x, p["start_indices"], p["limit_indices"], step, _like(equation)[0])


def _dynamic_slice(w: Writer, equation: Any, x: Value, *starts: Value) -> Node:
    sizes = np.array(equation.params["slice_sizes"], np.int64)
    wide = [_reshaped(w, _cast(w, start, np.int64), (1,)) for start in starts]
    rank = (len(sizes),)
    begin: Value = w.add("Concat", wide, rank, np.int64, axis=0)
    begin = w.add("Max", [begin, np.zeros(rank, np.int64)], rank, np.int64)
    begin = w.add("Min", [begin, np.array(x.shape, np.int64) - sizes], rank, np.int64)
    end = w.add("Add", [begin, sizes], rank, np.int64)
    return _sliced(w, x, begin, end, np.ones(rank), _like(equation)[0])


def _reversed(w: Writer, equation: Any, x: Value) -> Node:
    turned = equation.params["dimensions"]
    begin = [-1 if i in turned else 0 for i in range(len(x.shape))]
    end = [-(n + 1) if i in turned else n for i, n in enumerate(x.shape)]
    step = [-1 if i in turned else 1 for i in range(len(x.shape))]
    return _sliced(w, x, begin, end, step, x.shape)


def _stack(w: Writer, equation: Any, *x: Value) -> Node:
    axis = equation.params["axis"]
    shape = (*x[0].shape[:axis], 1, *x[0].shape[axis:])
    return w.add("Concat", [_reshaped(w, y, shape) for y in x], *_like(equation), axis=axis)


def _split(w: Writer, equation: Any, x: Value) -> list[Value]:
    p = equation.params
    found = [Node(w.name("Split"), *_like(equation, i)) for i in range(len(equation.outvars))]
    operands = [w.read(x), w.read(np.array(p["sizes"], np.int64))]
    w.node("Split", operands, [y.name for y in found], axis=p["axis"])
    return list(found)


def _unstacked(w: Writer, equation: Any, x: Value) -> list[Value]:
    """JAX 0.12's primitive for `x[0], x[1], …`."""
    parts = range(len(equation.outvars))
    axis = equation.params["axis"]
    return [w.add("Gather", [x, np.array(i)], *_like(equation, i), axis=axis) for i in parts]


def _padded(w: Writer, x: Value, config: Sequence[tuple[int, int, int]], filler: Value) -> Value:
    """Pads each axis by (before, after, between entries); negative amounts cut."""
    for axis, (*_, inside) in enumerate(config):
        if inside and x.shape[axis] > 1:
            before, size, rest = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
            apart = _reshaped(w, x, [*before, size, 1, *rest])
            room = [(0, inside if i == axis + 1 else 0, 0) for i in range(len(apart.shape))]
            wide = [*before, size * (1 + inside), *rest]
            cut = [(0, -inside if i == axis else 0, 0) for i in range(len(x.shape))]
            x = _padded(w, _reshaped(w, _padded(w, apart, room, filler), wide), cut, filler)
    low, high, _ = np.array(config, np.int64).reshape(-1, 3).T
    more = np.maximum([low, high], 0)
    if more.any():
        shape = np.array(x.shape) + more.sum(0)
        x = w.add("Pad", [x, more.ravel(), filler], shape.tolist(), x.dtype)
    if min(*low, *high, 0) < 0:
        begin, end = np.maximum(-low, 0), x.shape + np.minimum(high, 0)
        x = _sliced(w, x, begin, end, np.ones_like(begin), np.maximum(end - begin, 0).tolist())
    return x


def _pad(w: Writer, equation: Any, x: Value, filler: Value) -> Value:
    return _padded(w, x, equation.params["padding_config"], filler)


def _pooled(operator: str, w: Writer, equation: Any, x: Value) -> Value:
    """The sum, maximum or minimum of each window: axis by axis, over one slice for each place in
    the window."""
    p, dtype = equation.params, x.dtype
    number = np.issubdtype(dtype, np.integer)
    low, high = (np.iinfo(dtype).min, np.iinfo(dtype).max) if number else (-np.inf, np.inf)
    nothing = np.asarray({"Add": 0, "Max": low, "Min": high}[operator], dtype)
    between = [n - 1 for n in p["base_dilation"]]
    config = [(*edges, n) for edges, n in zip(p["padding"], between, strict=True)]
    x = _padded(w, x, config, nothing)
    for axis, size in enumerate(_like(equation)[0]):
        step, apart = p["window_strides"][axis], p["window_dilation"][axis]
        shape = [size if i == axis else n for i, n in enumerate(x.shape)]
        starts = [i * apart for i in range(p["window_dimensions"][axis])]
        parts = [_strided(w, x, axis, i, step, shape) for i in starts]
        x = parts[0]
        for part in parts[1:]:
            x = w.add(operator, [x, part], shape, dtype)
    return x


def _strided(w: Writer, x: Value, axis: int, begin: int, step: int, shape: Sequence[int]) -> Value:
    """The entries `begin`, `begin` + `step`, … of an axis that make this shape."""
    if x.shape == tuple(shape):
        return x
    every = np.arange(len(shape)) == axis
    end = np.where(every, begin + (shape[axis] - 1) * step + 1, x.shape)
    return _sliced(w, x, np.where(every, begin, 0), end, np.where(every, step, 1), shape)


def _ordered(w: Writer, keys: Sequence[Value], axis: int, most: int, largest: bool) -> Node:
    """Indices along an axis of the first `most` entries in the order of the keys, the first key
    counting most; equal entries keep their order, and NaN is above all numbers."""
    parts: list[Value] = []
    for key in keys:
        if np.issubdtype(key.dtype, np.floating):
            odd = w.add("IsNaN", [key], key.shape, np.bool_)
            plain = w.add("Where", [odd, np.zeros((), key.dtype), key], key.shape, key.dtype)
            parts += [_cast(w, odd, np.int32), plain]
        else:
            parts.append(_cast(w, key, np.int64))
    order: Any = None
    for i, part in enumerate(reversed(parts)):
        count = most if i == len(parts) - 1 else part.shape[axis]
        shape = [count if j == axis else n for j, n in enumerate(part.shape)]
        key = part if order is None else _picked(w, part, order, axis)
        found = [Node(w.name("TopK"), tuple(shape), d) for d in (key.dtype, np.dtype(np.int64))]
        operands = [w.read(key), w.read(np.array([count], np.int64))]
        w.node("TopK", operands, [x.name for x in found], axis=axis, largest=int(largest))
        order = found[1] if order is None else _picked(w, order, found[1], axis)
    return order


def _picked(w: Writer, x: Value, at: Node, axis: int) -> Node:
    return w.add("GatherElements", [x, at], at.shape, x.dtype, axis=axis)


def _sort(w: Writer, equation: Any, *x: Value) -> list[Value]:
    p = equation.params
    axis = p["dimension"]
    order = _ordered(w, x[: p["num_keys"]], axis, x[0].shape[axis], largest=False)
    return [_picked(w, y, order, axis) for y in x]


def _top_k(w: Writer, equation: Any, x: Value) -> list[Value]:
    axis = equation.params.get("axis", -1) % len(x.shape)
    keys: list[Value] = [x]
    if np.issubdtype(x.dtype, np.floating):  # XLA has 0 above -0
        sign = w.add("Div", [np.ones((), x.dtype), x], x.shape, x.dtype)
        above = w.add("Greater", [sign, np.zeros((), x.dtype)], x.shape, np.bool_)
        keys.append(_cast(w, above, np.int32))
    order = _ordered(w, keys, axis, equation.params["k"], largest=True)
    return [_picked(w, x, order, axis), _cast(w, order, _like(equation, 1)[1])]


def _cumsum(w: Writer, equation: Any, x: Value) -> Node:
    p = equation.params
    axis = np.asarray(p["axis"], np.int64)
    return _plain("CumSum", w, equation, x, axis, reverse=int(p["reverse"]))


def _product(w: Writer, equation: Any, x: Value, y: Value) -> Value:
    (x_sum, y_sum), (x_rows, y_rows) = equation.params["dimension_numbers"]
    shape, dtype = _like(equation)
    x_free = [i for i in range(len(x.shape)) if i not in (*x_sum, *x_rows)]
    y_free = [i for i in range(len(y.shape)) if i not in (*y_sum, *y_rows)]
    rows = [x.shape[i] for i in x_rows]
    many, summed = (prod(x.shape[i] for i in axes) for axes in (x_free, x_sum))
    wide = prod(y.shape[i] for i in y_free)
    left = _transposed(w, _cast(w, x, dtype), [*x_rows, *x_free, *x_sum])
    right = _transposed(w, _cast(w, y, dtype), [*y_rows, *y_sum, *y_free])
    pair = [_reshaped(w, left, [*rows, many, summed]), _reshaped(w, right, [*rows, summed, wide])]
    return _reshaped(w, w.add("MatMul", pair, [*rows, many, wide], dtype), shape)


def _convolution(w: Writer, equation: Any, x: Value, kernel: Value) -> Value:
    p, (shape, dtype) = equation.params, _like(equation)
    axes = p["dimension_numbers"]
    if p["batch_group_count"] != 1 or not p["padding"] or dtype != np.float32:
        raise ValueError(
            f"ONNX has no convolution of {dtype} with batch_group_count {p['batch_group_count']} "
            f"and {len(p['padding'])} spatial axes; export to stablehlo."
        )
    between = [n - 1 for n in p["lhs_dilation"]]
    edges = [(*pair, n) for pair, n in zip(p["padding"], between, strict=True)]
    rows = _transposed(w, x, axes.lhs_spec)
    found = w.add(
        "Conv",
        [
            _padded(w, rows, [(0, 0, 0)] * 2 + edges, np.zeros((), dtype)),
            _transposed(w, kernel, axes.rhs_spec),
        ],
        [shape[i] for i in axes.out_spec],
        dtype,
        strides=list(p["window_strides"]),
        dilations=list(p["rhs_dilation"]),
        group=p["feature_group_count"],
    )
    return _transposed(w, found, np.argsort(axes.out_spec).tolist())


def _within(w: Writer, index: Value, sizes: Sequence[int]) -> tuple[Value, Value]:
    """Indices clipped to `sizes`, and a mask of the indices that were within."""
    most = np.array(sizes, np.int64) - 1
    clipped = w.add("Max", [index, np.zeros_like(most)], index.shape, np.int64)
    clipped = w.add("Min", [clipped, most], index.shape, np.int64)
    same = w.add("Equal", [clipped, index], index.shape, np.bool_)
    least = w.add(
        *("ReduceMin", [_cast(w, same, np.int32), np.array([-1])], index.shape[:-1], np.int32),
        keepdims=0,
    )
    return clipped, _cast(w, least, np.bool_)


def _gather(w: Writer, equation: Any, x: Value, index: Value) -> Value:
    p, (shape, dtype) = equation.params, _like(equation)
    d, sizes = p["dimension_numbers"], p["slice_sizes"]
    shared, found = list(d.operand_batching_dims), list(d.start_index_map)
    rest = [i for i in range(len(x.shape)) if i not in (*shared, *found)]
    if any(sizes[i] != 1 for i in found) or any(sizes[i] != x.shape[i] for i in rest):
        raise ValueError("ONNX gathers single entries, not windows; export to stablehlo.")
    batch = list(range(len(index.shape) - 1))
    common = list(d.start_indices_batching_dims)
    others = [i for i in batch if i not in common]
    index = _transposed(w, _cast(w, index, np.int64), [*common, *others, len(batch)])
    inside: Value | None = None
    if p["mode"] != GatherScatterMode.PROMISE_IN_BOUNDS:
        index, inside = _within(w, index, [x.shape[i] for i in found])
    ordered = _transposed(w, x, [*shared, *found, *rest])
    ends = [x.shape[i] for i in rest]
    taken = [*(index.shape[:-1]), *ends]
    if shared or len(found) > 1:
        got: Value = w.add("GatherND", [ordered, index], taken, dtype, batch_dims=len(shared))
    else:
        got = w.add(
            "Gather", [ordered, _reshaped(w, index, index.shape[:-1])], taken, dtype, axis=0
        )
    if p["mode"] == GatherScatterMode.FILL_OR_DROP and inside is not None:
        flag = _reshaped(w, inside, [*inside.shape, *[1] * len(ends)])
        got = w.add("Where", [flag, got, _filler(p["fill_value"], dtype)], taken, dtype)
    windows = [i for i in range(len(x.shape)) if i not in (*d.collapsed_slice_dims, *shared)]
    labels = [*(("b", i) for i in (*common, *others)), *(("w", i) for i in rest)]
    batches, kept = iter(batch), iter(windows)
    wanted: list[tuple[str, int]] = [
        ("w", next(kept)) if i in d.offset_dims else ("b", next(batches)) for i in range(len(shape))
    ]
    order = [labels.index(label) for label in wanted if label in labels]
    return _reshaped(w, _transposed(w, got, order), shape)


def _filler(given: Any, dtype: np.dtype) -> np.ndarray:
    if given is None:
        given = np.nan if np.issubdtype(dtype, np.floating) else np.iinfo(dtype).min
    return np.asarray(given, dtype)


def _scatter(reduction: str, w: Writer, equation: Any, x: Value, index: Value, new: Value) -> Node:
    d, (shape, dtype) = equation.params["dimension_numbers"], _like(equation)
    every = tuple(range(len(x.shape)))
    if d.update_window_dims or d.operand_batching_dims or d.inserted_window_dims != every:
        raise ValueError("ONNX scatters single entries, not windows; export to stablehlo.")
    index = _cast(w, index, np.int64)
    index, inside = _within(w, index, [x.shape[i] for i in d.scatter_dims_to_operand_dims])
    if equation.params["mode"] != GatherScatterMode.CLIP:
        least = np.iinfo(dtype).min if np.issubdtype(dtype, np.integer) else -np.inf
        nothing = np.asarray(least if reduction == "max" else 0, dtype)
        new = w.add("Where", [inside, new, nothing], new.shape, dtype)
    back = np.argsort(d.scatter_dims_to_operand_dims)
    if list(back) != sorted(back):
        index = w.add("Gather", [index, back], index.shape, np.int64, axis=-1)
    return w.add("ScatterND", [x, index, new], shape, dtype, reduction=reduction)


def _scan(w: Writer, equation: Any, *operands: Value) -> list[Value]:
    p = equation.params
    closed, (fixed, begin, lists) = p["jaxpr"], _scanned(p, operands)
    consts, carries = len(fixed), len(begin)
    if not p["length"]:  # onnxruntime runs no Scan without steps
        shapes = [_like(equation, i) for i in range(carries, len(equation.outvars))]
        return [*begin, *(np.zeros(*each) for each in shapes)]
    if not lists:
        lists = (np.arange(p["length"], dtype=np.int64),)
    body = Writer(w.rules, w)
    carried = [Node(w.name("carry"), x.shape, x.dtype) for x in begin]
    items = [Node(w.name("item"), x.shape[1:], x.dtype) for x in lists]
    read = items[: len(closed.jaxpr.invars) - consts - carries]
    found = body.closed(closed, [*fixed, *carried, *read])
    named = [(w.name("next"), x) for x in found]
    graph = body.graph(w.name("body"), [*carried, *items], named)
    results = [Node(w.name("Scan"), *_like(equation, i)) for i in range(len(equation.outvars))]
    backward = {
        "scan_input_directions": [1] * len(lists),
        "scan_output_directions": [1] * (len(results) - carries),
    }
    w.node(
        "Scan",
        [w.read(x) for x in (*begin, *lists)],
        [x.name for x in results],
        body=graph,
        num_scan_inputs=len(lists),
        **{name: value for name, value in backward.items() if p["reverse"] and value},
    )
    return list(results)


def _scanned(params: Any, operands: Sequence[Value]) -> tuple[Sequence[Value], ...]:
    """A loop's constants, carry and sliced arrays; JAX 0.12 gives their numbers as trees."""
    if "ft_in" in params:
        return tuple(map(tuple, params["ft_in"].update(operands).unpack()))
    consts, carries = params["num_consts"], params["num_carry"]
    return operands[:consts], operands[consts : consts + carries], operands[consts + carries :]


RULES: dict[str, Rule] = {
    **dict.fromkeys(
        ("name", "stop_gradient", "copy", "copy_p", "sharding_constraint", "reduce_precision",
         "optimization_barrier"),
        _same,
    ),
    **dict.fromkeys(("reshape", "squeeze"), lambda w, eq, x: _reshaped(w, x, _like(eq)[0])),
    **{
        name: partial(_plain, operator)
        for name, operator in {
            "add": "Add", "add_any": "Add", "sub": "Sub", "mul": "Mul", "div": "Div",
            "max": "Max", "min": "Min", "pow": "Pow", "neg": "Neg", "abs": "Abs", "sign": "Sign",
            "exp": "Exp", "log": "Log", "sqrt": "Sqrt", "tanh": "Tanh", "logistic": "Sigmoid",
            "erf": "Erf", "sin": "Sin", "asin": "Asin", "cos": "Cos", "floor": "Floor",
            "ceil": "Ceil", "eq": "Equal", "lt": "Less", "le": "LessOrEqual", "gt": "Greater",
            "ge": "GreaterOrEqual",
        }.items()
    },
    **{
        name: partial(_reduced, operator)
        for name, operator in {
            "reduce_sum": "ReduceSum", "reduce_max": "ReduceMax", "reduce_min": "ReduceMin",
            "reduce_prod": "ReduceProd", "reduce_or": "ReduceMax", "reduce_and": "ReduceMin",
        }.items()
    },
    "and": partial(_bool, logical="And", bitwise="BitwiseAnd"),
    "or": partial(_bool, logical="Or", bitwise="BitwiseOr"),
    "xor": partial(_bool, logical="Xor", bitwise="BitwiseXor"),
    "not": partial(_bool, logical="Not", bitwise="BitwiseNot"),
    "rem": partial(_plain, "Mod", fmod=1),
    "argmax": partial(_extreme, "ArgMax"),
    "argmin": partial(_extreme, "ArgMin"),
    "scatter-max": partial(_scatter, "max"),
    "scatter-add": partial(_scatter, "add"),
    "broadcast_in_dim": _broadcast,
    "clamp": lambda w, eq, low, x, high: _plain("Min", w, eq, _plain("Max", w, eq, x, low), high),
    "concatenate": lambda w, eq, *x: _plain("Concat", w, eq, *x, axis=eq.params["dimension"]),
    "conv_general_dilated": _convolution,
    "convert_element_type": lambda w, eq, x: _cast(w, x, _like(eq)[1]),
    "cumsum": _cumsum,
    "dot_general": _product,
    "dynamic_slice": _dynamic_slice,
    "erfc": lambda w, eq, x: _plain("Sub", w, eq, np.ones((), x.dtype), _plain("Erf", w, eq, x)),
    "gather": _gather,
    "integer_pow": lambda w, eq, x: _plain("Pow", w, eq, x, np.asarray(eq.params["y"], x.dtype)),
    "iota": _iota,
    "is_finite": _finite,
    "log1p": lambda w, eq, x: _in_turn("Add", "Log", w, eq, x, np.ones((), x.dtype)),
    "ne": partial(_in_turn, "Equal", "Not"),
    "pad": _pad,
    "rev": _reversed,
    "round": _round,
    "rsqrt": partial(_in_turn, "Sqrt", "Reciprocal"),
    "reduce_window_max": partial(_pooled, "Max"),
    "reduce_window_min": partial(_pooled, "Min"),
    "reduce_window_sum": partial(_pooled, "Add"),
    "scan": _scan,
    "select_n": _select,
    "slice": _slice,
    "sort": _sort,
    "split": _split,
    "unstack": _unstacked,
    "square": lambda w, eq, x: _plain("Mul", w, eq, x, x),
    "stack": _stack,
    "top_k": _top_k,
    "transpose": lambda w, eq, x: _transposed(w, x, eq.params["permutation"]),
}  # fmt: skip
"""Rules by the primitive's name."""
