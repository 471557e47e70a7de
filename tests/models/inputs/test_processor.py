"""Prompts, states and actions are prepared exactly as openpi prepares them."""

import io
import json
from dataclasses import dataclass, replace

import numpy as np
import pytest
import sentencepiece

from models import Embodiment, Normalizer, Processor
from models.checkpoints.statistics_file import read_scale
from models.config import from_json, to_json
from models.inputs.observation import RobotObservation, samples_of
from models.inputs.tokenizer import SentencePiece, TextTokenizer
from models.load import load_policy
from tests.helpers.models.openpi_numbers import FIXTURES, TOLD
from tests.helpers.models.processors import tokens_of, word_processor

PROMPTS = json.loads((FIXTURES / "prompts.json").read_text())


@dataclass(frozen=True)
class Bytes(TextTokenizer):
    """The tokenizer with which the peer's prompts were recorded: UTF-8, 1 begins every text."""

    begins = 1

    def encode(self, text: str) -> np.ndarray:
        return np.array([1, *text.encode()], np.int32)


def processor(state_input: str, **changes) -> Processor:
    identity = Normalizer((0.0,) * 10, (1.0,) * 10)
    robot = Embodiment("robot", ("front",), identity, identity)
    settings = {"words": (), "embodiments": (robot,), "text_limit": 24} | changes
    return word_processor(
        image_size=8,
        state_dim=10,
        action_dim=10,
        horizon=4,
        state_input=state_input,
        **settings,
    )


@pytest.mark.parametrize("case", PROMPTS, ids=str)
def test_prompts_become_openpis_tokens_and_are_never_cut(case):
    state = case["state"]
    reader = processor("suffix" if state is None else "text", text_limit=case["length"])
    reader = reader.with_tokenizer(Bytes())
    arguments = (reader, case["prompt"], np.zeros(3) if state is None else np.array(state))
    whole = next(
        c["ids"]
        for c in PROMPTS
        if (c["prompt"], c["state"]) == (case["prompt"], state) and c["length"] == 96
    )
    if len(whole) > case["length"]:
        with pytest.raises(ValueError, match=f"{len(whole)} tokens long, .* {case['length']}"):
            tokens_of(*arguments)
    else:
        assert tokens_of(*arguments).tolist() == case["ids"]


def test_quantile_statistics_scale_as_openpis_and_a_constant_dimension_is_its_lowest_bin():
    file = FIXTURES / "pi0" / "assets" / "robot" / "norm_stats.json"
    state, actions = (read_scale(file, x, "quantile") for x in ("state", "actions"))
    with np.load(FIXTURES / "processor.npz") as case:
        normalized = state(case["raw/state"])
        np.testing.assert_allclose(
            normalized, case["quantile/normalized/state"], rtol=1e-5, atol=1e-5
        )
        restored = actions.inverse(case["model/actions"][..., :6])
        expected = case["quantile/unnormalized/actions"][..., :6]
        np.testing.assert_allclose(restored, expected, rtol=1e-5, atol=1e-6)


def test_a_sentencepiece_model_travels_in_the_processor(tmp_path):
    model = io.BytesIO()
    texts = [f"Task: lift the {c} block, State: {n};" for c in ("red", "green") for n in range(99)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, vocab_size=45, minloglevel=2
    )
    file = tmp_path / "tokenizer.model"
    file.write_bytes(model.getvalue())
    pieces = SentencePiece.read(file)
    reader = from_json(Processor, to_json(processor("suffix").with_tokenizer(pieces)))
    plain = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    tokens = tokens_of(reader, "lift the red block", np.zeros(3))
    assert tokens[: len(tokens) - len(plain.encode("\n"))].tolist() == plain.encode(
        "lift the red block", add_bos=True
    )
    policy = load_policy(FIXTURES / "pi05" / "params", tokenizer=file, **TOLD["pi05"])
    seen = {"image": {}, "state": np.zeros(10), "prompt": "lift the red block"}
    assert policy.infer(seen, noise=np.zeros((1, 6, 10)))["actions"].shape == (6, 10)
    with pytest.raises(FileNotFoundError, match="no such tokenizer"):
        SentencePiece.read(tmp_path / "absent.model")


ARM = Embodiment(
    "arm",
    ("front",),
    Normalizer((0.0,) * 3, (1.0,) * 3),
    Normalizer((0.5, 0.0, 1.0), (2.0, 0.5, 4.0)),
    relative=(2, -1, 0),
)
MEASURED = word_processor(8, 4, 4, 2, "token", ("lift",), (ARM,))
STATES = np.array([[1.0, 2.0, 3.0], [-1.0, 0.0, 0.5]], np.float32)
CHUNKS = np.array(
    [[[4.5, 0.25, 6.0], [3.5, -0.5, 2.0]], [[0.5, 0.0, 0.0], [2.0, 1.0, -1.0]]], np.float32
)
WORKED = np.array(
    [[[0.5, 0.5, 1.0], [0.0, -1.0, 0.0]], [[-0.25, 0.0, 0.0], [0.5, 2.0, -0.25]]], np.float32
)
"""Worked by hand: (action − state 2 − 0.5) / 2, action / 0.5, (action − state 0 − 1) / 4."""


def test_relative_actions_are_measured_from_the_state_at_the_observation():
    _, chunks, mask = MEASURED.numbers(STATES, CHUNKS)
    np.testing.assert_array_equal(chunks[:, :, :3], WORKED)
    assert mask[:, :, :3].all()
    assert not mask[:, :, 3].any()
    one = MEASURED.sample([None], STATES[1], "lift", actions=CHUNKS[1])
    np.testing.assert_array_equal(one.actions[:, :3], WORKED[1])


def test_openpis_delta_mask_is_the_dims_own_number():
    """openpi: mask (true, true, false) takes state dims 0 and 1 off, for every step alike."""
    plain = Normalizer((0.0,) * 3, (1.0,) * 3)
    robot = Embodiment("openpi", (), plain, plain, relative=(0, 1, -1))
    reader = word_processor(8, 4, 3, 2, "token", ("lift",), (robot,))
    expected = CHUNKS - [[[1.0, 2.0, 0.0]], [[-1.0, 0.0, 0.0]]]
    np.testing.assert_array_equal(reader.numbers(STATES, CHUNKS)[1], expected)


def test_relative_actions_come_back_exactly():
    rng = np.random.default_rng(0)
    states = rng.normal(scale=3, size=(50, 3)).astype(np.float32)
    chunks = rng.normal(scale=3, size=(50, 2, 3)).astype(np.float32)
    made = MEASURED.numbers(states, chunks)[1]
    np.testing.assert_allclose(MEASURED.actions(made, state=states), chunks, rtol=1e-6, atol=1e-6)
    single = MEASURED.actions(made[7], state=states[7])
    np.testing.assert_allclose(single, chunks[7], rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match=r"'arm' has actions relative .* give the state"):
        MEASURED.actions(made)


def test_what_actions_are_relative_to_travels_and_older_processors_are_absolute():
    value = json.loads(json.dumps(to_json(MEASURED)))
    assert from_json(Processor, value) == MEASURED
    del value["embodiments"][0]["relative"]
    assert from_json(Processor, value).embodiments[0].relative == ()


@pytest.mark.slow
def test_a_policy_with_relative_actions_adds_the_state_it_saw():
    policy = load_policy(FIXTURES / "pi0" / "params", **TOLD["pi0"])
    robot = policy.processor.embodiments[0]
    dims = len(robot.actions.offset)
    moved = replace(robot, relative=(1,) + (-1,) * (dims - 1))
    relative = replace(policy, processor=replace(policy.processor, embodiments=(moved,)))
    seen = {"image": {}, "state": np.arange(10.0), "tokenized_prompt": np.array([1, 5, 7])}
    noise = np.zeros((1, 6, 10))
    away = relative.infer(seen, noise)["actions"] - policy.infer(seen, noise)["actions"]
    expected = np.zeros((6, dims))
    expected[..., 0] = 1.0
    np.testing.assert_allclose(away, expected, atol=1e-5)


@pytest.mark.parametrize("state_input", ["suffix", "token"])
def test_a_tokenized_prompt_stands_for_no_state_that_the_model_reads_beside_it(state_input):
    seen = RobotObservation({}, np.array([1, 5, 7], np.int32))
    with pytest.raises(ValueError, match="has no 'state'; 'robot' needs one"):
        samples_of([seen], processor(state_input))


@pytest.mark.parametrize("state_input", ["text", "none"])
def test_a_tokenized_prompt_is_enough_where_it_spells_the_state_or_none_is_read(state_input):
    seen = RobotObservation({}, np.array([1, 5, 7], np.int32))
    (sample,) = samples_of([seen], processor(state_input))
    np.testing.assert_array_equal(sample.text, [1, 5, 7])
