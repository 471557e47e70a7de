"""Product of float8 matrices with a scale for every block of the contraction, on the tensor cores
of a Hopper GPU, in Pallas/Triton (DeepSeek-V3, arXiv 2412.19437, section 3.3).

A program multiplies 128 places of the contraction at a time in float8 and adds each such product,
scaled, to f32 registers: partial sums never reach memory, and the tensor cores' loss of precision
(they keep about 14 bits of a float8 sum) extends over no more than 128 places. Pallas' own float8
product asks for exact sums, which Triton then makes in float16 at half the speed; hence the
primitive.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.lib.triton import dialect
from jax._src.pallas.triton.lowering import register_lowering
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxtyping import Array, Float

from models.layers.float8.scales import BLOCK

_FEW_ROWS, _INEXACT = 64, 2**30


def block_product(
    a: Float[Array, "m c"],
    a_scale: Float[Array, "m b"],
    b: Float[Array, "n c"],
    b_scale: Float[Array, "n_or_blocks b"],
    dtype: Any,
    *,
    interpret: bool = False,
) -> Float[Array, "m n"]:
    """Σ over blocks of a_scale · b_scale · (a's block @ b's block transposed), summed in f32.

    Args:
      a, b: e4m3, with the contraction last in both, as the tensor cores require of float8.
      a_scale: f32, one for each row and 128 places of the contraction.
      b_scale: the same, or one for every 128 rows too (n/128 of them, rounded up).
      interpret: runs the kernel step by step on any backend.
    """
    rows, columns = len(a), len(b)
    shared = len(b_scale) != columns
    tile = _FEW_ROWS if rows <= _FEW_ROWS else BLOCK
    a, b = _padded(a, tile, BLOCK), _padded(b, BLOCK, BLOCK)
    a_scale, b_scale = _padded(a_scale, tile, 1), _padded(b_scale, 1 if shared else BLOCK, 1)
    blocks, width = a_scale.shape[1], 1 if shared else BLOCK
    out = pl.pallas_call(
        partial(_kernel, blocks),
        grid=(len(a) // tile, len(b) // BLOCK),
        in_specs=[
            pl.BlockSpec((tile, a.shape[1]), lambda i, j: (i, 0)),
            pl.BlockSpec((blocks, tile), lambda i, j: (0, i)),
            pl.BlockSpec((BLOCK, b.shape[1]), lambda i, j: (j, 0)),
            pl.BlockSpec((blocks, width), lambda i, j: (0, j)),
        ],
        out_specs=pl.BlockSpec((tile, BLOCK), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((len(a), len(b)), dtype),
        compiler_params=triton.CompilerParams(num_warps=8 if tile > 64 else 4, num_stages=4),
        interpret=interpret,
        name="float8_block_product",
    )(a, a_scale.T, b, b_scale.T)
    return out[:rows, :columns]


def _kernel(blocks: int, a_ref, a_scale_ref, b_ref, b_scale_ref, out_ref) -> None:
    zeros = jnp.zeros(out_ref.shape, jnp.float32)

    def add(i: Array, total: Float[Array, "m n"]) -> Float[Array, "m n"]:
        at = pl.ds(i * BLOCK, BLOCK)
        product = _dot.bind(a_ref[:, at], b_ref[:, at], zeros)
        if b_scale_ref.shape[1] == 1:
            return total + product * (a_scale_ref[i, :] * b_scale_ref[i, 0])[:, None]
        return total + product * (a_scale_ref[i, :][:, None] * b_scale_ref[i, :][None, :])

    out_ref[...] = jax.lax.fori_loop(0, blocks, add, zeros).astype(out_ref.dtype)


def _padded(x: Array, rows: int, columns: int) -> Array:
    return jnp.pad(x, [(0, -x.shape[0] % rows), (0, -x.shape[1] % columns)])


def _plain_dot(
    a: Float[Array, "m c"], b: Float[Array, "n c"], total: Float[Array, "m n"]
) -> Float[Array, "m n"]:
    dims = (((1,), (1,)), ((), ()))
    return total + jax.lax.dot_general(a, b, dims, preferred_element_type=total.dtype)


def _triton_dot(context: Any, a: Any, b: Any, total: Any) -> Any:
    """Triton's product, allowed to sum as the tensor cores do."""
    return dialect.dot(a, dialect.trans(b, (1, 0)), total, max_num_imprecise_acc=_INEXACT)


_dot = Primitive("float8_dot")
_dot.def_impl(_plain_dot)
_dot.def_abstract_eval(lambda a, b, total: total)
mlir.register_lowering(_dot, mlir.lower_fun(_plain_dot, multiple_results=False))
register_lowering(_dot)(_triton_dot)
