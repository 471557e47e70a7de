"""Diffusion transformer of GR00T (arXiv 2503.14734) and the blocks it shares with the adapter
before it.

Layers alternate between cross-attention to the observation and self-attention; flow time enters by
adaptive layer norm (arXiv 2212.09748). What the cross-attention reads does not depend on time or
actions, so its keys and values are computed once per observation and used for every denoising step
and every noised chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, UInt32

from models.attention.attention import attend, attend_locally
from models.files.bounds import LARGEST_DEPTH, check_size, check_sizes
from models.layers.dropout import drop
from models.layers.gemma import Cache, Modulations
from models.layers.layers import (
    Compute,
    Dense,
    LayerNorm,
    Lora,
    Remat,
    feed_forward,
)
from models.layers.pipeline import on_each_stage
from models.layers.stack import layer_of, over_layers, scan_but_last, scan_layers, stack_layers
from models.sharding import ROWS, axis_size, constrain, dividing

LOG_10000 = np.log(np.float32(10_000))
_TIME_WIDTH = 256


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes of a stack of blocks. A block is `heads` · `head_dim` wide, and its MLP four times as
    wide. `dropout`: share of values dropped in training: after attention (twice, as in the
    release), and within and after the MLP."""

    depth: int
    heads: int
    head_dim: int
    lora: Lora | None = None
    remat: Remat = "none"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_sizes("transformer", self, "heads", "head_dim")
        if not 0 <= self.dropout < 1:
            raise ValueError(
                f"transformer.dropout is {self.dropout}; give a share from 0 to less than 1."
            )
        check_size("transformer.depth", self.depth, LARGEST_DEPTH)

    @property
    def width(self) -> int:
        """Width of a token."""
        return self.heads * self.head_dim


class Adapter(nnx.Module):
    """Layer norm, then blocks in which every place attends to its whole sample."""

    def __init__(self, config: TransformerConfig, compute: Compute, rngs: nnx.Rngs):
        self.compute, self.remat, self.dropout = compute, config.remat, config.dropout
        self.norm = LayerNorm(config.width, epsilon=1e-5, dtype=jnp.dtype(compute.dtype), rngs=rngs)
        self.blocks = stack_layers(
            lambda r: DitBlock(config, config.width, False, compute, r), config.depth, rngs
        )

    @jax.named_scope("adapter")
    def __call__(
        self,
        x: Float[Array, "r p w"],
        segment: Int[Array, "r p"],
        keys: UInt32[Array, "r p d"] | None = None,
        samples: int | None = None,
    ) -> Float[Array, "r p w"]:
        """`keys`: dropout keys of each place, in training; `samples`: as in `attend`."""
        graph, weights = nnx.split(self.blocks)
        stacked, rows = _with_keys(weights, (segment,), keys)

        def layer(x: Array, stacked: Any, segment: Array, *keys: Array) -> tuple[Array, None]:
            block, dropped = nnx.merge(graph, stacked[0]), _dropping(stacked, keys, self.dropout)
            x = constrain(x, ROWS, "context")
            y = block.norm1(x)
            seen = attend(
                block.q(y),
                block.k(y),
                block.v(y),
                segment,
                segment,
                implementation=self.compute.attention,
                samples=samples,
            )
            x = x + _attended(block.out(seen.out), dropped)
            return block.mlp(x, dropped), None

        pipeline, unroll = self.compute.pipeline, self.compute.unroll
        return scan_layers(
            layer, self.norm(x), stacked, self.remat, rows=rows, pipeline=pipeline, unroll=unroll
        )[0]


class DiT(nnx.Module):
    """C noised chunks of each of K samples; each attends to its sample's observation and itself.
    With `text_every`, every so many cross-attentions, from the first on, read the observation's
    words, and the others its pictures."""

    def __init__(
        self,
        config: TransformerConfig,
        observed_width: int,
        out_width: int,
        compute: Compute,
        rngs: nnx.Rngs,
        text_every: int = 0,
    ):
        self.compute, self.remat, self.dropout = compute, config.remat, config.dropout
        self.text_every = text_every
        dtype, width, pairs = jnp.dtype(compute.dtype), config.width, config.depth // 2
        self.time_in = nnx.Linear(_TIME_WIDTH, width, dtype=dtype, rngs=rngs)
        self.time_out = nnx.Linear(width, width, dtype=dtype, rngs=rngs)
        self.cross_blocks = stack_layers(
            lambda r: DitBlock(config, observed_width, True, compute, r), pairs, rngs
        )
        self.self_blocks = stack_layers(
            lambda r: DitBlock(config, width, True, compute, r), pairs, rngs
        )
        self.norm = LayerNorm(
            width, epsilon=1e-6, use_bias=False, use_scale=False, dtype=dtype, rngs=rngs
        )
        self.modulation = nnx.Linear(width, 2 * width, dtype=dtype, rngs=rngs)
        self.out = nnx.Linear(width, out_width, dtype=dtype, rngs=rngs)

    @jax.named_scope("dit")
    def observe(
        self,
        x: Float[Array, "r p w"],
        segment: Int[Array, "r p"],
        pictured: Bool[Array, "r p"] | None = None,
    ) -> Cache:
        """Keys and values of the observation in every cross-attention. With `text_every`, the
        cache's segments are [r, p, 2], those of words and those of pictures, which `pictured`
        tells apart."""
        if pictured is not None:
            segment = jnp.stack([jnp.where(pictured, 0, segment), segment * pictured], axis=-1)
        graph, weights = nnx.split(self.cross_blocks)

        def layer(x: Array, weights: Any) -> tuple[Array, tuple[Array, Array]]:
            block = nnx.merge(graph, weights)
            return x, (block.k(x), block.v(x))

        k, v = on_each_stage(
            lambda x, weights: scan_layers(layer, x, weights, unroll=self.compute.unroll)[1],
            x,
            weights,
        )
        return Cache(k, v, segment)

    @jax.named_scope("dit/norm")
    def modulations(self, bucket: Int[Array, " s"]) -> Modulations:
        """Modulations of all norms in S buckets of time, from one reading of the weights."""
        time = self._time(bucket)

        def layers(blocks: Any) -> Array:
            graph, weights = nnx.split(blocks)
            of = over_layers(lambda w: nnx.merge(graph, w).modulation(time), weights)
            return of.swapaxes(0, 1)

        cross, among = layers(self.cross_blocks), layers(self.self_blocks)
        return Modulations(cross, among, self.modulation(time))

    @jax.named_scope("dit")
    def __call__(
        self,
        x: Float[Array, "r k c n w"],
        bucket: Int[Array, "r k c"],
        cache: Cache,
        read: int,
        keys: UInt32[Array, "r k d"] | None = None,
        ahead: Modulations | None = None,
    ) -> Float[Array, "r k c h o"]:
        """The last `read` tokens of each chunk. The last layer computes only these. With several
        stages, however, it computes all tokens, in the time that the other stages take for theirs.

        Args:
          keys: dropout keys of each sample, in training; then the last layer computes all tokens.
          ahead: the bucket's modulations, if they are known.
        """
        time, known = self._time(bucket)[..., None, :], ahead or Modulations()
        r, samples, chunks, tokens, _ = x.shape
        segment = jnp.repeat(jnp.arange(1, samples + 1), chunks * tokens)
        segment = jnp.broadcast_to(segment, (r, segment.size))
        over = dividing(samples, "context")
        (cross_graph, cross_weights), (self_graph, self_weights) = (
            nnx.split(blocks) for blocks in (self.cross_blocks, self.self_blocks)
        )

        def pair(
            x: Array, stacked: Any, k: Array, v: Array, known: Any, *rows: Any, read: int = tokens
        ) -> tuple[Array, None]:
            weights = stacked[0]
            cross, among = nnx.merge(cross_graph, weights[0]), nnx.merge(self_graph, weights[1])
            first, second = (_dropping(stacked, rows[3:], self.dropout, half) for half in range(2))
            x = constrain(x, ROWS, over)
            time, segment, cached_segment = rows[:3]
            if len(weights) > 2:
                cached_segment = jnp.where(weights[2], *jnp.unstack(cached_segment, axis=-1))
            own = jnp.ones((len(x), samples * chunks, tokens), jnp.int32)
            q = cross.q(cross.modulated(x, time, known[0]))
            seen = attend(
                q.reshape(len(x), -1, *q.shape[4:]),
                k,
                v,
                segment,
                cached_segment,
                implementation=self.compute.attention,
                split_queries=bool(over),
                samples=samples,
            )
            x = cross.mlp(x + _attended(cross.out(seen.out.reshape(q.shape)), first), first)
            y = among.modulated(x, time, known[1])
            q, k, v = among.q(y[..., -read:, :]), among.k(y), among.v(y)
            q, k, v = (z.reshape(len(x), -1, *z.shape[3:]) for z in (q, k, v))
            seen = jax.vmap(attend_locally)(q, k, v, own[..., -read:], own)
            x = x[..., -read:, :]
            out = among.out(seen.out.reshape(*x.shape[:-1], *seen.out.shape[3:]))
            return among.mlp(x + _attended(out, second), second), None

        both: tuple[Any, ...] = (cross_weights, self_weights)
        if self.text_every:
            both = (*both, jnp.arange(len(cache.k)) % self.text_every == 0)
        stacked, rows = _with_keys(both, (time, segment, cache.segment), keys)
        cached, unroll = (cache.k, cache.v, known[:2]), self.compute.unroll
        if axis_size("stage") > 1 or keys is not None:
            x, _ = scan_layers(
                pair, x, stacked, self.remat, rows, cached, self.compute.pipeline, unroll=unroll
            )
            x = x[..., -read:, :]
        else:
            x, _ = scan_but_last(pair, x, stacked, self.remat, rows, cached, unroll)
            last = layer_of((stacked, *cached), -1)
            x, _ = pair(x, *last, *rows, read=read)
        modulation = self.modulation(time) if known.norm is None else known.norm
        shift, scale = jnp.split(modulation, 2, axis=-1)
        return self.out(self.norm(x) * (1 + scale) + shift)

    def _time(self, bucket: Int[Array, "*b"]) -> Float[Array, "*b w"]:
        half = _TIME_WIDTH // 2
        time = sinusoid(bucket, LOG_10000 * np.arange(half, dtype=np.float32) / (half - 1))
        time = jnp.roll(time, half, axis=-1).astype(jnp.dtype(self.compute.dtype))
        return jax.nn.silu(self.time_out(jax.nn.silu(self.time_in(time))))


class DitBlock(nnx.Module):
    """Pre-norm attention with biases, then a GELU MLP. In a modulated block, flow time scales and
    shifts the first norm, and neither norm has parameters."""

    def __init__(
        self,
        config: TransformerConfig,
        kv_width: int,
        modulated: bool,
        compute: Compute,
        rngs: nnx.Rngs,
    ):
        self.chunk = compute.chunk
        width, heads = config.width, (config.heads, config.head_dim)
        dense = partial(Dense, bias=True, compute=compute, rngs=rngs, lora=config.lora)
        dtype, affine = jnp.dtype(compute.dtype), not modulated
        norm = partial(LayerNorm, width, epsilon=1e-5, use_bias=affine, use_scale=affine)
        self.norm1, self.norm2 = (norm(dtype=dtype, rngs=rngs) for _ in range(2))
        if modulated:
            self.modulation = nnx.Linear(width, 2 * width, dtype=dtype, rngs=rngs)
        self.q, self.k, self.v = dense(width, heads), dense(kv_width, heads), dense(kv_width, heads)
        self.out = dense(heads, width)
        self.up, self.down = dense(width, 4 * width), dense(4 * width, width)

    def modulated(
        self,
        x: Float[Array, "*b n w"],
        time: Float[Array, "*b 1 w"],
        known: Float[Array, " w2"] | None = None,
    ) -> Float[Array, "*b n w"]:
        """The first norm, scaled and shifted by the embedded time, or by its `known` modulation."""
        modulation = self.modulation(time) if known is None else known
        scale, shift = jnp.split(modulation, 2, axis=-1)
        return self.norm1(x) * (1 + scale) + shift

    def mlp(
        self, x: Float[Array, "*b w"], dropped: Callable[..., Array] | None = None
    ) -> Float[Array, "*b w"]:
        """The second half of the block, residual included."""
        if dropped is None:
            return x + feed_forward(self.up, self.down, self.norm2(x), self.chunk)
        hidden = dropped(jax.nn.gelu(self.up(self.norm2(x)), approximate=True), 2)
        return x + dropped(self.down(hidden), 3)


def _with_keys(
    weights: Any, rows: tuple[Array, ...], keys: Array | None
) -> tuple[tuple[Any, ...], tuple[Array, ...]]:
    """Inputs of every layer: its own (and its number, for dropout), and those of the rows."""
    if keys is None:
        return (weights,), rows
    depth = len(jax.tree.leaves(weights)[0])
    return (weights, jnp.arange(depth, dtype=jnp.float32)), (*rows, keys)


def _dropping(
    stacked: tuple[Any, ...], keys: tuple[Array, ...], rate: float, half: int = 0
) -> Callable[..., Array] | None:
    """Function that applies dropout at a site (0 to 3) of a layer; None for no dropout."""
    if not keys:
        return None
    first = 8 * stacked[1].astype(jnp.int32) + 4 * half
    return lambda x, site: drop(x, keys[0], first + site, rate)


def _attended(out: Array, dropped: Callable[..., Array] | None) -> Array:
    return out if dropped is None else dropped(dropped(out, 0), 1)


def sinusoid(value: Int[Array, "*b"], decay: Float[np.ndarray, " i"]) -> Float[Array, "*b 2*i"]:
    """[sin, cos] of value · e^−decay, f32. Values up to a thousand magnify the last bit of a
    frequency, so compute `decay` in f32, in the release's order of operations."""
    frequency = np.exp(-decay.astype(np.float64)).astype(np.float32)
    angle = value[..., None].astype(jnp.float32) * frequency
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)
