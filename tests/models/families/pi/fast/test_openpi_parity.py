"""Released π0-FAST policies read raw observations, write tokens and answer as openpi's own stack
does, and are trained by its loss (tests/fixtures/pi0_fast, recorded by openpi's code)."""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import jax
import numpy as np
import pytest

from models import load_policy, pack
from models.families.pi.fast.written import opening
from models.families.pi.released import RELEASED
from models.families.pi.targets import logits
from models.model import bind_processor
from tests.helpers.models.free_tokens import predict_tokens
from tests.helpers.models.openpi_numbers import close
from tests.helpers.models.released_cases import answers, case_policy

FIXTURES = Path(__file__).parents[4] / "fixtures" / "pi0_fast"
CASES = sorted(file.parent for file in FIXTURES.glob("openpi/*/case.json"))
FIRST, *OTHERS = CASES
SLOW = [pytest.param(case, marks=pytest.mark.slow) for case in OTHERS]
UNRUNNABLE = {"paligemma_fast_droid", "paligemma_fast_specialist_droid"}
"""openpi's own configs of them raise TypeError (DroidInputs takes no action_dim)."""


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def case(request, tmp_path_factory):
    """A policy, and for each observation what openpi made of it."""
    untold = {"relative": (), "horizon": 10} if request.param.name.endswith("_base") else {}
    policy = load_policy(
        case_policy(request.param, tmp_path_factory.mktemp("fast")),
        tokenizer=FIXTURES / "tokenizer.model",
        fast=FIXTURES / "fast",
        **untold,
    )
    seen, recorded = answers(request.param)
    return policy, seen, recorded


def test_prompts_are_openpis(case):
    policy, seen, recorded = case
    for one, text in zip(seen, recorded["text"], strict=True):
        (request,) = policy.prepare(one)
        np.testing.assert_array_equal(request.sample.text, text[text >= 0])


@pytest.mark.parametrize("case", [FIRST, *SLOW], indirect=True, ids=lambda c: c.name)
def test_actions_are_openpis(case):
    policy, seen, recorded = case
    for one, actions in zip(seen, recorded["actions"], strict=True):
        found = policy.infer(one)["actions"]
        close(found.reshape(found.shape[-2:]), actions)


@pytest.mark.parametrize("case", [FIRST, SLOW[2]], indirect=True, ids=lambda c: c.name)
def test_tokens_are_openpis_with_the_grammar_and_without(case):
    policy, seen, recorded = case
    model, processor = bind_processor(policy.model, policy.processor), policy.processor
    end, before = processor.tokenizer.end, len(opening(processor.tokenizer))
    batch = policy.rows([policy.prepare(one)[0].sample for one in seen])
    write = jax.jit(partial(predict_tokens, model), static_argnums=(2, 3))
    free = write(policy.params, batch, 60, end)
    noise = np.zeros(batch.actions.shape, np.float32)
    written, count = jax.jit(model.write)(policy.params, batch, noise)
    for row, theirs in enumerate(recorded["written"]):
        until = theirs.tolist().index(end) + 1
        np.testing.assert_array_equal(free[row, 0, :until], theirs[:until])
        ids = processor.targets.top - theirs[before : until - 2]
        np.testing.assert_array_equal(written[row, 0, : count[row, 0]], ids)


@cache
def compiled(config):
    """Scores of words at the targets, and the loss."""
    model = config.build()

    def scores(params, batch):
        modules = model._modules.bind(params)
        return logits(modules.written(batch)[0], modules.scorer)

    return jax.jit(scores), jax.jit(model.loss)


def test_losses_and_scores_are_openpis(case):
    """Neither depends on the numbers of a chunk beside its tokens, so that all take one shape."""
    policy, seen, recorded = case
    sizes = {"horizon": 16, "state_dim": 8, "action_dim": 8}
    config = replace(policy.model.config, **sizes)
    shown = {"actions": np.zeros((16, 8), np.float32), "action_mask": np.ones((16, 8), bool)}
    samples = [
        replace(policy._samples(policy._read(one).rows, chunk[None])[0], **shown)
        for one, chunk in zip(seen, recorded["taught"], strict=True)
    ]
    prefix = 2 * (3 * config.tokens_per_image + 100)
    batch = pack([samples], config.layout(prefix=prefix, samples=2, images=6, targets=60))
    scores, loss = compiled(config)
    found = scores(policy.params, batch)
    for slot, (wanted, places) in enumerate(
        zip(recorded["scores"], recorded["places"], strict=True)
    ):
        close(found[slot, places, ::16], wanted, 1e-5)
        alone = replace(batch, weight=np.eye(2, dtype=np.float32)[[slot]])
        total, count = loss(policy.params, alone, jax.random.key(0))
        np.testing.assert_allclose(total / count, recorded["loss"][slot], rtol=1e-4, atol=1e-6)


def test_every_policy_of_openpis_that_can_act_here_was_recorded():
    acting = {
        name
        for name, row in RELEASED.items()
        if row.source == "openpi" and "_fast_" in name and not row.refused
    }
    assert acting - UNRUNNABLE == {case.name for case in CASES}
