"""GR00T-N1.7 beside LeRobot's port of it: from raw observation to robot action by NVIDIA's files
and LeRobot's, samples alone, at 1e-5 of the largest; its loss and gradients; and files written."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import Embodiment, Policy, load_policy, pack
from models.flow import flow
from models.formats import writers
from models.load import derived, inspect_checkpoint, trained_preparation
from tests.helpers.models.groot17_case import (
    BACKBONE,
    CAMERAS,
    CASE,
    FIXTURE,
    IMAGE_TOKEN,
    folder,
    observation,
)

OPTIONS = {"backbone": BACKBONE, "base": FIXTURE / "checkpoint"}
FORMS = {
    "nvidia/libero_sim": ("checkpoint", "libero_sim"),
    "nvidia/new_embodiment": ("checkpoint", "new_embodiment"),
    "lerobot/libero_sim": ("lerobot_libero", "libero_sim"),
    "lerobot/new_embodiment": ("lerobot_new", "new_embodiment"),
    "lerobot/plain": ("lerobot_plain", "plain"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """All forms of the case; the processors alone have a config.json beside them here."""
    path = tmp_path_factory.mktemp("groot17")
    for name in {name for name, _ in FORMS.values()}:
        folder(name, path)
    shutil.copytree(FIXTURE / "nvidia", path / "nvidia")
    told = json.loads((FIXTURE / "lerobot_libero" / "config.json").read_text())
    cameras = [f"observation.images.{camera}" for camera in CAMERAS["plain"]]
    picture = {"type": "VISUAL", "shape": [3, 256, 256]}
    told["input_features"] = dict.fromkeys(cameras, picture)
    told["action_decode_transform"] = "libero"
    (path / "lerobot_plain" / "config.json").write_text(json.dumps(told))
    return path


def options(name: str, tag: str) -> dict:
    if name == "checkpoint":
        return {"robot": tag, "backbone": BACKBONE}
    return OPTIONS


def near(ours, theirs) -> None:
    theirs = np.asarray(theirs)
    assert ours.shape == theirs.shape
    assert np.abs(np.asarray(ours) - theirs).max() <= 1e-5 * np.abs(theirs).max()


def words(tag: str, sample: int) -> np.ndarray:
    """Token ids of a sample without those of pictures."""
    ids = CASE[f"{tag}/in/input_ids"][sample]
    ids = ids[CASE[f"{tag}/in/attention_mask"][sample] == 1]
    return ids[ids != IMAGE_TOKEN]


@pytest.mark.parametrize("form", FORMS)
def test_preparation_is_the_ports(folders, form):
    """Ids, states, normalised chunks and decoded actions of every form."""
    name, tag = FORMS[form]
    found = inspect_checkpoint(folders / name, **options(name, tag))
    processor, robot = found.processor, found.processor.embodiments[0]
    policy = Policy(found.config.build(), {}, processor)
    for i in range(len(CASE[f"{tag}/state"])):
        raw = observation(tag, i)
        (request,) = policy.prepare(raw)
        np.testing.assert_array_equal(request.sample.text, words(tag, i))
        np.testing.assert_allclose(request.sample.state, CASE[f"{tag}/in/state"][i, 0], atol=1e-6)
        given, steps = CASE[f"{tag}/action"][i], robot.own.steps
        actions = np.zeros((processor.horizon, given.shape[1]), np.float32)
        actions[:steps] = given[:steps]
        _, chunk, mask = processor.numbers(raw["observation.state"][None], actions[None])
        assert mask[0].any(-1).sum() == steps
        np.testing.assert_allclose(chunk[0], CASE[f"{tag}/in/action"][i], atol=2e-6)
        model = CASE[f"{tag}/{'model_actions' if tag == 'plain' else 'action_pred'}"][i]
        acted = processor.actions(model, 0, raw["observation.state"])
        near(acted, CASE[f"{tag}/decoded"][i])


def test_pictures_of_the_processors_alone_are_the_ports(folders):
    """By alphabet, stretched and cut; patches of every 23rd row as the port has them."""
    found = inspect_checkpoint(folders / "lerobot_plain", **OPTIONS)
    assert found.processor.embodiments[0].cameras[0].endswith("front")
    (request,) = Policy(found.config.build(), {}, found.processor).prepare(observation("plain", 0))
    rows = []
    for image in request.sample.images:
        cut = image.reshape(8, 2, 16, 8, 2, 16, 3).transpose(0, 3, 1, 4, 6, 2, 5)
        rows.append(np.repeat(cut.reshape(-1, 3, 1, 256), 2, axis=2).reshape(256, -1))
    pixels = (np.concatenate(rows)[::23] / 255 - 0.5) / 0.5
    np.testing.assert_allclose(pixels, CASE["plain/in/pixel_values_every_23rd_row"], atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("form", [form for form in FORMS if "plain" not in form])
def test_an_observation_becomes_the_ports_actions(folders, form):
    name, tag = FORMS[form]
    policy = load_policy(folders / name, **options(name, tag))
    for i in range(len(CASE[f"{tag}/state"])):
        raw = observation(tag, i)
        (request,) = policy.prepare(raw)
        ((_, _, batch),) = policy.batches([request])
        noise, theirs = CASE[f"{tag}/noise"][i], CASE[f"{tag}/action_pred_alone{i}"][0]
        near(policy._sample(policy.params, batch, None, noise[None], None)[0, 0], theirs)
        state = raw["observation.state"]
        near(policy.infer(raw, noise=noise)["actions"], policy.processor.actions(theirs, 0, state))


@pytest.mark.slow
def test_loss_and_gradients_are_the_ports_and_a_samples_own(folders):
    """The port's for a sample alone, whose batch has no padding; a packed row's is the sum of its
    samples' alone."""
    tag = "new_embodiment"
    policy = load_policy(folders / "checkpoint", robot=tag, backbone=BACKBONE)
    state, given = CASE[f"{tag}/state"][0], CASE[f"{tag}/action"][0]
    actions = np.zeros((policy.processor.horizon, given.shape[1]), np.float32)
    actions[: len(given)] = given
    raw = observation(tag, 0)
    (image,) = (x for name, x in raw.items() if "images" in name)
    sample = policy.processor.sample([image], state, raw["task"], actions=actions)
    batch = policy.rows([sample])

    def loss(params, batch, time, noise):
        noised, target = flow.interpolate(batch.actions[:, :, None], noise, time)
        error = policy.model.field(params, batch)(noised, time).velocity - target
        counted = batch.action_mask & (batch.weight > 0)[..., None, None]
        return jnp.sum(error[:, :, 0] ** 2 * counted) / counted.sum()

    noise, time = CASE[f"{tag}/noise"][:, None, None], 1 - CASE[f"{tag}/time"][:, None, None]
    found = jax.jit(jax.value_and_grad(loss))
    value, gradient = found(policy.params, batch, time, noise)
    np.testing.assert_allclose(value, CASE[f"{tag}/loss"], rtol=1e-5)
    near(gradient["adapter"]["norm"]["scale"], CASE[f"{tag}/grad:action_head.vlln.weight"])
    norms = {
        "action_head.state_encoder.layer1.W": gradient["state_encoder"]["hidden"]["kernel"],
        "action_head.action_encoder.W2.W": gradient["action_encoder"]["mix"]["kernel"],
        "backbone.model.model.visual.merger.linear_fc2.weight": gradient["vision"]["merger"][
            "down"
        ]["kernel"],
        "action_head.model.transformer_blocks.0.norm1.linear.weight": gradient["dit"][
            "cross_blocks"
        ]["modulation"]["kernel"][0],
    }
    for name, leaf in norms.items():
        np.testing.assert_allclose(np.linalg.norm(leaf), CASE[f"{tag}/grad_norm:{name}"], rtol=1e-5)
    other = policy.processor.sample(
        [np.flipud(image)], -state, "close it", actions=actions[::-1], id=1
    )
    config = policy.model.config.for_pictures([x.shape[:2] for x in sample.images])
    layout = config.layout(prefix=64, samples=2, images=2)
    packed = pack([[sample, other]], layout)
    both = (np.repeat(time, 2, axis=1), np.repeat(noise, 2, axis=1))
    value, together = found(policy.params, packed, *both)
    alone = [found(policy.params, policy.rows([x]), time, noise) for x in (sample, other)]
    np.testing.assert_allclose(value, np.mean([x for x, _ in alone]), rtol=1e-5)
    means = jax.tree.map(lambda a, b: (a + b) / 2, *(x for _, x in alone))
    for ours, wanted in zip(jax.tree.leaves(together), jax.tree.leaves(means), strict=True):
        np.testing.assert_allclose(ours, wanted, atol=1e-5 * max(np.abs(wanted).max(), 1e-2))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("written", ["groot", "lerobot"])
def test_a_policy_written_and_read_again_is_the_same(folders, tmp_path, form, written):
    """Every parameter and every prepared number, to the bit, and the names of the files' arrays."""
    name, tag = FORMS[form]
    policy = load_policy(folders / name, **options(name, tag))
    if form == "lerobot/plain" and written == "groot":
        with pytest.raises(ValueError, match="gripper"):
            writers("groot17")[written](policy, tmp_path / "out")
        return
    writers("groot17")[written](policy, tmp_path / "out")
    again = load_policy(tmp_path / "out")
    jax.tree.map(np.testing.assert_array_equal, policy.params, again.params)
    raw = observation(tag, 0)
    ((before,), (after,)) = (each.prepare(raw) for each in (policy, again))
    for ours, theirs in zip(before.sample.images, after.sample.images, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(before.sample.text, after.sample.text)
    np.testing.assert_array_equal(before.sample.state, after.sample.state)
    model = np.random.default_rng(0).normal(size=(12, 18)).astype(np.float32)
    acted = (p.processor.actions(model, 0, raw["observation.state"]) for p in (policy, again))
    np.testing.assert_array_equal(*acted)
    assert replace(again.model.config, image_size=policy.model.config.image_size) == replace(
        policy.model.config, euler_steps=again.model.config.euler_steps
    )


def test_training_begins_with_the_preparation_of_the_files(folders):
    """Pictures then have one size, and the backbone's files are found beside the checkpoint."""
    found = inspect_checkpoint(folders / "checkpoint", robot="libero_sim")
    made = trained_preparation(folders / "checkpoint", found.config)
    robots = [Embodiment.in_model_units(("front",), 6, 6)]
    begun = derived(made, found.config, robots)
    assert begun.prompts == found.processor.prompts
    assert begun.pictures == replace(found.processor.pictures, any_size=False)
    assert begun.pictures.crop == 0.95
    found.config.check_processor(replace(begun, embodiments=tuple(robots)))


def test_what_is_not_supported_is_refused(folders, tmp_path):
    with pytest.raises(ValueError, match="backbone"):
        inspect_checkpoint(shutil.copytree(folders / "lerobot_new", tmp_path / "alone"))
    with pytest.raises(ValueError, match="libero_sim"):
        inspect_checkpoint(folders / "checkpoint", robot="gr1", backbone=BACKBONE)
    target = shutil.copytree(folders / "checkpoint", tmp_path / "changed")
    file = target / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "use_vlln": False}))
    with pytest.raises(ValueError, match="use_vlln"):
        inspect_checkpoint(target, robot="libero_sim", backbone=BACKBONE)
