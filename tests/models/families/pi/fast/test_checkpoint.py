"""π0-FAST comes back from the layouts of openpi and LeRobot with all that folders tell, and what
they lack is asked for."""

import json
from dataclasses import replace

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from models import load_policy
from models.checkpoints.layout import exported
from models.checkpoints.safetensors_format import write_file
from models.families.pi.fast import checkpoint
from models.families.pi.fast.model import Pi0FastConfig
from models.inputs.fast import Fast
from models.layers.gemma import GemmaConfig
from models.layers.siglip import SiglipConfig
from models.load import inspect_checkpoint

TINY = Pi0FastConfig(
    vision=SiglipConfig(width=16, depth=1, hidden=24, heads=2, patch=8),
    language=GemmaConfig(width=32, depth=2, hidden=48, heads=2, kv_heads=1, head_dim=16),
    image_size=16,
    vocabulary=600,
)


def drawn(config: Pi0FastConfig) -> dict:
    shapes = jax.eval_shape(config.build().init, jax.random.key(0))
    draw = np.random.default_rng(0)
    return jax.tree.map(lambda x: draw.standard_normal(x.shape).astype(np.float32), shapes)


@pytest.fixture(scope="module")
def openpi(tmp_path_factory):
    """A checkpoint in a folder named pi0_fast_libero, and its parameters."""
    root = tmp_path_factory.mktemp("fast") / "pi0_fast_libero"
    params = drawn(TINY)
    arrays = {n: make() for n, (_, make) in exported(params, checkpoint.OPENPI, "openpi").items()}
    with ocp.PyTreeCheckpointer() as writer:
        writer.save(root / "params", {"params": unflatten_dict(arrays, sep="/")})
    one = {"mean": [0.0] * 8, "std": [1.0] * 8, "q01": [-1.0] * 8, "q99": [1.0] * 8}
    stats = root / "assets" / "physical-intelligence" / "libero"
    stats.mkdir(parents=True)
    told = {"norm_stats": {"state": one, "actions": one}}
    (stats / "norm_stats.json").write_text(json.dumps(told))
    return root, params


def same(ours: dict, theirs: dict) -> None:
    ours, theirs = flatten_dict(ours, sep="/"), flatten_dict(theirs, sep="/")
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)


def test_openpis_checkpoint_comes_back_with_what_its_name_tells(openpi, tmp_path):
    root, params = openpi
    chunks = np.random.default_rng(0).uniform(-1, 1, (50, 10, 7))
    Fast.train(chunks, 400).save(tmp_path / "fast", 10, 7)
    policy = load_policy(root, fast=tmp_path / "fast")
    config, processor = policy.model.config, policy.processor
    sizes = {"horizon": 10, "state_dim": 8, "action_dim": 7}
    assert config.computing(dtype="bfloat16") == replace(TINY, **sizes)
    same(policy.params, params)
    assert processor.targets.top == 600 - 129
    assert (processor.prompts.normalize, processor.black_absent) == ("lower", True)
    assert processor.text_limit == 180
    assert processor.embodiments[0].relative == (0, 1, 2, 3, 4, 5, -1)


def test_an_absent_camera_is_seen_black(openpi):
    processor = inspect_checkpoint(openpi[0]).processor
    shown = np.full((16, 16, 3), 200, np.uint8)
    sample = processor.sample([shown, shown, None], np.zeros(8), np.array([2, 3]))
    assert [image.mean() for image in sample.images] == [200, 200, 0]
    assert sample.cameras == (0, 1, 2)


def test_a_folder_of_another_name_is_asked_about(openpi, tmp_path):
    (tmp_path / "mine").symlink_to(openpi[0])
    with pytest.raises(ValueError, match="horizon: how many steps a chunk has"):
        load_policy(tmp_path / "mine")


def test_a_model_without_its_tokenizer_is_told_of_it(openpi):
    policy = load_policy(openpi[0])
    with pytest.raises(ValueError, match="came without a FAST tokenizer"):
        policy.model.reading(policy.processor)


@pytest.mark.parametrize("head", [False, True])
def test_lerobots_files_come_back_with_the_scores_table_that_they_have(tmp_path, head):
    config = replace(TINY, vision=replace(TINY.vision, heads=16), head=head, writing="lerobot")
    params = drawn(config)
    table = checkpoint.LEROBOT_UNTIED if head else checkpoint.LEROBOT
    arrays = {f"model.{n}": x for n, x in exported(params, table, "LeRobot").items()}
    write_file(tmp_path / "model.safetensors", arrays, np.dtype(np.float32), {"format": "pt"})
    told = {
        "type": "pi0_fast",
        "chunk_size": 6,
        "max_decoding_steps": 100,
        "tokenizer_max_length": 90,
        "input_features": {
            "observation.images.image": {"type": "VISUAL", "shape": [3, 16, 16]},
            "observation.state": {"type": "STATE", "shape": [2]},
        },
        "output_features": {"action": {"type": "ACTION", "shape": [4]}},
    }
    (tmp_path / "config.json").write_text(json.dumps(told))
    policy = load_policy(tmp_path)
    same(policy.params, params)
    found = policy.model.config
    assert (found.writing, found.head, found.horizon, found.max_decoding_steps) == (
        "lerobot",
        head,
        6,
        100,
    )
    assert (found.action_dim, policy.processor.text_limit) == (4, 90)
    assert policy.processor.prompts.begin_last
