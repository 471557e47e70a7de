"""`load_policy` tells checkpoints apart by looking, gives the numbers of their own codes, and
refuses what does not fit in one sentence."""

import json
import shutil

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file

from models import load_policy
from models.families.pi import lerobot, openpi
from models.families.pi.released import CAMERAS
from models.load import like_model
from tests.helpers.models.openpi_numbers import FIXTURES as OPENPI
from tests.helpers.models.openpi_numbers import TOLD, close, observation
from tests.helpers.models.tiny_policy import GROOT


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    with np.load(OPENPI / "pi05" / "case.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def policy():
    return load_policy(OPENPI / "pi05", **TOLD["pi05"])


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["transformers", "lerobot"])
@pytest.mark.parametrize("padding", ["masked", "released"])
def test_groot_gives_the_ports_numbers_from_its_own_inputs(writer, padding, tmp_path):
    folder = tmp_path / "groot"
    shutil.copytree(GROOT / writer, folder)
    shutil.copy(GROOT / "config.json", folder)
    with np.load(GROOT / "cases.npz") as file:
        case = {k[7:]: file[k] for k in file.files if k.startswith("padded/")}
    policy = load_policy(folder, padding=padding)
    names = ("images", "image_sample", "input_ids", "attention_mask", "state", "embodiment_id")
    seen = {name: case[name] for name in names}
    actions = policy.infer(seen, noise=case["noise"])["actions"]
    alone = "alone/" if padding == "masked" else ""
    close(actions, case[f"{alone}sampled"])
    if padding == "released":
        loss = policy.loss(
            seen,
            case["actions"],
            action_mask=case["action_mask"],
            noise=case["noise"],
            time=1 - case["t"],
        )
        close(loss, case["loss"])


@pytest.mark.slow
def test_lerobots_files_of_the_same_weights_give_the_same_actions(policy, arrays, tmp_path):
    told = lerobot.LerobotConfig(horizon=6, text=200, state_dim=10, cameras=CAMERAS)
    lerobot.export(policy.params, told, tmp_path / "port")
    port = load_policy(tmp_path / "port")
    assert port.model.config.horizon == 6
    seen, noise = observation(arrays), arrays["sample_noise"]
    np.testing.assert_array_equal(
        port.infer(seen, noise)["actions"], policy.infer(seen, noise)["actions"]
    )


def test_a_policy_exported_to_openpi_comes_back_the_same(policy, tmp_path):
    openpi.export(policy.params, tmp_path)
    again = load_policy(tmp_path, **TOLD["pi05"])
    jax.tree.map(np.testing.assert_array_equal, again.params, policy.params)


@pytest.mark.slow
def test_parameters_go_to_the_mesh_and_dtype_asked_for(tmp_path, policy, arrays):
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("data", "fsdp"))
    spread = load_policy(OPENPI / "pi05", mesh=mesh, dtype="bfloat16", **TOLD["pi05"])
    kernel = spread.params["language"]["layers"]["mlp"]["up"]["kernel"]
    assert kernel.dtype == "bfloat16"
    assert kernel.addressable_shards[0].data.size == kernel.size // 2
    actions = spread.infer(observation(arrays), arrays["sample_noise"])["actions"]
    assert np.abs(actions - arrays["sampled"]).mean() < 0.1


@pytest.mark.slow
def test_one_observation_needs_no_batch_axis(policy, arrays):
    batched = policy.infer(observation(arrays), arrays["sample_noise"])["actions"]
    alone = {
        "image": {name: arrays["images"][3, i] for i, name in enumerate(CAMERAS)},
        "image_mask": {name: arrays["image_mask"][3, i] for i, name in enumerate(CAMERAS)},
        "state": arrays["state"][3],
        "tokenized_prompt": arrays["tokens"][3][arrays["token_mask"][3]],
    }
    close(policy.infer(alone, arrays["sample_noise"][3])["actions"], batched[3], 1e-5)


def test_openpis_statistics_scale_state_and_actions():
    scaled = load_policy(OPENPI / "pi0", **TOLD["pi0"])
    with np.load(OPENPI / "processor.npz") as file:
        case = dict(file)
    robot = scaled.processor.embodiments[0]
    np.testing.assert_allclose(
        robot.state(case["raw/state"]), case["z/normalized/state"], rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(
        scaled.processor.actions(case["model/actions"]),
        case["z/unnormalized/actions"][..., :6],
        rtol=1e-5,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"image": {"wrist": np.zeros((21, 21, 3), np.uint8)}},
            r"unknown entries \['wrist'\]",
        ),
        ({"tokenized_prompt": np.ones(201, np.int32)}, "201 tokens long, .* at most 200"),
        ({"tokenized_prompt": np.array([300])}, "holds 300; expected token ids from 0 to 299"),
        ({"prompt": "lift"}, "prompt twice, as .*'tokenized_prompt'"),
        ({"state": np.zeros(3)}, "has 3 dims; this policy reads 10"),
        ({"image_masks": {}}, r"unknown entries \['image_masks'\]"),
        ({"image": {CAMERAS[0]: np.full((21, 21, 3), 9.0)}}, "float64 .* from 9 to 9; expected"),
    ],
)
def test_an_observation_that_does_not_fit_is_refused_in_one_sentence(policy, change, message):
    seen = {
        "image": {CAMERAS[0]: np.zeros((21, 21, 3), np.uint8)},
        "state": np.zeros(10),
        "tokenized_prompt": np.ones(4, np.int32),
    }
    with pytest.raises(ValueError, match=message):
        policy.infer(seen | change)


def test_text_without_a_tokenizer_is_refused(policy):
    seen = {"image": {}, "state": np.zeros(10), "prompt": "lift the block"}
    with pytest.raises(ValueError, match="came without a tokenizer"):
        policy.infer(seen)


def test_a_checkpoint_of_other_dims_and_nan_weights_are_refused(policy, tmp_path):
    told = lerobot.LerobotConfig(horizon=6, text=200)
    lerobot.export(policy.params, told, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.action_out_proj.bias"
    heads = {"vision_heads": "5", "kv_heads": "1"}
    save_file(tensors | {name: tensors[name] * np.nan}, file, heads)
    with pytest.raises(ValueError, match="NaN or infinite weights in 1 of"):
        load_policy(tmp_path)
    save_file(tensors | {name: tensors[name][1:]}, file, heads)
    with pytest.raises(ValueError, match="action_out"):
        load_policy(tmp_path)
    del tensors[name]
    save_file(tensors, file, heads)
    with pytest.raises(ValueError, match="action_out"):
        load_policy(tmp_path)


def test_a_sampler_without_a_step_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"steps is 0; .* at least one step"):
        load_policy(tmp_path, euler_steps=0)


def test_what_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_policy(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        load_policy(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"type": "vqbet", "chunk_size": 3}))
    save_file({"x": np.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="of type 'vqbet'"):
        load_policy(tmp_path)


def test_like_model_describes_every_parameter(policy):
    like = like_model(policy.model, "bfloat16")
    assert jax.tree.map(np.shape, like) == jax.tree.map(np.shape, policy.params)
