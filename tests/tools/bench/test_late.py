"""The measurement of policies whose chunks come late: what it counts as a jump, and its table."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from rich.console import Console

from models import Embodiment, Normalizer, Pi
from models.config import to_json
from parallel.checkpoint import CheckpointWriter
from sim.results import Episode
from tests.helpers.models.processors import word_processor
from tools.bench.sim import late
from tools.recipes.presets import TINY

SUITE = """
from sim.environments.device_slots import DeviceSlots
from sim.suite import Suite
from tests.helpers.models.processors import word_processor
from tests.helpers.sim.point_world import PointWorld

def opened(tasks, count, size):
    return DeviceSlots(PointWorld(), count)

POINTS = Suite("points", ("points",), 2, opened)
"""


def checkpoint(folder, delay):
    config = replace(TINY.model, chunks=1, image_size=32, steps=2, rtc_max_delay=delay)
    scale = Normalizer((0.25,) * 2, (0.4,) * 2)
    processor = word_processor(
        *(config.image_size, config.state_dim, config.action_dim, config.horizon),
        *(config.state_input, ("go", "to", "the", "disc", "reach", "red", "green", "blue")),
        (Embodiment("pointer", ("top",), scale, scale),),
        text_limit=32,
    )
    params = jax.jit(Pi(config).init)(jax.random.key(delay))
    assets = {"processor": to_json(processor)}
    with CheckpointWriter(folder / "checkpoints", {"model": to_json(config)}, assets) as writer:
        writer.save(1, {"ema": params}, {})
    return folder


def test_a_jump_is_where_the_first_action_follows_that_was_not_committed():
    """Chunks of 3 steps acted, 2 late: the second chunk's own begin at step 5, the third's at 8."""
    actions = np.repeat(np.array([0.0, 1.0, 3.0]), [5, 3, 2])[:, None] * [1.0, -2.0]
    episode = Episode("", 0, "", "", "", True, True, 10, 0.0, 0.0, actions.astype(np.float32))
    np.testing.assert_allclose(late.jumps(episode, 2, 3), [1.5, 3.0])
    assert not late.jumps(replace(episode, actions=actions[:5]), 2, 3).size


@pytest.mark.slow
def test_every_way_acts_from_the_same_starts_at_every_delay(tmp_path):
    (tmp_path / "mine.py").write_text(SUITE)
    config = late.LateConfig(
        plain=(checkpoint(tmp_path / "plain", 0),),
        trained=(checkpoint(tmp_path / "trained", 2),),
        out=tmp_path / "out",
        suite=f"{tmp_path / 'mine.py'}:POINTS",
        delays=(0, 2),
        episodes=2,
    )
    rows = late.run(config, Console(quiet=True))
    assert [(row["delay"], row["chunking"]) for row in rows] == [
        (delay, way) for delay in (0, 2) for way in ("none", "guided", "trained")
    ]
    assert {row["success"]["trials"] for row in rows} == {2}
    assert json.loads((tmp_path / "out" / "late.json").read_text()) == rows
