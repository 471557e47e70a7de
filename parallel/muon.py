"""Muon (Jordan 2024, scaled as arXiv 2502.16982): orthogonalised momentum for the matrices inside a
network, Adam for all else: embeddings, norms, biases, input and output layers.

optax orthogonalises; this module states which axes of our kernels are a matrix's two sides.
"""

import math
import re
from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from models.sharding import path_name

_RMS = 0.2
"""Root mean square of an update, close to Adam's, so that both can use one learning rate."""


def scale_by_muon_and_adam(
    matrices: str, b1: float, b2: float, eps: float, momentum: float = 0.95
) -> optax.GradientTransformation:
    """Muon with Nesterov `momentum` for each parameter whose path matches the regex `matrices`,
    Adam with `b1`, `b2`, `eps` for the others."""

    def labels(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: "muon" if re.search(matrices, path_name(path)) else "adam", params
        )

    muon = optax.chain(
        scale_by_muon(beta=momentum, weight_dimension_numbers=_all_sides),
        optax.stateless(lambda updates, _: _scaled(updates)),
    )
    return optax.partition({"muon": muon, "adam": optax.scale_by_adam(b1, b2, eps)}, labels)


def _all_sides(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, x: _sides(path_name(path), x), params)


def _sides(name: str, x: jax.Array) -> MuonDimensionNumbers:
    """Input and output axes of a kernel [*layers, *inner, *outer]; heads and their width are two
    axes (`models.layers.layers.Dense`)."""
    if x.ndim < 2:
        raise ValueError(
            f"optimizer.matrices matches {name}, of shape {x.shape}, but Muon only trains "
            f"matrices; let the regex match only kernels."
        )
    if x.ndim > 3 and re.search(r"(^|/)[qkv]/kernel$", name):
        return MuonDimensionNumbers((-3,), (-2, -1))
    if x.ndim > 3 and re.search(r"(^|/)out/kernel$", name):
        return MuonDimensionNumbers((-3, -2), (-1,))
    return MuonDimensionNumbers((-2,), (-1,))


def _scaled(updates: Any) -> Any:
    def scaled(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        sides = _sides(path_name(path), x)
        longer = max(math.prod(x.shape[axis] for axis in side) for side in sides)
        return x * (_RMS * math.sqrt(longer))

    return jax.tree_util.tree_map_with_path(scaled, updates)
