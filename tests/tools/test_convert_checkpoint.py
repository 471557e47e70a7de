"""Checkpoints go from one code to another and back unchanged, and fine-tuning begins from them."""

import json
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest
import tyro
from flax.traverse_util import flatten_dict

from models import Pi, Policy, load_policy
from models.checkpoints.layout import exported
from models.families.pi import openpi
from models.families.pi.fast.model import Pi0FastConfig
from models.families.pi.lerobot import open_lerobot
from models.inputs.tokenizer import Tokenizer
from models.layers.adapters import merge
from models.layers.float8.fp8 import HISTORY_LEAF
from models.layers.layers import Lora
from models.load import begin_from, inspect_params, like_model, load_params
from tests.helpers.models.openpi_numbers import FIXTURES, TOLD, observation
from tests.helpers.models.released_cases import RELEASED_CASES, answers, read_case
from tests.helpers.models.tiny_policy import ARM, CONFIG, PROCESSOR
from tests.helpers.tools.exported_policies import EXPORTS, digests, export
from tools import convert_checkpoint
from tools.quantize import quantize
from tools.recipes.presets import GROOT_TINY, presets

PI0 = replace(CONFIG, state_input="suffix", time="input")
PROCESSOR0 = replace(PROCESSOR, state_input="suffix")
FAST = Pi0FastConfig(
    CONFIG.vision, CONFIG.language, image_size=8, vocabulary=320, compute=CONFIG.compute
)


def adapted(config, alpha: float, *stacks: str):
    """The config with adapters of rank 2 in its decoders."""
    low = Lora(2, alpha)
    changed = {
        name: replace(getattr(config, name), attention_lora=low, mlp_lora=low) for name in stacks
    }
    return replace(config, **changed)


def drawn(config) -> Policy:
    """A policy without a processor, its parameters random everywhere."""
    leaves, tree = jax.tree.flatten(jax.eval_shape(config.build().init, jax.random.key(0)))
    rng = np.random.default_rng(1)
    params = tree.unflatten([(0.3 * rng.normal(size=x.shape)).astype(x.dtype) for x in leaves])
    return Policy(config.build(), params, None)


def convert(*arguments: str, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["convert_checkpoint", *map(str, arguments)])
    tyro.cli(convert_checkpoint.main)


def test_a_checkpoint_survives_the_road_through_every_format(tmp_path, monkeypatch):
    source = FIXTURES / "pi0"
    first = load_policy(source, **TOLD["pi0"])
    convert_checkpoint.convert(first, tmp_path / "own", "chiliad")
    convert(tmp_path / "own", tmp_path / "openpi", "--to", "openpi", monkeypatch=monkeypatch)
    for path, told in ((tmp_path / "own", {}), (tmp_path / "openpi", TOLD["pi0"])):
        again = load_policy(path, **told)
        jax.tree.map(np.testing.assert_array_equal, again.params, first.params)
        robot, expected = again.processor.embodiments[0], first.processor.embodiments[0]
        np.testing.assert_allclose(robot.state.offset, expected.state.offset)
        np.testing.assert_allclose(robot.actions.scale, expected.actions.scale)
    assert load_policy(tmp_path / "own").model.config.horizon == 6
    with pytest.raises(SystemExit, match="exists"):
        convert(tmp_path / "own", tmp_path / "own", monkeypatch=monkeypatch)
    with pytest.raises(SystemExit, match="Format 'groot' cannot hold a model of family"):
        convert(tmp_path / "own", tmp_path / "other", "--to", "groot", monkeypatch=monkeypatch)


@pytest.mark.slow
def test_fresh_adapters_on_loaded_weights_compute_the_same_at_first():
    base = load_policy(FIXTURES / "pi05", **TOLD["pi05"])
    config = base.model.config
    adapted = Pi(replace(config, language=replace(config.language, attention_lora=Lora(2, 4.0))))
    params = begin_from(FIXTURES / "pi05", adapted, like_model(adapted), 0)
    loaded = dict(jax.tree_util.tree_leaves_with_path(params))
    for path, leaf in jax.tree_util.tree_leaves_with_path(base.params):
        np.testing.assert_array_equal(loaded[path], leaf)
    with np.load(FIXTURES / "pi05" / "case.npz") as file:
        arrays = dict(file)
    seen, noise = observation(arrays), arrays["sample_noise"]
    again = replace(base, model=adapted, params=params)
    actions = [policy.infer(seen, noise)["actions"] for policy in (again, base)]
    np.testing.assert_allclose(*actions, rtol=0, atol=1e-5)
    assert np.abs(params["language"]["layers"]["attention"]["q"]["lora_a"]).max() > 0


def test_a_checkpoint_of_other_sizes_than_the_model_is_refused():
    other = Pi(replace(presets()["tiny"].model, state_input="text", film=False))
    with pytest.raises(ValueError, match="vision/blocks"):
        begin_from(FIXTURES / "pi05", other, like_model(other), 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [adapted(PI0, 5.0, "language", "expert"), adapted(FAST, 5.0, "language")],
    ids=["pi0", "pi0_fast"],
)
def test_adapters_of_any_alpha_compute_the_same_in_openpis_files(config, tmp_path):
    policy = drawn(config)
    convert_checkpoint.convert(policy, tmp_path / "theirs", "openpi")
    found = inspect_params(tmp_path / "theirs")
    assert found.config.language.mlp_lora == Lora(2, 2.0)
    params = load_params(tmp_path / "theirs", like_model(found.config.build()), found)
    again, before = (merge(*x)[1] for x in ((found.config, params), (config, policy.params)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), again, before)


def test_adapters_are_not_gone_on_with_at_another_alpha(tmp_path):
    policy = drawn(adapted(PI0, 16.0, "language"))
    convert_checkpoint.convert(policy, tmp_path / "own", "chiliad")
    other = adapted(PI0, 4.0, "language").build()
    told = r"rank 2 and alpha 16.0 \(model.language.attention_lora\), but rank 2 and alpha 4.0 were"
    with pytest.raises(ValueError, match=told):
        begin_from(tmp_path / "own", other, like_model(other), 0)
    params = begin_from(tmp_path / "own", policy.model, like_model(policy.model), 0)
    jax.tree.map(np.testing.assert_array_equal, params, policy.params)


@pytest.mark.slow
def test_pi0_fasts_adapters_on_few_bits_are_folded_in_for_openpi(tmp_path):
    policy = quantize(drawn(adapted(FAST, 5.0, "language")))
    convert_checkpoint.convert(policy, tmp_path / "theirs", "openpi")
    found = load_params(tmp_path / "theirs", like_model(FAST.build()))
    expected = merge(policy.model.config, policy.params)[1]
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_lerobots_files_keep_the_samplers_steps_and_the_delay_that_was_trained(tmp_path):
    policy = replace(drawn(replace(PI0, euler_steps=3, rtc_max_delay=2)), processor=PROCESSOR0)
    convert_checkpoint.convert(policy, tmp_path / "theirs", "lerobot")
    again = load_policy(tmp_path / "theirs")
    assert (again.euler_steps, again.model.config.rtc_max_delay, again.continues) == (
        3,
        2,
        "trained",
    )
    told = json.loads((tmp_path / "theirs/config.json").read_text())
    assert (told["num_inference_steps"], told["rtc_training_max_delay"]) == (3, 2)
    plain = replace(policy, model=replace(PI0, euler_steps=10).build())
    convert_checkpoint.convert(plain, tmp_path / "plain", "lerobot")
    told = json.loads((tmp_path / "plain/config.json").read_text())
    assert not {"num_inference_steps", "rtc_training_max_delay"} & set(told)


def test_parameters_stay_in_the_16_bits_that_they_were_saved_in(tmp_path):
    policy = replace(drawn(PI0), processor=PROCESSOR0)
    half = jax.tree.map(lambda x: x.astype("bfloat16"), policy.params)
    mixed = half | {"embedding": policy.params["embedding"]}
    for name, params in (("half", half), ("mixed", mixed)):
        convert_checkpoint.convert(replace(policy, params=params), tmp_path / name, "chiliad")
        again = load_policy(tmp_path / name)
        jax.tree.map(_same_to_the_dtype, again.params, params)
        convert_checkpoint.convert(again, tmp_path / f"{name} theirs", "lerobot")
    found = {
        name: open_lerobot(tmp_path / f"{name} theirs").arrays["action_in_proj.weight"].dtype
        for name in ("half", "mixed")
    }
    assert found == {"half": "bfloat16", "mixed": "float32"}
    whole = load_policy(tmp_path / "half", dtype="float32")
    assert {x.dtype for x in jax.tree.leaves(whole.params)} == {np.dtype("float32")}


def _same_to_the_dtype(found, wanted):
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.slow
def test_the_robot_that_is_chosen_acts_from_what_is_written(tmp_path):
    others = tuple(replace(ARM, name=name) for name in "ABC")
    processor = replace(PROCESSOR, embodiments=others)
    policy = replace(drawn(CONFIG), processor=processor)
    convert_checkpoint.convert(policy, tmp_path / "own", "chiliad")
    for name, order in (("A", "ABC"), ("B", "BAC"), ("C", "CAB")):
        chosen = load_policy(tmp_path / "own", robot=name)
        convert_checkpoint.convert(chosen, tmp_path / name, "chiliad")
        again = load_policy(tmp_path / name)
        assert again.embodiment == 0
        assert "".join(robot.name for robot in again.processor.embodiments) == order


def test_a_robot_is_not_put_first_where_the_model_knows_it_by_its_place(tmp_path):
    model = GROOT_TINY.model.build()
    processor = GROOT_TINY.model.processor((ARM, replace(ARM, name="B")), Tokenizer(("go",)))
    with pytest.raises(ValueError, match="tell robots apart by their order, so 'B' cannot be put"):
        convert_checkpoint.convert(Policy(model, {}, processor, 1), tmp_path / "own", "chiliad")


def test_lerobot_gets_no_other_solver_than_eulers_which_can_be_asked_for(tmp_path, monkeypatch):
    policy = replace(drawn(replace(PI0, solver="ab2")), processor=PROCESSOR0)
    convert_checkpoint.convert(policy, tmp_path / "own", "chiliad")
    typed = [tmp_path / "own", tmp_path / "theirs", "--to", "lerobot"]
    with pytest.raises(SystemExit, match=r"model.solver is 'ab2'; give --solver euler"):
        convert(*typed, monkeypatch=monkeypatch)
    convert(*typed, "--solver", "euler", "--euler-steps", "7", monkeypatch=monkeypatch)
    assert load_policy(tmp_path / "theirs").model.config.euler_steps == 7


@pytest.mark.parametrize("to", ["openpi", "lerobot"])
@pytest.mark.parametrize(
    ("time", "state_input"),
    [("input", "token"), ("modulation", "token"), ("input", "none"), ("input", "text")],
)
def test_a_model_that_reads_the_state_as_no_other_codes_is_not_written_for_it(
    to, time, state_input, tmp_path
):
    policy = drawn(replace(CONFIG, time=time, state_input=state_input))
    processor = policy.model.config.processor(PROCESSOR.embodiments, PROCESSOR.tokenizer)
    policy = replace(policy, processor=processor)
    with pytest.raises(ValueError, match=f"has '{time}' and '{state_input}', so it would act"):
        convert_checkpoint.convert(policy, tmp_path / "theirs", to)
    assert not (tmp_path / "theirs").exists()


def test_a_pi05_that_reads_no_state_is_written_for_openpi_alone(tmp_path):
    policy = drawn(replace(CONFIG, state_input="none"))
    policy = replace(policy, processor=replace(PROCESSOR, state_input="none"))
    with pytest.raises(ValueError, match=r"LeRobot has models .* --to chiliad or openpi\."):
        convert_checkpoint.convert(policy, tmp_path / "theirs", "lerobot")
    convert_checkpoint.convert(policy, tmp_path / "theirs", "openpi")
    params = load_params(tmp_path / "theirs", like_model(policy.model))
    jax.tree.map(np.testing.assert_array_equal, params, policy.params)


@pytest.mark.slow
@pytest.mark.parametrize("wanted", ["none", "current", "delayed"])
def test_a_run_in_float8_with_delayed_scales_is_begun_from_at_any_precision(wanted, tmp_path):
    policy = drawn(PI0.computing(fp8="delayed"))
    convert_checkpoint.convert(policy, tmp_path / "own", "chiliad")
    model = PI0.computing(fp8=wanted).build()
    params = flatten_dict(begin_from(tmp_path / "own", model, like_model(model), 0), sep="/")
    assert params.keys() == flatten_dict(like_model(model), sep="/").keys()
    for path, value in flatten_dict(policy.params, sep="/").items():
        if not path.endswith(HISTORY_LEAF):
            np.testing.assert_array_equal(params[path], value)


def test_a_history_of_scales_stays_behind_in_openpis_files(tmp_path):
    policy = drawn(PI0.computing(fp8="delayed"))
    convert_checkpoint.convert(policy, tmp_path / "theirs", "openpi")
    found = load_params(tmp_path / "theirs", like_model(PI0.build()))
    before = flatten_dict(policy.params, sep="/")
    for path, value in flatten_dict(found, sep="/").items():
        np.testing.assert_array_equal(value, before[path])


def test_adapters_of_pi0_fasts_vision_tower_are_gone_on_with_and_folded_in_for_openpi(tmp_path):
    seeing = replace(FAST, vision=replace(FAST.vision, lora=Lora(2, 5.0)))
    policy = drawn(seeing)
    convert_checkpoint.convert(policy, tmp_path / "own", "chiliad")
    params = begin_from(tmp_path / "own", policy.model, like_model(policy.model), 0)
    jax.tree.map(np.testing.assert_array_equal, params, policy.params)
    convert_checkpoint.convert(policy, tmp_path / "theirs", "openpi")
    found = load_params(tmp_path / "theirs", like_model(FAST.build()))
    jax.tree.map(np.testing.assert_array_equal, found, merge(seeing, policy.params)[1])


@pytest.mark.parametrize("name", ["pi0", "pi05"])
def test_presets_have_the_released_trees(name):
    golden = json.loads((FIXTURES / "golden.json").read_text())[name]
    shapes = jax.eval_shape(Pi(presets()[name].model).init, jax.random.key(0))
    table = openpi.PI05 if name == "pi05" else openpi.PI0
    tree = {path: list(shape) for path, (shape, _) in exported(shapes, table, name).items()}
    assert tree == golden["leaves"]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPORTS)
def test_lerobots_own_loader_ran_the_files_that_are_exported_and_acts_alike(name, tmp_path):
    case = RELEASED_CASES / "exports" / name
    policy = export(name, tmp_path)
    told = read_case(case)
    assert told["version"] == "0.6.1"
    assert digests(tmp_path / name) == told["files"]
    again = load_policy(tmp_path / name, tokenizer=RELEASED_CASES / "tokenizer.model")
    observations, recorded = answers(case)
    cases = zip(observations, recorded["noise"], recorded["actions"], strict=True)
    for i, (seen, noise, wanted) in enumerate(cases):
        found = again.infer(seen, noise=noise)["actions"]
        assert np.abs(found - wanted).max() < 1e-4 * np.abs(wanted).max()
        if i == 0:  # no resizing, in which openpi's and LeRobot's policies differ
            own = policy.infer(_in_openpis_words(seen), noise=noise)["actions"]
            assert np.abs(own - wanted).max() < 1e-4 * np.abs(wanted).max()


def _in_openpis_words(seen):
    images = {key: value for key, value in seen.items() if "images" in key}
    return {"image": images, "state": seen["observation.state"], "prompt": seen["task"]}
