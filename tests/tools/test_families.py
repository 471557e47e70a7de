"""Commands take any family of models: GR00T's and π0-FAST's small presets, and two that users'
files define, one of which reads the past, each recorded for, trained, evaluated, served, planned,
quantised, converted and, if it has a velocity field, improved by RL."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np
import pytest
import tyro

from models import Pi, Policy, load_policy
from models.checkpoints import own
from models.config import from_json
from models.files.own_file import run_file
from models.files.terminal import Console
from models.formats import writers
from models.model import _FAMILIES, ModelConfig
from parallel.monitor.metrics import read_metrics
from rl.checks import check_policy
from rl.config import FlowConfig, ObjectiveConfig, RlConfig, RolloutConfig
from tests.helpers.models.tiny_policy import CONFIG, tiny_policy
from tests.helpers.tools.served import client, serving
from tests.helpers.tools.small_run import one_device
from tools import convert_checkpoint, evaluate, plan, quantize, record, rl, serve, train
from tools.serving.metrics import Metrics

FOLDER = Path(__file__).parents[1]
OWN, SMOL, ACT = (FOLDER / f"own_{name}.py" for name in ("model", "smol", "act"))
SUITES = """
from sim.environments.device_slots import DeviceSlots
from sim.suites import Suite
from tests.helpers.sim.point_world import PointWorld, expert

class World(PointWorld):
    max_steps = 6

    def __init__(self, size):
        self.size = size

    def pictures(self, scene):
        return self.render(scene, self.size)[:, None]

    def step_chunk(self, state, actions):
        state, happened = super().step_chunk(state, actions)
        return state, happened._replace(reward=happened.reward + happened.state[..., 0])

def open_lanes(tasks, count, size):
    return DeviceSlots(World(size), count, expert)

POINTS = Suite("points", ("points",), 4, open_lanes, first_seed=500, together=False, slots=4)
"""
TOWER = ["width", "16", "depth", "1", "hidden", "16", "heads", "2"]
QUIET = Console(quiet=True)
pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Family:
    name: str
    preset: str
    file: Path | None
    options: tuple[str, ...]
    kept: str
    """A parameter that RL's presets leave as it is."""
    quantised: str
    """A kernel that tools.quantize takes."""
    flows: bool = True
    """It has a velocity field, and so Euler steps and RL."""
    remembers: bool = False
    """It reads the past, step by step."""
    slow: str = "@vision"
    """Parameters with half the rate."""


def sizes(stack: str, *values: str) -> tuple[str, ...]:
    pairs = zip(values[::2], values[1::2], strict=True)
    return tuple(x for name, value in pairs for x in (f"--model.{stack}{name}", value))


FAMILIES = [
    Family(
        "sight",
        f"{OWN}:SIGHT",
        OWN,
        (
            *sizes("vision.", *TOWER),
            *sizes("", "width", "16", "depth", "2", "heads", "2", "chunks", "1"),
        ),
        "camera",
        "blocks/up/kernel",
    ),
    Family(
        "groot",
        "groot-tiny",
        None,
        (
            *sizes("vision.", *TOWER),
            *sizes("language.", "width", "16", "depth", "1", "hidden", "16", "head-dim", "8"),
            *sizes("adapter.", "head-dim", "8"),
            *sizes("dit.", "depth", "2", "head-dim", "8"),
            *sizes("", "hidden", "16", "chunks", "1"),
        ),
        "embedding",
        "dit/cross_blocks/k/kernel",
    ),
    Family(
        "pi0_fast",
        "pi0-fast-tiny",
        None,
        (
            *sizes("vision.", *TOWER),
            *sizes("language.", "width", "16", "depth", "2", "hidden", "16", "head-dim", "8"),
            *sizes("", "vocabulary", "800", "max-decoding-steps", "16"),
        ),
        "",
        "language/layers/mlp/up/kernel",
        flows=False,
    ),
    Family(
        "smol",
        f"{SMOL}:SMOL",
        SMOL,
        (*sizes("vision.", *TOWER), *sizes("", "width", "16", "depth", "1", "heads", "2")),
        "words",
        "action_blocks/up/kernel",
        remembers=True,
    ),
    Family(
        "act",
        "act-tiny",
        None,
        sizes("", "width", "16", "heads", "2", "hidden", "24", "encoder-depth", "2"),
        "",
        "decoder/up/kernel",
        flows=False,
    ),
    Family(
        "small-act",
        f"{ACT}:ACT",
        ACT,
        (*sizes("", "width", "16", "depth", "2", "heads", "2"), "--model.widths", "4", "8"),
        "",
        "decoder/up/kernel",
        flows=False,
        slow="^tower",
    ),
]


@pytest.fixture(scope="module")
def points(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("suite") / "mine.py"
    file.write_text(SUITES)
    return f"{file}:POINTS"


@pytest.fixture(scope="module")
def demos(points, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("data") / "points"
    record.record_dataset(record.RecordConfig(out, points, episodes=10, image_size=16))
    return out


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.name)
def family(request) -> Family:
    return request.param


@pytest.fixture(scope="module")
def trained(family, demos, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp(family.name) / "run"
    paths, config, _ = train.parse(
        [
            *("--data", str(demos), "--out", str(out), "--preset", family.preset),
            *("--model.image-size", "16", "--model.horizon", "4"),
            *(
                "--trainer.train-steps",
                "4",
                "--trainer.save-every",
                "2",
                "--trainer.eval-every",
                "4",
            ),
            *("--rows.number", "4", "--optimizer.warmup-steps", "1", "--mesh.data", "1"),
            *("--optimizer.rate-factors", family.slow, "0.5", ".", "1.0"),
            *family.options,
        ]
    )
    with one_device():
        assert train.run(paths, config, QUIET).finished
    return out


def test_training_makes_steps_and_leaves_a_policy_that_is_rebuilt_from_its_checkpoint(
    family, trained
):
    rows = read_metrics(trained)
    assert len([row for row in rows if "loss" in row]) == 4
    assert all(np.isfinite(row["loss"]) for row in rows if "loss" in row)
    assert np.isfinite([row["val_action_mse"] for row in rows if "val_action_mse" in row]).all()
    config = own.read_json(trained, "config")
    assert config["model"]["family"] == family.name
    policy = load_policy(trained)
    assert policy.model.config.family == family.name
    before = jax.jit(policy.model.init)(jax.random.key(0))
    moved = jax.tree.map(lambda a, b: float(np.abs(np.subtract(a, b)).max()), policy.params, before)
    assert max(jax.tree.leaves(moved)) > 0


def test_a_trained_policy_acts_in_a_suite(family, trained, points, tmp_path):
    config = evaluate.EvaluateConfig(
        trained,
        points,
        out=tmp_path,
        episodes=2,
        euler_steps=2 if family.flows else None,
        controls=("untrained",),
        family=family.file,
    )
    found = evaluate.run(config, QUIET)
    assert {name: result.success.trials for name, result in found.items()} == {
        "trained": 2,
        "untrained": 2,
    }


def test_a_trained_policy_answers_a_robot(family, trained):
    steps = 2 if family.flows else None
    config = serve.ServeConfig(trained, sizes=(1,), euler_steps=steps, family=family.file)
    with (
        serve._engine(config, Metrics()) as engine,
        serving(engine) as running,
        client(running.url) as robot,
    ):
        seen = {name: _shown(name) for name in robot.metadata["inputs"]}
        actions = robot.infer(seen)["actions"]
    assert actions.shape == (4, 2)
    assert np.isfinite(actions).all()


def _shown(name):
    if "prompt" in name:
        return "go to the red disc"
    return np.zeros(2) if "state" in name else np.zeros((16, 16, 3), np.uint8)


def test_grpo_improves_what_draws_chunks_and_leaves_what_reads_observations(
    family, trained, points, tmp_path, monkeypatch
):
    one = jax.devices()[:1]
    monkeypatch.setattr("rl.host.placement.split_devices", lambda acting: (one, one))
    config = replace(
        rl.parse(["--checkpoint", str(trained), "--out", "x", "--preset", "tabletop-grpo"])[1],
        learner_steps=1,
        flow=FlowConfig(euler_steps=2),
        objective=ObjectiveConfig(advantage="group"),
        rollout=RolloutConfig(
            suite=points, groups=2, group=2, staleness=0, slots=2, reward="suite", replan_steps=4
        ),
        eval_every=0,
        save_every=1,
    )
    config = replace(config, learner=replace(config.learner, micro=8, epochs=1, minibatches=1))
    paths = rl.RlPaths(trained, tmp_path / "rl", family=family.file)
    if not family.flows:
        with pytest.raises(ValueError, match=f"'{family.name}' have no `field`, needed for RL"):
            rl.run(paths, config, QUIET)
        return
    if family.remembers:
        with pytest.raises(ValueError, match="reads state, images of steps at which RL does not"):
            rl.run(paths, config, QUIET)
        config = replace(config, rollout=replace(config.rollout, replan_steps=1))
    assert rl.run(paths, config, QUIET).finished
    before, after = (load_policy(path).params for path in (trained, tmp_path / "rl"))
    moved = jax.tree_util.tree_flatten_with_path(
        jax.tree.map(lambda a, b: float(np.abs(np.subtract(a, b)).max()), before, after)
    )[0]
    names = {jax.tree_util.keystr(p, simple=True, separator="/"): x for p, x in moved}
    assert names[family.kept] == 0
    assert max(x for name, x in names.items() if name.startswith("action_")) > 0


def test_a_family_is_planned(family):
    run, machines = plan.PlannedRun(preset=family.preset, rows=16), plan.Machines(gpus=2)
    if family.name == "smol":
        with pytest.raises(ValueError, match=r"'smol' have no `stacks`, needed for tools\.plan"):
            plan.plan(run, machines, ("bf16",), ("none",))
        return
    found = plan.plan(run, machines, ("bf16",), ("none",))[2]
    assert found[0].step > 0
    if family.name == "sight":
        with pytest.raises(ValueError, match=r"'sight' have no `recomputing`.*remat 'full'"):
            plan.plan(run, machines, ("bf16",), ("full",))


def command(main, *arguments, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
    tyro.cli(main)


def test_a_policy_is_quantised(family, trained, tmp_path, monkeypatch, capsys):
    options = () if family.file is None else ("--family", family.file)
    arguments = (quantize.main, trained, tmp_path / "small", *options)
    command(*arguments, monkeypatch=monkeypatch)
    assert "bytes became" in capsys.readouterr().err
    small = load_policy(tmp_path / "small")
    kernel = small.params
    for name in family.quantised.split("/"):
        kernel = kernel[name]
    assert kernel.q.dtype == jax.numpy.float8_e4m3fn
    pictures, state = np.zeros((1, 1, 16, 16, 3), np.uint8), np.zeros((1, 2))
    assert np.isfinite(small.act((pictures, state), ["go to the red disc"], keys=[(0, 0)])).all()


def test_a_policy_is_converted_to_formats_of_its_family_alone(
    family, trained, tmp_path, monkeypatch
):
    options = () if family.file is None else ("--family", family.file)
    command(convert_checkpoint.main, trained, tmp_path / "own", *options, monkeypatch=monkeypatch)
    again, first = load_policy(tmp_path / "own"), load_policy(trained)
    jax.tree.map(np.testing.assert_array_equal, again.params, first.params)
    assert again.model == first.model
    other = next(x for x in ("lerobot", "openpi") if x not in writers(family.name))
    with pytest.raises(SystemExit, match=f"'{other}' cannot hold .* family '{family.name}'"):
        command(
            *(convert_checkpoint.main, trained, tmp_path / "other", "--to", other, *options),
            monkeypatch=monkeypatch,
        )


def test_a_checkpoint_names_its_family_and_runs_no_file_of_it(tmp_path, monkeypatch):
    monkeypatch.delitem(_FAMILIES, "sight", raising=False)
    values = {"family": "sight", "width": 16}
    with pytest.raises(ValueError, match=r"Family 'sight' is unknown.*--family path/to/file\.py"):
        from_json(ModelConfig, values)


def test_rl_takes_eulers_steps_alone():
    policy = replace(tiny_policy(), model=Pi(replace(CONFIG, solver="ab2")))
    with pytest.raises(ValueError, match=r"model.solver is 'ab2', but RL needs the probability of"):
        check_policy(policy, RlConfig())


def test_workers_elsewhere_know_no_family_of_a_users_file():
    policy = Policy(run_file(OWN).SightConfig().build(), None, None)
    with pytest.raises(ValueError, match="its workers do not know the model family 'sight'"):
        check_policy(policy, RlConfig(placement="disaggregated"))
