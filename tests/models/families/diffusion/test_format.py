"""Diffusion policies act, learn and are saved as LeRobot 0.6.1's own classes have them. Its cases
were made by these, with the noise given and crops in the middle; weights are made by rule."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors import safe_open

from models import load_policy
from models.families.diffusion.format import table
from models.families.diffusion.model import grid
from models.formats import writers
from models.inputs.packed_batch import count_code, counts_of, most_images, pack
from models.layers.batch_norm import advance, training
from tests.helpers.models.policy_cases import (
    CASES,
    arrays,
    as_older,
    case_policy,
    raw,
    written_cameras,
)

NAMES = (
    "diffusion_sample",
    pytest.param("diffusion_ddpm", marks=pytest.mark.slow),
    pytest.param("diffusion_ddim", marks=pytest.mark.slow),
)


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    return request.param


def made(name, folder):
    names = json.loads((CASES / name / "shapes.json").read_text())["stored"]
    return case_policy(name, folder / name, dict.fromkeys(names, grid(2, 2)))


@pytest.fixture(scope="module")
def folder(name, tmp_path_factory):
    return made(name, tmp_path_factory.mktemp("diffusion"))


@pytest.fixture(scope="module")
def policy(folder):
    return load_policy(folder)


def given_noise(policy, case):
    """The policy, in whose steps DDPM adds the case's noise."""
    model, steps = policy.model, policy.model.config.answered

    def step_noise(start, number):
        own = jnp.abs(jnp.asarray(case["noise/start"])[:, 0] - start[0, 0]).sum((1, 2)).argmin()
        return jnp.asarray(case["noise/steps"])[own, number][None]

    @jax.jit
    def sample(params, batch, keys, noise, weights):
        added = step_noise if "noise/steps" in case else None
        chunks = model.sample_actions(params, batch, noise[:, None], step_noise=added)
        return chunks[:, :, steps.start : steps.stop]

    return policy.sampling_by(lambda _: sample)


def test_raw_observations_give_the_robots_actions(name, policy):
    case = arrays(name)
    acting, session = given_noise(policy, case), policy.session()
    count, found = policy.model.config.action_steps, []
    for begin in range(0, len(case["actions"]), count):
        noise = case["noise/start"][begin // count]
        executed = count if begin else None
        answer = acting.infer(raw(case, begin), noise, session=session, executed=executed)
        found += list(answer["actions"])
        for step in range(begin + 1, begin + count):
            if step < len(case["actions"]):
                session.observe(policy.inputs.read(raw(case, step)).rows[0], step)
    found = np.stack(found[: len(case["actions"])])
    np.testing.assert_allclose(found, case["actions"], rtol=0, atol=2e-5)
    alone = acting.infer(raw(case, 0), case["noise/start"][0])["actions"]
    np.testing.assert_array_equal(alone, found[:count])


def batch_of(policy, name, rows, masked):
    """A case's training batch, of which each row has the samples with these numbers, with times
    and noise."""
    case, processor = arrays(name), policy.processor
    robot, config = processor.embodiments[0], policy.model.config
    state = np.concatenate([case[f"train/{part}"] for part in robot.keys.state], axis=-1)
    samples = [
        processor.sample(
            [case[f"train/raw/{camera}"][i, 1] for camera in robot.cameras],
            state[i, 1],
            "",
            actions=case["train/action"][i],
            valid=~case["train/action_is_pad"][i] if masked else None,
            past={"state": [state[i, 0]]}
            | {camera: [case[f"train/raw/{camera}"][i, 0]] for camera in robot.cameras},
            id=i,
        )
        for i in range(len(case["train/action"]))
    ]
    each, longest = config.layout(prefix=0, samples=0, images=0), max(map(len, rows))
    most = counts_of(most_images(samples, each), len(each.groups))
    layout = config.layout(prefix=8, samples=longest, images=int(count_code(most * longest)))
    batch = pack([[samples[i] for i in row] for row in rows], layout)
    time = np.zeros((len(rows), longest, 1), np.int32)
    noise = np.zeros((len(rows), longest, 1, *case["train/noise"].shape[1:]), np.float32)
    for i, row in enumerate(rows):
        time[i, : len(row), 0] = case["train/times"][list(row)]
        noise[i, : len(row), 0] = case["train/noise"][list(row)]
    return jax.tree.map(jnp.asarray, batch), time, noise


def learnt(policy, name, rows, **changes):
    """Loss and gradients in a training step."""
    model = policy.model.config.changed(**changes).build()
    given = batch_of(policy, name, rows, model.config.padding != "learnt")

    @jax.jit
    @jax.value_and_grad
    def mean(params):
        total, count = model.loss_at(training(params), *given)
        return total / count

    return mean(policy.params)


def test_loss_and_gradients_are_lerobots(name, policy):
    case, (loss, grown) = arrays(name), learnt(policy, name, [(0,), (1,), (2,)])
    np.testing.assert_allclose(loss, case["train/loss"], rtol=1e-6)
    flat = flatten_dict(grown, sep="/")
    norms = {x: float(jnp.linalg.norm(g)) for x, g in flat.items() if "/running/" not in x}
    whole = sum(x**2 for x in norms.values()) ** 0.5
    np.testing.assert_allclose(whole, case["train/gradient_norm"], rtol=1e-4)
    rules = table(policy.model.config).by_path
    if (CASES / name / "gradients.json").exists():
        wanted = json.loads((CASES / name / "gradients.json").read_text())
        for path, norm in norms.items():
            theirs = wanted[rules[path].theirs]
            np.testing.assert_allclose(norm, theirs, rtol=1e-4, atol=1e-6 * whole, err_msg=path)
    moved = flatten_dict(advance(policy.params, policy.params, grown), sep="/")
    ours = {rules[path].theirs: x for path, x in moved.items()}
    for key in filter(lambda key: key.startswith("running/"), case):
        np.testing.assert_allclose(ours[key[8:]], case[key], rtol=1e-5, atol=1e-6, err_msg=key)


def test_a_samples_loss_does_not_depend_on_what_it_is_packed_with(name, policy):
    if policy.model.config.resnet.norm == "running" and policy.model.config.image_size:
        pytest.skip("a batch's own statistics normalise it")
    (loss, grown), (other, packed) = (
        learnt(policy, name, rows) for rows in ([(0,), (1,), (2,)], [(0, 2), (1,)])
    )
    np.testing.assert_allclose(other, loss, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(grown), jax.tree.leaves(packed), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-3, atol=1e-5 * max(1e-3, np.abs(a).max()))


def test_a_policy_that_is_written_is_the_file_that_was_read(name, policy, folder, tmp_path):
    writers("diffusion")["lerobot"](policy, tmp_path / name)
    case, again = arrays(name), load_policy(tmp_path / name)
    found, wanted = (x.infer(raw(case, 1), keys=[(3, 4)])["actions"] for x in (again, policy))
    np.testing.assert_array_equal(found, wanted)
    assert again.model == policy.model
    files = [path / "model.safetensors" for path in (folder, tmp_path / name)]
    with safe_open(files[0], "np") as theirs, safe_open(files[1], "np") as ours:
        assert list(ours.keys()) == list(theirs.keys())
        for key in theirs.keys():  # noqa: SIM118
            np.testing.assert_array_equal(ours.get_tensor(key), theirs.get_tensor(key), key)
    for file in ("config.json", "policy_preprocessor.json", "policy_postprocessor.json"):
        saved, wrote = (json.loads((path / file).read_text()) for path in (folder, tmp_path / name))
        for newer in ("pretrained_revision", "gradient_checkpointing"):  # 0.4 refuses them
            saved.pop(newer, None)
        ordered = saved.get("input_features", {})
        assert list(wrote.get("input_features", {})) == sorted(ordered, key=_place)
        assert wrote == saved


@pytest.mark.slow
def test_a_name_of_lerobots_own_stays_a_cameras_name(tmp_path):
    names = written_cameras(
        load_policy(made("diffusion_ddpm", tmp_path)),
        ("observation.image", "wrist"),
        tmp_path / "out",
    )
    assert names == ["observation.image", "observation.images.wrist"]


def _place(name):
    return ("observation.state", "observation.images", "observation.env").index(
        next(x for x in ("observation.state", "observation.images", "observation.env") if x in name)
    )


def test_a_policy_from_before_0_4_acts_the_same(name, policy, folder, tmp_path):
    case, older = arrays(name), load_policy(as_older(folder, tmp_path / "older"))
    found, wanted = (x.infer(raw(case, 1), keys=[(3, 4)])["actions"] for x in (older, policy))
    np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return made("diffusion_sample", tmp_path_factory.mktemp("small"))


def test_the_loss_of_lerobot_0_4_counts_padded_steps(small):
    loss, _ = learnt(load_policy(small), "diffusion_sample", [(0, 1, 2)], padding="masked-0.4")
    np.testing.assert_allclose(loss, 0.2407, atol=5e-5)  # as its own class gave


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"prediction_type": "v_prediction"}, r"noise.predicts is 'v_prediction'; expected one of"),
        ({"noise_scheduler_type": "EDM"}, r"noise.sampler is 'edm'; expected one of"),
        ({"vision_backbone": "vit_b_16"}, r"resnet.name is 'vit_b_16'; expected one of"),
        ({"horizon": 9}, r"model.horizon is 9; give a multiple of 4 for the 2 levels"),
        ({"n_action_steps": 8}, r"model.action_steps is 8; expected a whole number from 1 to 7"),
        ({"num_inference_steps": 13}, r"model.euler_steps is 13; expected .* from 1 to 12"),
        ({"transformer": True}, r"unknown fields \['transformer'\]"),
    ],
)
def test_a_file_that_says_what_is_not_supported_is_refused(small, tmp_path, changes, wrong):
    told = json.loads((small / "config.json").read_text()) | changes
    for file in small.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(told))
    with pytest.raises(ValueError, match=wrong):
        load_policy(tmp_path)


def test_a_policy_that_lerobot_cannot_hold_is_not_written(small, tmp_path):
    policy = load_policy(small)
    wide = replace(policy, model=policy.model.config.changed(state_dim=9).build())
    with pytest.raises(ValueError, match=r"\(7, 2\)\] of 9 and 2.*the robot's own --mod"):
        writers("diffusion")["lerobot"](wide, tmp_path / "out")
