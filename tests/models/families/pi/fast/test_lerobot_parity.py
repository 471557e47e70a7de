"""A π0-FAST of LeRobot's reads raw observations, writes words and is trained as LeRobot 0.6.1's own
code does (tests/fixtures/pi0_fast/lerobot, recorded by it)."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from models import load_policy, pack
from models.checkpoints.safetensors_format import write_file
from models.layers.stack import apart
from models.model import bind_processor
from tests.helpers.models.free_tokens import predict_tokens
from tests.helpers.models.released_cases import answers

FIXTURES = Path(__file__).parents[4] / "fixtures" / "pi0_fast"
CASE = FIXTURES / "lerobot"


def drawn(shapes: dict[str, list[int]]) -> dict[str, np.ndarray]:
    """The weights that make_lerobot.py drew."""
    found = {}
    for at, (name, shape) in enumerate(sorted(shapes.items())):
        draw = np.random.default_rng(at).standard_normal(shape).astype(np.float32)
        from_one = "vision" in name and "norm" in name and name.endswith("weight")
        found[name] = np.float32(0.15) * draw + np.float32(from_one)
    return found


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """The policy, and for each observation what LeRobot made of it."""
    root = tmp_path_factory.mktemp("lerobot") / "robot"
    shutil.copytree(CASE, root)
    weights = drawn(json.loads((CASE / "case.json").read_text())["shapes"])
    entries = {name: (x.shape, lambda x=x: x) for name, x in weights.items()}
    write_file(root / "model.safetensors", entries, np.dtype(np.float32), {"format": "pt"})
    policy = load_policy(root, tokenizer=FIXTURES / "tokenizer.model", fast=FIXTURES / "fast")
    return policy, *answers(CASE)


@pytest.fixture(scope="module")
def batch(case):
    """Both observations with the chunks to be taught, in one row."""
    policy, seen, recorded = case
    config = policy.model.config
    samples = [
        policy._samples(policy._read(one).rows, chunk[None])[0]
        for one, chunk in zip(seen, recorded["taught"], strict=True)
    ]
    text = max(len(sample.text) for sample in samples)
    prefix = 2 * (2 * config.tokens_per_image + text)
    layout = config.layout(prefix=prefix, samples=2, images=4, targets=60)
    return samples, pack([samples], layout)


def test_prompts_and_action_tokens_are_lerobots(batch, case):
    policy, _, recorded = case
    for sample, text, tokens in zip(batch[0], recorded["text"], recorded["tokens"], strict=True):
        begin = policy.processor.tokenizer.begin
        np.testing.assert_array_equal(sample.text, [*text[text >= 0], begin])
        np.testing.assert_array_equal(sample.action_tokens, tokens[tokens >= 0])


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["stacked", "apart"])
def test_words_written_freely_are_lerobots(case, layers):
    policy, seen, recorded = case
    if layers == "apart":
        policy = replace(policy, params=apart(policy.params, policy.model.stacked))
    model, processor = bind_processor(policy.model, policy.processor), policy.processor
    rows = policy.rows([policy.prepare(one)[0].sample for one in seen])
    length = recorded["written"].shape[1]
    write = jax.jit(partial(predict_tokens, model), static_argnums=(2, 3))
    free = write(policy.params, rows, length, processor.tokenizer.end)
    for ours, theirs in zip(free[:, 0], recorded["written"], strict=True):
        assert len(set(theirs.tolist())) > 3
        np.testing.assert_array_equal(ours, theirs)


def test_losses_are_lerobots(batch, case):
    policy, _, recorded = case
    run = jax.jit(policy.model.loss)
    for slot, wanted in enumerate(recorded["loss"]):
        weight = np.eye(2, dtype=np.float32)[[slot]]
        loss, count = run(policy.params, replace(batch[1], weight=weight), jax.random.key(0))
        np.testing.assert_allclose(loss / count, wanted, rtol=1e-4)
