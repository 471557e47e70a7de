"""A family with nothing but what the contract asks for (no pictures, no `sharding_rules`, no
`groups`) trains on any mesh and acts, and one that lacks some of that is refused before its data is
opened."""

from dataclasses import replace

import numpy as np
import pytest

from models import load_policy
from models.files.own_file import named_in_file
from models.files.terminal import Console
from models.model import _FAMILIES, FLOW, groups_of, rules_of
from models.robot_policy import RobotPolicy
from parallel.mesh import MeshConfig
from tests.helpers.tools.small_run import SMALL, losses, one_device, write_dataset
from tools import train
from tools.recipes.rl_presets import RL_PRESETS, learner_of
from tools.serving.engine import Engine
from tools.serving.metrics import Metrics

QUIET, PICTURE = Console(quiet=True), np.full((12, 16, 3), 90, np.uint8)
LEAST = """
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from models.model import ModelConfig
from tools.recipes.presets import RowsConfig, RunConfig


@dataclass(frozen=True)
class LeastConfig(ModelConfig, family="least"):
    state_dim: int = 3
    action_dim: int = 2
    horizon: int = 4
    state_input: str = "suffix"

    def build(self):
        return Least(self)


@dataclass(frozen=True)
class Least:
    config: LeastConfig

    def init(self, key):
        return {"weight": jax.random.normal(key, (3, 8)), "bias": jnp.zeros(8)}

    def chunks(self, params, batch):
        x = batch.state @ params["weight"] + params["bias"]
        return x.reshape(*x.shape[:2], 4, 2)

    def loss(self, params, batch, key):
        weight = batch.action_mask * batch.weight[..., None, None]
        error = self.chunks(params, batch) - batch.actions
        return jnp.sum(error**2 * weight), jnp.sum(weight)

    def sample_actions(self, params, batch, noise, guidance=None):
        return self.chunks(params, batch)


PRESET = RunConfig(LeastConfig(), RowsConfig(8, 2))
"""


@pytest.fixture(autouse=True)
def unknown(monkeypatch):
    monkeypatch.delitem(_FAMILIES, "least", raising=False)


def preset(folder, text=LEAST):
    file = folder / "least.py"
    file.write_text(text)
    own = named_in_file(f"{file}:PRESET")
    return replace(SMALL, model=own.model, rows=own.rows)


def run(config, data, out):
    assert train.run(train.Paths(str(data), out), config, QUIET).finished
    return losses(out)


def test_a_family_without_rules_and_groups_trains_on_one_device_and_on_eight(tmp_path):
    config, data = preset(tmp_path), write_dataset(tmp_path / "data")
    config = replace(config, optimizer=replace(config.optimizer, rate_factors=(("@all", 1.0),)))
    with one_device():
        alone = run(config, data, tmp_path / "one")
    shared = run(replace(config, mesh=MeshConfig(data=4, fsdp=2)), data, tmp_path / "eight")
    np.testing.assert_allclose(shared, alone, rtol=1e-5)
    assert not list((tmp_path / "one/store").rglob("frames")), "no picture is decoded"
    policy = load_policy(tmp_path / "eight")
    assert np.shape(policy.params["weight"]) == (3, 8)
    robot = RobotPolicy.for_clients(policy)
    seen = {"image": {}, "state": np.ones(3), "prompt": "anything"}
    wanted = policy.infer(seen)["actions"]
    with Engine(policy, Metrics(), deadline=0, capacity=1) as engine:
        engine.start()
        session, pictures = engine.join(1), dict.fromkeys(robot.embodiment.cameras, PICTURE)
        given = engine.read({**pictures, "state": np.ones(3), "prompt": "anything"}, session)
        np.testing.assert_array_equal(engine.submit(given).result(60).actions, wanted)
    model = config.model.build()
    assert not any(hasattr(model, name) for name in ("sharding_rules", "groups", *FLOW))
    assert groups_of(model).keys() == {"all"}
    assert len(rules_of(model)) == 1
    with pytest.raises(ValueError, match="names a group '@action', but the model has @all"):
        learner_of(RL_PRESETS["tabletop-grpo"], model)


@pytest.mark.parametrize(
    ("line", "other", "sentence"),
    [
        ("    horizon: int = 4\n", "", "'least' have no `horizon`, needed for every run; add"),
        ("(frozen=True)\nclass LeastC", "\nclass LeastC", "LeastConfig.* no frozen dataclass"),
        (
            "    horizon",
            "    image_size: int = 8\n    horizon",
            "LeastConfig.* fill no places",
        ),
        ("Least(self)", "Least(None)", r"Least, which LeastConfig\.build\(\) returned, has no `c"),
        ("def loss", "def losses", "no `loss`, needed for every run; add it to Least as models"),
        ("def sample_actions", "def act", "have no `sample_actions`, needed for every run"),
    ],
)
def test_what_the_contract_misses_is_said_before_data_is_read(line, other, sentence, tmp_path):
    assert line in LEAST
    config = preset(tmp_path, LEAST.replace(line, other))
    with one_device(), pytest.raises(ValueError, match=sentence):
        train.run(train.Paths(str(tmp_path / "no data"), tmp_path / "run"), config, QUIET)
    assert not (tmp_path / "run").exists()
