"""A quantised policy is written, read back and served like any other."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tyro

from models import load_policy
from models.load import like_model
from parallel.mesh import MeshConfig, make_mesh
from tests.helpers.models.openpi_numbers import FIXTURES, TOLD
from tools import quantize
from tools.bench.models.fp8 import random_batch


def run(*arguments, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["quantize", *map(str, arguments)])
    tyro.cli(quantize.main)


@pytest.mark.slow
def test_a_quantised_policy_is_saved_and_served_and_acts_almost_alike(
    tmp_path, monkeypatch, capsys
):
    named = tmp_path / "pi05_base"
    named.symlink_to(FIXTURES / "pi05")
    run(named, tmp_path / "small", "--horizon", "6", monkeypatch=monkeypatch)
    assert "bytes became" in capsys.readouterr().err
    policy, served = load_policy(FIXTURES / "pi05", **TOLD["pi05"]), load_policy(tmp_path / "small")
    language = served.params["language"]["layers"]
    assert language["mlp"]["down"]["kernel"].q.dtype == jnp.float8_e4m3fn
    assert served.params["vision"]["blocks"]["q"]["kernel"].q.dtype == jnp.float8_e4m3fn
    assert served.params["embedding"].dtype == jnp.float32
    made = quantize.quantize(policy)
    jax.tree.map(np.testing.assert_array_equal, served.params, made.params)
    batch = random_batch(policy.model.config, rows=1, samples=1)
    assert 0 < quantize.action_error(policy, served, batch) < 0.1
    assert quantize.size(served.params) < quantize.size(policy.params)
    with pytest.raises(SystemExit, match="quantised already"):
        run(tmp_path / "small", tmp_path / "again", monkeypatch=monkeypatch)


def test_quantised_kernels_are_spread_as_the_kernels_they_were():
    policy = quantize.quantize(load_policy(FIXTURES / "pi05", **TOLD["pi05"]))
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    like = like_model(policy.model, "bfloat16", mesh)
    kernel = like["language"]["layers"]["attention"]["q"]["kernel"]
    assert kernel.q.dtype == jnp.float8_e4m3fn
    assert kernel.q.sharding.spec == jax.sharding.PartitionSpec("stage", "fsdp", "tensor")
    assert kernel.scale.dtype == jnp.float32


def test_activations_may_be_rounded_too_of_kernels_in_float8_alone():
    policy = load_policy(FIXTURES / "pi05", **TOLD["pi05"])
    batch = random_batch(policy.model.config, rows=1, samples=1)
    both = quantize.quantize(policy, activations=True)
    kernels = quantize.action_error(policy, quantize.quantize(policy), batch)
    assert kernels < quantize.action_error(policy, both, batch) < 0.1
    with pytest.raises(ValueError, match="quantized_activations is for kernels kept in float8"):
        quantize.quantize(policy, kind="nf4", activations=True)


@pytest.mark.parametrize("pattern", [".", "^vision/", "^action_in/"])
def test_kernels_that_the_family_does_not_read_in_few_bits_are_refused_by_name(pattern):
    policy = load_policy(FIXTURES / "pi05", **TOLD["pi05"])
    named = "vision/embed/kernel" if pattern != "^action_in/" else "action_in/kernel"
    with pytest.raises(ValueError, match=f"names .*{named}.* family 'pi' do not read in few bits"):
        quantize.quantize(policy, pattern)
    with pytest.raises(ValueError, match="do not read in few bits"):
        like_model(policy.model.config.computing(quantized=pattern).build())
