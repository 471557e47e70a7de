"""Action chunks as tokens that a language model learns to predict: FAST's, at the end of its
vocabulary.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from models.inputs.fast import SPECIAL_WORDS, Fast
from models.inputs.parts import InputPart
from models.inputs.tokenizer import SentencePiece, TextTokenizer


@dataclass(frozen=True)
class ActionTokens(InputPart, kind="fast"):
    """Chunks as FAST's tokens, between two end tokens; a family may frame them in another way:
    `class Mine(ActionTokens, kind="mine")`.

    `fast`: None if the policy came without its tokenizer. Token i has the id `top` − i, so the
    tokens take the rare words at the vocabulary's end. In PaliGemma's vocabulary, the last 128
    words are special, and openpi's `top` is 257152 − 1 − 128.

    Raises:
      ValueError: the ids reach below 0.
    """

    fast: Fast | None
    top: int

    def __post_init__(self) -> None:
        if self.fast is not None and self.lowest < 0:
            raise ValueError(
                f"{self.fast.size} FAST tokens, counted down from id {self.top}, reach below 0."
            )

    @property
    def lowest(self) -> int:
        """The smallest id of a token."""
        return self.top - self.found().size + 1

    def found(self) -> Fast:
        """FAST's tokenizer.

        Raises:
          ValueError: the policy came without one.
        """
        if self.fast is None:
            raise ValueError(
                "This policy came without a FAST tokenizer, so its chunks can be neither written "
                "nor read: give the folder of the tokenizer that it was trained with, "
                "load_policy(fast='FOLDER') (--fast FOLDER)."
            )
        return self.fast

    def encode(self, chunk: Float[np.ndarray, "h d"], text: TextTokenizer) -> Int[np.ndarray, " t"]:
        """Token ids of a normalised chunk, framed.

        Raises:
          ValueError: there is no `fast`, or it cannot spell the chunk.
        """
        return self.framed(self.top - self.found().encode(chunk), text)

    def framed(self, ids: Int[np.ndarray, " n"], text: TextTokenizer) -> Int[np.ndarray, " t"]:
        """A chunk's own ids with those around them."""
        return np.array([text.end, *ids, text.end], np.int32)

    def decode(
        self, ids: Int[np.ndarray, " n"], horizon: int, dims: int
    ) -> Float[np.ndarray, "h d"]:
        """The normalised chunk that a chunk's own ids spell.

        Raises:
          ValueError: there is no `fast`, or the ids spell no chunk.
        """
        return self.found().decode(self.top - ids, horizon, dims)


def last_free(vocabulary: int, text: TextTokenizer | None) -> int:
    """The largest id for action tokens beside this text tokenizer; None stands for PaliGemma's."""
    special = text is None or isinstance(text, SentencePiece)
    return vocabulary - 1 - (SPECIAL_WORDS if special else 0)
