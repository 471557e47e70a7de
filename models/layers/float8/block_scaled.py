"""Products in float8 with a scale for every 128 places of the contraction, and every 128 columns of
a kernel too (DeepSeek-V3, arXiv 2412.19437), forward and for both gradients, all in e4m3.

On a Hopper GPU the float8 numbers are multiplied directly (`models.layers.float8.kernel`); on a
mesh, each device multiplies those that it holds. Elsewhere the numbers are rounded in the same way
and multiplied in the dtype of the activations. The same applies on a mesh inside a `shard_map` that
leaves axes to the compiler, because the compiler cannot split a kernel there: with stages, and with
chunks of tokens beside "tensor" or "context".
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec, get_abstract_mesh
from jaxtyping import Array, Float

from models.attention.target import target
from models.layers.float8.kernel import block_product
from models.layers.float8.scales import BLOCK, block_scales, in_blocks, spread
from models.sharding import axes_of

_HOPPER = 9.0


@jax.custom_vjp
def dot(x: Float[Array, "m k"], kernel: Float[Array, "k n"]) -> Float[Array, "m n"]:
    """x @ kernel in x's dtype; the kernel's gradient has the kernel's dtype."""
    return _forward(x, kernel)[0]


def _forward(x: Array, kernel: Array) -> tuple[Array, Any]:
    return _product(x, kernel.T, square=True), (x, kernel)


def _backward(saved: Any, g: Float[Array, "m n"]) -> tuple[Array, Array]:
    x, kernel = saved
    d_kernel = _product(x.T, g.T, square=False).astype(kernel.dtype)
    return _product(g, kernel, square=True), d_kernel


dot.defvjp(_forward, _backward)


@jax.custom_vjp
def dot_kept(
    x: Float[Array, "m k"], kernel: Float[Array, "k n"], scale: Float[Array, "p q"]
) -> Float[Array, "m n"]:
    """x @ a kernel stored in e4m3 with a scale for every block; the kernel has no gradient."""
    return _kept_forward(x, kernel, scale)[0]


def _kept_forward(x: Array, kernel: Array, scale: Array) -> tuple[Array, Any]:
    return _kept_product(x, kernel.T, scale.T), (kernel, scale)


def _kept_backward(saved: Any, g: Float[Array, "m n"]) -> tuple[Array, None, None]:
    return _kept_product(g, *saved), None, None


dot_kept.defvjp(_kept_forward, _kept_backward)


def _kept_product(a: Array, b: Array, b_scale: Array) -> Float[Array, "m n"]:
    if target().capability >= _HOPPER and math.prod(get_abstract_mesh().axis_sizes) == 1:
        a_scale = block_scales(a, (1, BLOCK))
        a8 = in_blocks(a, a_scale, (1, BLOCK))
        return block_product(a8, a_scale, b, b_scale, a.dtype)
    whole = b.astype(jnp.float32) * spread(b_scale, (BLOCK, BLOCK), b.shape)
    return _dot(_rounded(a, (1, BLOCK)), whole)


def _product(a: Float[Array, "m c"], b: Float[Array, "n c"], square: bool) -> Float[Array, "m n"]:
    """a @ b.T in a's dtype, rounded in blocks; b's are `square` or as narrow as a's."""
    mesh = get_abstract_mesh()
    left = [axis for axis, size in mesh.shape.items() if size > 1 and axis not in mesh.manual_axes]
    if target().capability >= _HOPPER and not (left and mesh.manual_axes):
        product = partial(_in_float8, square)
        return product(a, b) if mesh.manual_axes else _by_device(product)(a, b)
    return _dot(_rounded(a, (1, BLOCK)), _rounded(b, (BLOCK if square else 1, BLOCK)))


def _dot(a: Float[Array, "m c"], b: Float[Array, "n c"]) -> Float[Array, "m n"]:
    dims = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(a, b.astype(a.dtype), dims, preferred_element_type=a.dtype)


def _in_float8(square: bool, a: Array, b: Array) -> Float[Array, "m n"]:
    block = (BLOCK if square else 1, BLOCK)
    a_scale, b_scale = block_scales(a, (1, BLOCK)), block_scales(b, block)
    a8, b8 = in_blocks(a, a_scale, (1, BLOCK)), in_blocks(b, b_scale, block)
    return block_product(a8, a_scale, b8, b_scale, a.dtype)


def _rounded(x: Float[Array, "m n"], block: tuple[int, int]) -> Float[Array, "m n"]:
    scale = block_scales(x, block)
    all_scales = spread(scale, block, x.shape).astype(x.dtype)
    return in_blocks(x, scale, block).astype(x.dtype) * all_scales


def _by_device(product: Any) -> Any:
    """`product(a, b)` of what each device holds, summed if the contraction is split."""

    def partition(mesh: Mesh, operands: Any, result: Any) -> Any:
        (rows, summed), (columns, _) = (_axes(x.sharding.spec) for x in operands)
        columns = tuple(axis for axis in columns if axis not in rows + summed)

        def local(a: Array, b: Array) -> Array:
            part = product(a, b)
            return jax.lax.psum(part, summed) if summed else part

        cuts = (rows, columns), (rows, summed), (columns, summed)
        out, *given = (NamedSharding(mesh, PartitionSpec(*cut)) for cut in cuts)
        return mesh, local, out, tuple(given)

    split = custom_partitioning(product)
    split.def_partition(partition=partition, sharding_rule="m c, n c -> m n")
    return split


def _axes(spec: PartitionSpec) -> tuple[tuple[str, ...], ...]:
    """Mesh axes along each of a matrix's dimensions."""
    first, second, *_ = (*spec, None, None)
    return axes_of(first), axes_of(second)
