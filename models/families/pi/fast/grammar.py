"""The grammar of chunks written in FAST tokens: which token may come next, so that the tokens
always form a chunk, and the numbers that the tokens stand for.

A FAST token is a run of bytes, which may begin or end inside a character of UTF-8, and each
character is a coefficient (arXiv 2501.09747). An automaton over UTF-8's states and the number of
coefficients left decides at every step, on the device, after which tokens a chunk can still follow.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt8

from models.inputs.fast import Fast, dct_matrix

_NEVER = 2**30
_LONGEST_CHARACTER = 4


class Rest(NamedTuple):
    """Rest of a chunk: the number of coefficients that are not complete, and the state of UTF-8
    inside the current character."""

    coefficients: Int[Array, "*b"]
    inside: Int[Array, "*b"]


@dataclass(frozen=True)
class Grammar:
    """Chunks of `horizon` steps in FAST tokens, at most `longest` of them; `dims`: action dims of
    each embodiment.

    Raises:
      ValueError: a chunk cannot be written in so few tokens.
    """

    fast: Fast
    horizon: int
    dims: tuple[int, ...]
    longest: int

    def __post_init__(self) -> None:
        for dims in self.dims:
            needed = int(self._fewest[self.horizon * dims, 0])
            if needed > self.longest:
                told = f"at least {needed}" if needed < _NEVER else "more than any number of"
                raise ValueError(
                    f"A chunk of {self.horizon} steps of {dims} dims takes {told} tokens of this "
                    f"FAST tokenizer, but model.max_decoding_steps allows {self.longest}."
                )

    def begin(self, embodiment: Int[Array, "*b"]) -> Rest:
        """The rest at the beginning: a whole chunk of each embodiment."""
        count = self.horizon * jnp.asarray(self.dims)[embodiment]
        return Rest(count, jnp.zeros_like(count))

    def allowed(self, rest: Rest, left: Int[Array, ""] | int) -> Bool[Array, "*b v"]:
        """FAST tokens after which a chunk can be finished in `left` − 1 more."""
        coefficients, inside = self._after(rest)
        fewest = jnp.asarray(self._fewest)[jnp.maximum(coefficients, 0), jnp.maximum(inside, 0)]
        return (coefficients >= 0) & (inside >= 0) & (fewest < left)

    def read(self, rest: Rest, token: Int[Array, "*b"]) -> Rest:
        """The rest after an allowed token."""
        coefficients, inside = self._after(rest)
        take = lambda x: jnp.take_along_axis(x, token[..., None], axis=-1)[..., 0]  # noqa: E731
        return Rest(take(coefficients), take(inside))

    def chunk(
        self, tokens: Int[Array, " n"], count: Int[Array, ""], embodiment: Int[Array, ""]
    ) -> Float[Array, "h a"]:
        """The normalised chunk that the first `count` tokens spell, f32, in as many dims as the
        largest embodiment has; 0 in the dims that this one lacks."""
        width = max(self.dims)
        most = self.horizon * width
        dims = jnp.asarray(self.dims)[embodiment]
        values = self._characters(tokens, count, most) + float(self.fast.lowest)
        frequency, dim = jnp.ogrid[: self.horizon, :width]
        at = jnp.minimum(frequency * dims + dim, most - 1)
        coefficients = jnp.where(dim < dims, values[at] / self.fast.scale, 0)
        inverse = jnp.asarray(dct_matrix(self.horizon).T, jnp.float32)
        return jnp.matmul(inverse, coefficients, precision=jax.lax.Precision.HIGHEST)

    def _after(self, rest: Rest) -> tuple[Int[Array, "*b v"], Int[Array, "*b v"]]:
        """Coefficients left and state of UTF-8 after each token; −1 where it breaks UTF-8."""
        finished, inside = (jnp.asarray(table)[rest.inside] for table in self._steps)
        return rest.coefficients[..., None] - finished, inside

    def _characters(
        self, tokens: Int[Array, " n"], count: Int[Array, ""], most: int
    ) -> Float[Array, " most"]:
        """Codes of the characters that the tokens' bytes spell."""
        table, lengths = (jnp.asarray(x) for x in self._bytes)
        size = most * _LONGEST_CHARACTER
        long = jnp.where(jnp.arange(len(tokens)) < count, lengths[tokens], 0)
        place = (jnp.cumsum(long) - long)[:, None] + jnp.arange(table.shape[1])
        place = jnp.where(jnp.arange(table.shape[1]) < long[:, None], place, size)
        room = jnp.zeros(size + _LONGEST_CHARACTER, jnp.int32)
        spelt = room.at[place].set(table[tokens].astype(jnp.int32), mode="drop")
        first, *others = (spelt[i : i + size] for i in range(_LONGEST_CHARACTER))
        second, third, fourth = (byte & 0x3F for byte in others)
        code = jnp.select(
            [first < 0x80, first < 0xE0, first < 0xF0],
            [first, (first & 0x1F) << 6 | second, (first & 0xF) << 12 | second << 6 | third],
            (first & 7) << 18 | second << 12 | third << 6 | fourth,
        )
        begins = (first & 0xC0 != 0x80) & (jnp.arange(size) < long.sum())
        at = jnp.where(begins, jnp.cumsum(begins) - 1, most)
        return jnp.zeros(most).at[at].set(code.astype(jnp.float32), mode="drop")

    @cached_property
    def _spelt(self) -> list[bytes]:
        return token_bytes(self.fast)

    @cached_property
    def _bytes(self) -> tuple[UInt8[np.ndarray, "v l"], Int[np.ndarray, " v"]]:
        """Bytes of each token, and their number."""
        found = self._spelt
        table = np.zeros((len(found), max(map(len, found), default=1) or 1), np.uint8)
        for row, spelt in zip(table, found, strict=True):
            row[: len(spelt)] = list(spelt)
        return table, np.array([len(spelt) for spelt in found], np.int32)

    @cached_property
    def _steps(self) -> tuple[Int[np.ndarray, "s v"], Int[np.ndarray, "s v"]]:
        """From each state of UTF-8, for each token: the number of characters that it finishes, and
        the state after it; −1 where it breaks UTF-8, or is not a token."""
        found = self._spelt
        finished = np.zeros((len(_STATES), len(found)), np.int32)
        inside = np.full(finished.shape, -1, np.int32)
        for state in range(len(_STATES)):
            for token, spelt in enumerate(found):
                if spelt:
                    finished[state, token], inside[state, token] = _run(state, spelt)
        return finished, inside

    @cached_property
    def _fewest(self) -> Int[np.ndarray, "n s"]:
        """Fewest tokens that finish the rest of a chunk; `_NEVER` where no tokens do."""
        finished, inside = self._steps
        moves = [
            np.unique(np.stack([f, i], 1)[i >= 0], axis=0)
            for f, i in zip(finished, inside, strict=True)
        ]
        most = self.horizon * max(self.dims)
        fewest = np.full((most + 1, len(_STATES)), _NEVER, np.int32)
        fewest[0, 0] = 0
        for left in range(most + 1):
            for _ in range(_LONGEST_CHARACTER):  # tokens that only begin or continue a character
                for state, (characters, after) in enumerate(m.T for m in moves):
                    rest = left - characters
                    costs = np.where(rest >= 0, fewest[np.maximum(rest, 0), after], _NEVER)
                    if (left or state) and len(costs):
                        best = min(int(costs.min()) + 1, _NEVER)
                        fewest[left, state] = min(fewest[left, state], best)
        return fewest


def token_bytes(fast: Fast) -> list[bytes]:
    """Bytes that each token spells; none for ids without a token.

    Raises:
      ValueError: the tokenizer decodes differently from FAST's (bytes, or plain characters).
    """
    decoder = (json.loads(fast.bpe).get("decoder") or {}).get("type")
    if decoder not in ("ByteLevel", "Fuse"):
        raise ValueError(
            f"This FAST tokenizer decodes with {decoder}; expected ByteLevel, as in the released "
            "one, or Fuse, as in those trained here."
        )
    letters = _letters() if decoder == "ByteLevel" else {}
    return [_spelt(text, letters) for text in fast.texts]


def _spelt(text: str | None, letters: dict[str, int]) -> bytes:
    known = [letters.get(letter, -1) for letter in text or ""]
    return bytes(known) if known and min(known) >= 0 else (text or "").encode()


def _letters() -> dict[str, int]:
    """The byte that each letter of byte-level BPE stands for: printable bytes stand for themselves,
    the others are letters from U+0100 on (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_STATES = (
    (0, 0, 0),
    (1, 0x80, 0xBF),
    (2, 0x80, 0xBF),
    (3, 0x80, 0xBF),
    (2, 0xA0, 0xBF),
    (2, 0x80, 0x9F),
    (3, 0x90, 0xBF),
    (3, 0x80, 0x8F),
)
"""States inside a character: bytes to come, and the range of the next byte. The first state is
between characters."""
_LEADS = (
    (0x00, 0x7F, 0),
    (0xC2, 0xDF, 1),
    (0xE0, 0xE0, 4),
    (0xE1, 0xEC, 2),
    (0xED, 0xED, 5),
    (0xEE, 0xEF, 2),
    (0xF0, 0xF0, 6),
    (0xF1, 0xF3, 3),
    (0xF4, 0xF4, 7),
)
"""Ranges of the first bytes of characters, and the state after them."""


def _run(state: int, spelt: bytes) -> tuple[int, int]:
    """Number of characters that bytes finish, and the state after; (0, −1) if they break UTF-8."""
    finished = 0
    for byte in spelt:
        left, low, high = _STATES[state]
        if left:
            state = left - 1 if low <= byte <= high else -1
        else:
            state = next((s for low, high, s in _LEADS if low <= byte <= high), -1)
        if state < 0:
            return 0, -1
        finished += state == 0
    return finished, state
