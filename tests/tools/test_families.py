"""Commands take any family of models: each that is built in, at a small size, and three that users'
files define, one of which reads the past. docs/families.md has the table that these tests fill."""

import json
import sys
from contextlib import nullcontext
from dataclasses import fields, is_dataclass, replace
from functools import reduce
from operator import getitem
from pathlib import Path

import jax
import numpy as np
import pytest
import tyro
from flax.traverse_util import flatten_dict

from models import Pi, Policy, load_policy
from models.checkpoints import own
from models.config import from_json
from models.files.own_file import run_file
from models.files.terminal import Console
from models.formats import writers
from models.inputs.packed_batch import most_images, pack
from models.layers.layers import Lora
from models.layers.quantized import Nf4
from models.model import _FAMILIES, ModelConfig
from parallel.mesh import MeshConfig
from parallel.monitor.metrics import read_metrics
from rl.checks import check_policy
from rl.config import FlowConfig, ObjectiveConfig, RlConfig, RolloutConfig
from tests.helpers.models.tiny_policy import CONFIG, tiny_policy
from tests.helpers.rotation import ROOT
from tests.helpers.tools.exported_run import ran
from tests.helpers.tools.families import CELLS, FAMILIES, OWN, RECORD, REFUSED, Family
from tests.helpers.tools.served import client, serving
from tests.helpers.tools.small_run import losses, one_device
from tools import convert_checkpoint, evaluate, plan, quantize, record, rl, serve, train
from tools.export.write import write
from tools.serving.metrics import Metrics

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
QUIET = Console(quiet=True)
ROWS = [
    pytest.param(
        family,
        id=family.row,
        marks=[
            pytest.mark.drill,
            pytest.mark.row(family.row, family.folder),
            pytest.mark.xdist_group(family.row),
        ],
    )
    for family in FAMILIES
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


@pytest.fixture(scope="module", params=ROWS)
def family(request) -> Family:
    return request.param


@pytest.fixture(autouse=True)
def sensible(request) -> None:
    """Skips a cell that makes no sense, which the page says of it."""
    if "family" in request.fixturenames:
        name = request.node.name
        tests = {cell: test for cell, test in CELLS.items() if test and cell not in REFUSED}
        cells = [cell for cell, test in tests.items() if _is(name, test)]
        row = request.getfixturevalue("family")
        for why in filter(None, map(row.without.get, cells)):
            pytest.skip(why)


def _is(name: str, test: str) -> bool:
    """True for a test, with a parameter if it names one."""
    base, _, parameter = test.partition("[")
    found, _, parameters = name.partition("[")
    return found == base and (not parameter or parameter[:-1] in parameters[:-1].split("-"))


@pytest.fixture(scope="module")
def options(family, demos) -> list[str]:
    return [
        *("--data", str(demos), "--preset", family.preset),
        *("--model.image-size", "16", "--model.horizon", "4"),
        *("--trainer.train-steps", "4", "--trainer.save-every", "2", "--trainer.eval-every", "4"),
        *("--rows.number", "4", "--optimizer.warmup-steps", "1", "--mesh.data", "1"),
        *("--optimizer.rate-factors", family.slow, "0.5", ".", "1.0"),
        *family.options,
    ]


@pytest.fixture(scope="module")
def trained(family, options, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("run") / "run"
    paths, config, _ = train.parse([*options, "--out", str(out)])
    with one_device():
        assert train.run(paths, config, QUIET).finished
    return out


def learnt(options, out, *, init=None, model=None, rates=None, mesh=None) -> list[float]:
    """The losses of two steps of a run as `trained`, with some of its config changed."""
    few = ("--trainer.train-steps", "2", "--optimizer.name", "adamw")
    paths, config, _ = train.parse([*options, "--out", str(out), *few])
    config = replace(config, trainer=replace(config.trainer, eval_every=0))
    if model is not None:
        config = replace(config, model=model(config.model))
    if rates is not None:
        config = replace(config, optimizer=replace(config.optimizer, rate_factors=rates))
    with nullcontext() if mesh else one_device():
        run = replace(config, mesh=mesh or config.mesh)
        assert train.run(replace(paths, init=init), run, QUIET).finished
    return losses(out)


def with_adapters(config):
    """A config with adapters of rank 2 in every part that takes some."""
    changed = {}
    for part in fields(config):
        value = getattr(config, part.name)
        if part.name.endswith("lora"):
            changed[part.name] = Lora(2, 2.0)
        elif is_dataclass(value):
            changed[part.name] = with_adapters(value)
    return replace(config, **changed)


ALONE = (("lora_[ab]$", 1.0), (".", 0.0))


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
    assert actions.shape == (family.answered, 2)
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


def test_adapters_alone_learn(options, trained, tmp_path):
    learnt(options, tmp_path / "lora", init=trained, model=with_adapters, rates=ALONE)
    before, after = (
        flatten_dict(load_policy(path).params, sep="/") for path in (trained, tmp_path / "lora")
    )
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)
    assert max(np.abs(x).max() for name, x in after.items() if name.endswith("lora_b")) > 0


def test_adapters_learn_on_a_base_in_four_bits(family, options, trained, tmp_path):
    def narrow(config):
        pattern = config.quantizable
        return with_adapters(config).computing(quantized=pattern, quantized_kind="nf4")

    assert np.isfinite(
        learnt(options, tmp_path / "q", init=trained, model=narrow, rates=ALONE)
    ).all()
    params = load_policy(tmp_path / "q").params
    assert isinstance(reduce(getitem, family.quantised.split("/"), params), Nf4)


def test_a_step_in_float8_is_near_that_in_f32(options, tmp_path):
    exact = learnt(options, tmp_path / "f32")
    rounded = learnt(options, tmp_path / "fp8", model=lambda m: m.computing(fp8="current"))
    np.testing.assert_allclose(rounded, exact, rtol=0.1)
    assert rounded != exact


def test_eight_devices_learn_as_one_does(options, tmp_path):
    rows = [*options, "--rows.number", "8"]
    eight = learnt(rows, tmp_path / "eight", mesh=MeshConfig(data=4, fsdp=2))
    np.testing.assert_allclose(eight, learnt(rows, tmp_path / "one"), rtol=1e-4)


def observed(policy, number):
    """A raw observation of a policy's robot, another for every number."""
    rng = np.random.default_rng(number)
    shown = {
        f"observation/{name}": rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
        for name in policy.processor.embodiments[0].cameras
    }
    dims = len(policy.processor.embodiments[0].state.offset)
    return {**shown, "observation/state": rng.normal(size=dims), "prompt": "go to the red disc"}


def test_a_samples_loss_does_not_depend_on_what_it_is_packed_with(trained):
    policy = load_policy(trained)
    robot, prepare = policy.processor.embodiments[0], policy.processor.sample
    samples = []
    for number in range(3):
        shown, chunk = observed(policy, number), np.full((4, 2), (number - 1.0) / 4)
        pictures = [shown[f"observation/{name}"] for name in robot.cameras]
        state = shown["observation/state"]
        samples.append(prepare(pictures, state, shown["prompt"], actions=chunk, id=number))
    config, text = policy.model.config, max(len(sample.text) for sample in samples)
    empty = config.layout(prefix=0, samples=1, images=0)
    images = most_images(samples, empty)
    places = {"prefix": 3 * empty.prefix_length(images, text), "text": 3 * text}
    targets = max(len(sample.subtask) + len(sample.action_tokens) for sample in samples)
    layout = config.layout(samples=3, images=3 * images, targets=targets, **places)
    together, *alone = (pack([row], layout) for row in (samples, *([x] for x in samples)))
    loss = jax.jit(lambda batch: policy.model.loss(policy.params, batch, jax.random.key(3)))
    sums = [np.asarray(loss(batch)) for batch in (together, *alone)]
    np.testing.assert_allclose(sums[0], sum(sums[1:]), rtol=1e-5)


def test_what_was_seen_before_changes_what_is_done(trained):
    policy = load_policy(trained)
    acts = []
    for number in (1, 2):
        session = policy.session()
        for step, seen in enumerate((number, 3)):
            acted = policy.infer(observed(policy, seen), session=session, executed=step or None)
        acts.append(acted["actions"])
    assert np.abs(acts[0] - acts[1]).max() > 1e-6


@pytest.mark.parametrize("form", ["stablehlo", "onnx"])
def test_an_exported_program_acts_as_its_policy(trained, form, tmp_path):
    if form == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnx")
    policy = load_policy(trained)
    write(policy, tmp_path / "out", form)
    (request,) = policy.prepare(observed(policy, 1))
    specs = json.loads((tmp_path / "out" / "policy.json").read_text())["inputs"]
    given = {spec["name"]: _input(spec, request) for spec in specs}
    found = ran(tmp_path / "out", given, also=("jax",) if form == "onnx" else ())["actions"]
    wanted = policy.sample_actions([request], given["noise"])
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())


def _input(spec, request):
    """An exported program's input for a request."""
    name, shape = spec["name"], spec["shape"]
    if name == "tokens":
        text = request.sample.text
        return np.pad(text, (0, shape[1] - len(text)))[None].astype(np.int32)
    if name.startswith("images"):
        shown = [picture for picture in request.sample.images if picture.shape == tuple(shape[2:])]
        return np.stack(shown)[None]
    noise = np.random.default_rng(7).standard_normal(shape, np.float32)
    one = {"state": request.state, "length": len(request.sample.text), "noise": noise[0]}
    return np.asarray(one[name])[None].astype(spec["dtype"])


def test_a_family_is_planned(family):
    run, machines = plan.PlannedRun(preset=family.preset, rows=16), plan.Machines(gpus=2)
    if "plan" in family.without:
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
    other = next(x for x in ("lerobot", "openpi", "groot") if x not in writers(family.name))
    with pytest.raises(SystemExit, match=f"'{other}' cannot hold .* family '{family.name}'"):
        command(
            *(convert_checkpoint.main, trained, tmp_path / "other", "--to", other, *options),
            monkeypatch=monkeypatch,
        )


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.row)
def test_every_cell_has_a_test_or_a_reason_of_five_words(family):
    known = {row["cell"]: row[family.row] for row in json.loads(RECORD.read_text())["cells"]}
    assert set(family.without) <= set(CELLS) == set(known)
    for cell in CELLS:
        if why := family.without.get(cell):
            assert len(why.split()) <= 5
            assert known[cell] == why
        else:
            file, name = family.test(cell).split("::")
            assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text()


@pytest.mark.slow
def test_a_checkpoint_names_its_family_and_runs_no_file_of_it(tmp_path, monkeypatch):
    monkeypatch.delitem(_FAMILIES, "sight", raising=False)
    values = {"family": "sight", "width": 16}
    with pytest.raises(ValueError, match=r"Family 'sight' is unknown.*--family path/to/file\.py"):
        from_json(ModelConfig, values)


@pytest.mark.slow
def test_rl_takes_eulers_steps_alone():
    policy = replace(tiny_policy(), model=Pi(replace(CONFIG, solver="ab2")))
    with pytest.raises(ValueError, match=r"model.solver is 'ab2', but RL needs the probability of"):
        check_policy(policy, RlConfig())


@pytest.mark.slow
def test_workers_elsewhere_know_no_family_of_a_users_file():
    policy = Policy(run_file(OWN).SightConfig().build(), None, None)
    with pytest.raises(ValueError, match="its workers do not know the model family 'sight'"):
        check_policy(policy, RlConfig(placement="disaggregated"))
