"""openpi's π0 and π0.5: where its JAX checkpoints keep our parameters, and their config.

Names and axes are those of openpi's `Pi0` (Flax linen modules inside nnx): both experts' layers are
stacked in axis 0, the action expert has the suffix `_1`, keys and values are in one array, and so
are gate and up projection.
"""

from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from flax.traverse_util import flatten_dict, unflatten_dict

from models.checkpoints.layout import exported
from models.checkpoints.rename import Rule, Table
from models.checkpoints.sources import CheckpointSource
from models.families.pi.infer import pi_config
from models.families.pi.model import PiConfig
from models.files.address import whole

PyTree = Any

_VISION = "PaliGemma/img"
_BLOCK = f"{_VISION}/Transformer/encoderblock"
_LLM = "PaliGemma/llm"


def _alike(ours: str, theirs: str, **axes: str) -> tuple[Rule, ...]:
    """Rules for leaves that have the same name and layout on both sides."""
    return tuple(
        Rule(f"{ours}/{leaf}", f"{theirs}/{leaf}", f"{pattern} -> {pattern}")
        for leaf, pattern in axes.items()
    )


def _layers(ours: str, tail: str) -> tuple[Rule, ...]:
    """A stack's projections with their LoRA leaves; theirs end in `tail`."""
    attention, mlp = f"{ours}/layers/attention", f"{ours}/layers/mlp"
    theirs = f"{_LLM}/layers/attn"
    q, kv, out = (f"{theirs}/{name}_einsum{tail}" for name in ("q", "kv", "attn_vec"))
    gating, linear = (f"{_LLM}/layers/mlp{tail}/{name}" for name in ("gating_einsum", "linear"))
    lora: list[Rule] = []
    for leaf in ("lora_a", "lora_b"):
        lora += [
            Rule(f"{attention}/q/{leaf}", f"{q}/{leaf}", "l n i o -> l n i o"),
            Rule(f"{attention}/k/{leaf}", f"{kv}/{leaf}", "l [0] g i o -> l g i o"),
            Rule(f"{attention}/v/{leaf}", f"{kv}/{leaf}", "l [1] g i o -> l g i o"),
            Rule(f"{attention}/out/{leaf}", f"{out}/{leaf}", "l n i o -> l n i o"),
            Rule(f"{mlp}/gate/{leaf}", f"{gating}_{leaf}", "l [0] i o -> l i o"),
            Rule(f"{mlp}/up/{leaf}", f"{gating}_{leaf}", "l [1] i o -> l i o"),
            Rule(f"{mlp}/down/{leaf}", f"{linear}_{leaf}", "l i o -> l i o"),
        ]
    return (
        Rule(f"{attention}/q/kernel", f"{q}/w", "l n w d -> l w n d"),
        Rule(f"{attention}/k/kernel", f"{kv}/w", "l [0] g w d -> l w g d"),
        Rule(f"{attention}/v/kernel", f"{kv}/w", "l [1] g w d -> l w g d"),
        Rule(f"{attention}/out/kernel", f"{out}/w", "l n d w -> l n d w"),
        Rule(f"{mlp}/gate/kernel", gating, "l [0] w f -> l w f"),
        Rule(f"{mlp}/up/kernel", gating, "l [1] w f -> l w f"),
        Rule(f"{mlp}/down/kernel", linear, "l f w -> l f w"),
        *lora,
    )


def _norms(ours: str, tail: str) -> tuple[Rule, ...]:
    """A stack's norms; theirs end in `tail`."""
    return (
        *_alike(f"{ours}/layers/norm1", f"{_LLM}/layers/pre_attention_norm{tail}", scale="l w"),
        *_alike(f"{ours}/layers/norm2", f"{_LLM}/layers/pre_ffw_norm{tail}", scale="l w"),
        *_alike(f"{ours}/norm", f"{_LLM}/final_norm{tail}", scale="w"),
    )


def _modulations() -> tuple[Rule, ...]:
    """The norms of an expert that flow time modulates."""
    stacked, last = {"kernel": "l i o", "bias": "l o"}, {"kernel": "i o", "bias": "o"}
    before = f"{_LLM}/layers/pre"
    return (
        *_alike("expert/layers/norm1/modulation", f"{before}_attention_norm_1/Dense_0", **stacked),
        *_alike("expert/layers/norm2/modulation", f"{before}_ffw_norm_1/Dense_0", **stacked),
        *_alike("expert/norm/modulation", f"{_LLM}/final_norm_1/Dense_0", **last),
    )


_ATTENTION = f"{_BLOCK}/MultiHeadDotProductAttention_0"
_SHARED = (
    Rule("vision/embed/kernel", f"{_VISION}/embedding/kernel", "p p' c=3 w -> (p p' c) w"),
    Rule("vision/embed/bias", f"{_VISION}/embedding/bias", "w -> w"),
    Rule("vision/position", f"{_VISION}/pos_embedding", "1 n w -> n w"),
    *_alike("vision/blocks/norm1", f"{_BLOCK}/LayerNorm_0", scale="l w", bias="l w"),
    *_alike("vision/blocks/q", f"{_ATTENTION}/query", kernel="l w h d", bias="l h d"),
    *_alike("vision/blocks/k", f"{_ATTENTION}/key", kernel="l w h d", bias="l h d"),
    *_alike("vision/blocks/v", f"{_ATTENTION}/value", kernel="l w h d", bias="l h d"),
    *_alike("vision/blocks/out", f"{_ATTENTION}/out", kernel="l h d w", bias="l w"),
    *_alike("vision/blocks/norm2", f"{_BLOCK}/LayerNorm_1", scale="l w", bias="l w"),
    *_alike("vision/blocks/up", f"{_BLOCK}/MlpBlock_0/Dense_0", kernel="l i o", bias="l o"),
    *_alike("vision/blocks/down", f"{_BLOCK}/MlpBlock_0/Dense_1", kernel="l i o", bias="l o"),
    *_alike("vision/norm", f"{_VISION}/Transformer/encoder_norm", scale="w", bias="w"),
    *_alike("vision/head", f"{_VISION}/head", kernel="i o", bias="o"),
    Rule("embedding", f"{_LLM}/embedder/input_embedding", "v w -> v w"),
    *_layers("language", ""),
    *_norms("language", ""),
    *_layers("expert", "_1"),
    *_alike("action_in", "action_in_proj", kernel="i o", bias="o"),
    *_alike("action_out", "action_out_proj", kernel="i o", bias="o"),
)

PI0 = Table(
    (
        *_SHARED,
        *_norms("expert", "_1"),
        *_alike("state_in", "state_proj", kernel="i o", bias="o"),
        *_alike("time_in", "action_time_mlp_in", kernel="i o", bias="o"),
        *_alike("time_out", "action_time_mlp_out", kernel="i o", bias="o"),
    )
)
PI05 = Table(
    (
        *_SHARED,
        *_modulations(),
        *_alike("time_in", "time_mlp_in", kernel="i o", bias="o"),
        *_alike("time_out", "time_mlp_out", kernel="i o", bias="o"),
    )
)


def table(source: CheckpointSource) -> Table:
    """π0's table or π0.5's, depending on which of the two time projections is present."""
    return PI05 if "time_mlp_in/kernel" in source.shapes else PI0


def config(source: CheckpointSource, horizon: int = 50) -> PiConfig:
    """The config of the model in an openpi checkpoint; see `pi_config`."""
    return pi_config(source, table(source), horizon)


def export(params: PyTree, path: Path, rules: Table | None = None) -> None:
    """Writes `path/params`, an Orbax directory that openpi restores: one tree `params` in f32, by
    `rules` (π0's or π0.5's if None).

    Arrays are fetched to this host. LoRA factors stay unchanged; `lora.for_openpi` scales them.

    Raises:
      ValueError: `path/params` exists, or openpi's models have no place for some parameter.
    """
    target = whole(path) / "params"
    if target.exists():
        raise ValueError(f"{target} already exists; give a directory without a checkpoint in it.")
    if rules is None:
        flow_time = "expert/norm/modulation/kernel"
        rules = PI05 if flow_time in flatten_dict(params, sep="/") else PI0
    arrays = {
        name: make().astype(np.float32, copy=False)
        for name, (_, make) in exported(params, rules, "An openpi checkpoint").items()
    }
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(target, {"params": unflatten_dict(arrays, sep="/")})
