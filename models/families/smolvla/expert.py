"""SmolVLA's two stacks of Llama layers: the language model, whose keys and values are kept, and the
action expert, which reads them (arXiv 2506.01844).

An expert's layer is of one of two kinds. In one, its actions attend to the prefix and, causally,
to each other; in the other to the prefix alone, by projections of the language model's keys and
values. The kinds repeat with a period, so the expert is that many stacks, run in turn.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from models.attention.attention import attend, attend_locally, merge
from models.layers.gemma import Cache, GemmaAttention, GemmaConfig, Prefix
from models.layers.layers import Compute, Dense
from models.layers.qwen.qwen3 import QwenNorm, SwiGLU
from models.layers.stack import scan_layers, stack_layers
from models.sharding import ROWS, constrain, dividing

Read = list[tuple[Float[Array, "l r p g d"], Float[Array, "l r p g d"]]]
"""Keys and values that each of the expert's stacks reads."""


class LlamaPrefix(Prefix):
    """The language model, whose last norm is kept for the files alone."""

    def __init__(self, config: GemmaConfig, compute: Compute, rngs: nnx.Rngs):
        self.compute, self.remat = compute, config.remat
        self.layers = stack_layers(lambda r: LlamaBlock(config, compute, r), config.depth, rngs)
        self.norm = _norm(config.width, compute, rngs)


class LlamaBlock(nnx.Module):
    """A layer of the language model or of the expert. One that `crosses` projects the keys and
    values that it reads, instead of its own tokens."""

    def __init__(
        self, config: GemmaConfig, compute: Compute, rngs: nnx.Rngs, crosses: bool = False
    ):
        self.norm1 = _norm(config.width, compute, rngs)
        self.attention = GemmaAttention(config, compute, rngs)
        if crosses:
            keys = config.kv_heads, config.head_dim
            dense = partial(Dense, compute=compute, rngs=rngs, lora=config.attention_lora)
            self.attention.k, self.attention.v = (dense(keys[0] * keys[1], keys) for _ in range(2))
        self.norm2 = _norm(config.width, compute, rngs)
        self.mlp = SwiGLU(config.width, config.hidden, compute, rngs, config.mlp_lora)


def crossing(depth: int, every: int) -> tuple[bool, ...]:
    """Kinds of an expert's layers in a period, true for those that cross: all but every `every`-th
    from the first on, or all if it is 0."""
    crosses = [every < 1 or layer % every > 0 for layer in range(depth)]
    period = 1 if len(set(crosses)) == 1 else every
    return tuple(crosses[: period if depth % period == 0 else depth])


class LlamaExpert(nnx.Module):
    """The action expert: C chunks of each of K samples."""

    def __init__(
        self, config: GemmaConfig, crosses: tuple[bool, ...], compute: Compute, rngs: nnx.Rngs
    ):
        self.compute, self.remat, self.depth = compute, config.remat, config.depth
        self.crosses = crosses

        def stack(crosses: bool) -> LlamaBlock:
            depth = config.depth // len(self.crosses)
            return stack_layers(lambda r: LlamaBlock(config, compute, r, crosses), depth, rngs)

        self.layers = nnx.List(map(stack, crosses))
        self.norm = _norm(config.width, compute, rngs)

    @jax.named_scope("expert")
    def read(self, cache: Cache) -> Read:
        """Keys and values of the prefix as each stack reads them, whatever the chunks."""
        shown, skip = [], len(cache.k) // self.depth
        for number, (stack, crosses) in enumerate(zip(self.layers, self.crosses, strict=True)):
            here = slice(number * skip, None, len(self.crosses) * skip)
            pair = cache.k[here], cache.v[here]
            shown.append(_projected(stack, pair, self.compute.unroll) if crosses else pair)
        return shown

    @jax.named_scope("expert")
    def __call__(
        self, x: Float[Array, "r k c h w"], read: Read, kept: Int[Array, "r p"]
    ) -> Float[Array, "r k c h w"]:
        """The tokens after the last norm; `kept`: the segment of each place that is read."""
        r, samples, chunks, horizon, _ = x.shape
        slot = jnp.arange(1, samples + 1)
        length = (kept[:, None] == slot[:, None]).sum(-1)
        segment = jnp.broadcast_to(jnp.repeat(slot, chunks * horizon), (r, x[0, ..., 0].size))
        over = dividing(samples, "context")
        graphs, weights = zip(*map(nnx.split, self.layers), strict=True)
        attending = partial(
            attend,
            implementation=self.compute.attention,
            split_queries=bool(over),
            samples=samples,
        )

        def layer(x: Array, weights: Any, read: Any, *rows: Array) -> tuple[Array, None]:
            length, segment, kept = rows
            x = constrain(x, ROWS, over)
            place = jnp.broadcast_to(jnp.arange(horizon), x.shape[:-1])
            for graph, own, shown, crosses in zip(graphs, weights, read, self.crosses, strict=True):
                block = nnx.merge(graph, own)
                y = block.norm1(x)
                at = place if crosses else place + length[:, :, None, None]
                q = block.attention.queries(y, at)
                k, v = shown
                seen = attending(q.reshape(len(x), -1, *q.shape[4:]), k, v, segment, kept)
                if not crosses:
                    among = _among(q, *block.attention.keys_values(y, at))
                    seen = merge(seen, jax.tree.map(lambda a, b: a.reshape(b.shape), among, seen))
                x = x + block.attention.out(seen.out.reshape(q.shape))
                x = (x + block.mlp(block.norm2(x))).astype(x.dtype)
            return x, None

        x, _ = scan_layers(
            layer,
            x,
            weights,
            self.remat,
            rows=(length, segment, kept),
            cached=(read,),
            unroll=self.compute.unroll,
        )
        return self.norm(x)


def _projected(stack: nnx.Module, pair: tuple[Array, Array], unroll: bool) -> tuple[Array, Array]:
    """The language model's keys and values by the projections of the layers that read them."""
    graph, weights = nnx.split(stack)

    def layer(nothing: None, weights: Any, k: Array, v: Array) -> tuple[None, tuple[Array, Array]]:
        block: Any = nnx.merge(graph, weights)
        flat = (x.reshape(*x.shape[:2], -1) for x in (k, v))
        return None, (block.attention.k(next(flat)), block.attention.v(next(flat)))

    return scan_layers(layer, None, weights, cached=pair, unroll=unroll)[1]


def _among(q: Array, k: Array, v: Array) -> Any:
    """Causal attention of the actions of each chunk among themselves."""
    q, k, v = (z.reshape(len(z), -1, *z.shape[3:]) for z in (q, k, v))
    one = jnp.ones(q.shape[:3], jnp.int32)
    place = jnp.broadcast_to(jnp.arange(q.shape[2]), one.shape)

    def causal(q: Array, k: Array, v: Array, one: Array, at: Array) -> Any:
        return attend_locally(q, k, v, one, one, q_position=at, kv_position=at)

    return jax.vmap(causal)(q, k, v, one, place)


def _norm(width: int, compute: Compute, rngs: nnx.Rngs) -> QwenNorm:
    return QwenNorm(width, epsilon=1e-5, dtype=jnp.dtype(compute.dtype), rngs=rngs)
