"""The language model's own predictions: subtask text and FAST action tokens, scored and decoded.

π0.5 (arXiv 2504.16054) first says what to do next and then does it; knowledge insulation (arXiv
2505.23705) trains the language model on action tokens while the expert learns from its features.
Logits over 257,152 words at every place would be the largest array of a step, so they are computed
for a few tokens at a time, where there is something to predict, and recomputed for backward.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from models.inputs.packed_batch import PackedBatch
from models.layers.gemma import Cache, Prefix
from models.layers.token_chunks import chunked, on_each_device

_TOKENS = 256


def cross_entropies(
    hidden: Float[Array, "r k l w"] | None,
    embedding: Float[Array, "v w"],
    batch: PackedBatch,
    kinds: dict[str, int],
) -> dict[str, Float[Array, "r k"]]:
    """Mean cross-entropy of each sample, by name of each kind of target, in nats, over the kind's
    tokens except the first; 0 where a sample has none.

    Args:
      hidden: the language model's last hidden states at `batch.targets`; each predicts the next
        token.

    Raises:
      ValueError: the batch has no places for targets.
    """
    if hidden is None:
        raise ValueError(
            "The model has a cross-entropy loss, but the batch has no targets; make its layout "
            "with targets=config.targets, and set model.targets (tools.train derives it from the "
            "data)."
        )
    kind = batch.target_kind[:, :, 1:]
    same = kind == batch.target_kind[:, :, :-1]
    chosen = {name: same & (kind == k) for name, k in kinds.items()}
    valid = jnp.stack(list(chosen.values())).any(0)
    rows = len(valid)
    losses = negative_log_likelihood(
        hidden[:, :, :-1].reshape(rows, -1, hidden.shape[-1]),
        embedding,
        batch.targets[:, :, 1:].reshape(rows, -1),
        valid.reshape(rows, -1),
    ).reshape(valid.shape)
    return {n: (losses * m).sum(-1) / jnp.maximum(m.sum(-1), 1) for n, m in chosen.items()}


def negative_log_likelihood(
    hidden: Float[Array, "r p w"],
    embedding: Float[Array, "v w"],
    tokens: Int[Array, "r p"],
    valid: Bool[Array, "r p"],
) -> Float[Array, "r p"]:
    """−log softmax(hidden · embeddingᵀ) of the tokens, f32; 0 where not valid.

    The embedding may be sharded over "tensor" by words. A token's logit is therefore selected by
    comparison, which stays sharded; an index would gather all logits.
    """

    def score(table: Array, xs: tuple[Array, Array, Array]) -> Array:
        hidden, tokens, valid = xs
        scores = logits(hidden, table)
        said = jnp.arange(len(table)) == tokens[:, None]
        label = jnp.sum(jnp.where(said, scores, 0), axis=-1)
        return jnp.where(valid, jax.nn.logsumexp(scores, axis=-1) - label, 0)

    def some(table: Array, xs: tuple[Array, Array, Array]) -> Array:
        nothing = lambda *_: jnp.zeros(xs[1].shape, jnp.float32)  # noqa: E731
        return jax.lax.cond(xs[2].any(), score, nothing, table, xs)

    def run(table: Array, hidden: Array, tokens: Array, valid: Array) -> Array:
        order = jnp.argsort(~valid.reshape(-1), stable=True)
        flat = tuple(x.reshape(-1, *x.shape[2:])[order] for x in (hidden, tokens, valid))
        return chunked(some, table, flat, _TOKENS)[jnp.argsort(order)].reshape(valid.shape)

    rows = hidden, jnp.asarray(tokens), jnp.asarray(valid)
    return on_each_device(run, embedding.astype(hidden.dtype), *rows)


def logits(hidden: Float[Array, "*b w"], embedding: Float[Array, "v w"]) -> Float[Array, "*b v"]:
    """f32 scores of every word; Gemma reads and writes with one table."""
    table = embedding.astype(hidden.dtype)
    return jnp.einsum("...w,vw->...v", hidden, table, preferred_element_type=jnp.float32)


def greedy(
    language: Prefix,
    embed: Callable[[Array], Array],
    embedding: Float[Array, "v w"],
    cache: Cache,
    *,
    slots: int,
    length: int,
    begin: int | Int[Array, ""] | Int[Array, "r k"],
    end: int,
    gap: int = 0,
    below: int | None = None,
) -> Int[Array, "r k length"]:
    """Greedy decoding: the likeliest token after `begin`, then after that one, until every sample
    has reached `end`. `end` fills the remaining places, and slots without a sample. `gap` positions
    are skipped after the first token; only ids less than `below` are chosen."""
    depth, rows, _, *heads = cache.k.shape
    past = jnp.zeros((depth, rows, slots, length, *heads), cache.k.dtype)
    slot = jnp.arange(1, slots + 1)
    empty = ~(cache.segment[:, None] == slot[:, None]).any(-1)
    table = embedding[:below].astype(past.dtype)

    def unfinished(state: tuple) -> Array:
        i, _, done, *_ = state
        return (i < length) & ~done.all()

    def step(state: tuple) -> tuple:
        i, token, done, tokens, own = state
        shift = jnp.where(i > 0, gap, 0)[None]
        hidden, own = language.read(embed(token[..., None]), cache, own, i, shift=shift)
        token = jnp.argmax(logits(hidden[:, :, 0], table), axis=-1).astype(jnp.int32)
        token = jnp.where(done, end, token)
        return i + 1, token, done | (token == end), tokens.at[:, :, i].set(token), own

    first = jnp.broadcast_to(jnp.asarray(begin, jnp.int32), (rows, slots))
    tokens = jnp.full((rows, slots, length), end, jnp.int32)
    start = (jnp.int32(0), first, empty, tokens, (past, past))
    return jax.lax.while_loop(unfinished, step, start)[3]
