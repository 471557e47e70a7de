"""ACT's policies act, learn and are saved as LeRobot 0.6.1's own classes have them. Its cases were
made by these, with dropout 0; a ResNet's weights are made by rule."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import safe_open

from models import load_policy
from models.checkpoints.layout import exported
from models.families.act.format import _joined, table
from models.families.act.model import ActConfig, line
from models.formats import writers
from models.inputs.packed_batch import count_code, counts_of, most_images, pack
from models.layers.vision.resnet import ResnetConfig
from tests.helpers.models.policy_cases import (
    CASES,
    arrays,
    as_older,
    case_policy,
    raw,
    written_cameras,
)

NAMES = ("act_two_cameras", "act_ensemble")


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def folder(name, tmp_path_factory):
    fixed = {"model.vae_encoder_pos_enc": line(8, 32)[None]}
    return case_policy(name, tmp_path_factory.mktemp("act") / name, fixed)


@pytest.fixture(scope="module")
def policy(folder):
    return load_policy(folder)


def acted(policy, case):
    """A robot's actions, one by one: a chunk, of which `n_action_steps` are executed."""
    session, steps, found = policy.session(), policy.model.config.n_action_steps, []
    for begin in range(0, len(case["actions"]), steps):
        executed = steps if begin else None
        answer = policy.infer(raw(case, begin), session=session, executed=executed)
        assert len(answer["actions"]) == len(policy.model.config.answered)
        found += list(answer["actions"][:steps])
    return np.stack(found[: len(case["actions"])])


def test_raw_observations_give_the_robots_actions(name, policy, folder):
    case = arrays(name)
    np.testing.assert_allclose(acted(policy, case), case["actions"], rtol=0, atol=5e-6)
    policy = load_policy(folder, n_action_steps=len(case["chunk"]))
    chunk = policy.infer(raw(case, 0), session=policy.session())["actions"]
    np.testing.assert_allclose(chunk, case["chunk"], rtol=0, atol=5e-6)


def batch_of(policy, name, rows):
    """A case's training batch, of which each row has the samples with these numbers."""
    case, processor = arrays(name), policy.processor
    robot, config = processor.embodiments[0], policy.model.config
    samples = [
        processor.sample(
            [case[f"train/raw/{camera}"][i] for camera in robot.cameras],
            np.concatenate([case[f"train/{part}"][i] for part in robot.keys.state]),
            "",
            actions=case["train/action"][i],
            valid=~case["train/action_is_pad"][i],
            id=i,
        )
        for i in range(len(case["train/action"]))
    ]
    each, longest = config.layout(prefix=0, samples=0, images=0), max(map(len, rows))
    most = counts_of(most_images(samples, each), len(each.groups))
    layout = config.layout(prefix=64, samples=longest, images=int(count_code(most * longest)))
    packed = pack([[samples[i] for i in row] for row in rows], layout)
    noise = np.zeros((len(rows), longest, config.latent), np.float32)
    for i, row in enumerate(rows):
        noise[i, : len(row)] = case["train/latent_noise"][list(row)]
    return jax.tree.map(jnp.asarray, packed), jnp.asarray(noise)


@pytest.fixture(scope="module")
def learnt(policy, name):
    """Loss, terms and gradients for samples alone in a row, and for some that share one."""

    def run(rows):
        batch, noise = batch_of(policy, name, rows)
        loss = lambda p: policy.model.losses(p, batch, jax.random.key(0), noise)  # noqa: E731
        (total, (count, terms)), grown = jax.jit(jax.value_and_grad(loss, has_aux=True))(
            policy.params
        )
        terms = {n: float(x / count) for n, x in terms.items()}
        return float(total / count), terms, jax.tree.map(lambda g: np.asarray(g / count), grown)

    return run([(0,), (1,), (2,)]), run([(0, 2), (1,)])


def test_loss_and_gradients_are_lerobots(name, policy, learnt):
    case, (loss, terms, grown) = arrays(name), learnt[0]
    np.testing.assert_allclose(loss, case["train/loss"], rtol=1e-6)
    np.testing.assert_allclose(terms["l1"], case["train/l1_loss"], rtol=1e-6)
    np.testing.assert_allclose(terms["kl"], case["train/kld_loss"], rtol=1e-6)
    norms = json.loads((CASES / name / "gradients.json").read_text())
    whole = norms.pop("total")
    theirs = _joined(exported(grown, table(policy.model.config), "gradients"))
    found = {n: float(np.linalg.norm(make())) for n, (_, make) in theirs.items()}
    for key, norm in norms.items():  # those of attention to zeros alone are rounding errors
        np.testing.assert_allclose(found[key], norm, rtol=1e-4, atol=1e-7 * whole, err_msg=key)
    np.testing.assert_allclose(sum(found[n] ** 2 for n in norms) ** 0.5, whole, rtol=1e-6)


def test_a_samples_loss_does_not_depend_on_what_it_is_packed_with(learnt):
    (alone, _, grown), (packed, _, other) = learnt
    np.testing.assert_allclose(packed, alone, rtol=1e-6)
    pairs = list(zip(jax.tree.leaves(grown), jax.tree.leaves(other), strict=True))
    largest = max(np.abs(a).max() for a, _ in pairs)
    for a, b in pairs:
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5 * largest)


def test_a_policy_that_is_written_is_the_file_that_was_read(name, policy, folder, tmp_path):
    writers("act")["lerobot"](policy, tmp_path / name)
    case = arrays(name)
    again = load_policy(tmp_path / name)
    np.testing.assert_array_equal(
        again.infer(raw(case, 1))["actions"], policy.infer(raw(case, 1))["actions"]
    )
    files = [path / "model.safetensors" for path in (folder, tmp_path / name)]
    with safe_open(files[0], "np") as theirs, safe_open(files[1], "np") as ours:
        assert list(ours.keys()) == list(theirs.keys())
        for key in theirs.keys():  # noqa: SIM118
            np.testing.assert_array_equal(ours.get_tensor(key), theirs.get_tensor(key), key)
    for file in ("config.json", "policy_preprocessor.json", "policy_postprocessor.json"):
        saved, wrote = (json.loads((path / file).read_text()) for path in (folder, tmp_path / name))
        saved.pop("pretrained_revision", None)  # 0.4 refuses it
        assert wrote == saved


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    fixed = {"model.vae_encoder_pos_enc": line(8, 32)[None]}
    return load_policy(case_policy(NAMES[0], tmp_path_factory.mktemp("act") / "seeing", fixed))


def test_a_name_of_lerobots_own_stays_a_cameras_name(seeing, tmp_path):
    names = written_cameras(seeing, ("observation.image", "wrist"), tmp_path / "out")
    assert names == ["observation.image", "observation.images.wrist"]


def test_a_policy_whose_tower_lerobot_cannot_hold_is_not_written(seeing, tmp_path):
    for tower in (ResnetConfig(norm="group"), ResnetConfig(norm="running", width=16)):
        other = replace(seeing, model=seeing.model.config.changed(tower=tower).build())
        with pytest.raises(ValueError, match=r"train with --model.tower.width 64 --model.tower.n"):
            writers("act")["lerobot"](other, tmp_path / "out")


def test_a_policy_from_before_0_4_acts_the_same(name, policy, folder, tmp_path):
    case, older = arrays(name), load_policy(as_older(folder, tmp_path / "older"))
    np.testing.assert_allclose(
        older.infer(raw(case, 1))["actions"], policy.infer(raw(case, 1))["actions"], atol=1e-6
    )


def test_the_loss_of_lerobot_0_4_counts_padded_steps(seeing):
    model = replace(seeing.model.config, loss_mean="all").build()
    batch, noise = batch_of(seeing, NAMES[0], [(0,), (1,), (2,)])
    total, (count, _) = jax.jit(model.losses)(seeing.params, batch, jax.random.key(0), noise)
    np.testing.assert_allclose(total / count, 61.886, atol=5e-4)


def changed(**values):
    def change(folder):
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed(n_obs_steps=2), "n_obs_steps is 2; ACT reads 1"),
        (changed(n_action_steps=9), "n_action_steps is 9; expected 1 to chunk_size, 5"),
        (changed(n_action_steps=2), "temporal_ensemble_coeff is 0.01; ensembling needs"),
        (changed(replace_final_stride_with_dilation=True), "dilation is True; only false"),
        (changed(vision_backbone="vgg11"), "resnet.name is 'vgg11'; expected one of"),
        (changed(feedforward_activation="glu"), "activation is 'glu'"),
        (changed(dim_model=24), "of another shape"),
        (changed(pre_norm=True), "model.encoder.norm.weight"),
        (changed(gripper=1), "unknown fields"),
    ],
)
def test_files_that_do_not_fit_are_refused_by_field(change, message, tmp_path):
    change(case_policy(NAMES[1], tmp_path / "policy"))
    with pytest.raises(ValueError, match=message):
        load_policy(tmp_path / "policy")


SMALL = ActConfig(
    width=16, heads=2, hidden=24, encoder_depth=2, vae_depth=1, latent=4, image_size=32, cameras=1,
    state_dim=3, action_dim=2, horizon=4, n_action_steps=4,
)  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"pre_norm": True, "activation": "gelu"},
        {"vae": False, "decoder_depth": 3},
        {"state_input": "none"},
        {"environment_dim": 3, "cameras": 0},
        {"environment_dim": 1, "camera_sizes": ((32, 64), (64, 32))},
    ],
)
def test_every_form_has_a_name_for_each_parameter(changes):
    config = replace(SMALL, **changes)
    params = jax.eval_shape(config.build().init, jax.random.key(0))
    flat = flatten_dict(params, sep="/")
    blank = {name: np.zeros(x.shape, np.float32) for name, x in flat.items()}
    theirs = _joined(exported(unflatten_dict(blank, sep="/"), table(config), "ACT"))
    assert ("model.encoder.norm.weight" in theirs) == config.pre_norm
    assert ("model.vae_encoder_cls_embed.weight" in theirs) == config.vae
    assert ("model.backbone.conv1.weight" in theirs) == bool(config.sizes)
    single = theirs["model.encoder_1d_feature_pos_embed.weight"][0][0]
    assert single == 1 + bool(config.robot_dim) + bool(config.environment_dim)
