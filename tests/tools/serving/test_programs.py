"""Traced programs outlive a server: the next one answers the same without tracing the model, and
takes none for another."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from models import Pi
from tests.helpers.models.tiny_policy import KEYS, PROMPTS, seen, tiny_policy
from tools.serving.programs import with_programs

pytest.importorskip("flatbuffers")


@pytest.fixture
def traced(monkeypatch):
    """One entry for each time that the model is traced to sample."""
    entries, sample = [], Pi.sample_actions

    def counted(self, *given, **options):
        entries.append(self)
        return sample(self, *given, **options)

    monkeypatch.setattr(Pi, "sample_actions", counted)
    return entries


def fresh():
    """The policy with nothing traced yet."""
    return replace(tiny_policy())


def acted(policy):
    return policy.act(seen(2), PROMPTS[:2], KEYS[:2])


def test_a_kept_program_answers_the_same_and_is_not_traced_again(tmp_path, traced):
    expected = acted(fresh())
    first = acted(with_programs(fresh(), tmp_path))
    assert len(traced) == 2
    again = acted(with_programs(fresh(), tmp_path))
    assert len(traced) == 2
    for found in (first, again):
        np.testing.assert_allclose(found, expected, atol=1e-6)
    (file,) = tmp_path.iterdir()
    assert file.suffix == ".stablehlo"


@pytest.mark.slow
def test_other_weights_share_a_program_and_another_sampler_does_not(tmp_path, traced):
    policy = fresh()
    acted(with_programs(policy, tmp_path))
    doubled = replace(policy, params=jax.tree.map(lambda x: 2 * x, policy.params))
    acted(with_programs(doubled, tmp_path))
    assert len(traced) == 1
    longer = replace(policy, model=policy.model.config.changed(euler_steps=3).build())
    three = acted(with_programs(longer, tmp_path))
    assert len(traced) == 2
    np.testing.assert_allclose(three, acted(replace(longer)), atol=1e-6)


def test_a_damaged_program_is_traced_again(tmp_path, traced, caplog):
    expected = acted(with_programs(fresh(), tmp_path))
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:100])
    np.testing.assert_array_equal(acted(with_programs(fresh(), tmp_path)), expected)
    assert len(traced) == 2
    assert "is damaged; the program is traced again" in caplog.text
    acted(with_programs(fresh(), tmp_path))
    assert len(traced) == 2


def test_parameters_are_told_apart_from_one_request_to_the_next(tmp_path):
    policy = with_programs(fresh(), tmp_path)
    doubled = jax.tree.map(lambda x: 2 * x, policy.params)
    before, other = acted(policy), acted(policy.varied(params=doubled))
    np.testing.assert_allclose(other, acted(replace(fresh(), params=doubled)), atol=1e-5)
    np.testing.assert_array_equal(acted(policy), before)
    assert np.abs(other - before).max() > 1e-3
