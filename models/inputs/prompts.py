"""Readers of prompts: the form of text, and of the state spelt in it, in which a policy's language
model was trained.

The forms of π0, π0.5 and π0-FAST are templates (openpi; arXiv 2504.16054, 2501.09747), in which a
state is spelt as the numbers of 256 bins.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Literal

import numpy as np
from jaxtyping import Float, Int

from models.files.bounds import check_size
from models.inputs.parts import InputPart
from models.inputs.tokenizer import TextTokenizer

StateInput = Literal["text", "token", "suffix", "none"]
Read = tuple[Int[np.ndarray, " t"], tuple[int, ...]]
"""Token ids of a prompt, and how many of them come before each picture; () if pictures come
first."""

PROMPT, NEW_LINE = "{prompt}", "\n"
TASK_AND_STATE = "Task: {prompt}, State: {state};\n"

_STATE_BINS = np.linspace(-1, 1, 257)[:-1]
_BIN_CENTRES = np.linspace(-1 - 1 / 128, 1 + 1 / 128, 259)
_KEPT = 1 << 16


@dataclass(frozen=True)
class PromptReader(InputPart):
    """A way to read prompts: a dataclass made as `class Mine(PromptReader, kind="mine")`.

    `tokenizer`: None if the policy came without one. `limit`: most tokens of a prompt.

    Raises:
      ValueError: the limit is below 1.
    """

    tokenizer: TextTokenizer | None
    limit: int = 200

    remedy: ClassVar[str] = "FILE (PaliGemma's is paligemma_tokenizer.model)"
    """Says what to give as the tokenizer of a policy that came without one."""

    def __post_init__(self) -> None:
        check_size("text_limit", self.limit)

    @abstractmethod
    def tokens(self, prompt: str, state: Float[np.ndarray, " s"], pictures: int) -> Read:
        """A prompt of any length; called only if there is a tokenizer."""

    @property
    def spells_state(self) -> bool:
        """True if the prompt has the state in it."""
        return False

    @property
    def pads_state(self) -> bool:
        """True if all of the model's state dims are spelt, not only the robot's."""
        return False

    @property
    def shows_pictures(self) -> bool:
        """True if pictures stand among the words."""
        return False

    def rule(self, pictures: int) -> dict[str, Any] | None:
        """The rule by which a program without this code reads prompts of samples with that many
        pictures, for `tools.export`; None if it can only be given token ids."""
        return None

    def read(self, prompt: str, state: Float[np.ndarray, " s"], dims: int, pictures: int) -> Read:
        """A prompt with a state.

        Args:
          state: normalised, in the model's dims; `dims` of them are the robot's.
          pictures: how many pictures the sample has.

        Raises:
          ValueError: there are more than `limit` tokens, or there is no tokenizer.
        """
        if not self.spells_state:
            return self._kept(prompt, pictures)
        return self._read(prompt, state if self.pads_state else state[:dims], pictures)

    def longest(self, state_dim: int, dims: int) -> Float[np.ndarray, " s"]:
        """A state in the model's dims that takes as many tokens to spell as any does."""
        if not self.spells_state:
            return np.zeros(state_dim)
        return self._longest(state_dim, dims)

    def checked(self, tokens: Int[np.ndarray, " t"], prompt: str) -> Int[np.ndarray, " t"]:
        """The tokens.

        Raises:
          ValueError: there are more than `limit`.
        """
        if len(tokens) > self.limit:
            raise ValueError(
                f"The prompt ({prompt[:40]!r}) is {len(tokens)} tokens long, but the model reads "
                f"at most {self.limit}; shorten it."
            )
        return tokens

    def found(self) -> TextTokenizer:
        """The tokenizer.

        Raises:
          ValueError: the policy came without one.
        """
        if self.tokenizer is None:
            raise ValueError(
                "This policy came without a tokenizer, so it cannot read a prompt as text: give "
                f"load_policy(tokenizer=…) {self.remedy}, or 'tokenized_prompt'."
            )
        return self.tokenizer

    @cached_property
    def whole(self) -> Callable[[str], Int[np.ndarray, " t"]]:
        """Token ids of a whole text, kept once they are known."""
        return lru_cache(_KEPT)(self.found().encode)

    def _read(self, prompt: str, state: Float[np.ndarray, " s"], pictures: int) -> Read:
        self.found()
        ids, at = self.tokens(prompt, state, pictures)
        return self.checked(ids, prompt), at

    @cached_property
    def _kept(self) -> Callable[[str, int], Read]:
        nothing = np.zeros(0, np.float32)
        return lru_cache(_KEPT)(lambda prompt, pictures: self._read(prompt, nothing, pictures))

    @cached_property
    def _longest(self) -> Callable[[int, int], Float[np.ndarray, " s"]]:
        def longest(state_dim: int, dims: int) -> Float[np.ndarray, " s"]:
            states = np.repeat(_BIN_CENTRES[:, None], state_dim, axis=1)
            spelt = None if self.pads_state else dims
            return max(states, key=lambda state: len(self.tokens("", state[:spelt], 0)[0]))

        return lru_cache(_KEPT)(longest)


@dataclass(frozen=True)
class TemplatePrompt(PromptReader, kind="template"):
    """A prompt filled into texts that are tokenised one after another, with {prompt} and perhaps
    {state} in them.

    `normalize`: "spaces" turns underscores and line breaks of the prompt into spaces (openpi's π0
    and π0.5), "lower" also its letters into small ones, but keeps line breaks (openpi's π0-FAST),
    and "line" takes only a last line break away (LeRobot's π0). `begin_last`: the token that begins
    a text ends the prompt too (LeRobot's π0-FAST). `pad_state_text`: all of the model's state dims
    are spelt (LeRobot's π0.5 before 0.5.0).
    """

    template: tuple[str, ...] = (PROMPT, NEW_LINE)
    normalize: Literal["spaces", "lower", "line"] = "spaces"
    begin_last: bool = False
    pad_state_text: bool = False

    @property
    def spells_state(self) -> bool:
        return any("{state}" in piece for piece in self.template)

    @property
    def pads_state(self) -> bool:
        return self.pad_state_text

    @property
    def closing(self) -> tuple[int, ...]:
        """Token ids after the last text of `template`."""
        return (self.found().begin,) if self.begin_last else ()

    def rule(self, pictures: int) -> dict[str, Any]:
        closing = {} if self.tokenizer is None else {"closing": list(self.closing)}
        return {"template": list(self.template), "normalize": self.normalize, **closing}

    def tokens(self, prompt: str, state: Float[np.ndarray, " s"], pictures: int) -> Read:
        tokenizer, bins = self.found(), np.digitize(state, _STATE_BINS) - 1
        spelt = " ".join(map(str, bins.tolist()))
        filled = {"prompt": normalized(prompt, self.normalize), "state": spelt}
        first, *rest = (piece.format(**filled) for piece in self.template)
        ids = [tokenizer.encode(first), *map(tokenizer.continued, rest)]
        return np.concatenate([*ids, np.asarray(self.closing, np.int32)]), ()


def template(state_input: StateInput) -> tuple[str, ...]:
    """The texts of π0's prompt or, if the state is spelt in it, of π0.5's."""
    return (f"{TASK_AND_STATE}Action: ",) if state_input == "text" else (PROMPT, NEW_LINE)


def normalized(prompt: str, way: Literal["spaces", "lower", "line"] = "spaces") -> str:
    """A prompt in the form of `TemplatePrompt.normalize`."""
    if way == "line":
        return prompt.removesuffix("\n")
    text = prompt.strip().replace("_", " ")
    return text.lower() if way == "lower" else text.replace("\n", " ")
