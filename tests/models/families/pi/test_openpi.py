"""openpi's checkpoints arrive in our parameters and leave again bit by bit, shard by shard."""

import json
import math
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models.checkpoints.layout import their_arrays
from models.checkpoints.load import read
from models.checkpoints.sources import CheckpointSource, open_orbax
from models.families.pi import openpi
from models.families.pi.model import PI0, Pi, PiConfig
from models.layers.layers import Lora

FIXTURES = Path(__file__).parents[3] / "fixtures" / "openpi"
GOLDEN = json.loads((FIXTURES / "golden.json").read_text())
LORA_2B, LORA_300M = Lora(16, 16.0), Lora(32, 32.0)
PRESETS = {"pi0": PI0, "pi05": PiConfig()}


def with_lora(config):
    return replace(
        config,
        language=replace(config.language, attention_lora=LORA_2B, mlp_lora=LORA_2B),
        expert=replace(config.expert, attention_lora=LORA_300M, mlp_lora=LORA_300M),
    )


def shapes(config):
    return jax.eval_shape(Pi(config).init, jax.random.key(0))


def like(name):
    return shapes(openpi.config(open_orbax(FIXTURES / name), horizon=6))


def load(source, wanted):
    return read(source, openpi.table(source), wanted)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", ["pi0", "pi05"])
def test_a_real_model_has_openpis_tree(name, lora):
    config = with_lora(PRESETS[name]) if lora else PRESETS[name]
    golden = GOLDEN[f"{name}_lora" if lora else name]
    ours = {path: leaf.shape for path, leaf in flatten_dict(shapes(config), sep="/").items()}
    table = openpi.PI05 if name == "pi05" else openpi.PI0
    theirs = {path: list(array.shape) for path, array in their_arrays(table, ours, "It").items()}
    assert theirs == golden["leaves"]
    assert sum(map(math.prod, theirs.values())) == golden["total"]


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", ["pi0", "pi05"])
def test_a_config_is_inferred_from_the_shapes_alone(name, lora):
    golden = GOLDEN[f"{name}_lora" if lora else name]["leaves"]
    source = CheckpointSource(
        "it", {path: jax.ShapeDtypeStruct(s, np.float32) for path, s in golden.items()}
    )
    config = with_lora(PRESETS[name]) if lora else PRESETS[name]
    inferred = openpi.config(source)
    assert replace(inferred, compute=config.compute) == config


@pytest.mark.parametrize("name", ["pi0", "pi05", "pi0_lora"])
def test_a_checkpoint_of_openpi_comes_back_bit_by_bit(name, tmp_path):
    source = open_orbax(FIXTURES / name)
    params = load(source, like(name))
    openpi.export(params, tmp_path)
    again = open_orbax(tmp_path)
    assert again.shapes == source.shapes
    for path in source.shapes:
        np.testing.assert_array_equal(np.asarray(again.arrays[path]), source.arrays[path])
    paths = json.loads((tmp_path / "params" / "_METADATA").read_text())["tree_metadata"]
    assert set(paths) == {str(("params", *path.split("/"))) for path in source.shapes}


def test_keys_values_gates_and_heads_go_where_openpi_means_them():
    source = open_orbax(FIXTURES / "pi05")
    params = load(source, like("pi05"))["expert"]["layers"]
    kv = np.asarray(source.arrays["PaliGemma/llm/layers/attn/kv_einsum_1/w"])
    gating = np.asarray(source.arrays["PaliGemma/llm/layers/mlp_1/gating_einsum"])
    x = np.random.default_rng(0).normal(size=(3, 16)).astype(np.float32)
    for i, name in enumerate("kv"):
        mine = np.einsum("tw,wgd->tgd", x, params["attention"][name]["kernel"][1])
        np.testing.assert_allclose(mine, np.einsum("tw,gwd->tgd", x, kv[1, i]), rtol=1e-5)
    np.testing.assert_array_equal(params["mlp"]["gate"]["kernel"], gating[:, 0])
    np.testing.assert_array_equal(params["mlp"]["up"]["kernel"], gating[:, 1])


def test_adapters_are_inferred_with_their_ranks_and_read():
    source = open_orbax(FIXTURES / "pi0_lora")
    config = openpi.config(source, horizon=6)
    assert (config.language.attention_lora, config.language.mlp_lora) == (
        Lora(3, 3.0),
        Lora(5, 5.0),
    )
    assert (config.expert.attention_lora, config.expert.mlp_lora) == (Lora(2, 2.0), Lora(7, 7.0))
    layers = load(source, like("pi0_lora"))["language"]["layers"]
    gating = np.asarray(source.arrays["PaliGemma/llm/layers/mlp/gating_einsum_lora_b"])
    np.testing.assert_array_equal(layers["mlp"]["up"]["lora_b"], gating[:, 1])
    values = np.asarray(source.arrays["PaliGemma/llm/layers/attn/kv_einsum/lora_a"])
    np.testing.assert_array_equal(layers["attention"]["v"]["lora_a"], values[:, 1])


class Recorder:
    """An array that notes how many entries were read of it."""

    def __init__(self, array):
        self.array, self.shape, self.dtype, self.read = (
            np.asarray(array),
            array.shape,
            array.dtype,
            [],
        )

    def __getitem__(self, region):
        part = self.array[region]
        self.read.append(part.size)
        return part


def test_each_device_gets_its_shard_and_each_entry_is_read_once():
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 4), ("data", "fsdp"))

    def placed(leaf):
        cut = next((i for i, n in enumerate(leaf.shape) if n % 4 == 0), None)
        spec = PartitionSpec(*(["fsdp" if i == cut else None for i in range(len(leaf.shape))]))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    plain = open_orbax(FIXTURES / "pi05")
    source = replace(plain, arrays={name: Recorder(a) for name, a in plain.arrays.items()})
    wanted = jax.tree.map(placed, like("pi05"))
    params = load(source, wanted)
    whole = load(plain, like("pi05"))
    for leaf, want, expected in zip(*map(jax.tree.leaves, (params, wanted, whole)), strict=True):
        assert leaf.sharding == want.sharding
        for shard in leaf.addressable_shards:
            assert shard.data.shape == want.sharding.shard_shape(leaf.shape)
            np.testing.assert_array_equal(shard.data, np.asarray(expected)[shard.index])
    conv = "PaliGemma/img/embedding/kernel"  # its cut falls within merged axes
    for name, array in source.arrays.items():
        assert name == conv or sum(array.read) == math.prod(array.shape), name
    gating = source.arrays["PaliGemma/llm/layers/mlp/gating_einsum"]
    assert max(gating.read) == math.prod(gating.shape) // 8


def test_every_shard_is_cast_to_the_dtype_that_is_asked_for():
    source = open_orbax(FIXTURES / "pi0")
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), like("pi0"))
    exact = load(source, like("pi0"))
    for half, full in zip(*map(jax.tree.leaves, (load(source, wanted), exact)), strict=True):
        assert half.dtype == jnp.bfloat16
        np.testing.assert_array_equal(half, np.asarray(full).astype(jnp.bfloat16))


def test_export_of_a_bfloat16_model_is_float32(tmp_path):
    params = jax.tree.map(lambda x: np.ones(x.shape, jnp.bfloat16), like("pi05"))
    openpi.export(params, tmp_path)
    assert {a.dtype.numpy_dtype for a in open_orbax(tmp_path).arrays.values()} == {np.dtype("f4")}
    with pytest.raises(ValueError, match="exists; give a directory without a checkpoint"):
        openpi.export(params, tmp_path)


def test_export_lists_what_openpi_has_no_place_for(tmp_path):
    params = {"film": {"kernel": np.zeros((2, 2))}, "vision": {"position": np.zeros((9, 4))}}
    with pytest.raises(ValueError, match=r"these 1 of the model's 2 parameters: film/kernel"):
        openpi.export(params, tmp_path)


def test_weights_that_are_not_finite_are_named_all_at_once(tmp_path):
    source = open_orbax(FIXTURES / "pi05")
    arrays = {name: np.asarray(a) for name, a in source.arrays.items()}
    arrays["PaliGemma/llm/layers/mlp/gating_einsum"][2, 1, 0, 3] = np.nan
    arrays["action_out_proj/bias"][1] = -np.inf
    with pytest.raises(ValueError, match=r"NaN or infinite weights in 2 of") as error:
        load(replace(source, arrays=arrays), like("pi05"))
    assert "action_out/bias (action_out_proj/bias)" in str(error.value)
    assert "language/layers/mlp/up/kernel" in str(error.value)
    assert "gate" not in str(error.value).replace("gating", "")


def test_a_checkpoint_of_other_sizes_is_refused_with_both_shapes():
    config = openpi.config(open_orbax(FIXTURES / "pi05"), horizon=6)
    other = replace(config, expert=replace(config.expert, width=20), action_dim=12)
    with pytest.raises(ValueError, match="of another shape") as error:
        load(open_orbax(FIXTURES / "pi05"), shapes(other))
    text = str(error.value)
    assert (
        "action_in_proj/kernel is [10, 16] where our action_in/kernel [12, 20] needs [12, 20]"
        in text
    )
    assert "q_einsum_1/w is [3, 4, 16, 8] where our expert/layers/attention/q/kernel" in text


def test_pi0_is_not_taken_for_pi05():
    with pytest.raises(ValueError, match="missing: ") as error:
        load(open_orbax(FIXTURES / "pi0"), like("pi05"))
    assert "expert/norm/modulation/kernel [16, 48]" in str(error.value)
    assert "unknown to this model" in str(error.value)
    assert "state_proj/kernel [10, 16]" in str(error.value)


def test_a_checkpoint_without_what_tells_its_sizes_is_refused():
    source = open_orbax(FIXTURES / "pi05")
    arrays = {n: a for n, a in source.arrays.items() if "q_einsum/" not in n and "pos_" not in n}
    with pytest.raises(ValueError, match=r"vision/position \(.*pos_embedding\), language/layers"):
        openpi.config(replace(source, arrays=arrays))
