"""A tiny π0.5 with a robot of its own, and GR00T's recorded case, for tests of what acts."""

import shutil
from functools import cache
from pathlib import Path

import jax
import numpy as np

from models import Embodiment, Normalizer, Pi, Policy
from models.load import load_policy
from tests.helpers.models.pi_sizes import TINY
from tests.helpers.models.processors import word_processor

GROOT = Path(__file__).parents[2] / "fixtures" / "groot"
CONFIG = TINY
ARM = Embodiment(
    "arm", ("front",), Normalizer((0.0,) * 3, (1.0,) * 3), Normalizer((0.5, -1.0), (2.0, 0.5))
)
WORDS = ("push", "pull", "the", "red", "green", "block", "far", "away")
PROCESSOR = word_processor(8, 3, 4, 6, "token", WORDS, (ARM,), text_limit=100)
KEYS = np.array([[5, 0], [5, 1], [7, 0], [2**32 - 1, 9], [0, 0]], np.uint32)


PROMPTS = ["push the red block", "pull", "push the green block far away", "pull the block", "push"]


@cache
def tiny_policy() -> Policy:
    """Random everywhere: π0.5 begins with closed gates, which would hide the observation."""
    leaves, tree = jax.tree.flatten(jax.eval_shape(Pi(CONFIG).init, jax.random.key(0)))
    rng = np.random.default_rng(1)
    params = tree.unflatten([(0.3 * rng.normal(size=x.shape)).astype(np.float32) for x in leaves])
    return Policy(Pi(CONFIG), params, PROCESSOR, sizes=(2, 4))


def seen(count: int = 5, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Pictures and states."""
    rng = np.random.default_rng(seed)
    pictures = rng.integers(0, 256, (count, 1, 8, 8, 3), dtype=np.uint8)
    return pictures, rng.normal(size=(count, 3)).astype(np.float32)


def openpi(count: int) -> dict:
    """The first of `seen` as openpi's observation."""
    pictures, states = seen()
    return {
        "image": {"front": pictures[:count, 0]},
        "state": states[:count],
        "prompt": PROMPTS[:count],
    }


def programs(policy: Policy) -> int:
    """Number of compiled programs."""
    return policy._sample._cache_size()


def recorded_groot(folder: Path) -> tuple[Policy, dict]:
    """The fixture's GR00T, laid out in `folder`, and an observation of several samples."""
    shutil.copytree(GROOT / "lerobot", folder)
    shutil.copy(GROOT / "config.json", folder)
    with np.load(GROOT / "cases.npz") as file:
        case = {k[7:]: file[k] for k in file.files if k.startswith("padded/")}
    names = ("images", "image_sample", "input_ids", "attention_mask", "state", "embodiment_id")
    return load_policy(folder, euler_steps=1), {name: case[name] for name in names}
