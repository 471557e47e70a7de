"""GR00T-N1.7's sizes, names and shards, and its past."""

import re
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from models import Embodiment, Normalizer, Policy
from models.checkpoints.layout import their_arrays
from models.families.groot.head import SHARDING_RULES
from models.families.groot.n17.model import Groot17Config
from models.families.groot.n17.names import TABLE
from models.families.groot.n17.qwen_turn import QwenTurn
from models.families.groot.presets import PRESETS
from models.inputs.bpe import ByteBpe
from models.inputs.history import History
from models.model import groups_of
from tests.helpers.models.groot17_case import BACKBONE

TINY = PRESETS["groot17-tiny"].model


def shapes(config):
    found = jax.eval_shape(config.build().init, jax.random.key(0))
    return {path: leaf.shape for path, leaf in flatten_dict(found, sep="/").items()}


def test_the_default_config_is_the_released_3b():
    """3,144.0 million parameters, with the embedding once, under the release's names."""
    ours = shapes(Groot17Config())
    assert sum(map(np.prod, ours.values())) == pytest.approx(3144.0e6, abs=0.05e6)
    theirs = their_arrays(TABLE, ours, "test")
    assert theirs["backbone.model.model.visual.blocks.23.attn.qkv.weight"].shape == (3072, 1024)
    assert theirs["action_head.state_encoder.layer1.W"].shape == (32, 132, 1024)
    assert theirs["action_head.model.transformer_blocks.31.attn1.to_k.weight"].shape == (1536, 1536)
    assert shapes(PRESETS["groot17"].model) == ours


@pytest.mark.parametrize("name", ["groot17", "groot17-tiny", "groot17-qlora"])
def test_every_parameter_matches_exactly_one_sharding_rule_and_a_group(name):
    config = PRESETS[name].model
    config = replace(config, compute=replace(config.compute, quantized="", quantized_kind="float8"))
    paths = list(shapes(config))
    matches = {p: [r for r, _ in SHARDING_RULES if re.search(r, p)] for p in paths}
    assert {p: m for p, m in matches.items() if len(m) != 1} == {}
    parts = [groups_of(config.build())[name] for name in ("vision", "language", "action")]
    assert all(sum(bool(re.match(part, path)) for part in parts) == 1 for path in paths)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_size": 50}, "image_size is 50"),
        ({"text_every": 2, "state_dropout": 1.0}, "state_dropout"),
        ({"projectors": (9,)}, "projectors"),
        ({"horizon": 17}, "action positions"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(TINY, **change)


def test_past_pictures_stand_before_the_present_ones_the_oldest_first():
    """A session keeps those of all cameras, and the first picture stands for those before it."""
    config = replace(TINY, observed=History((("images", (2, 5)),), shown=True))
    robot = Embodiment("arm", ("a", "b"), Normalizer.identity(2), Normalizer.identity(2))
    processor = replace(
        config.processor([robot], ByteBpe.read(BACKBONE)), prompts=QwenTurn(ByteBpe.read(BACKBONE))
    )
    policy = Policy(config.build(), {}, processor)
    session = policy.session()

    def seen(step):
        pictures = {
            name: np.full((48, 48, 3), 10 * step + i, np.uint8) for i, name in enumerate("ab")
        }
        raw = {**pictures, "state": np.zeros(2), "prompt": "lift"}
        (request,) = policy.prepare(raw, session=session, executed=None if step == 0 else step)
        sample = request.sample
        assert len(sample.image_at) == len(sample.images) == 6
        assert len(set(sample.image_at)) == 6
        assert sample.cameras == (0, 1) * 3
        batch = policy.rows([sample])
        assert batch.images.shape[1] == 6
        return [int(image[0, 0, 0]) for image in sample.images]

    assert seen(0) == [0, 1] * 3
    session.answered(np.zeros((8, 2), np.float32))
    for step in range(1, 6):
        found = seen(step)
    assert found == [0, 1, 30, 31, 50, 51]
