"""GR00T-N1.5's names and layouts: what the release's safetensors call our parameters."""

import re

from models.checkpoints.rename import Rule, Table

VISION = "backbone.eagle_model.vision_model.vision_model."
LANGUAGE = "backbone.eagle_model.language_model."
_HEAD = "action_head."


def canonical(name: str) -> str:
    """A tensor's name as transformers 4.57 writes it: without LeRobot's prefix, and with the vision
    tower's name doubled."""
    name = name.removeprefix("_groot_model.")
    return re.sub(r"^backbone\.eagle_model\.vision_model\.(vision_model\.)?", VISION, name)


def _linear(ours: str, theirs: str, weight: str, bias: str | None = None) -> tuple[Rule, ...]:
    """Kernel of a projection, and its bias if it has one."""
    rules = [Rule(f"{ours}/kernel", f"{theirs}.weight", weight)]
    return (*rules, Rule(f"{ours}/bias", f"{theirs}.bias", bias)) if bias else tuple(rules)


def _norm(ours: str, theirs: str, axes: str) -> tuple[Rule, ...]:
    return (
        Rule(f"{ours}/scale", f"{theirs}.weight", axes),
        Rule(f"{ours}/bias", f"{theirs}.bias", axes),
    )


def _attention(ours: str, theirs: str, names: tuple[str, ...], bias: bool) -> tuple[Rule, ...]:
    """Queries, keys, values and output of a stack."""
    inward, outward = ("(n d) -> l n d", "w -> l w") if bias else (None, None)
    rules: tuple[Rule, ...] = ()
    for part, name in zip("qkv", names, strict=False):
        rules += _linear(f"{ours}/{part}", f"{theirs}.{name}", "(n d) w -> l w n d", inward)
    return rules + _linear(f"{ours}/out", f"{theirs}.{names[3]}", "w (n d) -> l n d w", outward)


def _block(ours: str, theirs: str, modulated: bool) -> tuple[Rule, ...]:
    """A stack of diffusers' transformer blocks."""
    first, second = f"{theirs}.norm1", f"{theirs}.norm3"
    norms = (
        _linear(f"{ours}/modulation", f"{first}.linear", *_STACKED)
        if modulated
        else _norm(f"{ours}/norm1", first, "w -> l w") + _norm(f"{ours}/norm2", second, "w -> l w")
    )
    return (
        *norms,
        *_attention(ours, f"{theirs}.attn1", ("to_q", "to_k", "to_v", "to_out.0"), bias=True),
        *_linear(f"{ours}/up", f"{theirs}.ff.net.0.proj", *_STACKED),
        *_linear(f"{ours}/down", f"{theirs}.ff.net.2", *_STACKED),
    )


def _embodiment(ours: str, theirs: str) -> tuple[Rule, ...]:
    return (
        Rule(f"{ours}/kernel", f"{theirs}.W", "e i o -> e i o"),
        Rule(f"{ours}/bias", f"{theirs}.b", "e o -> e o"),
    )


_STACKED = ("o i -> l i o", "o -> l o")
_PLAIN = ("o i -> i o", "o -> o")
_TOWER = VISION + "encoder.layers.{l}"
_LAYER = LANGUAGE + "model.layers.{l}"
_BLOCKS = "transformer_blocks"
_EMBODIMENT = {
    "state_encoder/hidden": "state_encoder.layer1",
    "state_encoder/out": "state_encoder.layer2",
    "action_encoder/action": "action_encoder.W1",
    "action_encoder/mix": "action_encoder.W2",
    "action_encoder/out": "action_encoder.W3",
    "action_decoder/hidden": "action_decoder.layer1",
    "action_decoder/out": "action_decoder.layer2",
}

TABLE = Table(
    (
        *_linear(
            "vision/embed",
            VISION + "embeddings.patch_embedding",
            "w c=3 p p' -> (p p' c) w",
            "w -> w",
        ),
        Rule("vision/position", VISION + "embeddings.position_embedding.weight", "n w -> n w"),
        *_norm("vision/blocks/norm1", _TOWER + ".layer_norm1", "w -> l w"),
        *_norm("vision/blocks/norm2", _TOWER + ".layer_norm2", "w -> l w"),
        *_attention(
            "vision/blocks",
            _TOWER + ".self_attn",
            ("q_proj", "k_proj", "v_proj", "out_proj"),
            bias=True,
        ),
        *_linear("vision/blocks/up", _TOWER + ".mlp.fc1", *_STACKED),
        *_linear("vision/blocks/down", _TOWER + ".mlp.fc2", *_STACKED),
        *_norm("vision/norm", VISION + "post_layernorm", "w -> w"),
        *_linear("vision/head", "backbone.eagle_model.mlp1.0", *_PLAIN),
        Rule(
            "embedding",
            LANGUAGE + "model.embed_tokens.weight",
            "v w -> v w",
            aliases=(LANGUAGE + "lm_head.weight",),
        ),
        Rule("language/layers/norm1/scale", _LAYER + ".input_layernorm.weight", "w -> l w"),
        Rule(
            "language/layers/norm2/scale", _LAYER + ".post_attention_layernorm.weight", "w -> l w"
        ),
        *_attention(
            "language/layers/attention",
            _LAYER + ".self_attn",
            ("q_proj", "k_proj", "v_proj", "o_proj"),
            bias=False,
        ),
        Rule(
            "language/layers/attention/q_norm/scale",
            _LAYER + ".self_attn.q_norm.weight",
            "d -> l d",
        ),
        Rule(
            "language/layers/attention/k_norm/scale",
            _LAYER + ".self_attn.k_norm.weight",
            "d -> l d",
        ),
        *(
            rule
            for part in ("gate", "up", "down")
            for rule in _linear(
                f"language/layers/mlp/{part}", f"{_LAYER}.mlp.{part}_proj", _STACKED[0]
            )
        ),
        Rule("language/norm/scale", LANGUAGE + "model.norm.weight", "w -> w"),
        *_norm("adapter/norm", _HEAD + "vlln", "w -> w"),
        *_block("adapter/blocks", f"{_HEAD}vl_self_attention.{_BLOCKS}.{{l}}", modulated=False),
        Rule("future_tokens", _HEAD + "future_tokens.weight", "n w -> n w"),
        Rule("positions", _HEAD + "position_embedding.weight", "n w -> n w"),
        *(
            rule
            for ours, theirs in _EMBODIMENT.items()
            for rule in _embodiment(ours, _HEAD + theirs)
        ),
        *(
            rule
            for part, number in (("in", 1), ("out", 2))
            for rule in _linear(
                f"dit/time_{part}",
                f"{_HEAD}model.timestep_encoder.timestep_embedder.linear_{number}",
                *_PLAIN,
            )
        ),
        *_block("dit/cross_blocks", f"{_HEAD}model.{_BLOCKS}.{{2*l}}", modulated=True),
        *_block("dit/self_blocks", f"{_HEAD}model.{_BLOCKS}.{{2*l+1}}", modulated=True),
        *_linear("dit/modulation", _HEAD + "model.proj_out_1", *_PLAIN),
        *_linear("dit/out", _HEAD + "model.proj_out_2", *_PLAIN),
    ),
    ignored=(
        rf"^{re.escape(VISION)}head\.",  # attention pooling
        rf"^{re.escape(LANGUAGE)}lm_head\.weight$",
        rf"^{re.escape(_HEAD)}mask_token(\.weight)?$",
    ),
)
"""Maps their canonical names to our parameters; ignores names of unused parts of their model."""
