"""Export of a π0-FAST as openpi's checkpoint, with its robot's scales and, beside them, the FAST
tokenizer, for which openpi's own layout has no place.

Anything that openpi would read differently is refused, not dropped.
"""

from pathlib import Path

from models.families.pi import lora, openpi
from models.families.pi.export import write_statistics
from models.families.pi.fast.checkpoint import OPENPI
from models.inputs.fast import SPECIAL_WORDS
from models.inputs.tokenizer import SentencePiece
from models.policy import Policy


def write_openpi(policy: Policy, target: Path) -> None:
    """Writes the parameters as openpi's Orbax directory (adapters as in `lora.for_openpi`),
    norm_stats.json, and a folder `fast` that `load_policy(fast=…)` and transformers' AutoProcessor
    can open.

    Raises:
      ValueError: openpi's π0-FAST writes its text or places, or scores its words, differently, or
        its FAST ids start elsewhere.
    """
    config, processor = policy.model.config, policy.processor
    if config.writing != "openpi":
        raise ValueError(
            "openpi's π0-FAST arranges text and positions as with model.writing 'openpi', but "
            f"this policy was trained with '{config.writing}'; give --to chiliad."
        )
    prompts = None if processor is None else processor.prompts
    text = None if prompts is None else prompts.tokenizer
    if text is not None and not isinstance(text, SentencePiece):
        raise ValueError(
            "openpi reads prompts with PaliGemma's tokenizer, but this policy uses its own word "
            "list; give --to chiliad."
        )
    top = config.vocabulary - 1 - SPECIAL_WORDS
    tokens = None if processor is None else processor.action_tokens
    if tokens is not None and tokens.top != top:
        raise ValueError(
            f"openpi's FAST tokens begin at id {top}, but this policy's begin at {tokens.top}; "
            "give --to chiliad."
        )
    openpi.export(lora.for_openpi(config, policy.params), target, OPENPI)
    if processor is not None and tokens is not None:
        robot = processor.embodiments[policy.embodiment]
        write_statistics(target, robot, quantiles=True)
        if tokens.fast is not None:
            tokens.fast.save(target / "fast", config.horizon, len(robot.actions.offset))
