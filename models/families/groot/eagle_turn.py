"""A prompt as the turn of a chat with pictures in it, the form in which GR00T-N1.5's language model
was trained.

Eagle's template has a system turn, a user turn with the pictures and then the words, and the
beginning of the answer. The words stand in brackets and quotes, as NVIDIA's policy and LeRobot's
port pass them (`str([words])`).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from models.families.groot.chat_turn import ChatTurn

PICTURE = "<IMG_CONTEXT>"
"""The token that stands for a picture's features."""
DEFAULT = "Perform the task."
"""Words of a prompt that is empty."""


@dataclass(frozen=True)
class EagleTurn(ChatTurn, kind="eagle_turn"):
    """Eagle's turn, without the tokens of pictures' features."""

    picture: ClassVar[str] = PICTURE

    def turn(self, prompt: str, pictures: int) -> str:
        return template(pictures).format(quoted=[prompt or DEFAULT])

    def rule(self, pictures: int) -> dict[str, Any]:
        return {"template": [template(pictures)], "default": DEFAULT, "without": PICTURE}


def template(pictures: int) -> str:
    """The turn's text, with {quoted} for the words in brackets and quotes."""
    shown = "".join(f"<image {k}><img>{PICTURE}</img>" for k in range(1, pictures + 1))
    return (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        f"<|im_start|>user\n{shown}{{quoted}}<|im_end|>\n<|im_start|>assistant\n"
    )
