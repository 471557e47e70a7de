"""GR00T-N1.5's names and layouts, and those of the head that it shares with N1.7: what the
release's safetensors call our parameters."""

import re

from models.checkpoints.rename import Rule, Table
from models.checkpoints.torch_rules import (
    STACKED,
    attention,
    linear,
    norm,
    norms,
    projections,
    siglip,
)

VISION = "backbone.eagle_model.vision_model.vision_model"
LANGUAGE = "backbone.eagle_model.language_model"
_HEAD = "action_head."


def canonical(name: str) -> str:
    """A tensor's name as transformers 4.57 writes it: without LeRobot's prefix, and with the vision
    tower's name doubled."""
    name = name.removeprefix("_groot_model.")
    return re.sub(r"^backbone\.eagle_model\.vision_model\.(vision_model\.)?", f"{VISION}.", name)


def _block(ours: str, theirs: str, modulated: bool) -> tuple[Rule, ...]:
    """A stack of diffusers' transformer blocks."""
    first, second = f"{theirs}.norm1", f"{theirs}.norm3"
    before = (
        linear(f"{ours}/modulation", f"{first}.linear", STACKED)
        if modulated
        else norm(f"{ours}/norm1", first, "w -> l w") + norm(f"{ours}/norm2", second, "w -> l w")
    )
    return (
        *before,
        *attention(ours, f"{theirs}.attn1", ("to_q", "to_k", "to_v", "to_out.0")),
        *linear(f"{ours}/up", f"{theirs}.ff.net.0.proj", STACKED),
        *linear(f"{ours}/down", f"{theirs}.ff.net.2", STACKED),
    )


_ATTENTION = LANGUAGE + ".model.layers.{l}.self_attn"
_BLOCKS = "transformer_blocks"
_TIME = _HEAD + "model.timestep_encoder.timestep_embedder"
_EMBODIMENT = {
    "state_encoder/hidden": "state_encoder.layer1",
    "state_encoder/out": "state_encoder.layer2",
    "action_encoder/action": "action_encoder.W1",
    "action_encoder/mix": "action_encoder.W2",
    "action_encoder/out": "action_encoder.W3",
    "action_decoder/hidden": "action_decoder.layer1",
    "action_decoder/out": "action_decoder.layer2",
}

HEAD = (
    *norm("adapter/norm", _HEAD + "vlln", "w -> w"),
    *_block("adapter/blocks", f"{_HEAD}vl_self_attention.{_BLOCKS}.{{l}}", modulated=False),
    Rule("positions", _HEAD + "position_embedding.weight", "n w -> n w"),
    *(
        Rule(f"{ours}/{own}", f"{_HEAD}{theirs}.{leaf}", f"{axes} -> {axes}")
        for ours, theirs in _EMBODIMENT.items()
        for own, leaf, axes in (("kernel", "W", "e i o"), ("bias", "b", "e o"))
    ),
    *linear("dit/time_in", f"{_TIME}.linear_1"),
    *linear("dit/time_out", f"{_TIME}.linear_2"),
    *_block("dit/cross_blocks", f"{_HEAD}model.{_BLOCKS}.{{2*l}}", modulated=True),
    *_block("dit/self_blocks", f"{_HEAD}model.{_BLOCKS}.{{2*l+1}}", modulated=True),
    *linear("dit/modulation", _HEAD + "model.proj_out_1"),
    *linear("dit/out", _HEAD + "model.proj_out_2"),
)
"""Rules of the head, but of future tokens."""
NO_MASK_TOKEN = rf"^{re.escape(_HEAD)}mask_token(\.weight)?$"
TABLE = Table(
    (
        *siglip(VISION, "backbone.eagle_model.mlp1.0"),
        Rule(
            "embedding",
            f"{LANGUAGE}.model.embed_tokens.weight",
            "v w -> v w",
            aliases=(f"{LANGUAGE}.lm_head.weight",),
        ),
        *projections("language", f"{LANGUAGE}.model"),
        *norms("language", f"{LANGUAGE}.model"),
        Rule("language/layers/attention/q_norm/scale", f"{_ATTENTION}.q_norm.weight", "d -> l d"),
        Rule("language/layers/attention/k_norm/scale", f"{_ATTENTION}.k_norm.weight", "d -> l d"),
        Rule("future_tokens", _HEAD + "future_tokens.weight", "n w -> n w"),
        *HEAD,
    ),
    ignored=(
        rf"^{re.escape(VISION)}\.head\.",  # attention pooling
        rf"^{re.escape(LANGUAGE)}\.lm_head\.weight$",
        NO_MASK_TOKEN,
    ),
)
"""Maps their canonical names to our parameters; ignores names of unused parts of their model."""
