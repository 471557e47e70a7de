"""π0-FAST writes chunks that can always be read, learns to write its own, and a sample's loss does
not depend on its neighbours."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict

from models import Embodiment, Normalizer, Policy, pack
from models.families.pi.fast.model import Pi0Fast, Pi0FastConfig
from models.families.pi.fast.written import opening
from models.inputs.fast import Fast
from models.inputs.tokenizer import Tokenizer
from models.layers.gemma import GemmaConfig
from models.layers.layers import Compute
from models.layers.siglip import SiglipConfig
from models.model import bind_processor
from models.sharding import path_name
from tests.helpers.models.free_tokens import predict_tokens
from tests.helpers.models.processors import tokens_of

CONFIG = Pi0FastConfig(
    vision=SiglipConfig(width=16, depth=1, hidden=24, heads=2, patch=8),
    language=GemmaConfig(width=32, depth=2, hidden=48, heads=2, kv_heads=1, head_dim=16),
    image_size=16,
    vocabulary=1000,
    state_dim=2,
    action_dim=4,
    horizon=6,
    max_decoding_steps=20,
    targets=30,
    writing="plain",
    compute=Compute(dtype="float32"),
)
DIMS = (3, 2)
BYTES = Path(__file__).parents[4] / "fixtures" / "pi0_fast" / "fast"
"""A FAST tokenizer whose tokens are runs of bytes, as the released one."""


def chunk(seed: int, dims: int) -> np.ndarray:
    slopes = np.random.default_rng(seed).uniform(-0.8, 0.8, (2, dims))
    return slopes[0] + slopes[1] * np.linspace(0, 1, CONFIG.horizon)[:, None]


@pytest.fixture(scope="module")
def processor():
    def robot(name: str, dims: int) -> Embodiment:
        return Embodiment(
            name, ("front",), Normalizer((0.0,) * 2, (1.0,) * 2),
            Normalizer((0.0,) * dims, (1.0,) * dims),
        )  # fmt: skip

    fast = Fast.train(np.stack([chunk(i, 3) for i in range(100)]), 400)
    words = Tokenizer.build(["Task: Action: State: |; lift the cup"], 500)
    made = CONFIG.processor((robot("arm", DIMS[0]), robot("hand", DIMS[1])), words)
    return replace(made, targets=replace(made.targets, fast=fast))


@pytest.fixture(scope="module")
def samples(processor):
    draw = np.random.default_rng(0)
    return [
        processor.sample(
            draw.integers(0, 256, (1, 16, 16, 3), dtype=np.uint8),
            draw.uniform(-1, 1, 2),
            ("Lift the_cup", "lift")[i % 2],
            actions=chunk(200 + i, DIMS[i % 2]),
            embodiment=i % 2,
            id=i,
        )
        for i in range(4)
    ]


@pytest.fixture(scope="module")
def acting(samples):
    """The same without the chunks that follow."""
    nothing = np.zeros(0, np.int32)
    return [replace(s, actions=0 * s.actions, action_tokens=nothing) for s in samples]


@pytest.fixture(scope="module")
def model(processor) -> Pi0Fast:
    return bind_processor(CONFIG.build(), processor)


@pytest.fixture(scope="module")
def params(model):
    return jax.jit(model.init)(jax.random.key(0))


@pytest.fixture(scope="module")
def loss(model):
    return jax.jit(jax.value_and_grad(model.loss, has_aux=True))


@pytest.fixture(scope="module")
def learnt(model, params, samples, loss):
    """Parameters that write the samples' chunks."""
    layout = CONFIG.layout(prefix=130, samples=2, images=2, targets=CONFIG.targets)
    batch = pack([samples[:2], samples[2:]], layout)
    optimizer = optax.adam(5e-3)
    state = jax.jit(optimizer.init)(params)

    @jax.jit
    def step(params, state):
        (value, count), gradient = loss(params, batch, jax.random.key(0))
        gradient = jax.tree.map(lambda g: g / count, gradient)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state, value / count

    for _ in range(150):
        params, state, value = step(params, state)
    assert value < 0.02
    return params


@pytest.mark.slow
def test_packing_changes_neither_loss_nor_gradients(params, samples, loss):
    together = CONFIG.layout(prefix=140, samples=3, images=3, targets=40)
    alone = CONFIG.layout(prefix=70, samples=1, images=1, targets=30)
    key = jax.random.key(0)
    (packed, count), gradient = loss(params, pack([samples[:3], samples[3:]], together), key)
    singles = [loss(params, pack([[sample]], alone), key) for sample in samples]
    assert count == sum(c for (_, c), _ in singles) == 6 * (3 + 2 + 3 + 2)
    np.testing.assert_allclose(packed, sum(value for (value, _), _ in singles), rtol=1e-5)
    added = jax.tree.map(lambda *g: sum(map(np.asarray, g)), *[g for _, g in singles])
    found, expected = (flatten_dict(tree, sep="/") for tree in (gradient, added))
    for name in expected:  # a key's bias moves no weight of attention: rounding, as in its kernel
        size = np.abs(expected[name.replace("k/bias", "k/kernel")]).max()
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=1e-5 * size + 1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_random_weights_write_chunks_that_the_tokenizer_reads(
    processor, params, acting, temperature
):
    model = bind_processor(replace(CONFIG, temperature=temperature).build(), processor)
    layout = CONFIG.layout(prefix=70, samples=1, images=1)
    batch = pack([[sample] for sample in acting], layout)
    noise = jax.random.normal(jax.random.key(1), batch.actions.shape)
    written, count = jax.jit(model.write)(params, batch, noise)
    chunks = jax.jit(model.sample_actions)(params, batch, noise)
    for i in range(4):
        dims = DIMS[i % 2]
        wanted = processor.targets.fast.decode(written[i, 0, : count[i, 0]], CONFIG.horizon, dims)
        np.testing.assert_allclose(chunks[i, 0, :, :dims], wanted, rtol=0, atol=1e-4)
        assert not chunks[i, 0, :, dims:].any()
    if temperature:
        again = jax.jit(model.write)(params, batch, noise[::-1])[0]
        assert (again != written).any()


@pytest.mark.slow
def test_scores_that_favour_what_spells_no_chunk_write_one_all_the_same(processor, params, acting):
    """Tokens that begin inside a character of UTF-8, or spell more than a chunk, by far the
    likeliest of all."""
    fast = Fast.load(BYTES)
    processor = replace(processor, targets=replace(processor.targets, fast=fast))
    model = bind_processor(replace(CONFIG, head=True).build(), processor)
    batch = pack(
        [acting[i : i + 1] for i in range(4)], CONFIG.layout(prefix=70, samples=1, images=1)
    )
    noise = np.zeros(batch.actions.shape, np.float32)
    grammar = model.grammar
    unfit = np.flatnonzero(
        ~np.asarray(grammar.allowed(grammar.begin(jnp.array(0)), CONFIG.max_decoding_steps))
    )
    draw, write = np.random.default_rng(0), jax.jit(model.write)
    for _ in range(6):
        favoured = draw.choice(unfit, 30, replace=False)
        head = draw.standard_normal((CONFIG.vocabulary, CONFIG.language.width))
        head[processor.targets.top - favoured] = 1e4 * draw.choice([-1, 1], (30, 1))
        written, count = write(params | {"head": head.astype(np.float32)}, batch, noise)
        for i in range(4):
            ids = np.asarray(written[i, 0, : count[i, 0]])
            assert ids[0] not in favoured
            assert np.isfinite(fast.decode(ids, CONFIG.horizon, DIMS[i % 2])).all()


def test_no_picture_is_looked_at_again_for_another_token(model, params, acting):
    batch = pack([acting[:2]], CONFIG.layout(prefix=130, samples=2, images=2))
    noise = jnp.zeros(batch.actions.shape)
    (loop,) = [
        equation
        for equation in jax.make_jaxpr(model.write)(params, batch, noise).eqns
        if equation.primitive.name == "while"
    ]
    read = {v.aval.shape for v in loop.invars}
    assert batch.images.shape not in read
    assert not read & {x.shape for x in jax.tree.leaves(params["vision"]) if x.ndim > 2}
    mlp = params["language"]["layers"]["mlp"]["down"]["kernel"].shape
    assert mlp in read  # a token passes these layers, and they see the prefix's keys
    depth, heads = CONFIG.language.depth, CONFIG.language.kv_heads
    assert (depth, 1, 130, heads, CONFIG.language.head_dim) in read


@pytest.mark.slow
def test_what_is_free_to_be_written_and_spells_a_chunk_is_what_is_written(
    processor, model, learnt, samples, acting
):
    """Greedy decoding over all words, begun by the prompt alone, writes what training taught, and
    the grammar changes none of it."""
    layout = CONFIG.layout(prefix=130, samples=2, images=2)
    batch = pack([acting[:2], acting[2:]], layout)
    noise = jnp.zeros(batch.actions.shape)
    written, count = jax.jit(model.write)(learnt, batch, noise)
    end = processor.tokenizer.end
    free = jax.jit(partial(predict_tokens, model), static_argnames=("length", "end"))(
        learnt, batch, length=30, end=end
    )
    for i, sample in enumerate(samples):
        row, slot = divmod(i, 2)
        taught = sample.action_tokens[1:]
        np.testing.assert_array_equal(free[row, slot, : len(taught)], taught)
        ids = processor.targets.top - taught[len(opening(processor.tokenizer)) : -2]
        np.testing.assert_array_equal(written[row, slot, : count[row, slot]], ids)


@pytest.mark.slow
def test_a_policy_answers_in_each_robots_dims(processor, learnt, samples):
    policy = Policy(CONFIG.build(), learnt, processor, embodiment=1, sizes=(1,))
    draw = np.random.default_rng(0)
    seen = [
        (draw.integers(0, 256, (1, 16, 16, 3), dtype=np.uint8), draw.uniform(-1, 1, 2))
        for _ in range(4)
    ]
    pictures, state = seen[1]
    (found,) = policy.act((pictures[None], state[None]), ["lift"], [(0, 0)])
    np.testing.assert_allclose(found, chunk(201, 2), atol=0.12)


def test_what_it_cannot_do_is_refused_in_a_sentence(params, acting, processor, model):
    batch = pack([acting[:1]], CONFIG.layout(prefix=70, samples=1, images=1))
    noise = jnp.zeros(batch.actions.shape)
    with pytest.raises(ValueError, match="has no FAST tokenizer"):
        CONFIG.build().sample_actions(params, batch, noise)
    with pytest.raises(ValueError, match="real-time chunking"):
        model.sample_actions(params, batch, noise, guidance=object())
    with pytest.raises(ValueError, match="came without a FAST tokenizer"):
        bind_processor(
            CONFIG.build(), replace(processor, targets=replace(processor.targets, fast=None))
        )
    with pytest.raises(ValueError, match="no targets"):
        model.loss(params, batch, jax.random.key(0))


def test_prompts_end_behind_the_state_and_tokens_stand_between_words(processor):
    read = lambda tokens: processor.tokenizer.decode(tokens).replace(" ", "")  # noqa: E731
    wanted = "Task:LifttheCup,State:128128;\n"
    assert read(tokens_of(processor, "Lift the_Cup ", np.zeros(2))) == wanted
    forms = [replace(CONFIG, writing=way) for way in ("openpi", "lerobot")]
    prompts = [form.processor(processor.embodiments, processor.tokenizer) for form in forms]
    openpi, lerobot = (tokens_of(p, "Lift the_Cup ", np.zeros(2)) for p in prompts)
    assert read(openpi) == wanted.replace("LifttheCup", "liftthecup")
    assert lerobot[-1] == processor.tokenizer.begin
    assert read(lerobot[1:-1]) == wanted
    tokens = processor.targets.encode(chunk(0, 3), processor.tokenizer)
    assert read(tokens[1:3]) == "Action:"
    assert read(tokens[-2:-1]) == "|"
    assert tokens[-1] == processor.tokenizer.end


def test_every_parameter_matches_exactly_one_sharding_rule():
    import re

    for head in (False, True):
        model = replace(CONFIG, head=head).build()
        shapes = jax.eval_shape(model.init, jax.random.key(0))
        for path, _ in jax.tree_util.tree_leaves_with_path(shapes):
            name = path_name(path)
            assert sum(bool(re.search(rule, name)) for rule, _ in model.sharding_rules) == 1, name
