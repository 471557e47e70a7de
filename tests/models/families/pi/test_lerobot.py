"""LeRobot's files hold what openpi's do, under the names and layouts of its PyTorch modules."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from models.checkpoints.layout import their_arrays
from models.checkpoints.load import read
from models.checkpoints.sources import open_orbax
from models.families.pi import lerobot, openpi
from models.families.pi.model import PI0, Pi, PiConfig

FIXTURES = Path(__file__).parents[3] / "fixtures" / "openpi"
CONFIG = lerobot.LerobotConfig(
    horizon=6,
    text=21,
    state_dim=10,
    action_dim=10,
    cameras=("observation.images.top", "observation.images.wrist"),
    robot_state=7,
    robot_action=8,
)
PALIGEMMA = "paligemma_with_expert.paligemma"


@pytest.fixture(scope="module", params=["pi0", "pi05"])
def saved(request, tmp_path_factory):
    """(openpi's arrays, the model's config, its parameters, the directory LeRobot reads)."""
    source = open_orbax(FIXTURES / request.param)
    config = openpi.config(source, horizon=6)
    like = jax.eval_shape(Pi(config).init, jax.random.key(0))
    params = read(source, openpi.table(source), like)
    path = tmp_path_factory.mktemp(request.param)
    lerobot.export(params, CONFIG, path)
    return source, config, params, path


def load(source, like):
    return read(source, lerobot.table(source), like)


def test_parameters_come_back_bit_by_bit_with_their_config(saved):
    _, config, params, path = saved
    source = lerobot.open_lerobot(path)
    assert lerobot.config(source, CONFIG) == config
    again = load(source, jax.eval_shape(Pi(config).init, jax.random.key(0)))
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_layouts_are_those_of_pytorchs_modules(saved):
    theirs, _, _, path = saved
    arrays = {name: np.asarray(a) for name, a in lerobot.open_lerobot(path).arrays.items()}
    llm, img = "PaliGemma/llm", "PaliGemma/img"
    q = np.asarray(theirs.arrays[f"{llm}/layers/attn/q_einsum_1/w"])[2]
    v = np.asarray(theirs.arrays[f"{llm}/layers/attn/kv_einsum/w"])[1, 1]
    out = np.asarray(theirs.arrays[f"{llm}/layers/attn/attn_vec_einsum/w"])[0]
    gating = np.asarray(theirs.arrays[f"{llm}/layers/mlp/gating_einsum"])[1]
    block = f"{img}/Transformer/encoderblock/MultiHeadDotProductAttention_0"
    key, key_bias = (np.asarray(theirs.arrays[f"{block}/key/{n}"])[1] for n in ("kernel", "bias"))
    conv = np.asarray(theirs.arrays[f"{img}/embedding/kernel"])
    language, expert = f"{PALIGEMMA}.model.language_model", "paligemma_with_expert.gemma_expert"
    vision = f"{PALIGEMMA}.model.vision_tower.vision_model"
    expected = {
        f"{expert}.model.layers.2.self_attn.q_proj.weight": q.transpose(0, 2, 1).reshape(32, 16),
        f"{language}.layers.1.self_attn.v_proj.weight": v.transpose(0, 2, 1).reshape(-1, 24),
        f"{language}.layers.0.self_attn.o_proj.weight": out.reshape(32, 24).T,
        f"{language}.layers.1.mlp.gate_proj.weight": gating[0].T,
        f"{language}.layers.1.mlp.up_proj.weight": gating[1].T,
        f"{vision}.encoder.layers.1.self_attn.k_proj.weight": key.reshape(20, 20).T,
        f"{vision}.encoder.layers.1.self_attn.k_proj.bias": key_bias.reshape(20),
        f"{vision}.embeddings.patch_embedding.weight": conv.transpose(3, 2, 0, 1),
        f"{PALIGEMMA}.lm_head.weight": theirs.arrays[f"{llm}/embedder/input_embedding"],
        "action_out_proj.weight": np.asarray(theirs.arrays["action_out_proj/kernel"]).T,
    }
    for name, array in expected.items():
        np.testing.assert_array_equal(arrays[name], array, err_msg=name)


@pytest.mark.parametrize(("preset", "count"), [(PiConfig(), 811), (PI0, 776)])
def test_a_real_model_has_every_tensor_of_the_port(preset, count):
    shapes = jax.eval_shape(Pi(preset).init, jax.random.key(0))
    flat = {path: leaf.shape for path, leaf in flatten_dict(shapes, sep="/").items()}
    table = lerobot.PI05 if preset.time == "modulation" else lerobot.PI0
    arrays = their_arrays(table, flat, "It")
    assert len(arrays) == count
    down = f"{PALIGEMMA}.model.language_model.layers.17.mlp.down_proj.weight"
    key = "paligemma_with_expert.gemma_expert.model.layers.0.self_attn.k_proj.weight"
    assert (arrays[down].shape, arrays[key].shape) == ((2048, 16384), (256, 1024))


def renamed(path, rename):
    """The saved file as another writer names its tensors."""
    return lerobot.open_safetensors(path).renamed(rename)


def test_other_writers_names_are_the_same_parameters(saved, monkeypatch):
    _, config, params, path = saved

    def openpi_pytorch(name):
        return name.removeprefix("model.").replace(
            f"{PALIGEMMA}.lm_head", f"{PALIGEMMA}.model.language_model.embed_tokens"
        )

    def before_transformers_4_52(name):
        return (
            name.replace("paligemma.model.language_model.", "paligemma.language_model.model.")
            .replace("paligemma.model.", "paligemma.")
            .replace("paligemma.lm_head.", "paligemma.language_model.lm_head.")
        )

    def other_model(name):
        if "action_time_mlp" in name:
            return name.replace("action_time_mlp", "time_mlp")
        return name.replace("time_mlp", "action_time_mlp")

    like = jax.eval_shape(Pi(config).init, jax.random.key(0))
    for rename in (openpi_pytorch, before_transformers_4_52, other_model):
        source = renamed(path, rename)
        monkeypatch.setattr(lerobot, "open_safetensors", lambda _, source=source: source)
        jax.tree.map(np.testing.assert_array_equal, load(lerobot.open_lerobot(path), like), params)


def test_a_tied_embedding_may_be_stored_under_both_names(saved):
    _, config, params, path = saved
    source = lerobot.open_lerobot(path)
    tied = f"{PALIGEMMA}.model.language_model.embed_tokens.weight"
    arrays = {**source.arrays, tied: source.arrays[f"{PALIGEMMA}.lm_head.weight"]}
    like = jax.eval_shape(Pi(config).init, jax.random.key(0))
    again = load(replace(source, arrays=arrays), like)
    np.testing.assert_array_equal(again["embedding"], params["embedding"])


def test_config_json_tells_what_shapes_do_not(saved):
    _, config, _, path = saved
    kind = "pi05" if config.time == "modulation" else "pi0"
    assert lerobot.read_config(path) == replace(CONFIG, kind=kind, earlier=True)
    values = json.loads((path / "config.json").read_text())
    assert values["type"] == ("pi05" if config.time == "modulation" else "pi0")
    assert values["image_resolution"] == [21, 21]
    assert values["max_action_dim"] == 10


def test_config_json_of_openpis_conversion_is_read_and_others_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json does not exist"):
        lerobot.read_config(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"action_dim": 32, "action_horizon": 15}))
    assert lerobot.read_config(tmp_path).horizon == 15
    file.write_text(json.dumps({"type": "act", "chunk_size": 100}))
    with pytest.raises(
        ValueError, match="policy of type 'act', expected 'pi0', 'pi05' or 'pi0_fast'"
    ):
        lerobot.read_config(tmp_path)
    file.write_text(json.dumps({"type": "pi05"}))
    with pytest.raises(ValueError, match="neither chunk_size nor action_horizon"):
        lerobot.read_config(tmp_path)


def test_export_refuses_what_the_port_has_no_place_for(saved, tmp_path):
    _, _, params, path = saved
    with pytest.raises(ValueError, match="exists; give a directory without a model"):
        lerobot.export(params, CONFIG, path)
    mlp = params["language"]["layers"]["mlp"]
    down = {**mlp["down"], "lora_a": np.zeros((3, 56, 2)), "lora_b": np.zeros((3, 2, 24))}
    layers = {**params["language"]["layers"], "mlp": {**mlp, "down": down}}
    adapted = {**params, "language": {**params["language"], "layers": layers}}
    with pytest.raises(ValueError, match=r"these 2 of .*mlp/down/lora_a \[3, 56, 2\]"):
        lerobot.export(adapted, CONFIG, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_bfloat16_export_holds_the_rounded_weights(saved, tmp_path):
    _, config, params, _ = saved
    lerobot.export(params, CONFIG, tmp_path, dtype="bfloat16")
    like = jax.eval_shape(Pi(config).init, jax.random.key(0))
    again = load(lerobot.open_lerobot(tmp_path), like)
    for ours, exact in zip(*map(jax.tree.leaves, (again, params)), strict=True):
        np.testing.assert_array_equal(
            ours, np.asarray(exact).astype(ml_dtypes.bfloat16).astype(np.float32)
        )
