"""The benchmark beside openpi compares equal work: it is held here to openpi's recorded answers."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from models import load_policy
from models.files.terminal import Console
from tests.helpers.models.openpi_numbers import TOLD
from tools.bench.models import pi05
from tools.bench.peer import asking

FIXTURE = Path(__file__).parents[2] / "fixtures" / "openpi" / "pi05"


@pytest.fixture(scope="module")
def case():
    with np.load(FIXTURE / "case.npz") as file:
        arrays = dict(file)
    policy = load_policy(FIXTURE / "params", **TOLD["pi05"])
    return policy.model, policy.params, arrays


def gradient_norm(arrays) -> float:
    squares = [np.square(g).sum() for name, g in arrays.items() if name.startswith("grad/")]
    return float(np.sqrt(np.sum(squares)))


@pytest.mark.slow
def test_losses_gradient_and_actions_agree_with_openpis(case):
    errors = pi05.deviations(*case, case[2], gradient_norm(case[2]))
    assert set(errors) == {"loss", "gradient", "actions"}
    assert max(errors.values()) < 1e-4


@pytest.mark.slow
def test_other_weights_are_not_compared(case):
    model, params, arrays = case
    other = params | {"action_out": jax.tree.map(lambda w: 1.01 * w, params["action_out"])}
    with pytest.raises(ValueError, match=r"differ by \{.*'actions'.*expected at most 0\.0001"):
        pi05.deviations(model, other, arrays, arrays, gradient_norm(arrays))


def test_sizes_in_openpis_words_are_the_ones_it_was_built_with(case):
    told = pi05.their_config(case[0].config)
    recorded = json.loads((FIXTURE / "config.json").read_text())
    assert told | {"prompt": recorded["prompt"], "lora": {}} == recorded


def test_rows_hold_real_cameras_and_tokens_alone():
    config = replace(pi05.CONFIG, image_size=28)
    arrays = pi05.random_batch(config)
    assert arrays["images"].shape[1] == 3
    assert arrays["tokens"].shape[1] == 200
    batch = pi05.rows(config, arrays)
    tokens = 2 * config.vision.tokens(config.image_size)
    assert batch.prefix_segment.shape == (2, tokens + 28)
    np.testing.assert_array_equal((batch.prefix_segment > 0).sum(1), [tokens + 22, tokens + 28])
    np.testing.assert_array_equal(batch.text[0, :22], arrays["tokens"][0, :22])


def test_without_a_peer_the_benchmark_says_how_to_get_one(tmp_path):
    with pytest.raises(ValueError, match=r"needs --peer PYTHON.*fixtures/openpi/make\.py"):
        pi05.run(Console())
    with pytest.raises(FileNotFoundError, match=r"nowhere is not a Python"):
        pi05.run(Console(), tmp_path / "nowhere")


def test_a_peer_without_openpi_is_told_so():
    with (
        pytest.raises(ValueError, match=r"gave no answer to \{'run': 'train'\}"),
        asking(Path(sys.executable), "openpi") as ask,
    ):
        ask(run="train")
