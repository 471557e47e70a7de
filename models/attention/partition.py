"""Tells the compiler's partitioner that the rows of a batch do not interact in attention.

Without it, a loop over rows, or a kernel, would make every device gather the whole batch first. It
uses `jax.experimental.custom_partitioning` with the rule that only the leading axis may be split.
"""

from collections.abc import Callable
from itertools import count
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec, get_abstract_mesh

from models.sharding import ROWS


def by_row(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, from trees of arrays [b, ...] to a tree of arrays [b, ...], run by each device on
    its own rows only. Within a `shard_map` over the rows, they are split already."""

    def call(*args: Any) -> Any:
        if set(ROWS) <= set(get_abstract_mesh().manual_axes):
            return function(*args)
        leaves, tree = jax.tree.flatten(args)
        result = jax.tree.structure(jax.eval_shape(function, *args))

        def flat(*leaves: Any) -> tuple[Any, ...]:
            return tuple(jax.tree.leaves(function(*jax.tree.unflatten(tree, leaves))))

        def partition(mesh: Mesh, operands: Any, results: Any) -> Any:
            spec = operands[0].sharding.spec
            rows = NamedSharding(mesh, PartitionSpec(*spec[:1]))
            return mesh, flat, (rows,) * len(results), (rows,) * len(operands)

        split = custom_partitioning(flat)
        shapes = jax.eval_shape(flat, *leaves)
        split.def_partition(partition=partition, sharding_rule=_rule(leaves, shapes))
        return jax.tree.unflatten(result, split(*leaves))

    return call


def _rule(operands: Any, results: Any) -> str:
    """ "b i0 i1, b i2 -> b i3": axes that share a name are cut alike, others not at all."""
    fresh = count()

    def axes(x: Any) -> str:
        return " ".join(["b", *(f"i{next(fresh)}" for _ in x.shape[1:])])

    return f"{', '.join(map(axes, operands))} -> {', '.join(map(axes, results))}"
