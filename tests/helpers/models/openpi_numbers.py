"""Numbers recorded from openpi, and how ours are compared with them."""

from pathlib import Path

import numpy as np

from models.load import CAMERAS

FIXTURES = Path(__file__).parents[2] / "fixtures" / "openpi"


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
