"""A prompt as the turn of a chat with pictures in it, the form in which GR00T-N1.5's language model
was trained.

Eagle's template has a system turn, a user turn with the pictures and then the words, and the
beginning of the answer. The words stand in brackets and quotes, as NVIDIA's policy and LeRobot's
port pass them (`str([words])`).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from models.inputs.bpe import ByteBpe
from models.inputs.prompts import PromptReader, Read

PICTURE = "<IMG_CONTEXT>"
"""The token that stands for a picture's features."""
DEFAULT = "Perform the task."
"""Words of a prompt that is empty."""


@dataclass(frozen=True)
class EagleTurn(PromptReader, kind="eagle_turn"):
    """Eagle's turn, without the tokens of pictures' features.

    Raises:
      ValueError: the tokenizer is no BPE.
    """

    limit: int = 512

    remedy = "FOLDER (the folder of its vocab.json and merges.txt, or its tokenizer.json)"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokenizer is not None and not isinstance(self.tokenizer, ByteBpe):
            raise ValueError(
                "Eagle's chat needs a BPE tokenizer, not SentencePiece or words; give the model's "
                "own tokenizer, its folder or its tokenizer.json."
            )

    def tokens(self, prompt: str, state: Float[np.ndarray, " s"], pictures: int) -> Read:
        """See `PromptReader.tokens`.

        Raises:
          ValueError: the tokenizer lacks a token of the template, or the words contain a picture's
            token.
        """
        tokenizer = self.found()
        ids = tokenizer.encode(template(pictures).format(quoted=[prompt or DEFAULT]))
        at = np.flatnonzero(ids == self.picture_token)
        if len(at) != pictures:
            raise ValueError(
                f"The prompt ({prompt[:40]!r}) contains {PICTURE}, which stands for an image; "
                "leave it out."
            )
        return np.delete(ids, at), tuple((at - np.arange(pictures)).tolist())

    @property
    def shows_pictures(self) -> bool:
        return True

    def rule(self, pictures: int) -> dict[str, Any]:
        return {"template": [template(pictures)], "default": DEFAULT, "without": PICTURE}

    @property
    def picture_token(self) -> int:
        """The id of the token that stands for a picture's features.

        Raises:
          ValueError: the tokenizer has none.
        """
        tokenizer = self.found()
        assert isinstance(tokenizer, ByteBpe)
        return tokenizer.id(PICTURE)


def template(pictures: int) -> str:
    """The turn's text, with {quoted} for the words in brackets and quotes."""
    shown = "".join(f"<image {k}><img>{PICTURE}</img>" for k in range(1, pictures + 1))
    return (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        f"<|im_start|>user\n{shown}{{quoted}}<|im_end|>\n<|im_start|>assistant\n"
    )
