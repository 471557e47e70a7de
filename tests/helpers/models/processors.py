"""Processors of word lists, as tests want them: a template's prompt and antialiased pictures."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from models import Embodiment, Processor
from models.inputs.pictures import Antialiased
from models.inputs.prompts import StateInput, TemplatePrompt, template
from models.inputs.tokenizer import Tokenizer


def word_processor(
    image_size: int,
    state_dim: int,
    action_dim: int,
    horizon: int,
    state_input: StateInput,
    words: Sequence[str],
    embodiments: Sequence[Embodiment],
    *,
    text_limit: int = 200,
    **changes: Any,
) -> Processor:
    """A processor of the family's default form; without words it has no tokenizer."""
    text = Tokenizer(tuple(words)) if words else None
    return Processor(
        state_dim,
        action_dim,
        horizon,
        state_input,
        tuple(embodiments),
        TemplatePrompt(text, text_limit, template(state_input)),
        Antialiased(image_size),
        **changes,
    )


def tokens_of(processor: Processor, prompt: str, state: np.ndarray) -> np.ndarray:
    """Token ids of a prompt with a normalised state of any number of dims, without pictures."""
    assert processor.prompts is not None
    return processor.prompts.read(prompt, state, len(state), 0)[0]


def reading(processor: Processor, **changes: Any) -> Processor:
    """The processor with other fields of its reader of prompts."""
    assert processor.prompts is not None
    return replace(processor, prompts=replace(processor.prompts, **changes))
