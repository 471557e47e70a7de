"""Qwen3-VL beside transformers (5.5.4, torch 2.11.0): a small one with random weights, which
`make_qwen3vl.py` made, on a packed row with pictures of three sizes, at 1e-5 of the largest."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from models import Sample, pack
from models.checkpoints.layout import read_block
from models.checkpoints.rename import Table, match
from models.families.groot.n17.names import qwen3_vl
from models.families.groot.n17.pictures import tower_size
from models.inputs.packed_batch import ImageSlots, Layout, prefix_tokens
from models.inputs.pictures import bicubic
from models.layers.functional import Functional
from models.layers.layers import Compute
from models.layers.qwen.qwen3 import Qwen, QwenConfig
from models.layers.qwen.vision import QwenVision, QwenVisionConfig, picture_places
from tests.helpers.models.groot17_case import CASE, FIXTURE, IMAGE_TOKEN
from tests.helpers.models.qwen_case import qwen_weights, smooth_pictures

COMPUTE = Compute(dtype="float32")
VISION = QwenVisionConfig(48, 4, 80, 4, table=6, deep=(0, 1, 3))
LANGUAGE = QwenConfig(64, 4, 96, 4, 2, 16, base=5e6, sections=(4, 2, 2))
SHOTS = [*smooth_pictures([(128, 192), (96, 96)], 0), *smooth_pictures([(300, 200)], 11)]
FITTED = [bicubic(x, tower_size(x.shape[:2], 32, 4096, 30_720)) for x in SHOTS]
IDS, CUT = CASE["qwen3vl/packed_input_ids"][0], CASE["qwen3vl/cu_seqlens"]


class Both(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.vision = QwenVision(VISION, LANGUAGE.width, COMPUTE, rngs)
        self.language = Qwen(LANGUAGE, COMPUTE, rngs)
        self.embedding = nnx.Param(jnp.zeros((448, LANGUAGE.width)))


MODEL = Functional(Both)


def near(ours, theirs) -> None:
    assert np.abs(np.asarray(ours) - theirs).max() <= 1e-5 * np.abs(theirs).max()


@pytest.fixture(scope="module")
def params():
    named = json.loads((FIXTURE / "qwen3vl_names.json").read_text())
    arrays = qwen_weights({name: tuple(shape) for name, shape in named.items()}, 0, {})
    shapes = flatten_dict(jax.eval_shape(MODEL.init, jax.random.key(0)), sep="/")
    table = Table(qwen3_vl("model."))
    found = match(
        table, {n: x.shape for n, x in arrays.items()}, {n: x.shape for n, x in shapes.items()}, ""
    )
    read = partial(
        read_block, fetch=lambda n, at: arrays[n][at], dtype=np.dtype(np.float32), piece_bytes=2**30
    )
    whole = {n: (slice(None),) * len(x.shape) for n, x in found.items()}
    return unflatten_dict({n: read(x, whole[n])[0] for n, x in found.items()}, sep="/")


def batch():
    """Both samples in one row, each size of picture in an array of its own."""
    shapes = list(dict.fromkeys(x.shape[:2] for x in FITTED))
    slots = [ImageSlots(*s, np.prod(VISION.grid(s)).item(), 1) for s in shapes]
    sizes = {"state_tokens": 0, "state_dim": 1, "horizon": 1, "action_dim": 1}
    first, row = slots[0], []
    layout = Layout(130, 1, 2, 80, first.shape, first.tokens, more=tuple(slots[1:]), **sizes)
    for i, pictures in enumerate((FITTED[:2], FITTED[2:])):
        own = IDS[CUT[i] : CUT[i + 1]]
        shown = own == IMAGE_TOKEN
        begins = np.flatnonzero(shown & ~np.pad(shown, (1, 0))[:-1])
        at = tuple((~shown).cumsum()[begins].tolist())
        empty = np.zeros((1, 1), np.float32)
        row.append(Sample(tuple(pictures), own[~shown], empty[0], empty, empty > 0, image_at=at))
    return pack([row], layout), tuple(map(VISION.grid, shapes))


@pytest.mark.slow
def test_tower_language_model_and_gradients_are_transformers(params):
    packed, grids = batch()
    count = len(IDS)
    places = np.asarray(picture_places(packed, grids))[0, :count]
    np.testing.assert_array_equal(places.T, CASE["qwen3vl/packed_position_ids"][1:, 0])
    labels = [
        x[m == 1]
        for x, m in zip(CASE["qwen3vl/labels"], CASE["qwen3vl/attention_mask"], strict=True)
    ]
    target = np.concatenate([np.append(x[1:], -100) for x in labels])

    def loss(params):
        modules, features, deep = MODEL.bind(params), [], []
        for images in (packed.images, *packed.more_images):
            tokens, inner = modules.vision(jnp.asarray(images[0]))
            features.append(tokens.reshape(1, -1, 64))
            deep.append(inner.reshape(1, -1, 3, 64))
        seen, inner = jnp.concatenate(features, 1), jnp.concatenate(deep, 1)
        x = prefix_tokens(packed, seen, modules.embedding[...][packed.text])
        shown = packed.prefix_source < seen.shape[1]
        at = jnp.where(shown, packed.prefix_source, 0)[..., None, None]
        added = jnp.take_along_axis(inner, at, 1) * shown[..., None, None]
        rope = LANGUAGE.pairs(picture_places(packed, grids))
        args = jnp.asarray(packed.prefix_segment), jnp.asarray(packed.prefix_position)
        out = modules.language(x, *args, rope, added)
        logits = (out @ modules.embedding[...].T)[0, :count]
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(target, 0)[:, None], 1)
        missed = -chosen[:, 0] * (target >= 0)
        return missed.sum(), (seen[0], inner[0], logits, missed)

    (_, found), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    seen, inner, logits, missed = found
    near(seen, CASE["qwen3vl/image_features"])
    near(inner[:, 0], CASE["qwen3vl/deepstack0"])
    near(inner[:, 2], CASE["qwen3vl/deepstack2"])
    near(logits[:, ::9], CASE["qwen3vl/logits_every_9th"])
    each = [missed[: CUT[1]].sum(), missed[CUT[1] :].sum()]
    np.testing.assert_allclose(each, CASE["qwen3vl/nll_per_sample"], rtol=1e-5)
    near(gradient["vision"]["position"], CASE["qwen3vl/grad:model.visual.pos_embed.weight"])
    name = "qwen3vl/grad:model.language_model.layers.0.self_attn.q_norm.weight"
    near(gradient["language"]["layers"]["attention"]["q_norm"]["scale"][0], CASE[name])
