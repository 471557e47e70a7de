"""A tree of Flax nnx modules as functions of a pure nested dict of parameters. That dict is
sharded, saved and differentiated; the models' own modules stay hidden behind it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import jax
from flax import nnx
from jaxtyping import PRNGKeyArray

Module = TypeVar("Module", bound=nnx.Module)
Params = dict[str, Any]


def only(tree: Any, mask: Any) -> Any:
    """The tree with None where the mask (a tree of bool) is false."""
    return jax.tree.map(lambda x, keep: x if keep else None, tree, mask, is_leaf=_is_none)


def fill(part: Any, whole: Any) -> Any:
    """`part`, with leaves of `whole` where it has None."""
    return jax.tree.map(lambda x, y: y if x is None else x, part, whole, is_leaf=_is_none)


@dataclass(frozen=True)
class Functional(Generic[Module]):
    """A module that `make(rngs)` builds, as pure functions.

    Raises:
      ValueError: (when used) it has statistics that are no parameters, such as nnx.BatchNorm's.
    """

    make: Callable[[nnx.Rngs], Module]

    def init(self, key: PRNGKeyArray) -> Params:
        """Random parameters, f32, as a nested dict."""
        module = self.make(nnx.Rngs(params=key))
        _check_statistics(module)
        return _named(nnx.to_pure_dict(nnx.state(module, nnx.Param)))

    def bind(self, params: Params) -> Module:
        """The modules with these parameters."""
        graph, shapes = self._abstract
        state = jax.tree.map(lambda x: x, shapes)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state)

    @cached_property
    def _abstract(self) -> tuple[Any, Any]:
        return nnx.split(nnx.eval_shape(lambda: self.make(nnx.Rngs(0))))


def _check_statistics(module: nnx.Module) -> None:
    if left := nnx.to_flat_state(nnx.state(module, nnx.BatchStat)):
        name = "/".join(map(str, left[0][0]))
        raise ValueError(
            f"{type(module).__name__} keeps {name} as an nnx.BatchStat, which is neither trained "
            "nor saved; use BatchNorm or FrozenBatchNorm of models.layers.batch_norm."
        )


def _named(tree: Any) -> Any:
    """The tree with the numbers of a list's modules as strings."""
    if not isinstance(tree, dict):
        return tree
    return {str(name): _named(x) for name, x in tree.items()}


def _is_none(x: Any) -> bool:
    return x is None
