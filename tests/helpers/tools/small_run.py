"""A run of `tools.train` that takes seconds: a small dataset, a small π0.5, eight steps. For tests
and for the processes that they start."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from data.lerobot.writer import DatasetWriter
from parallel.mesh import MeshConfig, make_mesh
from parallel.monitor.metrics import read_metrics
from tools.recipes import training
from tools.recipes.presets import TINY

MODEL = replace(
    TINY.model,
    vision=replace(TINY.model.vision, width=16, hidden=16, heads=2),
    language=replace(TINY.model.language, width=16, depth=2, hidden=16, head_dim=8),
    expert=replace(TINY.model.expert, width=16, depth=2, hidden=16, head_dim=8),
    image_size=16,
    horizon=4,
    chunks=2,
)
SMALL = replace(
    TINY,
    model=MODEL,
    trainer=replace(TINY.trainer, train_steps=8, save_every=3, eval_every=4),
    optimizer=replace(TINY.optimizer, name="adamw", learning_rate=1.5e-3, warmup_steps=2),
    data=replace(TINY.data, holdout=0.2),
    mesh=MeshConfig(data=1),
)
LONG = replace(SMALL, trainer=replace(SMALL.trainer, train_steps=40, save_every=4, eval_every=0))
HOSTS = replace(SMALL, mesh=MeshConfig())


def write_dataset(path: Path, seed: int = 0, fps: int = 10) -> Path:
    rng = np.random.default_rng(seed)
    features = {
        "observation.state": {"dtype": "float32", "shape": (3,), "names": ["x", "y", "z"]},
        "action": {"dtype": "float32", "shape": (2,), "names": ["dx", "dy"]},
    } | {
        f"observation.images.{name}": {
            "dtype": "video",
            "shape": (16, 16, 3),
            "names": ["height", "width", "channels"],
        }
        for name in ("front", "wrist")
    }
    with DatasetWriter(path, fps=fps, features=features, robot_type="test") as writer:
        for i in range(12):
            steps = 6 + i % 3
            writer.add_episode(
                {
                    "observation.state": rng.normal(size=(steps, 3)).astype(np.float32),
                    "action": rng.normal(size=(steps, 2)).astype(np.float32),
                },
                {
                    name: rng.integers(0, 256, (steps, 16, 16, 3), dtype=np.uint8)
                    for name in features
                    if "images" in name
                },
                ("push", "pull the thing over there")[i % 2],
            )
    return path


@contextmanager
def one_device() -> Iterator[None]:
    """The machine of a user without accelerators: the mesh tests name their own devices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "make_mesh", _mesh)
        yield


def _mesh(config: MeshConfig) -> jax.sharding.Mesh:
    return make_mesh(config, jax.devices()[: config.data * config.fsdp])


def losses(out: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(out) if "loss" in row]
