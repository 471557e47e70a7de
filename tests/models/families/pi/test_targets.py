"""Knowledge insulation and the language model's own targets: which gradient and which token reaches
whom, and what decoding gives."""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sentencepiece
from scipy.special import log_softmax

from models import Embodiment, Normalizer, PackedBatch, Sample, pack
from models.families.pi.model import Pi
from models.families.pi.targets import negative_log_likelihood
from models.inputs.action_tokens import ActionTokens
from models.inputs.fast import Fast
from models.inputs.packed_batch import ACTION_TOKENS, SUBTASK
from models.inputs.tokenizer import BOS, SentencePiece, Tokenizer
from models.inputs.tokenizer import PAD as END
from tests.helpers.models.pi_sizes import TINY
from tests.helpers.models.processors import word_processor
from tests.helpers.models.random_parameters import random_parameters
from tests.helpers.models.velocity import velocity_of

CONFIG = dataclasses.replace(
    TINY,
    horizon=3,
    state_input="suffix",
    time="input",
    insulate=True,
    text_loss=0.5,
    action_token_loss=2.0,
    targets=12,
)
MODEL = Pi(CONFIG)
KEY = jax.random.key(7)
PACKED = CONFIG.layout(prefix=40, samples=4, images=5, targets=12)


def samples(seed: int, count: int = 3) -> list[Sample]:
    """The second has no subtask, the third no action tokens."""
    rng = np.random.default_rng(seed)
    return [
        Sample(
            images=tuple(rng.integers(0, 256, (1 + i % 2, 8, 8, 3), dtype=np.uint8)),
            text=rng.integers(1, 40, 2 + i).astype(np.int32),
            state=rng.normal(size=3).astype(np.float32),
            actions=rng.normal(size=(3, 4)).astype(np.float32),
            action_mask=rng.random((3, 4)) > 0.3,
            weight=1 + i,
            id=100 * seed + i,
            subtask=np.array([BOS, *rng.integers(2, 200, 3), END][: 0 if i == 1 else 5], np.int32),
            action_tokens=np.array(
                [END, *rng.integers(200, 300, 3 + i), END][: 0 if i == 2 else 7], np.int32
            ),
        )
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def params():
    return random_parameters(MODEL)


@jax.jit
def loss_and_gradient(params, batch: PackedBatch):
    return jax.value_and_grad(MODEL.loss, has_aux=True)(params, batch, KEY)


@jax.jit
def read_and_act(params, batch: PackedBatch):
    """Last hidden states of the targets, and the velocity of one chunk."""
    noised = jnp.ones((*batch.actions.shape[:2], 1, 3, 4))
    velocity = velocity_of(MODEL, params, batch, noised, jnp.full(noised.shape[:3], 0.5))
    return MODEL._modules.bind(params).read(batch)[0], velocity


predict = jax.jit(MODEL.predict_text, static_argnames="length")
FLOW = Pi(dataclasses.replace(CONFIG, insulate=False, text_loss=0, action_token_loss=0))
flow_loss = jax.jit(lambda params, batch: FLOW.loss(params, batch, KEY)[0])


def bare(group: list[Sample]) -> list[Sample]:
    none = np.zeros(0, np.int32)
    return [dataclasses.replace(s, subtask=none, action_tokens=none) for s in group]


def assert_close(a, b) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        scale = max(1.0, float(np.abs(x).max()))
        np.testing.assert_allclose(np.asarray(x) / scale, np.asarray(y) / scale, atol=1e-5)


def largest(tree) -> float:
    return max(float(np.abs(x).max()) for x in jax.tree.leaves(tree))


@pytest.mark.slow
def test_packing_changes_neither_loss_nor_count_nor_gradients(params):
    group = samples(1)
    together = loss_and_gradient(params, pack([group], PACKED))
    alone = [loss_and_gradient(params, pack([[s]], PACKED)) for s in group]
    assert_close(together, jax.tree.map(lambda *x: sum(map(np.asarray, x)), *alone))
    assert largest(together[1]["language"]) > 1e-3


@pytest.mark.slow
def test_insulation_stops_the_experts_gradient_at_what_it_reads_and_changes_no_other(params):
    batch = pack([samples(2)], PACKED)

    def gradient(insulate: bool):
        model = Pi(dataclasses.replace(CONFIG, insulate=insulate, text_loss=0, action_token_loss=0))
        (loss, _), gradients = jax.jit(jax.value_and_grad(model.loss, has_aux=True))(
            params, batch, KEY
        )
        return loss, gradients

    (loss, insulated), (same, free) = gradient(True), gradient(False)
    assert loss == same
    for part in ("vision", "language", "embedding"):
        assert largest(insulated.pop(part)) == 0.0
        assert largest(free.pop(part)) > 1e-3
    assert largest(insulated["state_in"]) > 1e-3
    assert_close(insulated, free)


@pytest.mark.slow
def test_the_loss_is_flow_matching_plus_weighted_means_over_samples(params):
    group = samples(3)
    batch = pack([group], PACKED)
    (loss, count), gradients = loss_and_gradient(params, batch)
    entries = np.array([s.action_mask.sum() * s.weight for s in group])
    assert count == entries.sum()
    assert min(largest(gradients[part]) for part in ("vision", "language", "embedding")) > 1e-3

    hidden, _ = read_and_act(params, batch)
    scores = log_softmax(np.asarray(hidden) @ np.asarray(params["embedding"]).T, axis=-1)
    expected = np.asarray(flow_loss(params, batch))
    for factor, kind in ((0.5, SUBTASK), (2.0, ACTION_TOKENS)):
        for slot in range(3):
            places = np.flatnonzero(batch.target_kind[0, slot] == kind)[1:]
            if len(places):
                label = batch.targets[0, slot, places]
                nats = -np.mean(scores[0, slot, places - 1, label])
                expected = expected + factor * nats * entries[slot]
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


@pytest.mark.slow
def test_room_for_targets_that_no_sample_has_changes_nothing(params):
    group = bare(samples(4))
    (with_room, _), _ = loss_and_gradient(params, pack([group], PACKED))
    none = dataclasses.replace(PACKED, targets=0)
    assert_close(with_room, flow_loss(params, pack([group], none)))


def changed(group: list[Sample], **tokens: int) -> PackedBatch:
    """The first sample's token at such a place of such a field is another."""
    new = {}
    for name, place in tokens.items():
        new[name] = getattr(group[0], name).copy()
        new[name][place] += 1
    return pack([[dataclasses.replace(group[0], **new), *group[1:]]], PACKED)


def test_the_expert_sees_the_subtask_and_never_the_action_tokens(params):
    group = samples(5)
    _, velocity = read_and_act(params, pack([group], PACKED))
    _, other_actions = read_and_act(params, changed(group, action_tokens=2))
    np.testing.assert_array_equal(velocity, other_actions)
    _, other_subtask = read_and_act(params, changed(group, subtask=4))
    velocity, other_subtask = (np.asarray(x) for x in (velocity, other_subtask))
    assert np.abs(velocity - other_subtask)[0, 0].max() > 1e-3
    np.testing.assert_array_equal(velocity[0, 1:], other_subtask[0, 1:])


def test_targets_are_causal_and_action_tokens_see_the_subtask(params):
    group = samples(6)
    subtask = len(group[0].subtask)
    hidden = np.asarray(read_and_act(params, pack([group], PACKED))[0])
    for batch, place in (
        (changed(group, action_tokens=2), subtask + 2),
        (changed(group, subtask=1), 1),
    ):
        difference = np.abs(hidden - np.asarray(read_and_act(params, batch)[0])).max(-1)
        assert not difference[0, 0, :place].any()
        assert difference[0, 0, place : subtask + len(group[0].action_tokens)].min() > 1e-5
        assert not difference[0, 1:].any()


def test_likelihoods_made_in_parts_are_those_of_the_whole():
    rng = np.random.default_rng(7)
    hidden, table = (rng.normal(size=n).astype(np.float32) for n in ((4, 150, 4), (9, 4)))
    tokens, order = rng.integers(0, 9, (4, 150), np.int32), rng.random((4, 150))

    def whole(hidden, table, valid):
        scores = jax.nn.log_softmax(hidden @ table.T)
        label = jnp.take_along_axis(scores, tokens[..., None], axis=2)[..., 0]
        return jnp.where(valid, -label, 0)

    def parts(hidden, table, valid):
        return negative_log_likelihood(hidden, table, tokens, valid)

    @jax.jit
    def both(valid):
        def squares(f):
            return lambda h, t: (jnp.sum(f(h, t, valid) ** 2), f(h, t, valid))

        return [jax.grad(squares(f), (0, 1), has_aux=True)(hidden, table) for f in (parts, whole)]

    for share in (0.0, 0.2, 1.0):
        assert_close(*both(order < share))


def test_logits_of_all_places_never_exist_at_once():
    rows, places, words = 4, 1024, 5000
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((rows, places, 8), jnp.float32),
            ((words, 8), jnp.float32),
            ((rows, places), jnp.int32),
            ((rows, places), jnp.bool),
        )
    ]
    gradient = jax.grad(lambda *x: negative_log_likelihood(*x).sum(), (0, 1))
    used = jax.jit(gradient).lower(*shapes).compile().memory_analysis().temp_size_in_bytes
    assert used < 0.3 * rows * places * words * 4


def test_decoding_with_a_cache_is_the_argmax_of_reading_what_it_decoded(params):
    group = bare(samples(7))
    tokens = np.asarray(predict(params, pack([group], PACKED), length=6, begin=BOS, end=END))
    assert (tokens[0, 3] == END).all()  # a slot without a sample
    told = [
        dataclasses.replace(s, subtask=np.array([BOS, *tokens[0, i]])) for i, s in enumerate(group)
    ]
    hidden = np.asarray(read_and_act(params, pack([told], PACKED))[0])
    likeliest = np.argmax(hidden[0, :3, :6] @ np.asarray(params["embedding"]).T, axis=-1)
    ended = np.cumsum(tokens[0, :3] == END, axis=-1) - (tokens[0, :3] == END) > 0
    np.testing.assert_array_equal(tokens[0, :3], np.where(ended, END, likeliest))


@pytest.mark.slow
def test_a_tiny_model_learns_its_targets_and_then_says_them():
    group = samples(8)
    batch = pack([group], PACKED)
    params = jax.jit(MODEL.init)(jax.random.key(3))

    @jax.jit
    def adam(params, mean, square, gradients, i):
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradients)
        square = jax.tree.map(lambda s, g: 0.98 * s + 0.02 * g * g, square, gradients)
        new = jax.tree.map(
            lambda p, m, s: p - 0.01 * m / (1 - 0.9**i) / (jnp.sqrt(s / (1 - 0.98**i)) + 1e-8),
            params,
            mean,
            square,
        )
        return new, mean, square

    zeros = jax.tree.map(np.zeros_like, params)
    state, losses = (params, zeros, zeros), []
    for i in range(1, 81):
        (loss, count), gradients = loss_and_gradient(state[0], batch)
        state = adam(*state, gradients, float(i))
        losses.append(float(loss / count))
    assert losses[-1] < 0.3 * losses[0]
    said = predict(state[0], pack([bare(group)], PACKED), length=6, begin=BOS, end=END)
    np.testing.assert_array_equal(said[0, 0], [*group[0].subtask[1:], END, END])
    np.testing.assert_array_equal(said[0, 2], [*group[2].subtask[1:], END, END])
    told = [dataclasses.replace(s, action_tokens=np.zeros(0, int)) for s in group]
    done = predict(state[0], pack([told], PACKED), length=6, begin=END, end=END)
    for slot in (0, 1):
        tokens = group[slot].action_tokens[1:]
        np.testing.assert_array_equal(done[0, slot, : len(tokens)], tokens)


@pytest.mark.parametrize("change", [{"targets": 1}, {"text_loss": -1.0}])
def test_weights_without_room_or_below_zero_are_refused(change):
    with pytest.raises(ValueError, match=r"model\.text_loss is .* with model\.targets"):
        dataclasses.replace(CONFIG, **change)


def test_a_loss_of_targets_needs_a_layout_that_has_them(params):
    none = dataclasses.replace(PACKED, targets=0)
    with pytest.raises(ValueError, match=r"targets=config\.targets"):
        jax.eval_shape(MODEL.loss, params, pack([[]], none), KEY)


def test_more_targets_than_places_are_refused_with_both_lengths():
    narrow = dataclasses.replace(PACKED, targets=9)
    with pytest.raises(ValueError, match=r"5 subtask tokens and 5 action tokens .* 9 places"):
        pack([samples(1)], narrow)


FAST = Fast.train(np.random.default_rng(0).uniform(-1, 1, (40, 3, 2)), 100)
ROBOT = Embodiment(
    "arm", ("front",), Normalizer((1.0,), (2.0,)), Normalizer((0.0, 3.0), (1.0, 4.0))
)
PROCESSOR = word_processor(
    image_size=8, state_dim=3, action_dim=4, horizon=3, state_input="suffix",
    words=Tokenizer.build(["pick up the red block"], 300).words, embodiments=(ROBOT,),
    targets=ActionTokens(FAST, 399),
)  # fmt: skip
IMAGE = np.zeros((8, 8, 3), np.uint8)
CHUNK = np.array([[0.5, 7.0], [-1.0, 2.0], [0.2, 1.0]], np.float32)


def test_samples_carry_subtask_and_action_tokens_that_can_be_read_back():
    made = PROCESSOR.sample([IMAGE], np.ones(1), "tidy", actions=CHUNK, subtask="pick_up the cup\n")
    assert (made.subtask[0], made.subtask[-1]) == (BOS, END)
    assert PROCESSOR.subtask_text(made.subtask) == "pick up the cup"
    assert (made.action_tokens[0], made.action_tokens[-1]) == (END, END)
    inner = made.action_tokens[1:-1]
    assert inner.min() > 399 - FAST.size
    assert inner.max() <= 399
    back = PROCESSOR.predicted_actions(made.action_tokens[1:])
    error = (back - CHUNK) / np.array([1.0, 4.0])
    assert np.linalg.norm(error) <= np.sqrt(6) / 20 + 1e-6


def test_a_sentencepiece_model_brings_its_own_begin_and_end(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("pick up the red cup\nopen the drawer\ntidy the table\n" * 5)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(tmp_path / "s"), vocab_size=40, hard_vocab_limit=False,
        pad_id=0, eos_id=1, bos_id=2, unk_id=3, minloglevel=2,
    )  # fmt: skip
    processor = PROCESSOR.with_tokenizer(SentencePiece.read(tmp_path / "s.model"))
    made = processor.sample([IMAGE], np.ones(1), "tidy", actions=CHUNK, subtask="open the drawer")
    assert (made.subtask[0], made.subtask[-1]) == (2, 1)
    assert (made.action_tokens[0], made.action_tokens[-1]) == (1, 1)
    predicted = np.append(made.subtask[1:], [7, 8])
    assert processor.subtask_text(predicted) == "open the drawer"


def test_acting_and_processors_without_fast_make_no_action_tokens():
    assert not len(PROCESSOR.sample([IMAGE], np.ones(1), "tidy").action_tokens)
    plain = dataclasses.replace(PROCESSOR, targets=ActionTokens(None, 399))
    made = plain.sample([IMAGE], np.ones(1), "tidy", actions=CHUNK)
    assert not len(made.subtask)
    assert not len(made.action_tokens)
    with pytest.raises(ValueError, match="without a FAST tokenizer"):
        plain.predicted_actions(np.array([300]))


def test_action_tokens_hold_the_last_step_of_an_episode():
    valid = np.array([True, True, False])
    garbage = np.concatenate([CHUNK[:2], [[99.0, -99.0]]])
    made = PROCESSOR.sample([IMAGE], np.ones(1), "tidy", actions=garbage, valid=valid)
    back = PROCESSOR.predicted_actions(made.action_tokens[1:])
    np.testing.assert_allclose(back, CHUNK[[0, 1, 1]], atol=0.5)


def test_action_tokens_that_spell_no_chunk_are_refused():
    with pytest.raises(ValueError, match="a chunk of 3 steps of 2 dims"):
        PROCESSOR.predicted_actions(np.array([399, END]))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        PROCESSOR.predicted_actions(np.array([260, END]))


def test_action_tokens_that_reach_into_the_words_are_refused():
    with pytest.raises(
        ValueError, match=r"FAST tokens, counted down from id 300, end at id 2\d\d, but ids below"
    ):
        dataclasses.replace(PROCESSOR, targets=ActionTokens(FAST, 300))


@pytest.mark.slow
def test_the_guide_runs_and_its_model_says_the_subtask():
    guide = (Path(__file__).parents[4] / "docs" / "insulation.md").read_text()
    found: dict = {}
    for block in re.findall(r"```python\n(.*?)```", guide, re.DOTALL):
        exec(block, found)
    assert found["subtask"] == "pick up the cup"
    assert np.abs(found["coarse"] - found["chunks"][0]).max() < 0.2
    assert found["chunk"].shape == found["coarse"].shape
