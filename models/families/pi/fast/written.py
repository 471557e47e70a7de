"""Action tokens as π0-FAST writes them after its prompt: between "Action: " and "|".

The token that begins a text stands for the prompt's last one.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from models.inputs.action_tokens import ActionTokens
from models.inputs.tokenizer import TextTokenizer


@dataclass(frozen=True)
class WrittenTokens(ActionTokens, kind="written_fast"):
    """A chunk's tokens with those around them; see `ActionTokens`."""

    def framed(self, ids: Int[np.ndarray, " n"], text: TextTokenizer) -> Int[np.ndarray, " t"]:
        closing = text.continued("|")
        return np.array([text.begin, *opening(text), *ids, *closing, text.end], np.int32)


def opening(text: TextTokenizer) -> Int[np.ndarray, " t"]:
    """Token ids before a chunk that the model writes."""
    return text.continued("Action: ")
