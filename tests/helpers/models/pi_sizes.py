"""Sizes of π0.5 that tests share, and with them compiled programs: as small as it goes, and
with dims that every axis of a mesh divides."""

from models.families.pi.model import PiConfig
from models.layers.gemma import GemmaConfig
from models.layers.layers import Compute
from models.layers.siglip import SiglipConfig

TINY = PiConfig(
    vision=SiglipConfig(width=16, depth=1, hidden=24, heads=2, patch=4),
    language=GemmaConfig(width=16, depth=2, hidden=24, heads=2, kv_heads=1, head_dim=8),
    expert=GemmaConfig(width=12, depth=2, hidden=16, heads=2, kv_heads=1, head_dim=8),
    image_size=8,
    vocabulary=320,
    state_dim=3,
    action_dim=4,
    horizon=6,
    state_input="token",
    euler_steps=2,
    compute=Compute(dtype="float32"),
)
SPLIT = PiConfig(
    vision=SiglipConfig(width=32, depth=1, hidden=64, heads=4, patch=4),
    language=GemmaConfig(32, depth=4, hidden=64, heads=4, kv_heads=1, head_dim=8, remat="full"),
    expert=GemmaConfig(32, depth=4, hidden=64, heads=4, kv_heads=1, head_dim=8, remat="full"),
    image_size=8,
    vocabulary=264,
    state_dim=8,
    action_dim=8,
    horizon=4,
    state_input="token",
    compute=Compute(dtype="float32"),
)
