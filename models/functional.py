"""A tree of Flax nnx modules as functions of a pure nested dict of parameters, which is what is
sharded, saved and differentiated; the models' own modules stay behind it.
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


@dataclass(frozen=True)
class Functional(Generic[Module]):
    """What `make(rngs)` builds."""

    make: Callable[[nnx.Rngs], Module]

    def init(self, key: PRNGKeyArray) -> Params:
        """Random parameters, f32, as a nested dict."""
        return nnx.to_pure_dict(nnx.state(self.make(nnx.Rngs(params=key)), nnx.Param))

    def bind(self, params: Params) -> Module:
        """The modules with these parameters."""
        graph, shapes = self._abstract
        state = jax.tree.map(lambda x: x, shapes)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state)

    @cached_property
    def _abstract(self) -> tuple[Any, Any]:
        return nnx.split(nnx.eval_shape(lambda: self.make(nnx.Rngs(0))))
