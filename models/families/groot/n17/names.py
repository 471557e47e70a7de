"""GR00T-N1.7's names and layouts: what the release's safetensors call our parameters."""

from models.checkpoints.rename import Rule, Table
from models.checkpoints.torch_rules import STACKED, linear, norm, norms, projections
from models.families.groot.names import HEAD, NO_MASK_TOKEN

BACKBONE = "backbone.model.model."
EMBEDDING, LM_HEAD = (
    f"{BACKBONE}language_model.embed_tokens.weight",
    "backbone.model.lm_head.weight",
)
"""Two names of one tensor: NVIDIA's files have both, LeRobot's the second alone."""


def qwen3_vl(before: str, head: str = "lm_head.weight") -> tuple[Rule, ...]:
    """The tower and the language model of transformers' Qwen3-VL, whose names begin with `before`;
    `head`: another name of the embedding."""
    tower, language = f"{before}visual", f"{before}language_model"
    block, deep = f"{tower}.blocks.{{l}}", f"{tower}.deepstack_merger_list.{{l}}"
    layer = f"{language}.layers.{{l}}.self_attn"
    patches = ("w c=3 t=2 p p' -> (t p p' c) w", "w -> w")
    return (
        *linear("vision/embed", f"{tower}.patch_embed.proj", patches),
        Rule("vision/position", f"{tower}.pos_embed.weight", "n w -> n w"),
        *norm("vision/blocks/norm1", f"{block}.norm1", "w -> l w"),
        *norm("vision/blocks/norm2", f"{block}.norm2", "w -> l w"),
        *linear("vision/blocks/qkv", f"{block}.attn.qkv", ("(h e) w -> l w h e", "(h e) -> l h e")),
        *linear("vision/blocks/out", f"{block}.attn.proj", ("w (h e) -> l h e w", "w -> l w")),
        *linear("vision/blocks/up", f"{block}.mlp.linear_fc1", STACKED),
        *linear("vision/blocks/down", f"{block}.mlp.linear_fc2", STACKED),
        *norm("vision/merger/norm", f"{tower}.merger.norm", "w -> w"),
        *linear("vision/merger/up", f"{tower}.merger.linear_fc1"),
        *linear("vision/merger/down", f"{tower}.merger.linear_fc2"),
        *norm("vision/deep_mergers/norm", f"{deep}.norm", "w -> l w"),
        *linear("vision/deep_mergers/up", f"{deep}.linear_fc1", STACKED),
        *linear("vision/deep_mergers/down", f"{deep}.linear_fc2", STACKED),
        Rule("embedding", f"{language}.embed_tokens.weight", "v w -> v w", (head,)),
        *projections("language", language),
        *norms("language", language),
        Rule("language/layers/attention/q_norm/scale", f"{layer}.q_norm.weight", "d -> l d"),
        Rule("language/layers/attention/k_norm/scale", f"{layer}.k_norm.weight", "d -> l d"),
    )


TABLE = Table((*qwen3_vl(BACKBONE, LM_HEAD), *HEAD), (NO_MASK_TOKEN,))
"""Maps names, without LeRobot's prefix, to our parameters."""
