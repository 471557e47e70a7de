"""A family of models that are linear in what they are shown, so that a test knows what one has
learnt: fitted by least squares to recorded chunks, it copies what depends linearly on the
brightness of each picture's upper left quarter, the words of the prompt, and the state.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from data import open_dataset
from data.lerobot.writer import DatasetWriter
from data.mixture.mixture import DatasetConfig
from models import Embodiment, Normalizer, Policy
from models.layers.layers import Compute
from models.model import ModelConfig
from tests.helpers.models.processors import word_processor

SIZE, HORIZON, CAMERAS, VOCABULARY = 16, 5, ("front", "wrist"), 320
NOISE = 0.01
PUSH, PULL = "push the block", "pull the block"
WORDS = ("push", "pull", "the", "block")


@dataclass(frozen=True)
class LinearConfig(ModelConfig, family="linear"):
    image_size: int = SIZE
    vocabulary: int = VOCABULARY
    state_dim: int = 2
    action_dim: int = 2
    horizon: int = HORIZON
    euler_steps: int = 1
    state_input: str = "suffix"
    compute: Compute = field(default_factory=lambda: Compute(dtype="float32"))

    tokens_per_image = property(lambda self: 1)

    def build(self):
        return Linear(self)


@dataclass(frozen=True)
class Linear:
    config: LinearConfig

    sharding_rules = ((r".", PartitionSpec()),)
    groups: ClassVar[dict] = {"action": "weight"}

    def init(self, key):
        shape = (len(CAMERAS) + VOCABULARY + 2, HORIZON * 2)
        return {"weight": 0.01 * jax.random.normal(key, shape)}

    def loss(self, params, batch, key):
        raise NotImplementedError

    def features(self, batch):
        seen = batch.images[:, :, : SIZE // 2, : SIZE // 2].astype(jnp.float32).mean((2, 3, 4))
        bright = [(seen * (batch.image_camera == c)).sum(1) / 255 for c in range(len(CAMERAS))]
        told = jax.nn.one_hot(batch.text, VOCABULARY).sum(1)
        return jnp.concatenate([jnp.stack(bright, 1), told, batch.state[:, 0]], axis=1)

    def sample_actions(self, params, batch, noise, guidance=None):
        chunk = self.features(batch) @ params["weight"]
        return chunk.reshape(-1, 1, HORIZON, 2) + NOISE * noise


def write_reaching(path: Path, episodes: int = 12, seed: int = 0) -> Path:
    """A point goes to a place in x that the front camera's brightness tells and one in y that the
    prompt tells; the wrist camera shows noise. Episodes of 20 frames at 10 a second."""
    rng = np.random.default_rng(seed)
    features = {
        "observation.state": {"dtype": "float32", "shape": (2,), "names": ["x", "y"]},
        "action": {"dtype": "float32", "shape": (2,), "names": ["dx", "dy"]},
    } | {
        f"observation.images.{name}": {
            "dtype": "video",
            "shape": (32, 32, 3),
            "names": ["height", "width", "channels"],
        }
        for name in CAMERAS
    }
    with DatasetWriter(path, fps=10, features=features, robot_type="point") as writer:
        for i in range(episodes):
            goal = np.array([rng.uniform(-1, 1), (1.0, -1.0)[i % 2]])
            at, states, actions = rng.uniform(-1, 1, 2), [], []
            for _ in range(20):
                states.append(at)
                actions.append(0.2 * (goal - at))
                at = at + actions[-1]
            front = np.full((20, 32, 32, 3), 60, np.uint8)
            front[:, :16, :16] = round(128 + 100 * goal[0])
            wrist = np.broadcast_to(rng.integers(0, 256, (20, 1, 1, 3)), (20, 32, 32, 3))
            writer.add_episode(
                {
                    "observation.state": np.array(states, np.float32),
                    "action": np.array(actions, np.float32),
                },
                {
                    "observation.images.front": front,
                    "observation.images.wrist": wrist.astype(np.uint8),
                },
                (PUSH, PULL)[i % 2],
            )
    return path


def fitted(path: Path, episodes: Sequence[int], blind_to: str = "") -> Policy:
    """A policy fitted to some episodes of `write_reaching`."""
    dataset = open_dataset(path)
    robot = Embodiment("reaching", CAMERAS, Normalizer((0.0,) * 2, (1.0,) * 2), _scale(0.2))
    processor = word_processor(SIZE, 2, 2, HORIZON, "suffix", WORDS, (robot,))
    model = Linear(LinearConfig())
    policy = Policy(model, model.init(jax.random.key(0)), processor, sizes=(4,))
    samples, chunks = zip(*_observed(policy, dataset, episodes), strict=True)
    weights = np.linalg.lstsq(np.concatenate(samples), np.concatenate(chunks), rcond=1e-6)[0]
    if blind_to:
        weights[CAMERAS.index(blind_to)] = 0
    return replace(policy, params={"weight": weights.astype(np.float32)})


SETTINGS = DatasetConfig("reaching")


def _scale(scale: float) -> Normalizer:
    return Normalizer((0.0,) * 2, (scale,) * 2)


def _observed(policy, dataset, episodes) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for e in episodes:
        one = dataset.episode(e)
        actions = one["action"]
        for t in range(len(actions) - HORIZON + 1):
            seen = {
                "image": {c: one[f"observation.images.{c}"][t] for c in CAMERAS},
                "state": one["observation.state"][t],
                "prompt": one["task"],
            }
            (request,) = policy.prepare(seen)
            batch = policy.rows([request.sample])
            chunk = actions[t : t + HORIZON].reshape(1, -1) / 0.2
            yield np.asarray(policy.model.features(batch)), chunk
