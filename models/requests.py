"""Requests to a policy: observations that are prepared one by one, wherever they arrive, and can
then be answered together in batches of a few sizes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float, Int, Integer, UInt32

from models.flow.realtime_chunking import Left
from models.inputs.packed_batch import Sample


@dataclass(frozen=True)
class Request:
    """One observation, prepared for `Policy.sample_actions`. `left` is the rest of the chunk to
    continue; it and `state` are in the robot's units. The sample's actions are `left` in the
    model's units."""

    sample: Sample
    state: Float[np.ndarray, " _s"]
    key: UInt32[np.ndarray, "2"]
    left: Left | None = None

    @property
    def depends(self) -> bool:
        """True if the answer depends on what is left of a chunk."""
        return self.left is not None and bool(self.left.weight.any())


def key_words(
    keys: Integer[ArrayLike, "n 2"] | Sequence[tuple[int, int]] | None, count: int
) -> UInt32[np.ndarray, "n 2"]:
    """The keys of `count` rows, (0, i) for row i if None.

    Raises:
      ValueError: they are not two integers for each row.
    """
    if keys is None:
        return np.stack([np.zeros(count, np.uint32), np.arange(count, dtype=np.uint32)], -1)
    words = np.asarray(keys)
    if words.shape != (count, 2) or not np.issubdtype(words.dtype, np.integer):
        raise ValueError(
            f"keys are {words.dtype} {list(words.shape)}; expected two integers for each of "
            f"{count} observations."
        )
    return words.astype(np.uint32)


def split_rows(count: int, sizes: Sequence[int]) -> Iterator[tuple[Int[np.ndarray, " r"], int]]:
    """Splits `count` rows into batches of the ascending sizes. Yields each batch's rows, padded by
    repeating the last of them, and how many of them count."""
    for first in range(0, count, sizes[-1]):
        rows = min(sizes[-1], count - first)
        size = next(size for size in sizes if size >= rows)
        yield np.minimum(first + np.arange(size), first + rows - 1), rows


def check_noise(noise: Float[np.ndarray, "b h a"] | None, count: int) -> None:
    """Raises ValueError if there is no row, or noise for another number of rows."""
    if not count:
        raise ValueError("The request has no observations; give at least one.")
    if noise is not None and len(noise) != count:
        raise ValueError(f"noise is for {len(noise)} observations, but there are {count}.")


def continuation_weights(lefts: Sequence[Left | None]) -> Float[np.ndarray, "b h"] | None:
    """Weights of the chunks to continue; None if no row depends on one."""
    if not any(left is not None and left.weight.any() for left in lefts):
        return None
    nothing = np.zeros_like(next(left.weight for left in lefts if left is not None))
    return np.stack([nothing if left is None else left.weight for left in lefts])


def with_committed(
    chunks: Float[np.ndarray, "b h a"], lefts: Sequence[Left | None]
) -> Float[np.ndarray, "b h a"]:
    """The chunks, with the committed actions as their first steps."""
    for chunk, left in zip(chunks, lefts, strict=True):
        if left is not None:
            chunk[: len(left.committed)] = left.committed
    return chunks
