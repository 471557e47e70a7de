"""π0-FAST in openpi's Orbax directories and LeRobot's safetensors: names, and sizes from shapes.

Both use their π0's names for the vision tower and the language model, and have no action expert. In
LeRobot's files, the scores may have a separate table, which LeRobot no longer ties to the
embedding.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

from models.checkpoints.rename import Rule, Table
from models.checkpoints.sources import CheckpointSource
from models.families.pi import lerobot, openpi
from models.families.pi.fast.model import Pi0FastConfig, Writing
from models.families.pi.infer import stack_sizes

_KEPT = ("vision/", "language/", "embedding")
_EXPERTS = re.compile(r"(einsum|mlp|norm)_1/|^(action|state|time)_")
_HEAD = "paligemma_with_expert.paligemma.lm_head.weight"

OPENPI = Table(tuple(rule for rule in openpi.PI05.rules if rule.ours.startswith(_KEPT)))
_RULES = tuple(rule for rule in lerobot.PI05.rules if rule.ours.startswith(_KEPT))
LEROBOT = Table(_RULES, lerobot.PI05.ignored)
LEROBOT_UNTIED = Table(
    (
        *(replace(rule, aliases=()) if rule.ours == "embedding" else rule for rule in _RULES),
        Rule("head", _HEAD, "v w -> v w"),
    ),
    lerobot.PI05.ignored,
)


def is_fast(source: CheckpointSource) -> bool:
    """True if an openpi checkpoint has only parameters of a vision tower and a language model."""
    return not any(_EXPERTS.search(name) for name in source.shapes)


def lerobot_table(source: CheckpointSource) -> Table:
    """LeRobot's rename table, by whether the scores have an embedding table of their own."""
    embedding = LEROBOT.by_path["embedding"].theirs
    return LEROBOT_UNTIED if {_HEAD, embedding} <= source.shapes.keys() else LEROBOT


def config(
    source: CheckpointSource, table: Table, known: Mapping[str, int] | None = None
) -> Pi0FastConfig:
    """A config inferred from the checkpoint's shapes by the rules of `table`; robots' sizes are
    openpi's defaults.

    Args:
      known: sizes of axes that the checkpoint merges.

    Raises:
      ValueError: parameters that determine sizes are missing (all of them are listed).
    """
    shapes, sizes = stack_sizes(source, table, "π0-FAST", known, ("language",))
    writing: Writing = "openpi" if table is OPENPI else "lerobot"
    return Pi0FastConfig(**sizes, head="head" in shapes, writing=writing)
