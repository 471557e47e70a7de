"""What computes: attention, flow-matching policies and what they take in. Knows no dataset, no
mesh."""

from models.inputs import Layout, PackedBatch, Sample, pack
from models.load import load_policy
from models.pi import Pi, PiConfig
from models.policy import Policy
from models.processor import Embodiment, Normalizer, Processor

__all__ = [
    "Embodiment",
    "Layout",
    "Normalizer",
    "PackedBatch",
    "Pi",
    "PiConfig",
    "Policy",
    "Processor",
    "Sample",
    "load_policy",
    "pack",
]
