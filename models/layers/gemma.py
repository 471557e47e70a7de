"""Gemma-style transformers of a VLA: the language model reads the prefix, and the action expert
reads its keys.

In π0 and π0.5 the prefix never attends to the suffix, so it runs once and leaves its keys and
values, to which any number of action chunks attend by `merge`. Training and sampling are then the
same program, and the last prefix layer computes only its keys and values.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from models.attention.attention import attend, attend_locally, merge
from models.attention.ring import append
from models.files.bounds import check_decoder
from models.layers.layers import (
    AdaRMSNorm,
    Compute,
    Dense,
    GatedMLP,
    Lora,
    Remat,
    RMSNorm,
    rotary,
)
from models.layers.stack import layer_of, over_layers, scan_but_last, scan_layers, stack_layers
from models.sharding import ROWS, axis_size, constrain, dividing


@dataclass(frozen=True)
class GemmaConfig:
    """Sizes of one stack, its adapters if any, and what it keeps for backward (`remat`)."""

    width: int
    depth: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    attention_lora: Lora | None = None
    mlp_lora: Lora | None = None
    remat: Remat = "none"

    def __post_init__(self) -> None:
        check_decoder("stack", self)


GEMMA_2B = GemmaConfig(2048, 18, 16384, 8, 1, 256)
GEMMA_300M = GemmaConfig(1024, 18, 4096, 8, 1, 256)


class Cache(NamedTuple):
    """Keys (rotated) and values of every layer, and the segment of each place."""

    k: Float[Array, "l r p g d"]
    v: Float[Array, "l r p g d"]
    segment: Int[Array, "r p"]

    def extend(self, other: "Cache") -> "Cache":
        """Both caches' places; on each device that has some, the other's come after this one's."""
        return Cache(
            append(self.k, other.k, axis=2),
            append(self.v, other.v, axis=2),
            append(self.segment, other.segment, axis=1),
        )

    def swapped(self) -> "Cache":
        """The cache with rows before layers, or the reverse."""
        return Cache(jnp.swapaxes(self.k, 0, 1), jnp.swapaxes(self.v, 0, 1), self.segment)


class GemmaAttention(nnx.Module):
    """Query, key, value and output projections without bias, and the rotation."""

    def __init__(self, config: GemmaConfig, compute: Compute, rngs: nnx.Rngs):
        heads = (config.heads, config.head_dim)
        keys = (config.kv_heads, config.head_dim)
        dense = partial(Dense, compute=compute, rngs=rngs, lora=config.attention_lora)
        self.q, self.k = dense(config.width, heads), dense(config.width, keys)
        self.v, self.out = dense(config.width, keys), dense(heads, config.width)

    def queries(
        self, x: Float[Array, "*b t w"], position: Int[Array, "*b t"]
    ) -> Float[Array, "*b t n d"]:
        return rotary(self.q(x), position)

    def keys_values(
        self, x: Float[Array, "*b t w"], position: Int[Array, "*b t"]
    ) -> tuple[Float[Array, "*b t g d"], Float[Array, "*b t g d"]]:
        return rotary(self.k(x), position), self.v(x)


class GemmaBlock(nnx.Module):
    """A layer of the language model or of the action expert; in π0.5's expert, flow time enters
    through its norms (`modulated`)."""

    def __init__(self, config: GemmaConfig, modulated: bool, compute: Compute, rngs: nnx.Rngs):
        self.norm1 = _norm(config, modulated, compute, rngs)
        self.attention = GemmaAttention(config, compute, rngs)
        self.norm2 = _norm(config, modulated, compute, rngs)
        self.mlp = GatedMLP(config.width, config.hidden, compute, rngs, config.mlp_lora)


class Prefix(nnx.Module):
    """The language model over a row's images, text and states; bidirectional within a sample."""

    def __init__(self, config: GemmaConfig, compute: Compute, rngs: nnx.Rngs):
        self.compute, self.remat = compute, config.remat
        self.layers: Any = stack_layers(
            lambda r: GemmaBlock(config, False, compute, r), config.depth, rngs
        )
        self.norm: Any = RMSNorm(config.width)

    @jax.named_scope("language")
    def __call__(
        self,
        x: Float[Array, "r p w"],
        segment: Int[Array, "r p"],
        position: Int[Array, "r p"],
        samples: int | None = None,
        rank: Int[Array, "r p"] | None = None,
    ) -> Cache:
        """Keys and values of every layer; `samples`: as in `attend`. With `rank`, a place does not
        see those of a higher rank.

        Nothing reads the last layer's attention and FFN, so they are not computed. With several
        stages, the last stage computes them anyway, in the time that the others take for a layer.
        """
        graph, weights = nnx.split(self.layers)
        implementation = self.compute.attention

        def layer(
            x: Array, weights: Any, segment: Array, position: Array, *rank: Array
        ) -> tuple[Array, tuple[Array, Array]]:
            block = nnx.merge(graph, weights)
            x = constrain(x, ROWS, "context")
            y = block.norm1(x)
            k, v = block.attention.keys_values(y, position)
            q = block.attention.queries(y, position)
            order = rank[0] if rank else None
            seen = attend(
                *(q, k, v, segment, segment),
                q_position=order,
                kv_position=order,
                causal=order is not None,
                implementation=implementation,
                samples=samples,
            )
            x = x + block.attention.out(seen.out)
            return x + block.mlp(block.norm2(x)), (k, v)

        rows = (segment, position, *(() if rank is None else (rank,)))
        unroll = self.compute.unroll
        if axis_size("stage") > 1:
            pipeline = self.compute.pipeline
            k, v = scan_layers(
                layer, x, weights, self.remat, rows, pipeline=pipeline, unroll=unroll
            )[1]
            return Cache(k, v, segment)
        x, (k, v) = scan_but_last(layer, x, weights, self.remat, rows, unroll=unroll)
        last = nnx.merge(graph, layer_of(weights, -1))
        last_k, last_v = last.attention.keys_values(last.norm1(x), position)
        return Cache(
            jnp.concatenate([k, last_k[None]]), jnp.concatenate([v, last_v[None]]), segment
        )

    @jax.named_scope("language")
    def read(
        self,
        x: Float[Array, "r k t w"],
        cache: Cache,
        own: tuple[Array, Array] | None = None,
        start: Int[Array, ""] | int = 0,
        shift: Int[Array, " t"] | int = 0,
    ) -> tuple[Float[Array, "r k t w"], tuple[Array, Array]]:
        """A causal continuation of each of K samples, which attends to its sample's cache and its
        own past.

        Returns the tokens after the last norm, and their keys and values in every layer, [l, r, k,
        t, g, d]. To continue token by token, pass these keys and values as `own`, with room for
        later tokens, and the place at which `x` starts as `start`; they are returned with `x`
        written in. A token's position is its place after the sample's cache, plus `shift`.
        """
        samples, new = x.shape[1:3]
        slot = jnp.arange(1, samples + 1)
        place = start + jnp.arange(new)
        length = (cache.segment[:, None] == slot[:, None]).sum(-1)
        total = new if own is None else own[0].shape[3]
        over = dividing(samples, "context")
        graph, weights = nnx.split(self.layers)

        def layer(
            x: Array, weights: Any, cached_k: Array, cached_v: Array, own: Any, *rows: Array
        ) -> tuple[Array, Any]:
            block = nnx.merge(graph, weights)
            x = constrain(x, ROWS, over)
            position, cached_segment = rows
            segment = jnp.broadcast_to(jnp.repeat(slot, new), (len(x), samples * new))
            q_place, kv_place = (
                jnp.broadcast_to(p, (len(x), samples, len(p))) for p in (place, jnp.arange(total))
            )
            y = block.norm1(x)
            q = block.attention.queries(y, position)
            k, v = block.attention.keys_values(y, position)
            if own is not None:
                k, v = (
                    jax.lax.dynamic_update_slice_in_dim(past, present, start, axis=2)
                    for past, present in zip(own, (k, v), strict=True)
                )
            before = attend(
                q.reshape(len(x), -1, *q.shape[3:]),
                cached_k,
                cached_v,
                segment,
                cached_segment,
                implementation=self.compute.attention,
                split_queries=bool(over),
                samples=samples,
            )
            among = jax.vmap(attend_locally)(
                q,
                k,
                v,
                jnp.ones_like(q_place),
                jnp.ones_like(kv_place),
                q_position=q_place,
                kv_position=kv_place,
            )
            among = jax.tree.map(lambda a, b: a.reshape(b.shape), among, before)
            x = x + block.attention.out(merge(before, among).out.reshape(q.shape))
            return x + block.mlp(block.norm2(x)), (k, v)

        x, own = scan_layers(
            layer,
            x,
            weights,
            self.remat,
            rows=(length[..., None] + place + shift, cache.segment),
            cached=(cache.k, cache.v, own),
            pipeline=self.compute.pipeline,
            unroll=self.compute.unroll,
        )
        return self.norm(x), own


class Modulations(NamedTuple):
    """Modulations of a network's norms at S flow times, or, without this axis, at one; None where
    they are yet to be computed. A layer has two, the last is that of the norm after the layers."""

    first: Float[Array, "*s l m"] | None = None
    second: Float[Array, "*s l m"] | None = None
    norm: Float[Array, "*s m"] | None = None


class Expert(nnx.Module):
    """The action expert: C chunks of each of K samples; each attends to its sample's cache and
    itself."""

    def __init__(self, config: GemmaConfig, modulated: bool, compute: Compute, rngs: nnx.Rngs):
        self.compute, self.remat = compute, config.remat
        self.layers = stack_layers(
            lambda r: GemmaBlock(config, modulated, compute, r), config.depth, rngs
        )
        self.norm = _norm(config, modulated, compute, rngs)

    @jax.named_scope("expert/norm")
    def modulations(self, condition: Float[Array, "s w"]) -> Modulations:
        """Modulations of all norms at S flow times, from one reading of the weights."""
        graph, weights = nnx.split(self.layers)

        def layer(weights: Any) -> tuple[Array, Array]:
            block = nnx.merge(graph, weights)
            return block.norm1.modulation(condition), block.norm2.modulation(condition)

        first, second = (y.swapaxes(0, 1) for y in over_layers(layer, weights))
        return Modulations(first, second, self.norm.modulation(condition))

    @jax.named_scope("expert")
    def __call__(
        self,
        x: Float[Array, "r k c h w"],
        condition: Float[Array, "r k c #h w"] | None,
        cache: Cache,
        ahead: Modulations | None = None,
    ) -> tuple[Float[Array, "r k c h w"], Cache]:
        """The tokens after the last norm, and their keys and values.

        `condition`, or `ahead`, its modulations if they are known, modulates the norms of an expert
        built with `modulated`; otherwise both are None.
        """
        known = ahead or Modulations()
        r, samples, chunks, horizon, _ = x.shape
        slot = jnp.arange(1, samples + 1)
        length = (cache.segment[:, None] == slot[:, None]).sum(-1)
        position = length[:, :, None, None] + jnp.arange(horizon)
        position = jnp.broadcast_to(position, x.shape[:-1])
        segment = jnp.broadcast_to(jnp.repeat(slot, chunks * horizon), (r, x[0, ..., 0].size))
        over = dividing(samples, "context")
        graph, weights = nnx.split(self.layers)
        implementation = self.compute.attention

        def layer(
            x: Array, weights: Any, cached_k: Array, cached_v: Array, known: Any, *rows: Any
        ) -> tuple[Array, tuple[Array, Array]]:
            block = nnx.merge(graph, weights)
            x = constrain(x, ROWS, over)
            condition, position, segment, cached_segment = rows
            r = len(x)
            own = jnp.ones((r, samples * chunks, horizon), jnp.int32)
            y, gate = _normed(block.norm1, x, condition, known[0])
            q = block.attention.queries(y, position)
            k, v = block.attention.keys_values(y, position)
            own_q, own_k, own_v = (z.reshape(r, -1, horizon, *z.shape[4:]) for z in (q, k, v))
            row_q, row_k, row_v = (z.reshape(r, -1, *z.shape[4:]) for z in (q, k, v))
            seen = attend(
                row_q,
                cached_k,
                cached_v,
                segment,
                cached_segment,
                implementation=implementation,
                split_queries=bool(over),
                samples=samples,
            )
            among = jax.vmap(attend_locally)(own_q, own_k, own_v, own, own)
            among = jax.tree.map(lambda a, s: a.reshape(s.shape), among, seen)
            x = x + gate * block.attention.out(merge(seen, among).out.reshape(q.shape))
            y, gate = _normed(block.norm2, x, condition, known[1])
            return (x + gate * block.mlp(y)).astype(x.dtype), (row_k, row_v)

        x, (k, v) = scan_layers(
            layer,
            x,
            weights,
            self.remat,
            rows=(condition, position, segment, cache.segment),
            cached=(cache.k, cache.v, known[:2]),
            pipeline=self.compute.pipeline,
            unroll=self.compute.unroll,
        )
        return _normed(self.norm, x, condition, known.norm)[0], Cache(k, v, segment)


def _norm(config: GemmaConfig, modulated: bool, compute: Compute, rngs: nnx.Rngs) -> Any:
    return AdaRMSNorm(config.width, compute, rngs) if modulated else RMSNorm(config.width)


def _normed(norm: Any, x: Array, condition: Any, known: Array | None) -> tuple[Array, Array]:
    """The norm of x, and the gate of the residual that follows (1 where nothing modulates)."""
    if condition is None and known is None:
        return norm(x), jnp.ones((), x.dtype)
    return norm(x, norm.modulation(condition) if known is None else known)
