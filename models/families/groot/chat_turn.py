"""Prompts as turns of a chat in which tokens stand for pictures, as GR00T's language models were
trained."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Float

from models.inputs.bpe import ByteBpe
from models.inputs.prompts import PromptReader, Read


@dataclass(frozen=True)
class ChatTurn(PromptReader):
    """A turn without the tokens of pictures' features. `picture`: the token that stands for those
    of one picture.

    Raises:
      ValueError: the tokenizer is no BPE.
    """

    limit: int = 512

    remedy = "FOLDER (the folder of its vocab.json and merges.txt, or its tokenizer.json)"
    picture: ClassVar[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokenizer is not None and not isinstance(self.tokenizer, ByteBpe):
            raise ValueError(
                "A chat with pictures needs a BPE tokenizer, not SentencePiece or words; give the "
                "model's own tokenizer, its folder or its tokenizer.json."
            )

    @abstractmethod
    def turn(self, prompt: str, pictures: int) -> str:
        """The turn's text, in which each picture is its token."""

    def tokens(self, prompt: str, state: Float[np.ndarray, " s"], pictures: int) -> Read:
        """See `PromptReader.tokens`.

        Raises:
          ValueError: the tokenizer lacks a token of the template, or the words contain a picture's
            token.
        """
        ids = self.found().encode(self.turn(prompt, pictures))
        at = np.flatnonzero(ids == self.picture_token)
        if len(at) != pictures:
            raise ValueError(
                f"The prompt ({prompt[:40]!r}) contains {self.picture}, which stands for an image; "
                "leave it out."
            )
        return np.delete(ids, at), tuple((at - np.arange(pictures)).tolist())

    @property
    def shows_pictures(self) -> bool:
        return True

    @property
    def picture_token(self) -> int:
        """The id of the token that stands for a picture's features.

        Raises:
          ValueError: the tokenizer has none.
        """
        tokenizer = self.found()
        assert isinstance(tokenizer, ByteBpe)
        return tokenizer.id(self.picture)
