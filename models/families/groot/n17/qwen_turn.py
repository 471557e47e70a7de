"""A prompt as a user turn of Qwen3-VL's chat, as GR00T-N1.7's language model was trained."""

import re
from dataclasses import dataclass
from typing import ClassVar

from models.families.groot.chat_turn import ChatTurn

PICTURE = "<|image_pad|>"
DEFAULT = "Perform the task."
"""Words that LeRobot puts in the place of none."""


@dataclass(frozen=True)
class QwenTurn(ChatTurn, kind="qwen_turn"):
    """A user turn alone: the pictures, then the words. `formal`: the words in small letters,
    without punctuation. `default`: words in the place of none."""

    formal: bool = True
    default: str = ""

    picture: ClassVar[str] = PICTURE

    def turn(self, prompt: str, pictures: int) -> str:
        words = prompt or self.default
        if self.formal:
            words = re.sub(r"[^\w\s]", "", words.lower())
        return _template(pictures).replace(_WORDS, words)


_WORDS = "{words}"


def _template(pictures: int) -> str:
    shown = f"<|vision_start|>{PICTURE}<|vision_end|>" * pictures
    return f"<|im_start|>user\n{shown}{_WORDS}<|im_end|>\n"
