"""Qwen3 (arXiv 2505.09388) as GR00T-N1.5 reads it: causal over each sample, features after the
last norm, no logits.

It differs from Gemma in the norms of its queries and keys, in SwiGLU, in a rotary base of a million
and in norm scales that are stored as used.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from models.attention.attention import attend
from models.files.bounds import check_decoder
from models.layers.layers import (
    Compute,
    Dense,
    GatedMLP,
    Lora,
    Remat,
    rotary,
)
from models.layers.stack import scan_layers, stack_layers
from models.sharding import ROWS, constrain

_ROTARY_BASE = 1e6


@dataclass(frozen=True)
class QwenConfig:
    """Sizes of one stack; the defaults are the first 12 layers of Qwen3-1.7B."""

    width: int = 2048
    depth: int = 12
    hidden: int = 6144
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    lora: Lora | None = None
    remat: Remat = "none"

    def __post_init__(self) -> None:
        check_decoder("language", self)


class Qwen(nnx.Module):
    """Maps a row's tokens to features; a place attends to its own sample up to itself."""

    def __init__(self, config: QwenConfig, compute: Compute, rngs: nnx.Rngs):
        self.compute, self.remat = compute, config.remat
        self.layers = stack_layers(lambda r: QwenBlock(config, compute, r), config.depth, rngs)
        self.norm = _norm(config.width, compute, rngs)

    @jax.named_scope("language")
    def __call__(
        self,
        x: Float[Array, "r p w"],
        segment: Int[Array, "r p"],
        position: Int[Array, "r p"],
        rope: Int[Array, "r p pairs"] | None = None,
    ) -> Float[Array, "r p w"]:
        graph, weights = nnx.split(self.layers)

        def layer(
            x: Array, weights: Any, segment: Array, position: Array, *rope: Array
        ) -> tuple[Array, None]:
            block = nnx.merge(graph, weights)
            x = constrain(x, ROWS, "context")
            q, k, v = block.attention(block.norm1(x), *(rope or (position,)))
            seen = attend(
                q,
                k,
                v,
                segment,
                segment,
                q_position=position,
                kv_position=position,
                causal=True,
                implementation=self.compute.attention,
            )
            x = x + block.attention.out(seen.out)
            return x + block.mlp(block.norm2(x)), None

        given = () if rope is None else (rope,)
        rows, pipeline = (segment, position, *given), self.compute.pipeline
        unroll = self.compute.unroll
        x, _ = scan_layers(layer, x, weights, self.remat, rows, pipeline=pipeline, unroll=unroll)
        return self.norm(x)


class QwenBlock(nnx.Module):
    """The parts of one layer."""

    def __init__(self, config: QwenConfig, compute: Compute, rngs: nnx.Rngs):
        self.norm1 = _norm(config.width, compute, rngs)
        self.attention = QwenAttention(config, compute, rngs)
        self.norm2 = _norm(config.width, compute, rngs)
        self.mlp = SwiGLU(config.width, config.hidden, compute, rngs, config.lora)


class QwenAttention(nnx.Module):
    """Projections without bias; each head of queries and keys is normed, then rotated."""

    def __init__(self, config: QwenConfig, compute: Compute, rngs: nnx.Rngs):
        heads, keys = (config.heads, config.head_dim), (config.kv_heads, config.head_dim)
        dense = partial(Dense, compute=compute, rngs=rngs, lora=config.lora)
        self.q, self.k = dense(config.width, heads), dense(config.width, keys)
        self.v, self.out = dense(config.width, keys), dense(heads, config.width)
        self.q_norm = _norm(config.head_dim, compute, rngs)
        self.k_norm = _norm(config.head_dim, compute, rngs)

    def __call__(
        self, x: Float[Array, "r p w"], position: Int[Array, "r p"] | Int[Array, "r p pairs"]
    ) -> tuple[Float[Array, "r p n d"], Float[Array, "r p g d"], Float[Array, "r p g d"]]:
        q = rotary(self.q_norm(self.q(x)), position, _ROTARY_BASE)
        return q, rotary(self.k_norm(self.k(x)), position, _ROTARY_BASE), self.v(x)


class SwiGLU(GatedMLP):
    """silu(x·gate) ⊙ (x·up), projected down."""

    activation = staticmethod(jax.nn.silu)


class QwenNorm(nnx.RMSNorm):
    """Flax's RMS norm, whose scale is stored as used."""

    __call__ = jax.named_scope("norm")(nnx.RMSNorm.__call__)


def _norm(width: int, compute: Compute, rngs: nnx.Rngs) -> QwenNorm:
    return QwenNorm(width, epsilon=1e-6, dtype=jnp.dtype(compute.dtype), rngs=rngs)
