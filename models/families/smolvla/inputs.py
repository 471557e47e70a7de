"""SmolVLA's preparation of prompts and pictures, as LeRobot has it."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float, Float32, UInt8

from models.inputs.pictures import Bilinear, fitted_size
from models.inputs.prompts import NEW_LINE, PromptReader, Read

Cut = Literal["left", "right"]


@dataclass(frozen=True)
class TaskLine(PromptReader, kind="smolvla_line"):
    """The prompt, which ends with a new line. One of more than `limit` tokens loses those at an
    end: on the left, where `cut` says so, its beginning, so that the new line stays."""

    cut: Cut = "left"

    remedy = "FOLDER (of SmolVLM2's tokenizer.json; docs/fine_tune.md says how to rebuild it)"

    def tokens(self, prompt: str, state: Float[np.ndarray, " s"], pictures: int) -> Read:
        ids = self.found().encode(prompt.removesuffix(NEW_LINE) + NEW_LINE)
        return (ids[-self.limit :] if self.cut == "left" else ids[: self.limit]), ()


@dataclass(frozen=True)
class Corner(Bilinear, kind="smolvla_corner"):
    """torch's bilinear filter, which reads four pixels; the picture stands in the lower right
    corner, with black above it and on its left."""

    def __call__(self, image: UInt8[np.ndarray, "_h _w 3"]) -> Float32[np.ndarray, "h w 3"]:
        high, wide = fitted_size(image.shape[0], image.shape[1], self.shape)
        shift = (self.shape[0] - high + 1) // 2, (self.shape[1] - wide + 1) // 2
        return np.roll(super().__call__(image), shift, (0, 1))
