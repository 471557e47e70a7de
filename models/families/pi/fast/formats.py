"""Export of a π0-FAST as openpi's checkpoint, with its robot's scales and, beside them, the FAST
tokenizer, for which openpi's own layout has no place.

Anything that openpi would read differently is refused, not dropped.
"""

from pathlib import Path

from models.families.pi import lora, openpi
from models.families.pi.fast.checkpoint import OPENPI
from models.families.pi.formats import write_statistics
from models.inputs.fast import SPECIAL_WORDS
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
    if processor is not None and not processor.sentencepiece and processor.words:
        raise ValueError(
            "openpi reads prompts with PaliGemma's tokenizer, but this policy uses its own word "
            "list; give --to chiliad."
        )
    top = config.vocabulary - 1 - SPECIAL_WORDS
    if processor is not None and processor.fast_top != top:
        raise ValueError(
            f"openpi's FAST tokens begin at id {top}, but this policy's begin at "
            f"{processor.fast_top}; give --to chiliad."
        )
    openpi.export(lora.for_openpi(config, policy.params), target, OPENPI)
    if processor is not None:
        robot = processor.embodiments[policy.embodiment]
        write_statistics(target, robot, quantiles=True)
        if processor.fast is not None:
            processor.fast.save(target / "fast", config.horizon, len(robot.actions.offset))
