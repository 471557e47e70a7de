"""Sharding of arrays over the mesh: parameters by a table of path patterns, activations where a
model says so.

A parameter's path ("encoder/3/mlp/up/kernel") must match exactly one pattern, so that a new layer
that was forgotten stops the run instead of silently being replicated. A model that runs without a
mesh, or on a mesh that lacks an axis, computes the same on one device.
"""

import math
import re
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, get_abstract_mesh
from jaxtyping import Array, Float, Int

PyTree = Any
Rules = tuple[tuple[str, PartitionSpec], ...]
WHOLE: Rules = ((".", PartitionSpec()),)
"""Every device holds all parameters."""
ROWS = ("data", "fsdp")
"""The axes that split the rows of a batch."""
_AXES = {*ROWS, "stage", "context", "tensor"}


def axis_size(name: str) -> int:
    """Devices along an axis of the mesh that the program is traced under
    (`jax.sharding.use_abstract_mesh`); 1 where there is none."""
    return get_abstract_mesh().shape.get(name, 1)


def dividing(count: int, *axes: str) -> tuple[str, ...]:
    """Axes to pass to `constrain`: of `axes`, in order, those whose devices together divide
    `count`. Along the others, every device holds the same."""
    fits: tuple[str, ...] = ()
    for axis in axes:
        if count % math.prod(axis_size(name) for name in (*fits, axis)) == 0:
            fits += (axis,)
    return fits


def axes_of(*entries: Any) -> tuple[str, ...]:
    """The mesh axes that entries of a PartitionSpec name."""
    each = (e if isinstance(e, tuple) else (e,) for e in entries if e is not None)
    return tuple(axis for entry in each for axis in entry)


def constrain(x: Array, *spec: Any) -> Array:
    """`x`, sharded as `PartitionSpec(*spec)` over the mesh that the program is traced under;
    unchanged if there is no mesh, or if each device computes its own part (`jax.shard_map`)."""
    if AxisType.Auto not in get_abstract_mesh().axis_types:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))


def keep_rows(tree: PyTree, axes: tuple[str, ...] = ROWS) -> PyTree:
    """Arrays [R, ...] with each row kept on the devices that its samples came to (split over
    `axes`); the compiler chooses how to shard the other dimensions. Without it, sharded weights
    would make devices gather whole batches."""
    free = PartitionSpec.UNCONSTRAINED
    return jax.tree.map(lambda x: constrain(x, axes, *[free] * (x.ndim - 1)), tree)


def look_up(table: Float[Array, "v w"], index: Int[Array, " r *i"]) -> Float[Array, "r *i w"]:
    """`table[index]` for a table whose words are sharded over "fsdp". Indices travel to the words
    and vectors back; otherwise the compiler might gather the whole table and reduce its whole
    gradient."""
    free = PartitionSpec.UNCONSTRAINED
    index = constrain(index, "data", *[free] * (index.ndim - 1))
    found = table[index]
    return keep_rows(constrain(found, "data", *[free] * (found.ndim - 1)))


def shardings(shapes: PyTree, rules: Rules, mesh: Mesh) -> PyTree:
    """The NamedSharding of every leaf of `shapes` (arrays or ShapeDtypeStructs), as the same tree.

    A rule applies to the paths in which `re.search` finds its pattern; an axis that the mesh lacks
    splits nothing.

    Raises:
      ValueError: a path matches no rule or several (all such are listed), or a spec splits a
        dimension that its mesh axes do not divide.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)
    named = [(path_name(path), leaf) for path, leaf in leaves]
    matches = {
        name: [(pattern, spec) for pattern, spec in rules if re.search(pattern, name)]
        for name, _ in named
    }
    problems = [
        f"{name} {'matches ' + ', '.join(p for p, _ in found) if found else 'matches no rule'}"
        for name, found in matches.items()
        if len(found) != 1
    ]
    if problems:
        raise ValueError(
            f"Every parameter must match exactly one sharding rule, but of {len(named)} these "
            f"{len(problems)} do not: {'; '.join(problems)}."
        )
    placed = [_checked(name, leaf, matches[name][0][1], mesh) for name, leaf in named]
    return jax.tree.unflatten(tree, placed)


def placed(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of an array or ShapeDtypeStruct; without a sharding, on this host's
    first device."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, jax.sharding.Sharding):
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """The leaves of a tree by their paths."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def path_name(path: tuple[Any, ...]) -> str:
    """ "a/b/c" for a key path of `jax.tree_util`, whatever containers it passes through."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _checked(name: str, leaf: Any, spec: PartitionSpec, mesh: Mesh) -> NamedSharding:
    if len(spec) > len(leaf.shape):
        raise ValueError(
            f"The rule for parameter {name} has {len(spec)} dimensions, {spec}, but its shape is "
            f"{tuple(leaf.shape)}; shorten the rule."
        )
    kept: list[Any] = []
    for dimension, entry in enumerate(spec):
        axes = tuple(a for a in axes_of(entry) if a in mesh.shape or a not in _AXES)
        kept.append(axes[0] if len(axes) == 1 else axes or None)
        unknown = [axis for axis in axes if axis not in mesh.shape]
        if unknown:
            raise ValueError(
                f"The rule for parameter {name} names mesh axis {unknown[0]!r}; "
                f"this mesh has {', '.join(mesh.shape)}."
            )
        size = math.prod(mesh.shape[axis] for axis in axes)
        if leaf.shape[dimension] % size:
            raise ValueError(
                f"Dimension {dimension} of parameter {name}, shape {tuple(leaf.shape)}, does not "
                f"divide over mesh axis {'×'.join(axes)} of size {size}; change its rule or the "
                f"mesh."
            )
    return NamedSharding(mesh, PartitionSpec(*kept))
