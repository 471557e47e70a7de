"""Models: attention, flow-matching policies and their inputs. They know no dataset and no mesh."""

from models.families.pi.model import Pi, PiConfig
from models.inputs.embodiment import Embodiment, Normalizer, Scaling
from models.inputs.packed_batch import Layout, PackedBatch, Sample, pack
from models.inputs.processor import Processor
from models.load import load_policy
from models.policy import Policy

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
    "Scaling",
    "load_policy",
    "pack",
]
