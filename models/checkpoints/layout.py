"""Conversion of blocks of our parameters from another code's arrays and back, as a rename rule lays
them out.

Reading maps an index of ours to the smallest region of theirs that covers it, so a device's shard
costs its own bytes. Large arrays, and layers that they store one by one, are filled in piece by
piece: only the block itself and one piece are held at a time.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict
from jaxtyping import Shaped

from models.checkpoints.rename import MappedParameter, Pattern, Shape, Sizes, Table
from models.checkpoints.safetensors_format import Entry
from models.checkpoints.transpose import copy_into
from models.layers.float8.fp8 import HISTORY_LEAF

PyTree = Any
Bounds = tuple[int, int]
Fetch = Callable[[str, tuple[slice, ...]], np.ndarray]


def read_block(
    leaf: MappedParameter, index: tuple[slice, ...], fetch: Fetch, dtype: np.dtype, piece_bytes: int
) -> tuple[Shaped[np.ndarray, "..."], bool]:
    """Block `index` of a parameter in `dtype`, and whether all that was read for it is finite.

    Args:
      fetch: reads a region, (name, slices), of an array of theirs.
      piece_bytes: about how many bytes of a whole array to read at a time.
    """
    bounds = [s.indices(n)[:2] for s, n in zip(index, leaf.shape, strict=True)]
    out = np.empty([stop - start for start, stop in bounds], dtype)
    finite = True
    for name, along, part in _pieces(leaf, bounds, -(-out.nbytes // piece_bytes)):
        piece = _region(leaf, name, part, fetch)
        finite = finite and _finite(piece)
        start, stop = (x - bounds[along][0] for x in part[along]) if part else (0, 0)
        copy_into(out[(slice(None),) * along + (slice(start, stop),) if part else ...], piece)
    return out, finite


class ArrayPart(NamedTuple):
    """The part that parameter `path` contributes to an array of theirs."""

    path: str
    pattern: Pattern
    sizes: Sizes
    layer: int | None


@dataclass(frozen=True)
class Outgoing:
    """An array of theirs and the parameters of ours that it is made of, by component."""

    shape: Shape
    components: int
    parts: dict[int, ArrayPart]

    def build(self, ours: Mapping[str, np.ndarray]) -> Shaped[np.ndarray, "..."]:
        """The array, from our parameters by path; a view of them where possible."""
        arrays = [_backward(part, ours[part.path]) for _, part in sorted(self.parts.items())]
        if len(arrays) == 1:
            return arrays[0]
        groups = self.parts[0].pattern.theirs
        along = next(i for i, group in enumerate(groups) if isinstance(group, int))
        return np.concatenate(arrays, axis=along)


def their_arrays(table: Table, ours: Mapping[str, Shape], what: str) -> dict[str, Outgoing]:
    """Every array of their checkpoint of a model whose parameters have the shapes `ours`.

    Args:
      what: the format, for the message.

    Raises:
      ValueError: the format cannot hold some parameter; all such are listed.
    """
    arrays: dict[str, Outgoing] = {}
    wrong = []
    for path, shape in ours.items():
        rule = table.by_path.get(path)
        sizes = None if rule is None else rule.pattern.solve(None, shape)
        if rule is None or sizes is None:
            wrong.append(f"{path} {list(shape)}")
            continue
        pattern, components = rule.pattern, table.components[rule.theirs]
        theirs = pattern.their_shape(sizes, components)
        component = next((group for group in pattern.theirs if isinstance(group, int)), 0)
        for layer in range(1 if rule.axis is None else sizes[rule.axis]):
            part = ArrayPart(path, pattern, sizes, None if rule.axis is None else layer)
            known = tuple(size for size in theirs if size is not None)
            array = arrays.setdefault(rule.name(layer), Outgoing(known, components, {}))
            array.parts[component] = part
            if len(known) != len(theirs) or array.shape != known:
                wrong.append(f"{path} {list(shape)}")
                break
    for name, array in arrays.items():
        parts = list(array.parts.values())
        if len(parts) != array.components:
            wrong.append(f"{parts[0].path} without the rest of {name}")
    if wrong:
        raise ValueError(
            f"{what} cannot hold these {len(wrong)} of the model's {len(ours)} parameters: "
            f"{'; '.join(wrong)}."
        )
    return arrays


def exported(params: PyTree, table: Table, what: str) -> dict[str, Entry]:
    """Their checkpoint of `params` (nested dict of arrays): every array with its shape and a
    function that makes it, on this host. The scales' history of a run in float8 is left out.

    Raises:
      ValueError: see `their_arrays`.
    """
    flat = {
        path: leaf
        for path, leaf in flatten_dict(params, sep="/").items()
        if not path.endswith(HISTORY_LEAF)
    }
    arrays = their_arrays(table, {path: leaf.shape for path, leaf in flat.items()}, what)
    host = {path: np.asarray(leaf) for path, leaf in flat.items()}
    return {name: (array.shape, partial(array.build, host)) for name, array in arrays.items()}


def _pieces(
    leaf: MappedParameter, bounds: list[Bounds], count: int
) -> Iterator[tuple[str, int, list[Bounds]]]:
    """Yields the name of each piece to read, the dimension that pieces divide, and its bounds."""
    if leaf.rule.axis is not None:
        along = leaf.rule.pattern.ours.index((leaf.rule.axis,))
        for layer in range(*bounds[along]):
            part = (layer, layer + 1)
            yield leaf.names[layer], along, [*bounds[:along], part, *bounds[along + 1 :]]
        return
    if not bounds:
        yield leaf.names[0], 0, []
        return
    start, stop = bounds[0]
    step = -(-(stop - start) // max(count, 1))
    for low in range(start, stop, step):
        yield leaf.names[0], 0, [(low, min(low + step, stop)), *bounds[1:]]


def _region(
    leaf: MappedParameter, name: str, bounds: list[Bounds], fetch: Fetch
) -> Shaped[np.ndarray, "..."]:
    """A piece of ours that lies in one array of theirs."""
    pattern, sizes = leaf.rule.pattern, leaf.sizes
    box: dict[str, Bounds] = {}
    boxed, trim = [], []
    for group, (start, stop) in zip(pattern.ours, bounds, strict=True):
        assert isinstance(group, tuple)
        ranges, offset = _box([sizes[axis] for axis in group], start, stop)
        box |= zip(group, ranges, strict=True)
        boxed.append(math.prod(high - low for low, high in ranges))
        trim.append(slice(offset, offset + stop - start))
    slices, split, inner = [], [], []
    for place in pattern.theirs:
        if isinstance(place, int):
            slices.append(slice(place, place + 1))
            continue
        flat, shape, within = _cover([box[a] for a in place], [sizes[a] for a in place])
        slices.append(flat)
        split += shape
        inner += within
    block = fetch(name, tuple(slices)).reshape(split)[tuple(inner)]
    order = [pattern.order.index(axis) for axis in _flat(pattern) if axis != pattern.layer]
    return block.transpose(order).reshape(boxed)[tuple(trim)]


def _backward(part: ArrayPart, ours: np.ndarray) -> Shaped[np.ndarray, "..."]:
    """One component of their array, from the whole of ours."""
    pattern, sizes = part.pattern, part.sizes
    axes = [axis for axis in _flat(pattern) if axis != pattern.layer]
    if part.layer is not None:
        assert pattern.layer is not None
        ours = ours[(slice(None),) * pattern.ours.index((pattern.layer,)) + (part.layer,)]
    split = ours.reshape([sizes[axis] for axis in axes])
    order = [axes.index(axis) for axis in pattern.order]
    shape = [n for n in pattern.their_shape(sizes, components=1) if n is not None]
    return split.transpose(order).reshape(shape)


def _flat(pattern: Pattern) -> list[str]:
    return [axis for group in pattern.ours if isinstance(group, tuple) for axis in group]


def _box(sizes: Sequence[int], start: int, stop: int) -> tuple[list[Bounds], int]:
    """The smallest box of merged axes that covers positions [start, stop) of their product, and
    where `start` lies in it."""
    ranges: list[Bounds] = []
    for i in range(len(sizes)):
        inner = math.prod(sizes[i + 1 :])
        low, high = start // inner, -(-stop // inner)
        ranges.append((low, high))
        start, stop = start - low * inner, stop - low * inner
        if high - low > 1:
            return ranges + [(0, size) for size in sizes[i + 1 :]], start
    return ranges, 0


def _cover(box: Sequence[Bounds], sizes: Sequence[int]) -> tuple[slice, list[int], list[slice]]:
    """The smallest contiguous range of merged axes that covers a box, how it splits into those axes
    and where the box lies in them."""
    start, shape, inner = 0, list[int](), list[slice]()
    for i, (low, high) in enumerate(box):
        rest = math.prod(sizes[i + 1 :])
        start += low * rest
        if high - low > 1:
            shape += [high - low, *sizes[i + 1 :]]
            inner += [slice(None), *(slice(*bounds) for bounds in box[i + 1 :])]
            return slice(start, start + (high - low) * rest), shape, inner
        shape.append(1)
        inner.append(slice(None))
    return slice(start, start + 1), shape, inner


def _finite(x: np.ndarray) -> bool:
    """True if no entry is NaN or infinite, without a copy for f32."""
    if x.dtype.itemsize < 4:
        x = x.astype(np.float32)
    return bool(np.isfinite(x.min()) and np.isfinite(x.max()))
