"""Parts of SmolVLA without weights: its sharding, adapters, flow times, pictures, tokenizer, and
what its config refuses."""

import re
import struct
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from models.families.smolvla.gguf import ADDED, rebuilt
from models.families.smolvla.inputs import Corner
from models.families.smolvla.model import SmolvlaConfig, time_embedding
from models.inputs.packed_batch import Sample, pack
from models.layers.adapters import merge
from models.layers.gemma import GemmaConfig
from models.layers.layers import Compute, Lora
from models.layers.siglip import SiglipConfig, _places
from models.model import quantize_params
from models.sharding import named_leaves, shardings
from parallel.mesh import MeshConfig, make_mesh
from tests.helpers.models.random_parameters import random_parameters

STACK = GemmaConfig(width=16, depth=2, hidden=16, heads=2, kv_heads=2, head_dim=8)
SMALL = SmolvlaConfig(
    vision=SiglipConfig(width=16, depth=1, hidden=16, heads=2, patch=8),
    language=STACK,
    expert=replace(STACK, width=8),
    image_size=16,
    shuffle=2,
    vocabulary=304,
    image_tokens=(298, 299),
    state_dim=8,
    action_dim=8,
    horizon=4,
    euler_steps=2,
    compute=Compute(dtype="float32"),
)
LORA = Lora(8, 16.0)
ADAPTED = replace(
    SMALL,
    vision=replace(SMALL.vision, lora=LORA),
    language=replace(STACK, attention_lora=LORA, mlp_lora=LORA),
    expert=replace(SMALL.expert, attention_lora=LORA, mlp_lora=LORA),
)
QUANTIZED = Compute(quantized=SmolvlaConfig.quantizable, quantized_kind="int8")


def shapes(config: SmolvlaConfig) -> Any:
    params = jax.eval_shape(config.build().init, jax.random.key(0))
    return jax.eval_shape(lambda p: quantize_params(config, p), params)


@pytest.mark.parametrize("config", [SMALL, replace(ADAPTED, compute=QUANTIZED)])
def test_each_parameter_is_sharded_by_one_rule(config):
    mesh = make_mesh(MeshConfig(data=1, fsdp=4, tensor=2))
    params = shapes(config)
    placed = shardings(params, config.build().sharding_rules, mesh)
    split = {path for path, x in named_leaves(placed).items() if any(x.spec)}
    assert any("expert/layers/1/attention/k" in path for path in split)
    names = list(named_leaves(params))
    for group in config.build().groups.values():
        assert any(re.match(group, name) for name in names)


def test_what_observes_is_not_what_draws_chunks():
    model = SMALL.build()
    for name in named_leaves(shapes(SMALL)):
        acts = bool(re.match(model.groups["action"], name))
        assert acts != bool(re.search(model.observing, name)), name


def batch(config: SmolvlaConfig, rows: list[int]) -> Any:
    """Rows of samples that are unlike each other."""
    draw = np.random.default_rng(0)
    samples = [
        Sample(
            images=tuple(
                draw.integers(0, 255, (16, 16, 3)).astype(np.uint8) for _ in range(1 + number % 2)
            ),
            text=draw.integers(0, 290, 3 + number).astype(np.int32),
            state=draw.normal(size=8).astype(np.float32),
            actions=draw.normal(size=(4, 8)).astype(np.float32),
            action_mask=np.ones((4, 8), bool),
            id=number,
        )
        for number in range(sum(rows))
    ]
    ends = np.cumsum(rows)
    cut = [samples[end - count : end] for end, count in zip(ends, rows, strict=True)]
    return pack(cut, config.layout(prefix=64, samples=3, images=6, text=24))


@pytest.mark.slow
def test_a_sample_acts_as_alone_whatever_it_is_packed_with_and_adapters_can_be_folded():
    model = ADAPTED.build()
    params = random_parameters(model)
    noise = np.random.default_rng(1).normal(size=(3, 4, 8)).astype(np.float32)
    spread = np.zeros((3, 3, 4, 8), np.float32)
    spread[:, 0] = noise
    packed = np.concatenate([noise[None], np.zeros_like(spread[:2])])
    act = jax.jit(model.sample_actions)
    together = act(params, batch(ADAPTED, [3, 0, 0]), packed)[0]
    single = act(params, batch(ADAPTED, [1, 1, 1]), spread)[:, 0]
    np.testing.assert_allclose(together, single, rtol=0, atol=1e-5)
    config, folded = merge(ADAPTED, params)
    assert not config.adapted
    plain = jax.jit(config.build().sample_actions)(folded, batch(ADAPTED, [3, 0, 0]), packed)[0]
    np.testing.assert_allclose(plain, together, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("width", "least", "most"), [(720, 4e-3, 4.0), (24, 1e-3, 8.0)])
def test_flow_times_are_embedded_as_in_f64(width, least, most):
    time = np.random.default_rng(0).uniform(0.001, 1, 500).astype(np.float32)
    period = least * (most / least) ** np.linspace(0, 1, width // 2)
    angle = time.astype(np.float64)[:, None] * (2 * np.pi / period)
    wanted = np.concatenate([np.sin(angle), np.cos(angle)], axis=-1)
    found = jax.jit(lambda t: time_embedding(t, width, least, most))(time)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "inner"), [((6, 12), (4, 8)), ((10, 5), (8, 4)), ((8, 8), (8, 8))]
)
def test_pictures_stand_in_the_lower_right_corner(shape, inner):
    image = np.full((*shape, 3), 200, np.uint8)
    shown = Corner(8)(image)
    assert (shown[-inner[0] :, -inner[1] :] == 200).all()
    assert shown.sum() == 600 * inner[0] * inner[1]


def test_patches_of_other_pictures_have_the_positions_of_their_corners():
    np.testing.assert_array_equal(_places(4, 16), [0, 2, 8, 10])
    np.testing.assert_array_equal(_places(9, 4), [0, 0, 1, 0, 0, 1, 2, 2, 3])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"expert": replace(SMALL.expert, heads=4)}, "must be model.language's"),
        ({"expert": replace(SMALL.expert, depth=1)}, "with fewer layers it must be 0"),
        ({"expert": replace(SMALL.expert, width=9)}, "it must be even"),
        ({"shuffle": 3}, "it must divide 2 patches"),
        ({"image_tokens": (1,)}, "give two ids"),
        ({"image_size": 20}, "not a multiple of"),
        ({"self_attention_every": -1}, "self_attention_every"),
    ],
)
def test_a_config_that_makes_no_model_is_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        replace(SMALL, **changes)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def listed(values: list[Any]) -> bytes:
    kind, packed = (8, map(text, values)) if isinstance(values[0], str) else (5, _numbers(values))
    return struct.pack("<IIQ", 9, kind, len(values)) + b"".join(packed)


def _numbers(values: list[int]) -> list[bytes]:
    return [struct.pack("<i", value) for value in values]


def test_a_tokenizer_is_rebuilt_from_gguf(tmp_path):
    tokens = ["<|endoftext|>", "<|im_start|>", "a", "b", "1", "2", "ab", "12", "\u010a"]
    metadata = {
        "general.alignment": struct.pack("<II", 4, 32),
        "tokenizer.ggml.tokens": listed(tokens),
        "tokenizer.ggml.merges": listed(["a b", "1 2"]),
        "tokenizer.ggml.token_type": listed([3, 3, 1, 1, 1, 1, 1, 1, 1]),
    }
    entries = b"".join(text(name) + value for name, value in metadata.items())
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(metadata)) + entries + b"tensors")
    found = rebuilt(file)
    assert found.encode("ab12<image>\n").ids == [6, 4, 5, found.token_to_id("<image>"), 8]
    assert found.get_vocab_size() == len(tokens) + len(ADDED)
    for wrong in (b"GGML", file.read_bytes()[:90], b""):
        file.write_bytes(wrong)
        with pytest.raises(ValueError, match=r"is no GGUF file .* give SmolLM2's"):
            rebuilt(file)
