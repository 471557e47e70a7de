"""A prompt as the turn of a chat with pictures in it, the form in which GR00T-N1.5's language model
was trained.

Eagle's template has a system turn, a user turn with the pictures and then the words, and the
beginning of the answer. The words stand in brackets and quotes, as NVIDIA's policy and LeRobot's
port pass them (`str([words])`).
"""

from typing import Literal

import numpy as np
from jaxtyping import Int

from models.inputs.bpe import ByteBpe

Chat = Literal["", "eagle"]
PICTURE = "<IMG_CONTEXT>"
"""The token that stands for a picture's features."""
DEFAULT = "Perform the task."
"""Words of a prompt that is empty."""
TEXT_LIMIT = 512


def eagle_turn(
    tokenizer: ByteBpe, words: str, pictures: int
) -> tuple[Int[np.ndarray, " t"], tuple[int, ...]]:
    """Token ids of the turn without those of pictures' features, and for each picture the index of
    the token before which it stands.

    Raises:
      ValueError: the tokenizer lacks a token of the template, or the words contain a picture's
        token.
    """
    ids = tokenizer.encode(eagle_template(pictures).format(quoted=[words or DEFAULT]))
    at = np.flatnonzero(ids == tokenizer.id(PICTURE))
    if len(at) != pictures:
        raise ValueError(
            f"The prompt ({words[:40]!r}) contains {PICTURE}, which stands for an image; leave it "
            "out."
        )
    return np.delete(ids, at), tuple((at - np.arange(pictures)).tolist())


def eagle_template(pictures: int) -> str:
    """The turn's text, with {quoted} for the words in brackets and quotes."""
    shown = "".join(f"<image {k}><img>{PICTURE}</img>" for k in range(1, pictures + 1))
    return (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        f"<|im_start|>user\n{shown}{{quoted}}<|im_end|>\n<|im_start|>assistant\n"
    )
