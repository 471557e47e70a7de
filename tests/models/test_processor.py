"""Prompts, states and actions are prepared exactly as openpi prepares them."""

import io
import json

import numpy as np
import pytest
import sentencepiece

from models import Embodiment, Normalizer, Processor
from models.config import from_json, to_json
from models.load import _scaled, _unscaled, load_policy
from models.pi import PiConfig
from models.tokenizer import SentencePiece
from tests.models.test_openpi_parity import FIXTURES

PROMPTS = json.loads((FIXTURES / "prompts.json").read_text())


class Bytes:
    """The tokenizer with which the peer's prompts were recorded: UTF-8, 1 begins every text."""

    def encode(self, text: str) -> np.ndarray:
        return np.array([1, *text.encode()], np.int32)


def processor(state_input: str, **changes) -> Processor:
    identity = Normalizer((0.0,) * 10, (1.0,) * 10)
    robot = Embodiment("robot", ("front",), identity, identity)
    settings = {"words": (), "embodiments": (robot,), "text_limit": 24} | changes
    return Processor(
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
    vars(reader)["tokenizer"] = Bytes()
    arguments = (case["prompt"], np.zeros(3) if state is None else np.array(state))
    whole = next(
        c["ids"]
        for c in PROMPTS
        if (c["prompt"], c["state"]) == (case["prompt"], state) and c["length"] == 96
    )
    if len(whole) > case["length"]:
        with pytest.raises(ValueError, match=f"{len(whole)} tokens long, .* {case['length']}"):
            reader.tokens(*arguments)
    else:
        assert reader.tokens(*arguments).tolist() == case["ids"]


def test_quantile_statistics_scale_as_openpis_and_a_constant_dimension_is_its_lowest_bin():
    file = FIXTURES / "pi0" / "assets" / "robot" / "norm_stats.json"
    config = PiConfig(state_dim=10, action_dim=10)
    robot = _scaled(_unscaled(config, ("front",)), "robot", file, quantiles=True)
    with np.load(FIXTURES / "processor.npz") as case:
        normalized = robot.state(case["raw/state"])
        np.testing.assert_allclose(
            normalized, case["quantile/normalized/state"], rtol=1e-5, atol=1e-5
        )
        restored = robot.actions.inverse(case["model/actions"][..., :6])
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
    reader = from_json(Processor, to_json(processor("suffix", sentencepiece=pieces.model)))
    plain = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    tokens = reader.tokens("lift the red block", np.zeros(3))
    assert tokens[: len(tokens) - len(plain.encode("\n"))].tolist() == plain.encode(
        "lift the red block", add_bos=True
    )
    policy = load_policy(FIXTURES / "pi05" / "params", tokenizer=file)
    seen = {"image": {}, "state": np.zeros(10), "prompt": "lift the red block"}
    assert policy.infer(seen, noise=np.zeros((1, 6, 10)))["actions"].shape == (1, 6, 10)
    with pytest.raises(FileNotFoundError, match="no such tokenizer"):
        SentencePiece.read(tmp_path / "absent.model")
