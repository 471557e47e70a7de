"""Qwen3 (arXiv 2505.09388), and the language model of Qwen3-VL (arXiv 2511.21631): causal over each
sample, features instead of logits.

It differs from Gemma in the norms of its queries and keys, in SwiGLU, in a rotary base of a million
and more, and in norm scales that are stored as used. Qwen3-VL's rotates each pair of a head by one
of three numbers of a place, and adds features of the vision tower after its first layers.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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


@dataclass(frozen=True)
class QwenConfig:
    """Sizes of one stack; the defaults are the first 12 layers of Qwen3-1.7B. `base`: of the rotary
    angles. `sections`: of M-RoPE, how many pairs of a head turn by time, row and column; () where
    each turns by the position. `normed`: features come after the last norm."""

    width: int = 2048
    depth: int = 12
    hidden: int = 6144
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    lora: Lora | None = None
    remat: Remat = "none"
    base: float = 1e6
    sections: tuple[int, ...] = ()
    normed: bool = True

    def __post_init__(self) -> None:
        check_decoder("language", self)
        if self.sections and (len(self.sections) != 3 or sum(self.sections) != self.head_dim // 2):
            raise ValueError(
                f"language.sections is {list(self.sections)}; give three numbers that make up the "
                f"{self.head_dim // 2} pairs of a head."
            )

    def pairs(self, places: Int[Array, "r p 3"]) -> Int[Array, "r p pairs"]:
        """Numbers that each pair of a head turns by: time, row and column of a place in turn, as
        far as each has pairs left, then time."""
        pair = np.arange(self.head_dim // 2)
        turn = pair % 3
        return places[..., np.where(pair < 3 * np.array(self.sections)[turn], turn, 0)]


class Qwen(nnx.Module):
    """Maps a row's tokens to features; a place attends to its own sample up to itself."""

    def __init__(self, config: QwenConfig, compute: Compute, rngs: nnx.Rngs):
        self.depth = config.depth
        self.compute, self.remat, self.normed = compute, config.remat, config.normed
        self.layers = stack_layers(lambda r: QwenBlock(config, compute, r), config.depth, rngs)
        self.norm = _norm(config.width, compute, rngs)

    @jax.named_scope("language")
    def __call__(
        self,
        x: Float[Array, "r p w"],
        segment: Int[Array, "r p"],
        position: Int[Array, "r p"],
        rope: Int[Array, "r p pairs"] | None = None,
        deep: Float[Array, "r p d w"] | None = None,
    ) -> Float[Array, "r p w"]:
        """`rope`: what each pair of a head turns by, the position if None. `deep`: added to what
        leaves the first d layers, one after the other."""
        graph, weights = nnx.split(self.layers)

        def layer(
            x: Array, stacked: Any, segment: Array, position: Array, rope: Any, deep: Any
        ) -> tuple[Array, None]:
            block = nnx.merge(graph, stacked[0])
            x = constrain(x, ROWS, "context")
            turn = position if rope is None else rope
            q, k, v = block.attention(block.norm1(x), turn)
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
            x = x + block.mlp(block.norm2(x))
            if deep is not None:
                x = x + (deep * stacked[1][:, None].astype(deep.dtype)).sum(2)
            return x, None

        depth, rows = self.depth, (segment, position, rope, deep)
        adds = () if deep is None else (jnp.eye(depth, deep.shape[2]),)
        pipeline, unroll = self.compute.pipeline, self.compute.unroll
        stacked = (weights, *adds)
        x, _ = scan_layers(layer, x, stacked, self.remat, rows, pipeline=pipeline, unroll=unroll)
        return self.norm(x) if self.normed else x


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
        self.base = config.base
        self.q_norm = _norm(config.head_dim, compute, rngs)
        self.k_norm = _norm(config.head_dim, compute, rngs)

    def __call__(
        self, x: Float[Array, "r p w"], position: Int[Array, "r p"] | Int[Array, "r p pairs"]
    ) -> tuple[Float[Array, "r p n d"], Float[Array, "r p g d"], Float[Array, "r p g d"]]:
        q = rotary(self.q_norm(self.q(x)), position, self.base)
        return q, rotary(self.k_norm(self.k(x)), position, self.base), self.v(x)


class SwiGLU(GatedMLP):
    """silu(x·gate) ⊙ (x·up), projected down."""

    activation = staticmethod(jax.nn.silu)


class QwenNorm(nnx.RMSNorm):
    """Flax's RMS norm, whose scale is stored as used."""

    __call__ = jax.named_scope("norm")(nnx.RMSNorm.__call__)


def _norm(width: int, compute: Compute, rngs: nnx.Rngs) -> QwenNorm:
    return QwenNorm(width, epsilon=1e-6, dtype=jnp.dtype(compute.dtype), rngs=rngs)
