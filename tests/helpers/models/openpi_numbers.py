"""Numbers recorded from openpi, and how ours are compared with them."""

from pathlib import Path
from typing import Any

import numpy as np

from models.families.pi.released import CAMERAS

FIXTURES = Path(__file__).parents[2] / "fixtures" / "openpi"
TOLD: dict[str, Any] = {
    "pi0": {"horizon": 6, "relative": ()},
    "pi05": {"horizon": 6, "state": "text"},
    "pi0_lora": {"horizon": 6},
}
"""Options of `load_policy` that each fixture's files leave open."""


def close(ours, theirs, tolerance: float = 1e-4) -> None:
    """Asserts a difference within `tolerance` of the largest entry."""
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * np.abs(theirs).max())


def observation(arrays: dict[str, np.ndarray], rows=slice(None)) -> dict:
    return {
        "image": {name: arrays["images"][rows, i] for i, name in enumerate(CAMERAS)},
        "image_mask": {name: arrays["image_mask"][rows, i] for i, name in enumerate(CAMERAS)},
        "state": arrays["state"][rows],
        "tokenized_prompt": arrays["tokens"][rows],
        "tokenized_prompt_mask": arrays["token_mask"][rows],
    }
