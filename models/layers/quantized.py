"""Quantised kernels, for serving and as the frozen base that adapters are trained on (QLoRA, arXiv
2305.14314): float8 or int8 with one scale for every 128×128 block, or NF4.

NF4 stores every number in 4 bits, as one of 16 quantiles of a normal distribution. For every 64
numbers along a row of the matrix it stores their largest magnitude, itself in float8 (its distance
from the layer's mean, under a scale that 256 of them share). A product dequantises kernels to the
activations' dtype, one layer at a time and again for backward; only quantised kernels are kept.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped, UInt8

from models.layers.float8 import block_scaled
from models.layers.float8.scales import BLOCK, block_amax, block_scales, in_blocks, quantise, spread
from models.sharding import path_name

Kind = Literal["float8", "int8", "nf4"]

QUANTILES = np.array(
    [-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0,
     0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0],
    np.float32,
)  # fmt: skip
"""Numbers that NF4 represents in a block whose largest magnitude is 1 (the paper's appendix E)."""

_EDGES = (QUANTILES[1:] + QUANTILES[:-1]) / 2
_NF4_BLOCK, _SCALES_BLOCK = 64, 256
_INT8_MOST = 127


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized:
    """Kernels in float8 or int8 with one f32 scale for every 128×128 block of each matrix."""

    q: Shaped[Array, "*l i o"]
    scale: Float[Array, "*l p r"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Nf4:
    """Kernels in NF4: `q` has two numbers per byte, the first in the upper half, in pairs along the
    last axis. A block's scale is its `scale` · the `scale_step` of its group of 256 + the layer's
    `scale_mean`."""

    q: UInt8[Array, "*l i h"]
    scale: Float[Array, "*l i p"]
    scale_step: Float[Array, "*l s"]
    scale_mean: Float[Array, "*l"]


Kernel: TypeAlias = Quantized | Nf4
Rounding: TypeAlias = Callable[[str, Float[Array, "l i *o"], Kind], Kernel]
"""Function that quantises the stacked kernels at a path to a kind."""


def quantize(
    params: Any, pattern: str, kind: Kind = "float8", rounding: Rounding | None = None
) -> Any:
    """`params` with the stacked kernels whose path matches `pattern` (`re.search`) quantised by
    `rounding`, or by `quantize_kernel` if None. Kernels that are already quantised stay unchanged.

    Raises:
      ValueError: no kernel matches, or one's last axis is odd, which NF4 cannot pack.
    """
    rounding = rounding or quantize_kernel
    found = []

    def leaf(path: tuple[Any, ...], kernel: Any) -> Any:
        name = path_name(path)
        if not names(pattern, name):
            return kernel
        found.append(name)
        return kernel if is_quantized(kernel) else rounding(name, kernel, kind)

    quantized = jax.tree_util.tree_map_with_path(leaf, params, is_leaf=is_quantized)
    if not found:
        raise ValueError(f"No kernel's path matches {pattern!r}, so nothing would be quantised.")
    return quantized


def names(pattern: str, path: str) -> bool:
    """True if a pattern names the kernel at a path."""
    return path.endswith("/kernel") and bool(re.search(pattern, path))


def quantize_kernel(path: str, kernel: Float[Array, "l i *o"], kind: Kind) -> Kernel:
    """Quantises the stacked kernels at `path`, rounding each number by itself: deterministic, and
    without calibration."""
    if kind == "nf4" and kernel.shape[-1] % 2:
        raise ValueError(
            f"{path} has {kernel.shape[-1]} numbers along its last axis, which NF4 cannot pack in "
            "pairs; leave it out of model.compute.quantized, or use int8."
        )
    flat = kernel.reshape(len(kernel), inner_size(path, kernel.shape), -1).astype(jnp.float32)
    made: Any = jax.vmap(_ROUNDED[kind])(flat)
    halved = kernel.shape[-1] // 2 if kind == "nf4" else kernel.shape[-1]
    return replace(made, q=made.q.reshape(*kernel.shape[:-1], halved))


def dequantize(path: str, kernel: Kernel) -> Float[Array, "l i *o"]:
    """The stacked kernels at `path` in f32, in their original shape."""
    shape = shape_of(kernel)
    inner = inner_size(path, shape)
    return jax.vmap(lambda layer: matrix(layer, inner))(kernel).reshape(shape)


def shape_of(kernel: Kernel) -> tuple[int, ...]:
    """Shape of the kernels before they were quantised."""
    *rest, last = kernel.q.shape
    return (*rest, 2 * last if isinstance(kernel, Nf4) else last)


def inner_size(path: str, shape: tuple[int, ...]) -> int:
    """Rows of each matrix of the stacked kernels [layers, …] at `path`; heads count as rows only
    for "out"."""
    heads_in = path.split("/")[-2] == "out" and len(shape) == 4
    return math.prod(shape[1 : 3 if heads_in else 2])


def is_quantized(leaf: Any) -> bool:
    """True for quantised kernels; for use as `is_leaf` of `jax.tree` functions."""
    return isinstance(leaf, Quantized | Nf4)


def matrix(kernel: Kernel, inner: int) -> Float[Array, "i o"]:
    """The matrix of one layer, f32."""
    if isinstance(kernel, Quantized):
        return kernel.q.reshape(inner, -1).astype(jnp.float32) * scales_of(kernel, inner)
    pairs = jnp.stack([kernel.q >> 4, kernel.q & 15], axis=-1).reshape(inner, -1)
    return CODES["nf4"].number(pairs) * scales_of(kernel, inner)


def scales_of(kernel: Kernel, inner: int) -> Float[Array, "i o"]:
    """Scale of every number of one layer's matrix."""
    shape = inner, math.prod(shape_of(kernel)) // inner
    if isinstance(kernel, Quantized):
        return spread(kernel.scale, (BLOCK, BLOCK), shape)
    return spread(_largest(kernel), (1, _NF4_BLOCK), shape)


@jax.custom_vjp
def dot(x: Float[Array, "*b i"], kernel: Kernel) -> Float[Array, "*b o"]:
    """x @ kernel of one layer in x's dtype; the kernel has no gradient."""
    return x @ matrix(kernel, x.shape[-1]).astype(x.dtype)


def _forward(x: Array, kernel: Kernel) -> tuple[Array, Kernel]:
    return dot(x, kernel), kernel


def _backward(kernel: Kernel, g: Float[Array, "*b o"]) -> tuple[Array, None]:
    """The barrier prevents the compiler from keeping forward's matrix until here."""
    kernel = jax.lax.optimization_barrier(kernel)
    inner = math.prod(shape_of(kernel)) // g.shape[-1]
    return g @ matrix(kernel, inner).astype(g.dtype).T, None


dot.defvjp(_forward, _backward)


def dot_in_float8(x: Float[Array, "*b i"], kernel: Quantized) -> Float[Array, "*b o"]:
    """x @ kernel of one layer in x's dtype. The kernel is in float8, and x is rounded to it with a
    scale for every 128 of a row (`models.layers.float8.block_scaled`). The kernel has no
    gradient."""
    flat = kernel.q.reshape(x.shape[-1], -1)
    y = block_scaled.dot_kept(x.reshape(-1, x.shape[-1]), flat, kernel.scale)
    return y.reshape(*x.shape[:-1], -1)


def _float8(flat: Float[Array, "i o"]) -> Quantized:
    scale = block_scales(flat, (BLOCK, BLOCK))
    return Quantized(in_blocks(flat, scale, (BLOCK, BLOCK)), scale)


def _int8(flat: Float[Array, "i o"]) -> Quantized:
    scale = block_amax(flat, (BLOCK, BLOCK)) / _INT8_MOST
    scale = jnp.where(scale > 0, scale, 1.0)
    return Quantized(CODES["int8"].code(flat / spread(scale, (BLOCK, BLOCK), flat.shape)), scale)


def _nf4(flat: Float[Array, "i o"]) -> Nf4:
    largest = block_amax(flat, (1, _NF4_BLOCK))
    unit = jnp.where(largest > 0, largest, 1.0)
    codes = CODES["nf4"].code(flat / spread(unit, (1, _NF4_BLOCK), flat.shape))
    mean = largest.mean()
    away = _in_groups(largest - mean)
    step = block_scales(away, (1, _SCALES_BLOCK))
    scale = quantise(away, step, jnp.float8_e4m3fn).reshape(-1)[: largest.size]
    return Nf4(CODES["nf4"].packed(codes), scale.reshape(largest.shape), step[:, 0], mean)


def _code_int8(shares: Array) -> Array:
    return jnp.clip(jnp.round(shares), -_INT8_MOST, _INT8_MOST).astype(jnp.int8)


def _code_nf4(shares: Array) -> Array:
    edges = jnp.asarray(_EDGES)
    return jnp.searchsorted(edges, shares, method="compare_all").astype(jnp.uint8)


class Codes(NamedTuple):
    """Encoding of a kind: the code of a number divided by its scale, the number that a code stands
    for, and codes as stored."""

    code: Callable[[Float[Array, "*s"]], Shaped[Array, "*s"]]
    number: Callable[[Shaped[Array, "*s"]], Float[Array, "*s"]]
    packed: Callable[[Shaped[Array, "*s o"]], Shaped[Array, "*s p"]] = lambda codes: codes


CODES: Mapping[Kind, Codes] = {
    "float8": Codes(
        lambda shares: quantise(shares, jnp.ones(()), jnp.float8_e4m3fn),
        lambda codes: codes.astype(jnp.float32),
    ),
    "int8": Codes(_code_int8, lambda codes: codes.astype(jnp.float32)),
    "nf4": Codes(
        _code_nf4,
        lambda codes: jnp.asarray(QUANTILES)[codes.astype(jnp.int32)],
        lambda codes: codes[..., ::2] << 4 | codes[..., 1::2],
    ),
}

_ROUNDED: dict[Kind, Callable[[Array], Any]] = {"float8": _float8, "int8": _int8, "nf4": _nf4}


def _largest(kernel: Nf4) -> Float[Array, "i p"]:
    """Largest magnitude of every block of a layer, as stored."""
    away = _in_groups(kernel.scale.astype(jnp.float32)) * kernel.scale_step[:, None]
    flat = away.reshape(-1)[: kernel.scale.size] + kernel.scale_mean
    return flat.reshape(kernel.scale.shape)


def _in_groups(scale: Float[Array, "i p"]) -> Float[Array, "s 256"]:
    flat = scale.reshape(-1)
    return jnp.pad(flat, (0, -flat.size % _SCALES_BLOCK)).reshape(-1, _SCALES_BLOCK)
