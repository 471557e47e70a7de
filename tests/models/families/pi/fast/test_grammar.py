"""Chunks are written so that they can be read: every token that is allowed leads to a whole chunk,
every chunk's own tokens are allowed, and what they spell is what the tokenizer reads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import ByteLevelBPETokenizer, Tokenizer, decoders, trainers

from models.families.pi.fast.grammar import Grammar, token_bytes
from models.inputs.fast import Fast, dct_matrix

HORIZON, DIMS, LONGEST = 8, (3, 2), 48


def smooth(count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    t = np.linspace(0, 1, HORIZON)[:, None]
    waves = rng.uniform(-0.5, 0.5, (2, count, 1, DIMS[0]))
    return waves[0] + waves[1] * np.sin(6 * rng.uniform(0, 1, (count, 1, DIMS[0])) * t)


def as_released() -> Fast:
    """Byte-level BPE whose coefficient 0 is a character of two bytes, as the released one's is."""
    coefficients = np.rint(10 * (dct_matrix(HORIZON) @ smooth(300))).astype(int) + 354
    bpe = ByteLevelBPETokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=600, min_frequency=2, special_tokens=[], show_progress=False,
        initial_alphabet=[chr(i) for i in range(420)], max_token_length=10000,
    )  # fmt: skip
    lines = ("".join(map(chr, c.ravel())) for c in coefficients)
    bpe._tokenizer.train_from_iterator(lines, trainer)
    return Fast(bpe._tokenizer.to_str(), 10.0, -354)


@pytest.fixture(scope="module", params=["ours", "released"])
def fast(request) -> Fast:
    return Fast.train(smooth(300), 400) if request.param == "ours" else as_released()


@pytest.fixture(scope="module")
def grammar(fast):
    return Grammar(fast, HORIZON, DIMS, LONGEST)


def test_the_bytes_of_every_token_are_those_that_the_tokenizer_decodes(fast):
    read = Tokenizer.from_str(fast.bpe)
    for token, spelt in enumerate(token_bytes(fast)):
        assert read.decode([token], skip_special_tokens=False) == spelt.decode(errors="replace")


def test_any_walk_over_allowed_tokens_ends_in_a_chunk_that_the_tokenizer_reads(grammar, fast):
    allowed, read, chunk = (jax.jit(f) for f in (grammar.allowed, grammar.read, grammar.chunk))
    draw = np.random.default_rng(1)
    for embodiment, dims in enumerate(DIMS):
        for _ in range(5):
            tokens, rest = [], grammar.begin(jnp.array(embodiment))
            while int(rest.coefficients):
                choice = np.flatnonzero(allowed(rest, jnp.int32(LONGEST - len(tokens))))
                tokens.append(int(draw.choice(choice)))
                rest = read(rest, np.int32(tokens[-1]))
            wanted = fast.decode(tokens, HORIZON, dims)
            room = np.pad(tokens, (0, LONGEST - len(tokens))).astype(np.int32)
            found = np.asarray(chunk(room, np.int32(len(tokens)), np.int32(embodiment)))
            np.testing.assert_allclose(
                found[:, :dims], wanted, rtol=0, atol=1e-6 * np.abs(wanted).max()
            )
            assert not found[:, dims:].any()


def test_a_chunks_own_tokens_are_allowed_one_after_the_other(grammar, fast):
    allowed, read = jax.jit(grammar.allowed), jax.jit(grammar.read)
    for chunk in smooth(5, 7):
        rest = grammar.begin(jnp.array(0))
        for at, token in enumerate(fast.encode(chunk)):
            assert allowed(rest, jnp.int32(LONGEST - at))[token]
            rest = read(rest, token)
        assert int(rest.coefficients) == 0


def test_as_tokens_run_out_only_those_that_finish_in_time_are_allowed(grammar, fast):
    rest = grammar.begin(jnp.array(0))
    counts = [int(np.sum(grammar.allowed(rest, left))) for left in range(1, HORIZON * 3)]
    assert counts == sorted(counts)
    fewest = 1 + next(i for i, count in enumerate(counts) if count)
    with pytest.raises(ValueError, match=rf"takes at least {fewest} tokens .* allows {fewest - 1}"):
        Grammar(fast, HORIZON, DIMS, fewest - 1)
    Grammar(fast, HORIZON, DIMS, fewest)


def test_a_tokenizer_that_decodes_otherwise_is_refused(fast):
    other = Tokenizer.from_str(fast.bpe)
    other.decoder = decoders.Metaspace()
    with pytest.raises(ValueError, match="decodes with Metaspace"):
        token_bytes(Fast(other.to_str()))
