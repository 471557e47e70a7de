"""What computes: layers, attention, flow-matching policies and what they take in. Knows no dataset
or mesh."""

from models.inputs import Layout, PackedBatch, Sample, pack
from models.processor import Embodiment, Normalizer, Processor

__all__ = ["Embodiment", "Layout", "Normalizer", "PackedBatch", "Processor", "Sample", "pack"]
