"""Layers shared by the towers: projections, norms, feed-forward, rotary and sinusoidal positions.

Arithmetic is Gemma's and π0.5's (openpi; Gemma report arXiv 2403.08295): norms in f32, RMS scale
stored as its distance from 1, tanh GELU, rotary halves split, base 10,000.
"""

import math
import re
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from models.attention.attention import Implementation
from models.files.bounds import check_size
from models.layers.calibrated import Watched, watched_dot
from models.layers.float8 import fp8
from models.layers.pipeline import Pipeline
from models.layers.quantized import Kind, dot, dot_in_float8, is_quantized, matrix
from models.layers.token_chunks import in_chunks

Remat = Literal["none", "dots", "qkv", "attention", "full"]
"""Results of each layer that a stack keeps for backward, from most to least. "none": everything.
"dots": results of all products with weights and of attention. "qkv": results of attention and its
projections; the wide feed-forward layer is recomputed. "attention": only results of attention, the
most expensive to recompute in a long row (the dense implementation keeps nothing). "full": only the
layer's input, which the others keep too."""

QKV = "qkv"
"""Name of a projection's results, by which `Remat` keeps them."""
_DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Compute:
    """Settings of the computation.

    `dtype`: that of activations (parameters stay f32). `attention`: the attention kernel. `fp8`:
    the scaling with which the blocks' projections multiply in float8. `quantized`: a regex for
    paths of kernels that are kept in few bits (`models.layers.quantized`), to serve or as the
    frozen base of adapters; `quantized_kind` is their format. With `quantized_activations`, kernels
    in float8 multiply activations that are also rounded to float8. `pipeline`: schedule of rows
    over the stages of a mesh that has several. Feed-forward layers take `chunk` tokens at a time on
    each device (0: all at once), see `models.layers.token_chunks`. Stacks of layers are a loop;
    with `unroll`, they are one layer after the other in the program, which is faster where copies
    of what backward needs take time, but slower to compile (docs/results/explain.md).
    """

    dtype: str = "bfloat16"
    attention: Implementation = "auto"
    fp8: Literal["none", "current", "delayed", "block"] = "none"
    quantized: str = ""
    quantized_kind: Kind = "float8"
    quantized_activations: bool = False
    pipeline: Pipeline = field(default_factory=Pipeline)
    chunk: int = 0
    unroll: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(f"compute.dtype is '{self.dtype}'; expected one of {list(_DTYPES)}.")
        check_size("compute.chunk", self.chunk, least=0)
        if self.quantized_kind not in get_args(Kind):
            raise ValueError(
                f"compute.quantized_kind is '{self.quantized_kind}'; expected one of "
                f"{list(get_args(Kind))}."
            )
        if self.quantized_activations and (not self.quantized or self.quantized_kind != "float8"):
            raise ValueError(
                "compute.quantized_activations needs kernels in float8, but compute.quantized is "
                f"'{self.quantized}' and compute.quantized_kind is '{self.quantized_kind}'; "
                "quantise kernels to float8, or leave it out."
            )
        try:
            re.compile(self.quantized)
        except re.error as error:
            raise ValueError(
                f"compute.quantized is {self.quantized!r}, which is not a regular expression: "
                f"{error}."
            ) from error

    def unquantized(self) -> "Compute":
        """Settings of the same model without quantised kernels."""
        return replace(self, quantized="", quantized_kind="float8", quantized_activations=False)


@dataclass(frozen=True)
class Lora:
    """Low-rank adaptation (arXiv 2106.09685): every projection of a stack gains B·A·alpha/rank."""

    rank: int
    alpha: float

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"lora.rank is {self.rank}; it must be at least 1 (or lora None).")
        check_size("lora.rank", self.rank)


class Dense(nnx.Module):
    """The projection of every block: `inner` to `outer` dims, each a size or a (heads, dim) pair.

    `kernel` is [*inner, *outer]. LoRA leaves have openpi's shapes, one pair per head: `lora_a`
    [heads, in, r] and `lora_b` [heads, r, out], without the heads axis if there are no heads. B is
    zero at first, so an adapter begins as the identity. If `inner` has heads, their contributions
    to the rank are summed, and so are their Bs, as in openpi.
    """

    def __init__(
        self,
        inner: int | tuple[int, int],
        outer: int | tuple[int, int],
        *,
        compute: Compute,
        rngs: nnx.Rngs,
        bias: bool = False,
        lora: Lora | None = None,
    ):
        self.inner = (inner,) if isinstance(inner, int) else inner
        self.outer = (outer,) if isinstance(outer, int) else outer
        self.dtype, self.fp8 = jnp.dtype(compute.dtype), compute.fp8
        self.kept_dot = dot_in_float8 if compute.quantized_activations else dot
        flat = (math.prod(self.inner), math.prod(self.outer))
        kernel = nnx.initializers.lecun_normal()(rngs.params(), flat)
        self.kernel = nnx.Param(kernel.reshape(*self.inner, *self.outer))
        if compute.fp8 == "delayed":
            self.fp8_history = nnx.Param(jnp.zeros((3, fp8.HISTORY)))
        if bias:
            self.bias = nnx.Param(jnp.zeros(self.outer))
        if lora is not None:
            self.lora_scale = lora.alpha / lora.rank
            heads = (*self.inner, *self.outer)[1:-1] if len(self.outer) > 1 else self.inner[:-1]
            narrow = (*heads, self.inner[-1], lora.rank)
            normal = nnx.initializers.normal(self.inner[-1] ** -0.5)
            self.lora_a = nnx.Param(normal(rngs.params(), narrow))
            self.lora_b = nnx.Param(jnp.zeros((*heads, lora.rank, self.outer[-1])))

    def __call__(self, x: Float[Array, "... i"]) -> Float[Array, "... o"]:
        """Maps [*b, *inner] to [*b, *outer]."""
        if len(self.inner) + len(self.outer) == 2:
            return self._applied(x)
        with jax.named_scope("projections"):
            return checkpoint_name(self._applied(x), QKV)

    def _applied(self, x: Float[Array, "... i"]) -> Float[Array, "... o"]:
        x = x.astype(self.dtype)
        batch = x.shape[: x.ndim - len(self.inner)]
        y = self._product(x.reshape(*batch, -1)).reshape(*batch, *self.outer)
        if hasattr(self, "lora_a"):
            y = y + self._adapter(x) * self.lora_scale
        return y + self.bias[...].astype(self.dtype) if hasattr(self, "bias") else y

    def _product(self, x: Float[Array, "*b i"]) -> Float[Array, "*b o"]:
        inner, kernel = math.prod(self.inner), cast(Any, self.kernel.get_value())
        if isinstance(kernel, Watched):
            return watched_dot(x, kernel)
        if not is_quantized(kernel):
            kernel = kernel.reshape(inner, -1)
        elif self.fp8 == "none":
            return self.kept_dot(x, kernel)
        else:
            kernel = matrix(kernel, inner)
        if self.fp8 == "none":
            return x @ kernel.astype(self.dtype)
        history = self.fp8_history[...] if self.fp8 == "delayed" else None
        return fp8.dot(x, kernel, self.fp8, history)

    def _adapter(self, x: Float[Array, "... i"]) -> Float[Array, "... o"]:
        a, b = self.lora_a[...].astype(self.dtype), self.lora_b[...].astype(self.dtype)
        if len(self.outer) > 1:
            return jnp.einsum("...i,nir,nro->...no", x, a, b)
        if len(self.inner) > 1:
            return jnp.einsum("...ni,nir->...r", x, a) @ b.sum(0)
        return x @ a @ b


class RMSNorm(nnx.Module):
    """x / rms(x) · (1 + scale); statistics in f32."""

    def __init__(self, width: int):
        self.scale = nnx.Param(jnp.zeros(width))

    @jax.named_scope("norm")
    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        return (normalise(x) * (1 + self.scale[...])).astype(x.dtype)


class LayerNorm(nnx.LayerNorm):
    """Flax's layer norm, under the name by which a compiled program is read."""

    __call__ = jax.named_scope("norm")(nnx.LayerNorm.__call__)


class AdaRMSNorm(nnx.Module):
    """RMS norm whose scale and shift, and the gate of the residual that follows, come from a
    condition.

    The projection is zero-initialised as in π0.5, so every block begins closed (gate 0).
    """

    def __init__(self, width: int, compute: Compute, rngs: nnx.Rngs):
        self.modulation = nnx.Linear(
            width,
            3 * width,
            kernel_init=nnx.initializers.zeros,
            dtype=jnp.dtype(compute.dtype),
            rngs=rngs,
        )

    @jax.named_scope("norm")
    def __call__(
        self, x: Float[Array, "*b d"], modulation: Float[Array, "*c 3*d"]
    ) -> tuple[Float[Array, "*b d"], Float[Array, "*c d"]]:
        """The modulated norm and the gate; `modulation`, the projected condition, broadcasts
        against `x`."""
        scale, shift, gate = jnp.split(modulation, 3, axis=-1)
        return (normalise(x) * (1 + scale) + shift).astype(x.dtype), gate


class GatedMLP(nnx.Module):
    """GeGLU: gelu(x·gate) ⊙ (x·up), projected down."""

    def __init__(
        self, width: int, hidden: int, compute: Compute, rngs: nnx.Rngs, lora: Lora | None = None
    ):
        self.chunk = compute.chunk
        self.gate = Dense(width, hidden, compute=compute, rngs=rngs, lora=lora)
        self.up = Dense(width, hidden, compute=compute, rngs=rngs, lora=lora)
        self.down = Dense(hidden, width, compute=compute, rngs=rngs, lora=lora)

    @jax.named_scope("mlp")
    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        def tokens(gate: Dense, up: Dense, down: Dense, x: Array) -> Array:
            return down(self.activation(gate(x)) * up(x))

        return in_chunks(tokens, (self.gate, self.up, self.down), x, self.chunk)

    @staticmethod
    def activation(x: Float[Array, "*b h"]) -> Float[Array, "*b h"]:
        return jax.nn.gelu(x, approximate=True)


@jax.named_scope("mlp")
def feed_forward(
    up: Dense, down: Dense, x: Float[Array, "*b d"], chunk: int
) -> Float[Array, "*b d"]:
    """gelu(x·up), projected down, `chunk` tokens at a time (`models.layers.token_chunks`)."""

    def tokens(up: Dense, down: Dense, x: Array) -> Array:
        return down(jax.nn.gelu(up(x), approximate=True))

    return in_chunks(tokens, (up, down), x, chunk)


def normalise(x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
    """x / sqrt(mean(x²) + 1e-6), in f32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def rotary(
    x: Float[Array, "*b t n d"],
    position: Int[Array, "*b t"] | Int[Array, "*b t {x.shape[-1]//2}"],
    base: float = 10_000.0,
) -> Float[Array, "*b t n d"]:
    """Rotates the two halves of each head by its position (RoPE, arXiv 2104.09864), which may
    differ between its d / 2 pairs (as M-RoPE's time, row and column, arXiv 2409.12191)."""
    half = x.shape[-1] // 2
    each = position[..., None] if position.ndim < x.ndim - 1 else position
    return turned(x, each / base ** (jnp.arange(half) / half))


@jax.named_scope("rope")
def turned(
    x: Float[Array, "*b t n d"], angle: Float[Array, "*#b t {x.shape[-1]//2}"]
) -> Float[Array, "*b t n d"]:
    """Each head's pairs, one number from each of its halves, turned by their angles."""
    half, angle = x.shape[-1] // 2, angle[..., None, :]
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    both = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return both.astype(x.dtype)


def sincos_embedding(
    value: Float[Array, "*b"], width: int, min_period: float = 4e-3, max_period: float = 4.0
) -> Float[Array, "*b d"]:
    """[sin, cos] of `value` at log-spaced periods; π0's embedding of flow time.

    Angles reach 1,570, so frequencies are computed once, in NumPy. If they were compiled, their
    last bit, and with it the fourth decimal of an angle, would depend on the shapes of the program.
    """
    half = width // 2
    fraction = np.linspace(0, 1, half, dtype=np.float32)
    period = np.float32(min_period) * np.float32(max_period / min_period) ** fraction
    angle = value[..., None] * (1 / period * np.float32(2 * np.pi))
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)
