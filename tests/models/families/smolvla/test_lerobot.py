"""SmolVLA against what LeRobot 0.6.1's own classes computed of the same files (actions of raw
observations, loss and gradient norms of a batch of unlike tasks), and its files written again."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models import Policy, load_policy
from models.checkpoints.layout import exported, their_arrays
from models.families.smolvla import checkpoint
from models.families.smolvla.expert import crossing
from models.families.smolvla.export import write
from models.families.smolvla.model import SmolvlaConfig
from models.families.smolvla.names import HEAD, table
from models.flow import flow
from models.formats import find_format
from models.inputs.packed_batch import PackedBatch, pack
from tests.helpers.models.policy_cases import written_cameras
from tests.helpers.models.rule_weights import whole

FIXTURES = Path(__file__).parents[3] / "fixtures" / "smolvla"
VLM = "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"
NAMES = ("two_cameras", "trained_vlm")
Case = Mapping[str, np.ndarray]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("smolvla")
    return {name: whole(FIXTURES / name, root / name) for name in NAMES}.__getitem__


@pytest.fixture(scope="module")
def policies(folders) -> Callable[[str], Policy]:
    made = {name: load_policy(folders(name)) for name in NAMES}
    return made.__getitem__


def arrays(name: str) -> dict[str, np.ndarray]:
    with np.load(FIXTURES / name / "case.npz") as file:
        return dict(file)


def observation(case: Case, step: int) -> dict[str, Any]:
    seen = {key[4:]: x[step] for key, x in case.items() if key.startswith("raw/")}
    return {**seen, "task": str(case["task"])}


def acted(policy: Policy, case: Case, every: int) -> np.ndarray:
    """Actions as the robot executes them, `every` of a chunk."""
    actions: list[np.ndarray] = []
    while len(actions) < len(case["actions"]):
        noise = case["noise"][len(actions) // every][0]
        chunk = policy.infer(observation(case, len(actions)), noise=noise)["actions"]
        actions += list(chunk[:every])
    return np.stack(actions[: len(case["actions"])])


def training_batch(policy: Policy, case: Case, folder: Path) -> PackedBatch:
    """All samples in one row, which has a slot more."""
    told = json.loads((folder / "config.json").read_text())
    cameras = [n for n, x in told["input_features"].items() if x["type"] == "VISUAL"]
    samples = [
        policy.processor.sample(
            [case[f"train/raw/{camera}"][i] for camera in cameras],
            case["train/observation.state"][i],
            str(task),
            actions=case["train/action"][i],
            valid=~case["train/action_is_pad"][i],
            id=i,
        )
        for i, task in enumerate(case["train/task"])
    ]
    for i, sample in enumerate(samples):
        told_tokens = case["train/tokens"][i][case["train/token_mask"][i].astype(bool)]
        np.testing.assert_array_equal(sample.text, told_tokens)
    config, images = policy.model.config, len(samples) * len(cameras)
    text = sum(len(sample.text) for sample in samples)
    prefix = images * config.tokens_per_image + text + len(samples)
    layout = config.layout(
        prefix=prefix + 3, samples=len(samples) + 1, images=images + 1, text=text + 2
    )
    return pack([samples], layout)


@pytest.fixture
def drawn(monkeypatch) -> Callable[[Case], None]:
    """Makes `flow.draw` give a case's noise and times."""

    def use(case: Case) -> None:
        def draw(key: Any, ids: Any, chunks: int, shape: Any) -> Any:
            pad = ids.shape[1] - len(case["train/time"])
            noise = np.pad(case["train/noise"], ((0, pad), (0, 0), (0, 0)))[None, :, None]
            return jnp.asarray(np.pad(case["train/time"], (0, pad)))[None, :, None], noise

        monkeypatch.setattr(flow, "draw", draw)

    return use


@pytest.mark.parametrize("name", NAMES)
def test_raw_observations_become_lerobots_actions(name, policies, folders):
    case, told = arrays(name), json.loads((folders(name) / "config.json").read_text())
    found = acted(policies(name), case, told["n_action_steps"])
    np.testing.assert_allclose(found, case["actions"], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_of_a_packed_row_are_lerobots(name, policies, folders, drawn):
    policy, case = policies(name), arrays(name)
    batch = training_batch(policy, case, folders(name))
    drawn(case)

    def mean(params: Any) -> jax.Array:
        total, count = policy.model.loss(params, batch, jax.random.key(0))
        return total / count

    loss, gradients = jax.jit(jax.value_and_grad(mean))(policy.params)
    assert abs(float(loss) - float(case["train/loss"])) < 1e-5
    theirs = exported(gradients, table(len(policy.model.config.crosses)), "A checkpoint")
    wanted = json.loads((folders(name) / "gradients.json").read_text())
    norms = {key: np.linalg.norm(theirs[key][1]()) for key in wanted if key != "total"}
    del wanted["total"]
    np.testing.assert_allclose([*norms.values()], [*wanted.values()], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_the_older_loss_counts_all_dims_and_steps(policies, folders, drawn):
    policy, case = policies("two_cameras"), arrays("two_cameras")
    batch = training_batch(policy, case, folders("two_cameras"))
    drawn(case)
    older = replace(policy.model.config, padded_loss=True).build()
    total, count = jax.jit(older.loss)(policy.params, batch, jax.random.key(0))
    samples, steps, dims = case["train/noise"].shape
    assert count == samples * steps * dims
    actions = np.zeros_like(case["train/noise"])
    actions[..., :6] = np.asarray(batch.actions)[0, :samples, :, :6]
    actions[1:, -2:] = actions[1:, -3:-2]  # the last step of the episode again
    time, noise = case["train/time"], case["train/noise"]
    noised, target = flow.interpolate(jnp.asarray(actions), jnp.asarray(noise), jnp.asarray(time))
    pad = ((0, 0), (0, 1), (0, 0), (0, 0), (0, 0))
    shown = jnp.pad(noised[None, :, None], pad), jnp.pad(jnp.asarray(time)[None, :, None], pad[:3])
    velocity = jax.jit(policy.model.field(policy.params, batch))(*shown).velocity
    wanted = ((velocity[0, :samples, 0] - target) ** 2).sum()
    np.testing.assert_allclose(total, wanted, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_files_written_again_act_the_same(name, policies, folders, tmp_path):
    policy, case = policies(name), arrays(name)
    write(policy, tmp_path / "again")
    ours, theirs = (load_file(x / "model.safetensors") for x in (tmp_path / "again", folders(name)))
    assert set(ours) == set(theirs)
    assert not ours.pop(HEAD).any()  # nothing reads it
    for key, value in ours.items():
        np.testing.assert_array_equal(value, theirs[key], err_msg=key)
    again = load_policy(tmp_path / "again")
    assert again.model == policy.model
    assert again.processor.prompts == policy.processor.prompts
    shown = observation(case, 0)
    first, second = (x.infer(shown, noise=case["noise"][0][0]) for x in (policy, again))
    np.testing.assert_array_equal(first["actions"], second["actions"])
    with pytest.raises(ValueError, match="already exists"):
        write(policy, tmp_path / "again")


def test_a_name_of_lerobots_own_stays_a_cameras_name(policies, tmp_path):
    names = written_cameras(
        policies("two_cameras"), ("observation.image", "wrist"), tmp_path / "out"
    )
    assert names == ["observation.image", "observation.images.wrist"]


@pytest.mark.parametrize("variant", ["", "so100-blue_"])
def test_files_from_before_processors_have_their_statistics_among_the_weights(
    variant, policies, folders, tmp_path
):
    old, whole_policy = tmp_path / "old", folders("two_cameras")
    (old / VLM).mkdir(parents=True)
    for file in (whole_policy / VLM).iterdir():
        (old / VLM / file.name).write_bytes(file.read_bytes())
    told = json.loads((whole_policy / "config.json").read_text())
    for name in ("use_peft", "pretrained_path", "pretrained_revision"):
        del told[name]
    (old / "config.json").write_text(json.dumps(told))
    weights = load_file(whole_policy / "model.safetensors")
    (kept,) = whole_policy.glob("policy_preprocessor_step_5*")
    for key, value in load_file(kept).items():
        feature, _, kind = key.rpartition(".")
        if feature in ("observation.state", "action") and kind in ("mean", "std"):
            module = "unnormalize_outputs" if feature == "action" else "normalize_inputs"
            buffer = f"{variant}buffer_{feature.replace('.', '_')}"
            weights[f"{module}.{buffer}.{kind}"] = value
    save_file(
        {k.replace("model.", "model._orig_mod.", 1): x for k, x in weights.items()},
        old / "model.safetensors",
    )
    found, wanted = load_policy(old), policies("two_cameras")
    assert found.processor == wanted.processor
    jax.tree.map(np.testing.assert_array_equal, found.params, wanted.params)


@pytest.mark.slow
def test_a_period_of_layers_is_only_how_they_are_kept(policies, folders, monkeypatch):
    """Layers one by one, as where the period does not divide their number, act as in stacks."""
    case, policy = arrays("two_cameras"), policies("two_cameras")
    assert policy.model.config.crosses == (False, True)
    monkeypatch.setattr(SmolvlaConfig, "crosses", (False, True) * 2)
    apart = load_policy(folders("two_cameras"))
    shown = observation(case, 0)
    first, second = (x.infer(shown, noise=case["noise"][0][0]) for x in (policy, apart))
    np.testing.assert_allclose(first["actions"], second["actions"], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("depth", "every", "crosses"),
    [
        (16, 2, (False, True)),
        (3, 2, (False, True, False)),
        (6, 3, (False, True, True)),
        (4, 1, (False,)),
        (2, 0, (True,)),
        (2, 5, (False, True)),
    ],
)
def test_kinds_of_the_experts_layers_repeat(depth, every, crosses):
    assert crossing(depth, every) == crosses


def test_a_missing_camera_costs_nothing_and_is_not_seen(policies):
    case, policy = arrays("two_cameras"), policies("two_cameras")
    shown = observation(case, 0)
    lacking = {k: x for k, x in shown.items() if k != "observation.images.camera2"}
    masked = {**shown, "observation.images.camera2_padding_mask": np.array(False)}
    whole_chunk, without, hidden = (
        policy.infer(x, noise=case["noise"][0][0])["actions"] for x in (shown, lacking, masked)
    )
    np.testing.assert_array_equal(without, hidden)
    assert np.abs(without - whole_chunk).max() > 0.1


def edited(folder: Path, target: Path, **changes: Any) -> Path:
    """A link-free copy of a policy with other fields in its config.json."""
    write_all = [x for x in folder.rglob("*") if x.is_file()]
    for file in write_all:
        copy = target / file.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
    told = json.loads((folder / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(told))
    return target


EMPTY = {"observation.images.empty_camera_0": {"type": "VISUAL", "shape": [3, 480, 640]}}


def test_empty_cameras_need_not_come(policies, folders, tmp_path):
    folder, policy = folders("two_cameras"), policies("two_cameras")
    inputs = json.loads((folder / "config.json").read_text())["input_features"] | EMPTY
    other = load_policy(edited(folder, tmp_path / "x", empty_cameras=1, input_features=inputs))
    (robot,) = other.processor.embodiments
    assert robot.cameras == (*policy.processor.embodiments[0].cameras, *EMPTY)
    assert set(robot.absent) == set(robot.cameras)
    case = arrays("two_cameras")
    shown = observation(case, 0)
    first, second = (x.infer(shown, noise=case["noise"][0][0]) for x in (policy, other))
    np.testing.assert_array_equal(first["actions"], second["actions"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"resize_imgs_with_padding": None}, "only squares of one size"),
        ({"resize_imgs_with_padding": [64, 32]}, "only squares of one size"),
        ({"use_delta_joint_actions_aloha": True}, "use_delta_joint_actions_aloha"),
        ({"adapt_to_pi_aloha": True}, "converts scaled joints"),
        ({"add_image_special_tokens": True, "empty_cameras": 1}, "empty_cameras"),
        ({"attention_mode": "both"}, "attention_mode"),
        ({"expert_depth": 3}, "unknown fields"),
        ({"vlm_model_name": "mine/vlm"}, "copy them into a folder of that name"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes, said, folders, tmp_path):
    other = edited(folders("two_cameras"), tmp_path / "x", **changes)
    with pytest.raises(ValueError, match=said):
        load_policy(other)


def test_a_long_task_loses_its_beginning(policies):
    reader = replace(policies("two_cameras").processor.prompts, limit=5)
    task = "pick up the red cube and put it in the box"
    nothing = np.zeros(0, np.float32)
    ids, _ = reader.read(task, nothing, 0, 1)
    np.testing.assert_array_equal(ids, reader.tokenizer.encode(task + "\n")[-5:])
    np.testing.assert_array_equal(ids, reader.read(task + "\n", nothing, 0, 1)[0])
    first, _ = replace(reader, cut="right").read(task, nothing, 0, 1)
    np.testing.assert_array_equal(first, reader.tokenizer.encode(task + "\n")[:5])


def test_the_published_model_has_lerobots_tensors():
    """Names and shapes of lerobot/smolvla_base, but for the output head, which nothing reads."""
    config = SmolvlaConfig()
    params = jax.eval_shape(config.build().init, jax.random.key(0))
    flat = {
        jax.tree_util.keystr(path, simple=True, separator="/"): x.shape
        for path, x in jax.tree_util.tree_leaves_with_path(params)
    }
    found = {
        name: x.shape for name, x in their_arrays(table(len(config.crosses)), flat, "x").items()
    }
    assert len(found) == 499
    vlm, text = "model.vlm_with_expert.vlm.model", "model.vlm_with_expert.vlm.model.text_model"
    own = "model.vlm_with_expert.lm_expert"
    wanted = {
        f"{vlm}.vision_model.embeddings.patch_embedding.weight": (768, 3, 16, 16),
        f"{vlm}.vision_model.embeddings.position_embedding.weight": (1024, 768),
        f"{vlm}.vision_model.encoder.layers.11.mlp.fc1.weight": (3072, 768),
        f"{vlm}.connector.modality_projection.proj.weight": (960, 12288),
        f"{text}.embed_tokens.weight": (49280, 960),
        f"{text}.layers.15.self_attn.k_proj.weight": (320, 960),
        f"{text}.layers.0.mlp.down_proj.weight": (960, 2560),
        f"{text}.norm.weight": (960,),
        f"{own}.layers.0.self_attn.k_proj.weight": (320, 720),
        f"{own}.layers.1.self_attn.k_proj.weight": (320, 320),
        f"{own}.layers.15.self_attn.v_proj.weight": (320, 320),
        f"{own}.layers.14.self_attn.q_proj.weight": (960, 720),
        f"{own}.layers.3.mlp.gate_proj.weight": (2048, 720),
        f"{own}.norm.weight": (720,),
        "model.state_proj.weight": (960, 32),
        "model.action_in_proj.weight": (720, 32),
        "model.action_out_proj.bias": (32,),
        "model.action_time_mlp_in.weight": (720, 1440),
        "model.action_time_mlp_out.weight": (720, 720),
    }
    assert {name: found.get(name) for name in wanted} == wanted
    assert config.tokens_per_image == 64


def test_facts_of_published_models_need_no_files_and_no_name_leads_elsewhere(tmp_path):
    told = checkpoint.SmolvlaFields()
    assert checkpoint._vlm(tmp_path, told) == checkpoint.Vlm(15, 5, 64, 12)
    for name in ("/etc/passwd", "../../x", "a/../../../b"):
        found = checkpoint._vlm_folder(tmp_path, replace(told, vlm_model_name=name))
        assert found.resolve().is_relative_to(tmp_path)


def test_a_folder_is_recognised_by_its_type(folders):
    assert find_format(folders("two_cameras")).families == ("smolvla",)
