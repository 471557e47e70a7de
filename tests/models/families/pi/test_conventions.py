"""Released policies act by the table, what files tell is kept, and what nothing tells is asked."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from models import Embodiment, Normalizer, load_policy
from models.checkpoints.sources import open_orbax
from models.families.pi import lerobot, openpi
from models.families.pi.model import Pi
from models.families.pi.released import CAMERAS, RELEASED
from models.load import inspect_checkpoint, inspect_params, trained_preparation
from tests.helpers.models.openpi_numbers import FIXTURES
from tests.helpers.models.processors import reading, tokens_of, word_processor

DRAW = np.random.default_rng(3)
STATISTICS = {
    key: {
        "mean": DRAW.uniform(-1, 1, 10).tolist(),
        "std": DRAW.uniform(0.5, 2, 10).tolist(),
        "q01": DRAW.uniform(-2, -1, 10).tolist(),
        "q99": DRAW.uniform(1, 2, 10).tolist(),
    }
    for key in ("state", "actions")
}
"""Statistics of ten dims, of which a robot has the first."""
TOKENS = {"tokenized_prompt": np.array([2, 5, 7])}
PICTURES = {name: DRAW.integers(0, 256, (30, 40, 3), np.uint8) for name in CAMERAS}
LIBERO = {
    "observation/image": PICTURES["base_0_rgb"],
    "observation/wrist_image": PICTURES["left_wrist_0_rgb"],
}
STATE = np.linspace(-0.8, 0.9, 8)


def folder(root: Path, name: str, kind: str, assets: str | None = None) -> Path:
    """A checkpoint as openpi's release has it, with the fixture's small parameters."""
    at = root / name
    at.mkdir(parents=True)
    (at / "params").symlink_to(FIXTURES / kind / "params")
    if assets is not None:
        (at / "assets" / assets).mkdir(parents=True)
        file = at / "assets" / assets / "norm_stats.json"
        file.write_text(json.dumps({"norm_stats": STATISTICS}))
    return at


@pytest.fixture(scope="module")
def libero(tmp_path_factory):
    at = folder(tmp_path_factory.mktemp("a"), "pi05_libero", "pi05", "physical-intelligence/libero")
    return load_policy(at, euler_steps=1)


@pytest.fixture(scope="module")
def pi0_libero(tmp_path_factory):
    at = folder(tmp_path_factory.mktemp("b"), "pi0_libero", "pi0", "physical-intelligence/libero")
    return at, load_policy(at, euler_steps=1, horizon=2)


def test_a_folder_named_like_a_released_policy_has_its_horizon(tmp_path, libero):
    assert libero.model.config.horizon == libero.processor.horizon == 10
    droid = inspect_checkpoint(folder(tmp_path, "pi05_droid", "pi05", "droid"))
    assert droid.config.horizon == 15
    assert droid.config.state_input == "text"
    trained = folder(tmp_path, "pi0_droid/mine/29999", "pi0", "droid")
    assert inspect_checkpoint(trained).config.horizon == 10
    assert inspect_checkpoint(trained / "params").processor.embodiments[0].name == "droid"
    longer = {"horizon": 7}
    assert inspect_checkpoint(trained, **longer).processor.horizon == 7


def test_statistics_as_wide_as_the_model_are_cut_to_the_dims_that_move(tmp_path):
    at, own = folder(tmp_path, "mine", "pi05", "arm"), np.linspace(0.5, 1.5, 7)
    padded = {"q01": -own, "q99": own}
    padded = {kind: [*values, 0.0, 0.0, 0.0] for kind, values in padded.items()}
    file = at / "assets/arm/norm_stats.json"
    file.write_text(json.dumps({"norm_stats": {"state": padded, "actions": padded}}))
    found = inspect_checkpoint(at, horizon=6, state="text", relative=())
    (robot,) = found.processor.embodiments
    np.testing.assert_allclose(robot.state.scale, own, rtol=1e-5)
    assert len(robot.actions.offset) == 7
    assert found.config.state_dim == 10


def test_an_openpi_checkpoint_of_an_unknown_name_is_asked_about_never_guessed(tmp_path):
    unknown = folder(tmp_path, "mine", "pi05", "robot")
    with pytest.raises(ValueError, match=r"horizon: .*state: .*'none'.*relative: ") as refused:
        load_policy(unknown)
    assert "released='pi05_droid'" in str(refused.value)
    with pytest.raises(ValueError, match="state: ") as refused:
        load_policy(unknown, horizon=6, relative=())
    assert "horizon:" not in str(refused.value)
    answered = {"horizon": 6, "relative": (), "state": "none"}
    config = inspect_checkpoint(unknown, **answered).config
    assert (config.horizon, config.state_input) == (6, "none")
    named = inspect_checkpoint(unknown, released="pi05_libero")
    assert (named.config.horizon, named.config.state_input) == (10, "none")


def test_pi05_libero_is_not_told_the_state_that_it_never_saw(libero):
    noise = np.zeros((10, 10), np.float32)
    seen = LIBERO | TOKENS
    without = libero.infer(seen, noise)["actions"]
    shown = libero.infer(seen | {"observation/state": STATE}, noise)["actions"]
    np.testing.assert_array_equal(without, shown)
    assert libero.processor.state_input == "none"
    assert libero.processor.text_limit == 200


def test_pi0_liberos_actions_are_differences_from_the_state_but_for_the_gripper(pi0_libero):
    at, policy = pi0_libero
    absolute = load_policy(at, euler_steps=1, horizon=2, relative=())
    absolute = absolute.varied()
    vars(absolute).update(_sample=policy._sample)
    seen = LIBERO | TOKENS | {"observation/state": STATE}
    noise = np.ones((1, 2, 10), np.float32)
    away = policy.infer(seen, noise)["actions"] - absolute.infer(seen, noise)["actions"]
    np.testing.assert_allclose(away, [[*STATE[:6], 0]] * 2, atol=1e-5)


def test_a_robots_own_observation_is_read_as_openpis_is(pi0_libero):
    _, policy = pi0_libero
    noise = np.ones((1, 2, 10), np.float32)
    raw = LIBERO | TOKENS | {"observation/state": STATE}
    named = {"image": {k: PICTURES[k] for k in CAMERAS[:2]}, "state": STATE, **TOKENS}
    found = policy.infer(raw, noise[0])["actions"]
    assert found.shape == (2, 7)
    np.testing.assert_array_equal(found, policy.infer(named, noise)["actions"])
    floats = {key: np.moveaxis(picture / np.float32(255), -1, 0) for key, picture in LIBERO.items()}
    again = policy.infer(raw | floats, noise[0])["actions"]
    assert np.abs(again - found).max() < 0.1  # openpi rounds floats down
    two = {
        key: np.stack([value] * 2) for key, value in raw.items() if key.startswith("observation")
    }
    rows = policy.infer(two | TOKENS, np.repeat(noise, 2, 0))["actions"]
    np.testing.assert_allclose(rows, [found] * 2, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"observation/wrist_image": None}, r"lacks \['wrist_image'\]"),
        ({"observation/state": None}, r"has no 'state'; .*libero' needs one"),
        ({"observation/wrist": STATE}, r"has unknown entries \['wrist'\]"),
        (
            {"observation/image": np.zeros((4, 4))},
            r"'image' is float64 \[4, 4\]",
        ),
        ({"observation/image": np.full((4, 4, 3), 7.0)}, "from 7 to 7; expected uint8"),
        ({"tokenized_prompt": None}, r"lacks \['prompt'\]"),
    ],
)
def test_a_robots_observation_that_does_not_fit_is_refused_in_a_sentence(
    pi0_libero, change, message
):
    seen = LIBERO | TOKENS | {"observation/state": STATE} | change
    with pytest.raises(ValueError, match=message):
        pi0_libero[1].infer({key: value for key, value in seen.items() if value is not None})


def test_statistics_of_padded_dims_are_cut_to_the_robots(libero, pi0_libero):
    quantile, normal = (p.processor.embodiments[0] for p in (libero, pi0_libero[1]))
    for robot in (quantile, normal):
        assert (len(robot.state.offset), len(robot.actions.offset)) == (8, 7)
        assert robot.absent == ("right_wrist_0_rgb",)
    np.testing.assert_allclose(normal.state.offset, STATISTICS["state"]["mean"][:8])
    low, high = (np.array(STATISTICS["actions"][key][:7]) for key in ("q01", "q99"))
    np.testing.assert_allclose(quantile.actions.inverse(np.full(7, -1.0)), low, rtol=1e-5)
    np.testing.assert_allclose(quantile.actions.inverse(np.ones(7)), high, rtol=1e-5)


def test_cameras_get_the_robots_names_and_the_others_are_absent(tmp_path):
    at = folder(tmp_path, "pi05_libero", "pi05", "physical-intelligence/libero")
    (robot,) = inspect_checkpoint(at, cameras={"agentview": "base_0_rgb"}).processor.embodiments
    assert robot.cameras == ("agentview", "left_wrist_0_rgb", "right_wrist_0_rgb")
    assert robot.absent == robot.cameras[1:]
    assert robot.keys.images[0] == ("observation/image", "agentview")
    with pytest.raises(ValueError, match="cameras a different one of the model's"):
        inspect_checkpoint(at, cameras={"agentview": "front"})


def test_what_contradicts_table_or_files_is_refused(tmp_path):
    droid = folder(tmp_path, "pi0_droid", "pi05", "droid")
    with pytest.raises(ValueError, match=r"released pi0_droid, a pi0, but .* those of a pi05"):
        inspect_checkpoint(droid)
    told = folder(tmp_path, "pi0_libero", "pi0", "physical-intelligence/libero")
    with pytest.raises(ValueError, match="a pi0, whose state is a suffix, so it cannot be 'text'"):
        inspect_checkpoint(told, state="text")
    with pytest.raises(ValueError, match=r"relative names dims \[8\]"):
        inspect_checkpoint(told, relative=(0, 8))
    with pytest.raises(ValueError, match="'pi06' is not a known released policy"):
        inspect_checkpoint(told, released="pi06")
    with pytest.raises(ValueError, match=r"'GR00T-N1\.5-3B' is not a known released policy"):
        inspect_checkpoint(told, released="GR00T-N1.5-3B")
    with pytest.raises(ValueError, match="which scales this policy's state"):
        inspect_checkpoint(folder(tmp_path, "pi05_libero", "pi05"))


@pytest.mark.parametrize("name", [name for name, row in RELEASED.items() if row.refused])
def test_a_policy_of_action_tokens_is_refused_by_name(tmp_path, name):
    if RELEASED[name].source == "openpi":
        at = folder(tmp_path, name, "pi05")
        with pytest.raises(ValueError, match=f"{name}, but its action tokens are not FAST's"):
            load_policy(at)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """LeRobot's files of a small π0.5 whose robot has 7 state and 8 action dims, of unknown age."""
    config = openpi.config(open_orbax(FIXTURES / "pi05"), horizon=6)
    told = lerobot.LerobotConfig(
        horizon=6,
        text=200,
        state_dim=10,
        cameras=("observation.images.image", "observation.images.empty_camera_0"),
        robot_state=7,
        robot_action=8,
    )
    at = tmp_path_factory.mktemp("port")
    params = jax.jit(Pi(config).init)(jax.random.key(0))
    lerobot.export(params, told, at)
    return at


@pytest.fixture
def port(exported, tmp_path):
    """The same in a folder of its own, whose config.json says that it is of 0.4.4 or 0.5.0."""
    (tmp_path / "model.safetensors").symlink_to(exported / "model.safetensors")
    values = json.loads((exported / "config.json").read_text())
    write(tmp_path / "config.json", values | {"use_peft": False})
    return tmp_path


def write(file: Path, values: dict) -> None:
    file.write_text(json.dumps(values))


def changed(port: Path, **values) -> Path:
    file = port / "config.json"
    write(file, json.loads(file.read_text()) | values)
    return port


def test_lerobots_pi05_of_unknown_age_is_asked_how_it_spells_the_state(port):
    with pytest.raises(ValueError, match=r"state: 'text' if LeRobot 0\.5\.0 or later"):
        load_policy(port)
    for state, padded in (("text", False), ("text-padded", True), ("none", False)):
        processor = inspect_checkpoint(port, state=state).processor
        assert processor.prompts.pads_state is padded
        assert processor.state_input == ("none" if state == "none" else "text")


def test_lerobots_age_is_read_from_its_files_where_they_tell_it(port):
    write(port / "train_config.json", {"seed": 1})
    old = inspect_checkpoint(port).processor
    write(port / "train_config.json", {"seed": 1, "cudnn_deterministic": False})
    new = inspect_checkpoint(port).processor
    (port / "train_config.json").unlink()
    newer = inspect_checkpoint(changed(port, use_relative_actions=False)).processor
    assert [p.prompts.pads_state for p in (old, new, newer)] == [True, False, False]
    assert [p.pictures.kind for p in (old, new, newer)] == ["bilinear-dark", "bilinear", "bilinear"]


def test_lerobots_pi0_reads_a_prompt_as_it_is_sent():
    one = Normalizer((0.0,), (1.0,))
    robot = Embodiment("robot", (), one, one)
    words = ("put", "the", "_", "red", "mug", " ", "\n")
    sent, cleaned = (
        reading(word_processor(14, 1, 1, 1, "suffix", words, (robot,)), normalize=way)
        for way in ("line", "spaces")
    )
    state = np.zeros(1)
    assert (
        tokens_of(sent, "the_red", state).tolist() != tokens_of(cleaned, "the_red", state).tolist()
    )
    assert (
        tokens_of(sent, "the red", state).tolist() == tokens_of(cleaned, "the red", state).tolist()
    )
    assert tokens_of(sent, "mug\n", state).tolist() == tokens_of(sent, "mug", state).tolist()


def test_lerobots_state_of_the_models_dims_is_spelt_alike_at_any_age(port):
    features = {"observation.state": {"type": "STATE", "shape": [10]}}
    assert inspect_checkpoint(changed(port, input_features=features)).config.state_dim == 10


def test_lerobots_relative_actions_are_kept(port):
    names = [*"abcdefg", "left_gripper"]
    changed(port, use_relative_actions=True, relative_exclude_joints=["Gripper", "C"])
    found = inspect_checkpoint(changed(port, action_feature_names=names)).processor.embodiments[0]
    assert found.relative == (0, 1, -1, 3, 4, 5, 6, -1)
    write(port / "policy_preprocessor.json", {"steps": pipeline(relative={"enabled": False})})
    assert inspect_checkpoint(port).processor.embodiments[0].relative == ()


def pipeline(rename=None, relative=None):
    """Steps before a π0.5 of LeRobot's."""
    steps = {
        "rename_observations_processor": {"rename_map": rename or {}},
        "relative_actions_processor": relative or {},
        "normalizer_processor": {},
        "pi05_prepare_state_tokenizer_processor_step": {},
        "tokenizer_processor": {"max_length": 200},
    }
    return [{"registry_name": name, "config": config} for name, config in steps.items()]


def test_a_renamed_camera_and_state_are_read_under_the_robots_names(port):
    """Cameras keep the model's order; a robot that sends the policy's own name is told."""
    features = {
        f"observation.images.{name}": {"type": "VISUAL", "shape": [3, 28, 28]}
        for name in ("base", "wrist", "empty_camera_0")
    }
    changed(port, input_features=features | {"observation.state": {"type": "STATE", "shape": [7]}})
    base, wrist, empty = features
    for renamed, cameras, state in (
        ({base: wrist, wrist: base}, (wrist, base, empty), "observation.state"),
        ({"front": base, "joints": "observation.state"}, ("front", wrist, empty), "joints"),
        ({"observation.images.unused": "other"}, (base, wrist, empty), "observation.state"),
    ):
        write(port / "policy_preprocessor.json", {"steps": pipeline(renamed)})
        (robot,) = inspect_checkpoint(port, state="text").processor.embodiments
        assert robot.cameras == cameras
        assert robot.absent == (empty,)
        assert robot.keys.images == tuple((name, name) for name in cameras)
        assert robot.keys.state == (state,)
    write(port / "policy_preprocessor.json", {"steps": pipeline({base: wrist})})
    with pytest.raises(ValueError, match=f"turns {base} into {wrist}, but the policy reads both"):
        inspect_checkpoint(port, state="text")


def test_preparation_to_train_from_refuses_a_step_that_it_does_not_know(port):
    unknown = {"class": "mine.Mirror", "config": {}}
    write(port / "policy_preprocessor.json", {"steps": [*pipeline(), unknown]})
    with pytest.raises(ValueError, match=r"step 5 is 'mine\.Mirror', which is not carried out"):
        trained_preparation(port, inspect_params(port).config)


def test_a_base_says_at_load_that_it_has_no_statistics(port, caplog):
    load_policy(port, state="text")
    assert "has no statistics of a robot, as a base to train from" in caplog.text


@pytest.mark.parametrize("name", ["use_visual_memory", "use_proprioceptive_memory"])
def test_lerobots_models_with_memory_are_refused(port, name):
    with pytest.raises(ValueError, match=f"has {name}; policies that read earlier observations"):
        load_policy(changed(port, **{name: True}), state="text")


def test_lerobots_empty_camera_is_absent_not_required(port):
    policy = load_policy(port, state="text", euler_steps=1)
    (robot,) = policy.processor.embodiments
    assert robot.absent == ("observation.images.empty_camera_0",)
    seen = {"observation.images.image": PICTURES["base_0_rgb"], **TOKENS}
    found = policy.infer(seen | {"observation.state": STATE[:7]}, np.zeros((6, 10)))["actions"]
    assert found.shape == (6, 8)
    assert np.isfinite(found).all()
    other = {"observation.images.empty_camera_0": PICTURES["base_0_rgb"]}
    with pytest.raises(ValueError, match=r"lacks \['image'\]"):
        policy.infer(other | TOKENS)
