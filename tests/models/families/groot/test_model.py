"""GR00T-N1.5 beside LeRobot's port of it: the port's numbers from its own checkpoints, padded,
alone and packed."""

import dataclasses
import json
import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict

from models import Sample, pack
from models.checkpoints.layout import exported
from models.checkpoints.load import read
from models.checkpoints.rename import match
from models.families.groot import checkpoint
from models.families.groot.head import SHARDING_RULES, EmbodimentLinear, time_bucket
from models.families.groot.inputs import groot_batch
from models.families.groot.model import Groot, GrootConfig
from models.families.groot.names import TABLE, canonical
from models.flow import flow
from models.layers.dit import TransformerConfig
from models.layers.layers import Compute, Lora

FIXTURES = Path(__file__).parents[3] / "fixtures" / "groot"
CASES = np.load(FIXTURES / "cases.npz")
VALUES = json.loads((FIXTURES / "config.json").read_text())
SOURCE = checkpoint.open_groot(FIXTURES / "transformers")
LOADED = dataclasses.replace(
    checkpoint.config(SOURCE, VALUES), compute=Compute(dtype="float32"), chunks=2
)


def rematerialised(config: GrootConfig) -> GrootConfig:
    """Every stack keeps its layers' inputs alone, so masked and released runs test both ways."""
    stacks = {
        name: dataclasses.replace(getattr(config, name), remat="full")
        for name in ("vision", "language", "adapter", "dit")
    }
    return dataclasses.replace(config, **stacks)


CONFIG = rematerialised(LOADED)
MODEL = Groot(CONFIG)
RELEASED = Groot(dataclasses.replace(LOADED, padding="released"))
MODELS = {"masked": MODEL, "released": RELEASED}
NAMES = ("unpadded", "padded", "edges")
KEY = jax.random.key(3)


def case(name: str) -> dict[str, np.ndarray]:
    return {k.partition("/")[2]: CASES[k] for k in CASES if k.startswith(f"{name}/")}


def load(source=SOURCE):
    return read(source, TABLE, jax.eval_shape(MODEL.init, KEY))


@pytest.fixture(scope="module")
def params():
    return load()


def batch_of(recorded, padding: str):
    return groot_batch(
        recorded, MODELS[padding].config, recorded["actions"], recorded["action_mask"]
    )


def measure(model, params, batch, noise, time):
    """Features, each sample's summed squared error over counted entries, and their gradient
    (numpy)."""
    return jax.device_get(_measure(model, params, batch, noise, time))


@partial(jax.jit, static_argnums=0)
def _measure(model, params, batch, noise, time):
    noised, target = flow.interpolate(batch.actions[:, :, None], noise, time)

    def total(params):
        error = model.field(params, batch)(noised, time).velocity - target
        per_sample = jnp.sum(error[:, :, 0] ** 2 * batch.action_mask, (-1, -2))
        return per_sample.sum(), per_sample

    gradient, per_sample = jax.grad(total, has_aux=True)(params)
    return model.features(params, batch), per_sample, gradient


def sample(model, params, batch, noise):
    return np.asarray(_sample(model, params, batch, noise))


@partial(jax.jit, static_argnums=0)
def _sample(model, params, batch, noise):
    return model.sample_actions(params, batch, noise)


def assert_near(ours, theirs, tolerance: float) -> None:
    """Largest difference relative to the largest entry."""
    theirs = np.asarray(theirs)
    assert np.abs(np.asarray(ours) - theirs).max() <= tolerance * np.abs(theirs).max()


def drawn(recorded):
    """Noise [b, 1, 1, h, a] and our time [b, 1, 1] of a recorded case."""
    return recorded["noise"][:, None, None], 1 - recorded["t"][:, None, None]


def assert_gradient_is_the_ports(gradient, recorded) -> None:
    """Every leaf's norm, and a few leaves whole."""
    theirs = {n: make() for n, (_, make) in exported(gradient, TABLE, "gradients").items()}
    norms = dict(zip(recorded["gradient_names"], recorded["gradient_norms"], strict=True))
    assert set(theirs) == set(norms)
    ours = [np.linalg.norm(theirs[name]) for name in norms]
    np.testing.assert_allclose(ours, list(norms.values()), rtol=1e-4, atol=1e-7)
    for key in recorded:
        if key.startswith("gradient/"):
            assert_near(theirs[key.removeprefix("gradient/")], recorded[key], 1e-4)


@pytest.mark.parametrize("name", [pytest.param("unpadded", marks=pytest.mark.slow), *NAMES[1:]])
def test_released_padding_gives_the_ports_features_loss_gradients_and_actions(params, name):
    recorded = case(name)
    batch = batch_of(recorded, "released")
    features, error, gradient = measure(RELEASED, params, batch, *drawn(recorded))
    count = recorded["action_mask"].sum()
    assert_near(features, recorded["features"], 1e-4)
    assert_near(error.sum() / count, recorded["loss"], 1e-4)
    assert_gradient_is_the_ports(jax.tree.map(lambda g: g / count, gradient), recorded)
    actions = sample(RELEASED, params, batch, recorded["noise"][:, None])
    assert_near(actions[:, 0], recorded["sampled"], 1e-4)


def samples(recorded) -> list[Sample]:
    """The recorded inputs as packable samples."""
    tokens = CONFIG.tokens_per_image
    made = []
    for i, (ids, valid) in enumerate(
        zip(recorded["input_ids"], recorded["attention_mask"], strict=True)
    ):
        words = ids[valid == 1]
        is_image = words == CONFIG.image_token
        made.append(
            Sample(
                images=tuple(recorded["images"][recorded["image_sample"] == i]),
                text=words[~is_image].astype(np.int32),
                state=recorded["state"][i, 0],
                actions=recorded["actions"][i],
                action_mask=recorded["action_mask"][i],
                embodiment=int(recorded["embodiment_id"][i]),
                id=10 + i,
                image_at=tuple(np.cumsum(~is_image)[is_image][::tokens]),
            )
        )
    return made


PLACES = (
    (("edges", 0), ("padded", 1), ("unpadded", 2), ("edges", 1)),
    (("padded", 2), ("unpadded", 0), ("edges", 2)),
    (("unpadded", 1), ("padded", 0)),
)
"""Cases and their samples in the order of the packed rows."""
LAYOUT = CONFIG.layout(prefix=140, samples=5, images=9, text=70)


@pytest.fixture(scope="module")
def packed():
    cases = {name: samples(case(name)) for name in NAMES}
    return pack([[cases[name][i] for name, i in row] for row in PLACES], LAYOUT)


@pytest.fixture(scope="module")
def alone(params):
    """Features, errors, gradient and actions of every case, each sample alone in such a row."""
    found = {}
    for name in NAMES:
        recorded = case(name)
        batch = pack([[one] for one in samples(recorded)], LAYOUT)
        first = np.arange(5) == 0
        noise, time = recorded["noise"][:, None], 1 - recorded["t"][:, None]
        noise, time = noise * first[:, None, None], time * first
        actions = sample(MODEL, params, batch, noise)[:, 0]
        features, error, gradient = measure(
            MODEL, params, batch, noise[:, :, None], time[:, :, None]
        )
        found[name] = (features, error[:, 0], gradient, actions)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_masked_padding_gives_each_sample_what_the_port_gives_it_alone(params, alone, name):
    recorded, (features, error, gradient, actions) = case(name), alone[name]
    valid = recorded["attention_mask"] == 1
    own = np.arange(LAYOUT.prefix) < valid.sum(1, keepdims=True)
    assert_near(np.asarray(features)[own], recorded["features"][valid], 1e-4)
    count = recorded["action_mask"].sum((1, 2))
    assert_near(error / count, recorded["alone/loss"], 1e-4)
    assert_near(actions, recorded["alone/sampled"], 1e-4)
    if valid.all():
        assert_gradient_is_the_ports(jax.tree.map(lambda g: g / count.sum(), gradient), recorded)
    batch = batch_of(recorded, "masked")
    assert_near(sample(MODEL, params, batch, recorded["noise"][:, None])[:, 0], actions, 1e-5)


@pytest.mark.slow
def test_the_switch_changes_padded_samples_and_no_others(params, alone):
    recorded = case("padded")
    batch = batch_of(recorded, "released")
    released = sample(RELEASED, params, batch, recorded["noise"][:, None])[:, 0]
    moved = np.abs(released - alone["padded"][-1]).max((1, 2))
    padded = (recorded["attention_mask"] == 0).any(1)
    assert list(padded) == [True, True, False]
    np.testing.assert_array_equal(moved > 0.01, padded)
    assert moved[2] < 1e-5


def spread(key: str) -> np.ndarray:
    """Recorded arrays laid out as the packed rows [rows, slots, ...]; zero in empty slots."""
    out = np.zeros((len(PLACES), 5, *case("padded")[key].shape[1:]), np.float32)
    for i, row in enumerate(PLACES):
        for j, (name, index) in enumerate(row):
            out[i, j] = case(name)[key][index]
    return out


@pytest.mark.slow
def test_packed_samples_have_the_errors_gradients_and_actions_they_have_alone(
    params, packed, alone
):
    noise, time = spread("noise"), 1 - spread("t")
    _, error, gradient = measure(MODEL, params, packed, noise[:, :, None], time[:, :, None])
    actions = sample(MODEL, params, packed, noise)
    for i, row in enumerate(PLACES):
        for j, (name, index) in enumerate(row):
            _, alone_error, _, alone_actions = alone[name]
            assert_near(error[i, j], alone_error[index], 1e-5)
            assert_near(actions[i, j], alone_actions[index], 1e-5)
    apart = jax.tree.map(lambda *g: sum(g), *(alone[name][2] for name in NAMES))
    flat = flatten_dict(apart, sep="/")
    for path, ours in flatten_dict(gradient, sep="/").items():
        if path.endswith("/k/bias"):  # moves all logits of a query alike: no gradient but rounding
            assert np.abs(ours).max() < 1e-6
        else:
            assert_near(ours, flat[path], 1e-5)


@pytest.mark.parametrize("rows", [(3,), pytest.param((4, 1), marks=pytest.mark.slow)])
def test_robots_use_the_rows_they_were_given_and_train_no_others(params, packed, rows):
    robot = np.arange(packed.embodiment.size).reshape(packed.embodiment.shape) % len(rows)
    robots = dataclasses.replace(packed, embodiment=robot)
    numbered = dataclasses.replace(packed, embodiment=np.array(rows)[robot])
    model = dataclasses.replace(CONFIG, projectors=rows).build()
    noise, time = spread("noise")[:, :, None], 1 - spread("t")[:, :, None]
    _, error, gradient = measure(model, params, robots, noise, time)
    _, expected, numbered_gradient = measure(MODEL, params, numbered, noise, time)
    assert_near(error, expected, 1e-5)
    for name in ("state_encoder", "action_encoder", "action_decoder"):
        theirs = flatten_dict(numbered_gradient[name])
        for path, ours in flatten_dict(gradient[name]).items():
            assert_near(ours, theirs[path], 1e-5)
            assert set(np.unique(np.nonzero(ours)[0])) == set(rows)


@pytest.mark.slow
def test_perturbing_one_sample_leaves_the_actions_of_the_others(params, packed):
    changed = {name: np.array(getattr(packed, name)) for name in ("images", "text", "state")}
    tokens, row = CONFIG.tokens_per_image, 0
    source = packed.prefix_source[row, packed.prefix_segment[row] == 2]
    first = tokens * packed.images.shape[1]
    changed["text"][row, source[source >= first] - first] += 1
    changed["images"][row, np.unique(source[source < first] // tokens)] ^= 255
    changed["state"][row, 1] += 1
    noise = spread("noise")
    before = sample(MODEL, params, packed, noise)
    after = sample(MODEL, params, dataclasses.replace(packed, **changed), noise)
    others = np.ones(before.shape[:2], bool)
    others[row, 1] = False
    np.testing.assert_array_equal(before[others], after[others])
    assert np.abs(before[row, 1] - after[row, 1]).max() > 1e-3


@pytest.mark.slow
def test_the_loss_is_the_mean_over_chunks_at_the_released_density_of_time(params, packed):
    total, count = jax.jit(lambda p, b: MODEL.loss(p, b, KEY))(params, packed)
    assert count == packed.action_mask.sum()
    time, noise = (np.asarray(x) for x in flow.draw(KEY, packed.sample_id, 2, (6, 7)))
    beta = (time - 0.001) / 0.999  # of Beta(1.5, 1), as `flow.draw` takes it
    theirs = (0.999 - beta) / 0.999
    expected = 0.0
    for c in range(2):  # one chunk at a time, so that chunks cannot have seen each other
        one = slice(c, c + 1)
        error = measure(MODEL, params, packed, noise[:, :, one], 1 - theirs[:, :, one])[1]
        expected += np.asarray(error).sum() / 2
    np.testing.assert_allclose(total, expected, rtol=1e-5)


def test_time_falls_into_the_ports_buckets():
    """The port's own f32 product falls short of five edges, k / 1000 just below k; we do not."""
    edges = np.arange(1000, dtype=np.float32) / np.float32(1000)
    np.testing.assert_array_equal(time_bucket(1 - edges), np.arange(1000))
    for steps in (4, 7, 10, 16, 100):
        time = flow.times(steps)
        expected = [i * 1000 // steps for i in range(steps)]
        np.testing.assert_array_equal(time_bucket(time), expected)
    outside = jnp.asarray([1.0007, 1.0011, 0.0, 0.00002])
    np.testing.assert_array_equal(time_bucket(outside), [0, -1, 1000, 999])


def test_both_writers_files_hold_the_same_parameters(params):
    other = checkpoint.open_groot(FIXTURES / "lerobot" / "model.safetensors")
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    stored = [
        {n.rpartition("language_model.")[2] for n in s.shapes if "language_model" in n}
        for s in (SOURCE, other)
    ]
    assert [embedding in s for s in stored] == [True, False]
    assert [head in s for s in stored] == [False, True]
    assert checkpoint.config(other, VALUES) == checkpoint.config(SOURCE, VALUES)
    jax.tree.map(np.testing.assert_array_equal, load(other), params)


def test_newer_names_of_the_vision_tower_are_read(params):
    newer = SOURCE.renamed(lambda n: n.replace("vision_model.vision_model.", "vision_model."))
    assert "backbone.eagle_model.vision_model.post_layernorm.bias" in newer.arrays
    again = load(newer.renamed(canonical))
    jax.tree.map(np.testing.assert_array_equal, again["vision"], params["vision"])


def test_an_export_is_the_transformers_checkpoint_without_its_unused_parts(params, tmp_path):
    checkpoint.export(params, CONFIG, tmp_path)
    again = checkpoint.open_groot(tmp_path)
    config = checkpoint.config(again, checkpoint.read_values(tmp_path))
    assert config == checkpoint.config(SOURCE, VALUES)
    unused = {n for n in SOURCE.arrays if TABLE.ignores(n)}
    assert {n.split("vision_model.")[-1].split(".")[0] for n in unused} == {"head"}
    assert set(again.arrays) == set(SOURCE.arrays) - unused
    for name, array in again.arrays.items():
        np.testing.assert_array_equal(array, SOURCE.arrays[name])
    with pytest.raises(ValueError, match="exists; give a directory"):
        checkpoint.export(params, CONFIG, tmp_path)


def with_value(path: str, value) -> dict:
    changed = json.loads(json.dumps(VALUES))
    *sections, name = path.split(".")
    place = changed
    for section in sections:
        place = place[section]
    place[name] = value
    return changed


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("eagle_cfg.select_layer", -4, r"eagle_cfg\.select_layer = -4; only -1"),
        ("backbone_cfg.project_to_dim", 1536, r"project_to_dim = 1536; only None"),
        ("action_head_cfg.use_vlln", False, r"use_vlln = False; only True"),
        ("eagle_cfg.vision_config.num_attention_heads", 5, "5 attention heads do not divide"),
    ],
)
def test_a_variant_that_is_not_this_architecture_is_refused(path, value, message):
    with pytest.raises(ValueError, match=message):
        checkpoint.config(SOURCE, with_value(path, value))


def test_unknown_missing_and_misshapen_tensors_are_told_in_one_message():
    shapes = dict(SOURCE.shapes)
    del shapes["action_head.vlln.bias"]
    shapes["action_head.mask_token"] = (1, 36)
    shapes["action_head.surprise.weight"] = (2,)
    shapes["action_head.future_tokens.weight"] = (4, 36)
    ours = {
        path: leaf.shape
        for path, leaf in flatten_dict(jax.eval_shape(MODEL.init, KEY), sep="/").items()
    }
    with pytest.raises(ValueError, match=r"vlln\.bias.*surprise.*future_tokens") as told:
        match(TABLE, shapes, ours, "checkpoint")
    assert "mask_token" not in str(told.value)
    source = dataclasses.replace(SOURCE, arrays={"a": np.zeros(1)})
    with pytest.raises(ValueError, match="not a complete GR00T"):
        checkpoint.config(source, VALUES)


def test_the_default_config_is_the_released_3b():
    """The port has 2,724,163,520, of which 325,878,992 are two heads that nothing reads."""
    golden = {
        name: tuple(shape)
        for name, shape in json.loads((FIXTURES / "golden.json").read_text()).items()
    }
    shapes = jax.eval_shape(Groot(GrootConfig()).init, KEY)
    ours = {path: leaf.shape for path, leaf in flatten_dict(shapes, sep="/").items()}
    match(TABLE, golden, ours, "the released tree")
    assert sum(x.size for x in jax.tree.leaves(shapes)) == 2_724_163_520 - 325_878_992
    source = dataclasses.replace(
        SOURCE, arrays={n: jax.ShapeDtypeStruct(s, jnp.bfloat16) for n, s in golden.items()}
    )
    assert checkpoint.config(source, {}) == GrootConfig()


def test_every_parameter_matches_exactly_one_sharding_rule():
    lora = Lora(rank=2, alpha=2.0)
    adapted = dataclasses.replace(
        CONFIG,
        language=dataclasses.replace(CONFIG.language, lora=lora),
        adapter=dataclasses.replace(CONFIG.adapter, lora=lora),
        dit=dataclasses.replace(CONFIG.dit, lora=lora),
    )
    paths = list(flatten_dict(jax.eval_shape(Groot(adapted).init, KEY), sep="/"))
    matches = {p: [r for r, _ in SHARDING_RULES if re.search(r, p)] for p in paths}
    assert {p: m for p, m in matches.items() if len(m) != 1} == {}
    assert any(p.endswith("lora_a") for p in paths)


def test_a_prefix_packed_by_us_is_the_one_that_the_ports_inputs_make():
    recorded = case("edges")
    ours = pack(
        [[one] for one in samples(recorded)],
        CONFIG.layout(prefix=37, samples=1, images=3, text=37),
    )
    theirs = batch_of(recorded, "masked")
    np.testing.assert_array_equal(ours.prefix_segment, theirs.prefix_segment)
    base = 3 * CONFIG.tokens_per_image
    for i in range(3):
        a, b = (np.asarray(x.prefix_source)[i] for x in (ours, theirs))
        a, b = a[ours.prefix_segment[i] > 0], b[ours.prefix_segment[i] > 0]
        np.testing.assert_array_equal(a < base, b < base)
        np.testing.assert_array_equal(a[a < base], b[b < base])
        words = [x.text[i][s[s >= base] - base] for x, s in ((ours, a), (theirs, b))]
        np.testing.assert_array_equal(*words)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_sample": np.asarray([0, 0, 0, 1, 1, 2])}, "18 image tokens .* 3 views"),
        ({"embodiment_id": np.asarray([0, 1, 5])}, "embodiment_id holds 5; expected 0 to 4"),
        ({"state": np.zeros((3, 9), np.float32)}, r"state has shape \[3, 9\]"),
        ({"images": np.zeros((6, 12, 12, 3), np.float32)}, "expected uint8 pixels"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        groot_batch(case("edges") | change, CONFIG)


def test_released_padding_refuses_packed_rows(params, packed):
    with pytest.raises(ValueError, match="needs one sample a row"):
        jax.eval_shape(lambda p, b: RELEASED.loss(p, b, KEY), params, packed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"adapter": TransformerConfig(2, 3, 16)}, "48 in all, but model.language.width is 32"),
        ({"dit": TransformerConfig(3, 3, 12)}, "depth is 3"),
        ({"horizon": 17}, "horizon is 17 but there are 16"),
        ({"image_size": 13}, "image_size is 13"),
    ],
)
def test_sizes_that_do_not_fit_each_other_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


def test_layers_of_embodiments_begin_with_outputs_as_large_as_their_inputs():
    layer = EmbodimentLinear(3, 64, 64, jnp.dtype("float32"), nnx.Rngs(0))
    x = jax.random.normal(KEY, (3, 1, 200, 64))
    out = layer(x, jnp.arange(3)[:, None])
    np.testing.assert_allclose(np.std(out, axis=(1, 2, 3)), 1, atol=0.1)


def test_acting_reads_the_weights_of_its_own_robots_alone():
    layer = EmbodimentLinear(4, 64, 64, jnp.dtype("float32"), nnx.Rngs(0))
    graph, state = nnx.split(layer)
    x, robot = jnp.ones((1, 1, 5, 64)), jnp.array([[2]])

    def apply(state, x):
        return nnx.merge(graph, state)(x, robot)

    def flops(function):
        return jax.jit(function).lower(state, x).compile().cost_analysis()["flops"]

    once = 2 * 5 * 64**2
    assert flops(apply) < 2 * once
    gradient = jax.grad(lambda state, x: apply(state, x).sum())
    assert flops(gradient) > 4 * 64**2
    own = x[0, 0] @ layer.kernel[2] + layer.bias[2]
    np.testing.assert_allclose(apply(state, x)[0, 0], own, rtol=1e-6)
    learnt = gradient(state, x)["kernel"][...]
    np.testing.assert_allclose(learnt[2], np.full((64, 64), 5), rtol=1e-6)
    assert not np.asarray(learnt[jnp.array([0, 1, 3])]).any()
