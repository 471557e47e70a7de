"""A GR00T-N1.5 of LeRobot's or NVIDIA's files answers raw observations as LeRobot's port run whole
does: pictures of any size, the robot's state and words in, actions in its units out."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest

from models import load_policy
from models.families.groot.checkpoint import write
from models.families.groot.eagle_turn import PICTURE
from models.inputs.packed_batch import pack
from models.inputs.pictures import StretchedMiddle
from tests.helpers.models.groot_whole import (
    CASES,
    VIDEO,
    WHOLE,
    lerobots_folder,
    nvidias_folder,
    observed,
    picture,
    write_modality,
)


@pytest.fixture(scope="module")
def recorded() -> dict[str, np.ndarray]:
    with np.load(WHOLE / "case.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return load_policy(lerobots_folder(tmp_path_factory.mktemp("groot") / "mine"))


@pytest.mark.parametrize("case", range(len(CASES)))
def test_a_raw_observation_is_answered_as_by_lerobots_port_run_whole(policy, recorded, case):
    found = policy.infer(observed(CASES[case]), noise=recorded["noise"][case])["actions"]
    wanted = recorded[f"{case}/actions"]
    assert found.shape == wanted.shape == (16, 7)
    assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("case", range(len(CASES)))
def test_what_the_model_reads_is_what_the_ports_processor_prepares(policy, recorded, case):
    (request,) = policy.prepare(observed(CASES[case]))
    sample, processor = request.sample, policy.processor
    marks = np.full(256, processor.tokenizer.id(PICTURE))
    ids = np.insert(sample.text, np.repeat(sample.image_at, 256), np.tile(marks, 2))
    np.testing.assert_array_equal(ids, recorded[f"{case}/input_ids"])
    rows = np.stack([image[::16] for image in sample.images])
    np.testing.assert_array_equal(rows, recorded[f"{case}/rows"])
    np.testing.assert_allclose(sample.state, recorded[f"{case}/state"], atol=2e-6)
    assert policy.model.config.projectors == tuple(recorded[f"{case}/embodiment"])


@pytest.mark.parametrize("number", range(3))
def test_nvidias_transforms_of_a_picture_are_ours_but_for_rounding(number):
    size = ((480, 640), (95, 131), (224, 224))[number]
    name = CASES[number]["pictures"]["observation.images.wrist"]
    with np.load(WHOLE / "crops.npz") as file:
        wanted = file[str(number)].astype(int)
    apart = np.abs(StretchedMiddle(224)(picture(name, size))[::16] - wanted)
    assert apart.max() <= 1
    assert apart.mean() < 5e-3


def test_nvidias_files_of_the_same_weights_and_statistics_act_alike(policy, recorded, tmp_path):
    modality = write_modality(tmp_path / "modality.json")
    theirs = load_policy(nvidias_folder(tmp_path / "nvidia"), modality=modality)
    seen = observed(CASES[0])
    given = {
        "state.arm": seen["observation.state"][None, :5],
        "state.gripper": seen["observation.state"][None, 5:],
        "annotation.human.task_description": [seen["task"]],
    }
    for name in VIDEO:
        full = f"observation.images.{name}"
        given[f"video.{name}"] = seen[full][None]
        seen[full] = StretchedMiddle(224)(seen[full])
    noise = recorded["noise"][:1]
    found = theirs.infer(given, noise=noise)["actions"]
    np.testing.assert_array_equal(found[0], policy.infer(seen, noise=noise[0])["actions"])


@pytest.mark.slow
def test_a_policy_survives_the_road_to_nvidias_files(policy, recorded, tmp_path):
    write(policy, tmp_path / "exported")
    again = load_policy(tmp_path / "exported")
    jax.tree.map(np.testing.assert_array_equal, again.params, policy.params)
    assert again.model.config == policy.model.config
    seen = observed(CASES[0])
    cameras = [f"observation.images.{name}" for name in VIDEO]
    fitted = {camera: StretchedMiddle(224)(seen[camera]) for camera in cameras}
    given = {
        "state.all": seen["observation.state"],
        "annotation.human.task_description": seen["task"],
        **{f"video.{name}": seen[f"observation.images.{name}"] for name in VIDEO},
    }
    noise = recorded["noise"][0]
    found = again.infer(given, noise=noise)["actions"]
    wanted = policy.infer(seen | fitted, noise=noise)["actions"]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_chats_pictures_packed_beside_others_are_as_alone(policy, dropout):
    requests = [policy.prepare(observed(case))[0] for case in CASES[:2]]
    config, draw = policy.model.config, np.random.default_rng(0)
    stacks = {name: replace(getattr(config, name), dropout=dropout) for name in ("adapter", "dit")}
    model = config.changed(**stacks).build()
    samples = [
        replace(
            request.sample,
            actions=draw.standard_normal((16, 32)).astype(np.float32),
            action_mask=np.ones((16, 32), bool),
            id=i,
        )
        for i, request in enumerate(requests)
    ]
    loss = jax.jit(model.loss)

    def total(rows, prefix, images, slots):
        layout = config.layout(prefix=prefix, samples=slots, images=images, text=200)
        return np.array(loss(policy.params, pack(rows, layout), jax.random.key(0)))

    alone = [total([[sample]], 700, 2, 1) for sample in samples]
    together = total([samples], 1300, 4, 2)
    np.testing.assert_allclose(together, np.sum(alone, axis=0), rtol=1e-5)
    if dropout:
        again = jax.jit(policy.model.loss)(
            policy.params,
            pack([[samples[0]]], config.layout(prefix=700, samples=1, images=2, text=200)),
            jax.random.key(0),
        )
        assert abs(float(again[0]) - alone[0][0]) > 1e-4 * float(again[0])


@pytest.mark.parametrize(
    ("harm", "options", "told"),
    [
        ("merges", {}, "merges.txt: no such file"),
        ("half", {}, r"merges.txt has no rule for \d+ of the tokens of vocab.json, such as"),
        ("range", {}, r"state.arm has 5 statistics, but modality.json gives it 4 dims"),
        ("", {"modality": None}, "does not give the order of the cameras of 'new_embodiment'"),
        ("", {"robot": "gr2"}, r"has statistics of \['new_embodiment'\]"),
        (
            "vocabulary",
            {},
            "tokenizer's <IMG_CONTEXT> has the id 331, but model.image_token is 330",
        ),
    ],
)
def test_files_that_do_not_fit_are_refused_in_a_sentence(harm, options, told, tmp_path):
    folder = nvidias_folder(tmp_path / "nvidia")
    modality = write_modality(tmp_path / "modality.json")
    if harm == "merges":
        (folder / "eagle/merges.txt").unlink()
    if harm == "half":
        whole = (folder / "eagle/merges.txt").read_text()
        (folder / "eagle/merges.txt").write_text(whole[: len(whole) // 2])
    if harm == "range":
        modality.write_text(modality.read_text().replace('"end": 5', '"end": 4'))
    if harm == "vocabulary":
        config = json.loads((folder / "eagle/config.json").read_text())
        changed = config | {"image_token_index": config["image_token_index"] - 1}
        (folder / "eagle/config.json").write_text(json.dumps(changed))
    with pytest.raises((ValueError, FileNotFoundError), match=told):
        load_policy(folder, **{"modality": modality} | options)


def test_a_policy_without_its_tokenizer_says_what_to_give(tmp_path):
    folder = lerobots_folder(tmp_path / "mine", tokenizer=False)
    policy = load_policy(folder)
    with pytest.raises(ValueError, match=r"the folder of its vocab\.json and merges\.txt"):
        policy.prepare(observed(CASES[0]))
    again = load_policy(folder, tokenizer=WHOLE / "eagle")
    assert len(again.prepare(observed(CASES[0]))[0].sample.text) > 20
