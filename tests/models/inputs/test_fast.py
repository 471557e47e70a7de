"""FAST: chunks come back within the rounding, the released files' form loads, nothing malformed
passes."""

import json

import numpy as np
import pytest
from tokenizers import ByteLevelBPETokenizer, trainers

from models.config import from_json, to_json
from models.inputs.fast import Fast

HORIZON, DIMS = 16, 3


def smooth(count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    t = np.linspace(0, 1, HORIZON)[:, None]
    waves = rng.uniform(-0.5, 0.5, (2, count, 1, DIMS))
    return waves[0] + waves[1] * np.sin(2 * np.pi * rng.uniform(0, 1, (count, 1, DIMS)) * t)


@pytest.fixture(scope="module")
def fast() -> Fast:
    return Fast.train(smooth(300), 400)


def test_a_chunk_comes_back_within_the_rounding_and_shorter_than_its_values(fast):
    for chunk in (*smooth(5, 1), np.random.default_rng(2).uniform(-2, 2, (HORIZON, DIMS))):
        back = fast.decode(fast.encode(chunk), HORIZON, DIMS)
        assert back.shape == chunk.shape
        assert np.linalg.norm(back - chunk) <= np.sqrt(HORIZON * DIMS) / (2 * fast.scale) + 1e-6
    lengths = [len(fast.encode(chunk)) for chunk in smooth(20, 3)]
    assert np.mean(lengths) < HORIZON * DIMS / 2


def test_a_finer_scale_gives_a_smaller_error():
    chunk = smooth(1, 4)[0]
    errors = []
    for scale in (5.0, 50.0):
        fast = Fast.train(smooth(20), 1200, scale)
        errors.append(np.abs(fast.decode(fast.encode(chunk), HORIZON, DIMS) - chunk).max())
    assert errors[1] < errors[0] / 3


def test_low_frequencies_of_all_dims_are_spelt_first(fast):
    constant = np.tile([0.5, -0.5, 0.0], (HORIZON, 1))
    spelt = fast._tokenizer.decode(fast.encode(constant).tolist())
    values = [ord(c) + fast.lowest for c in spelt]
    assert values == [20, -20, 0] + [0] * (HORIZON - 1) * DIMS  # 10 · 0.5 · √16


def test_it_survives_json_and_trains_to_the_same_vocabulary_again(fast):
    again = from_json(Fast, json.loads(json.dumps(to_json(fast))))
    assert again == fast
    assert Fast.train(smooth(300), 400) == fast
    assert fast.size <= 400


def test_files_in_the_released_form_load_as_they_are(tmp_path):
    """The released tokenizer is byte-level BPE over characters shifted by min_token = -354."""
    bpe = ByteLevelBPETokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=420, min_frequency=2, special_tokens=[], show_progress=False,
        initial_alphabet=[chr(i) for i in range(400)], max_token_length=10000,
    )  # fmt: skip
    exact = np.rint(10 * np.random.default_rng(0).uniform(-1, 1, (50, 8, 2))).astype(int)
    bpe._tokenizer.train_from_iterator(("".join(map(chr, c.ravel() + 354)) for c in exact), trainer)
    bpe.save(str(tmp_path / "tokenizer.json"))
    config = {
        "action_dim": None, "auto_map": {}, "min_token": -354, "scale": 10,
        "time_horizon": None, "vocab_size": 420,
    }  # fmt: skip
    (tmp_path / "processor_config.json").write_text(json.dumps(config))
    fast = Fast.load(tmp_path)
    assert (fast.scale, fast.lowest) == (10.0, -354)
    chunk = np.random.default_rng(1).uniform(-1, 1, (8, 2))
    ids = fast.encode(chunk)
    assert np.linalg.norm(fast.decode(ids, 8, 2) - chunk) <= np.sqrt(16) / 20 + 1e-6
    half_a_character = json.loads(fast.bpe)["model"]["vocab"]["Å"]
    with pytest.raises(ValueError, match="invalid characters"):
        fast.decode([half_a_character], 1, 1)


def test_missing_and_foreign_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        Fast.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json: not JSON"):
        Fast.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="no field 'model'"):
        Fast.load(tmp_path)


def test_malformed_tokens_are_refused(fast):
    ids = fast.encode(smooth(1, 5)[0])
    with pytest.raises(ValueError, match=r"spell .* a chunk of 16 steps of 3 dims has 48"):
        fast.decode(ids[:-1], HORIZON, DIMS)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        fast.decode([fast.size], 1, 1)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        fast.decode([-1], 1, 1)


@pytest.mark.parametrize(
    ("value", "message"),
    [(np.nan, "not finite"), (-50.0, r"from -2000 .* begins at -80"), (50.0, "to 2000 ")],
)
def test_a_chunk_that_cannot_be_spelt_is_refused_never_clipped(fast, value, message):
    with pytest.raises(ValueError, match=message):
        fast.encode(np.full((HORIZON, DIMS), value))


def test_a_vocabulary_smaller_than_its_alphabet_is_refused():
    with pytest.raises(ValueError, match="no room for the 161 values"):
        Fast.train(smooth(5), 100)
