"""Presets of π0, π0.5 and π0-FAST."""

from dataclasses import replace

from models.families.pi.fast.model import Pi0FastConfig
from models.families.pi.model import PiConfig
from models.families.presets import (
    LORA,
    RELEASED,
    SMALL,
    SMALL_ADAMW,
    ModelPreset,
    merged,
    qlora,
)
from models.layers.gemma import GEMMA_2B, GEMMA_300M, GemmaConfig
from models.layers.layers import Compute
from models.layers.siglip import SiglipConfig

_TINY = PiConfig(
    vision=SiglipConfig(width=64, depth=1, hidden=128, heads=4, patch=8),
    language=GemmaConfig(width=64, depth=2, hidden=128, heads=2, kv_heads=1, head_dim=32),
    expert=GemmaConfig(width=32, depth=2, hidden=64, heads=2, kv_heads=1, head_dim=32),
    image_size=48,
    vocabulary=512,
    state_dim=8,
    action_dim=8,
    horizon=8,
    state_input="token",
    film=True,
    chunks=3,
    compute=Compute(dtype="float32"),
)
"""π0.5's architecture with small numbers."""

_TABLETOP = replace(_TINY, film_order=True, state_dim=16)
"""`tiny` for all tasks of the tabletop's gripper and of the arm; in some of their prompts, the
order of the words matters (docs/results/tabletop.md)."""

_METAWORLD = replace(
    _TINY,
    vision=replace(_TINY.vision, width=128, hidden=256, patch=12, stem=4),
    language=replace(_TINY.language, width=128, hidden=256, heads=4),
    expert=replace(_TINY.expert, width=64, hidden=128, heads=4),
    image_size=96,
    horizon=16,
)
"""`tiny` for many of Meta-World's tasks at once: wider, two cameras, larger pictures that are read
through a stem, longer chunks (docs/results/metaworld.md)."""

_LIBERO = replace(
    _TINY,
    vision=replace(_TINY.vision, patch=12, stem=4),
    expert=replace(_TINY.expert, width=64, hidden=128),
    image_size=96,
    horizon=16,
)
"""`tiny` for a LIBERO suite's ten tasks: two cameras, larger pictures that are read through a stem,
longer chunks (docs/results/libero.md)."""

_PI05 = PiConfig(
    vision=SiglipConfig(remat="full"),
    language=replace(GEMMA_2B, remat="full"),
    expert=replace(GEMMA_300M, remat="full"),
)
"""π0.5 as released: `--init` takes the released weights."""

_PI05_QLORA = replace(
    _PI05,
    vision=replace(_PI05.vision, lora=LORA),
    language=replace(_PI05.language, attention_lora=LORA, mlp_lora=LORA),
    expert=replace(_PI05.expert, attention_lora=LORA, mlp_lora=LORA),
    compute=Compute(quantized=PiConfig.quantizable, quantized_kind="nf4"),
)
"""π0.5 on one GPU of 24 GB: adapters in every stack."""

_PI0_FAST = Pi0FastConfig(
    vision=SiglipConfig(remat="full"), language=replace(GEMMA_2B, remat="full"), horizon=10
)
"""π0-FAST as released; `--fast` takes the released tokenizer's folder."""

_PI0_FAST_TINY = Pi0FastConfig(
    vision=SiglipConfig(width=64, depth=1, hidden=128, heads=4, patch=8),
    language=GemmaConfig(width=64, depth=3, hidden=128, heads=2, kv_heads=1, head_dim=32),
    image_size=48,
    vocabulary=1536,
    state_dim=8,
    action_dim=8,
    horizon=8,
    max_decoding_steps=64,
    writing="plain",
    compute=Compute(dtype="float32"),
)
"""π0-FAST's architecture with small numbers."""

PRESETS = {
    "tiny": ModelPreset(_TINY, SMALL),
    "tabletop": ModelPreset(
        _TABLETOP,
        merged(SMALL, trainer={"train_steps": 12_000, "save_every": 1000, "eval_every": 2000}),
    ),
    "metaworld": ModelPreset(
        _METAWORLD,
        merged(
            SMALL,
            optimizer={"learning_rate": 4e-3},
            trainer={"train_steps": 10_000, "save_every": 2000, "eval_every": 2000},
        ),
    ),
    "libero-tiny": ModelPreset(
        _LIBERO,
        merged(
            SMALL,
            data={"holdout": 0.03},
            optimizer={"learning_rate": 2e-3},
            trainer={"train_steps": 8000, "save_every": 2000, "eval_every": 2000},
        ),
    ),
    "pi05": ModelPreset(_PI05, RELEASED),
    "pi05-qlora": ModelPreset(_PI05_QLORA, qlora(RELEASED, learning_rate=1e-4)),
    "pi0": ModelPreset(
        replace(_PI05, state_input="suffix", time="input"),
        merged(RELEASED, data={"state_scaling": "z-score", "action_scaling": "z-score"}),
    ),
    "pi0-fast": ModelPreset(_PI0_FAST, RELEASED),
    "pi0-fast-tiny": ModelPreset(_PI0_FAST_TINY, SMALL_ADAMW),
}
