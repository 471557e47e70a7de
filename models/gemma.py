"""Gemma-style transformers of a VLA: the language model reads the prefix, the action expert reads
its keys.

In π0 and π0.5 the prefix never sees the suffix, so the two experts need not walk the layers side by
side: the prefix runs once and leaves its keys and values, and any number of action chunks attend to
them by `merge`. Training and sampling are then the same program, and the last prefix layer computes
only what is read: its keys and values.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from models.attention import Implementation, attend, merge
from models.layers import AdaRMSNorm, GatedMLP, RMSNorm, rotary, scan_layers


@dataclass(frozen=True)
class GemmaConfig:
    """Sizes of one stack; gemma_2b is (2048, 18, 16384, 8, 1, 256)."""

    width: int
    depth: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int


class Cache(NamedTuple):
    """Keys (rotated) and values that the prefix leaves behind in every layer."""

    k: Float[Array, "l r p g d"]
    v: Float[Array, "l r p g d"]


class Attention(nnx.Module):
    """Query, key, value and output projections without bias; rotation included."""

    def __init__(self, config: GemmaConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        heads = (config.heads, config.head_dim)
        keys = (config.kv_heads, config.head_dim)

        def project(size: tuple[int, int]) -> nnx.LinearGeneral:
            return nnx.LinearGeneral(config.width, size, use_bias=False, dtype=dtype, rngs=rngs)

        self.q, self.k, self.v = project(heads), project(keys), project(keys)
        self.out = nnx.LinearGeneral(
            heads, config.width, axis=(-2, -1), use_bias=False, dtype=dtype, rngs=rngs
        )

    def keys_values(
        self, x: Float[Array, "*b t w"], position: Int[Array, "*b t"]
    ) -> tuple[Float[Array, "*b t g d"], Float[Array, "*b t g d"]]:
        return rotary(self.k(x), position), self.v(x)


class PrefixBlock(nnx.Module):
    """A layer of the language model."""

    def __init__(self, config: GemmaConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.norm1 = RMSNorm(config.width)
        self.attention = Attention(config, dtype, rngs)
        self.norm2 = RMSNorm(config.width)
        self.mlp = GatedMLP(config.width, config.hidden, dtype, rngs)


class Prefix(nnx.Module):
    """The language model over a row's images, text and states; bidirectional within a sample."""

    def __init__(self, config: GemmaConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=config.depth)
        @nnx.vmap
        def stack(rngs: nnx.Rngs) -> PrefixBlock:
            return PrefixBlock(config, dtype, rngs)

        self.layers = stack(rngs)

    def __call__(
        self,
        x: Float[Array, "r p w"],
        segment: Int[Array, "r p"],
        position: Int[Array, "r p"],
        implementation: Implementation,
    ) -> Cache:
        """Keys and values of every layer. The last layer's attention and FFN have no reader, so
        none of them is computed."""
        graph, weights = nnx.split(self.layers)

        def layer(x: Array, weights: Any) -> tuple[Array, Cache]:
            block = nnx.merge(graph, weights)
            y = block.norm1(x)
            k, v = block.attention.keys_values(y, position)
            q = rotary(block.attention.q(y), position)
            seen = attend(q, k, v, segment, segment, implementation=implementation)
            x = x + block.attention.out(seen.out)
            return x + block.mlp(block.norm2(x)), Cache(k, v)

        x, caches = scan_layers(layer, x, jax.tree.map(lambda w: w[:-1], weights))
        last = nnx.merge(graph, jax.tree.map(lambda w: w[-1], weights))
        final = Cache(*last.attention.keys_values(last.norm1(x), position))
        return jax.tree.map(lambda c, f: jnp.concatenate([c, f[None]]), caches, final)


class ExpertBlock(nnx.Module):
    """A layer of the action expert; flow time enters through its norms."""

    def __init__(self, config: GemmaConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.norm1 = AdaRMSNorm(config.width, dtype, rngs)
        self.attention = Attention(config, dtype, rngs)
        self.norm2 = AdaRMSNorm(config.width, dtype, rngs)
        self.mlp = GatedMLP(config.width, config.hidden, dtype, rngs)


class Expert(nnx.Module):
    """The action expert: C chunks of each of K samples, each seeing its sample's prefix and
    itself."""

    def __init__(self, config: GemmaConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=config.depth)
        @nnx.vmap
        def stack(rngs: nnx.Rngs) -> ExpertBlock:
            return ExpertBlock(config, dtype, rngs)

        self.layers = stack(rngs)
        self.norm = AdaRMSNorm(config.width, dtype, rngs)

    def __call__(
        self,
        x: Float[Array, "r k c h w"],
        condition: Float[Array, "r k c 1 w"],
        cache: Cache,
        prefix_segment: Int[Array, "r p"],
        implementation: Implementation,
    ) -> Float[Array, "r k c h w"]:
        r, samples, chunks, horizon, _ = x.shape
        slot = jnp.arange(1, samples + 1)
        length = (prefix_segment[:, None] == slot[:, None]).sum(-1)
        position = length[:, :, None, None] + jnp.arange(horizon)
        position = jnp.broadcast_to(position, x.shape[:-1])
        row_segment = jnp.broadcast_to(jnp.repeat(slot, chunks * horizon), (r, x[0, ..., 0].size))
        own = jnp.ones((r * samples * chunks, horizon), jnp.int32)
        graph, weights = nnx.split(self.layers)

        def layer(x: Array, xs: tuple[Any, Cache]) -> tuple[Array, None]:
            weights, (prefix_k, prefix_v) = xs
            block = nnx.merge(graph, weights)
            y, gate = block.norm1(x, condition)
            q = rotary(block.attention.q(y), position)
            k, v = block.attention.keys_values(y, position)
            chunk_q, chunk_k, chunk_v = (z.reshape(-1, horizon, *z.shape[4:]) for z in (q, k, v))
            by_row = q.reshape(r, -1, *q.shape[4:])
            seen = attend(
                by_row,
                prefix_k,
                prefix_v,
                row_segment,
                prefix_segment,
                implementation=implementation,
            )
            among = attend(chunk_q, chunk_k, chunk_v, own, own, implementation="dense")
            among = jax.tree.map(lambda a, s: a.reshape(s.shape), among, seen)
            joined = merge(seen, among).out.reshape(q.shape)
            x = x + gate * block.attention.out(joined)
            y, gate = block.norm2(x, condition)
            return (x + gate * block.mlp(y)).astype(x.dtype), None

        x, _ = scan_layers(layer, x, (weights, cache))
        return self.norm(x, condition)[0]
