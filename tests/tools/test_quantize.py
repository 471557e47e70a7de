"""A quantised policy is written, read back and served like any other."""

import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tyro
from jax.tree_util import tree_leaves_with_path

from models import load_policy
from models.files.terminal import Console
from models.layers.quantized import dequantize, inner_size, is_quantized
from models.load import like_model
from models.sharding import path_name
from parallel.mesh import MeshConfig, make_mesh
from parallel.planning.random_batch import random_batch
from tests.helpers.models.openpi_numbers import FIXTURES, TOLD
from tests.helpers.tools.small_run import one_device
from tools import quantize
from tools.recipes import training
from tools.recipes.presets import load_preset
from tools.recipes.recording import RecordConfig, record_dataset

HELPERS = Path(__file__).parents[1] / "helpers"


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
    with pytest.raises(SystemExit, match="already quantised"):
        run(tmp_path / "small", tmp_path / "again", monkeypatch=monkeypatch)


def test_quantised_kernels_are_spread_as_the_kernels_they_were():
    policy = quantize.quantize(load_policy(FIXTURES / "pi05", **TOLD["pi05"]))
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    like = like_model(policy.model, "bfloat16", mesh)
    kernel = like["language"]["layers"]["attention"]["q"]["kernel"]
    assert kernel.q.dtype == jnp.float8_e4m3fn
    assert kernel.q.sharding.spec == jax.sharding.PartitionSpec("stage", "fsdp", "tensor")
    assert kernel.scale.dtype == jnp.float32


@pytest.mark.slow
def test_activations_may_be_rounded_too_of_kernels_in_float8_alone():
    policy = load_policy(FIXTURES / "pi05", **TOLD["pi05"])
    batch = random_batch(policy.model.config, rows=1, samples=1)
    both = quantize.quantize(policy, activations=True)
    kernels = quantize.action_error(policy, quantize.quantize(policy), batch)
    assert kernels < quantize.action_error(policy, both, batch) < 0.1
    with pytest.raises(ValueError, match="quantized_activations needs kernels in float8"):
        quantize.quantize(policy, kind="nf4", activations=True)


def test_observations_without_a_dataset_are_refused(tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match="--observations needs --calibrate"):
        run(tmp_path / "none", tmp_path / "no", "--observations", "40", monkeypatch=monkeypatch)


@pytest.mark.slow
def test_observations_of_the_robot_make_up_for_rounding_and_those_of_another_are_refused(
    tmp_path, monkeypatch
):
    data, other, trained = tmp_path / "data", tmp_path / "other", tmp_path / "run"
    record_dataset(RecordConfig(data, f"{HELPERS}/sim/point_suite.py:POINTS", episodes=4))
    record_dataset(RecordConfig(other, "tabletop-reach", episodes=1, image_size=16))
    small = load_preset(f"{HELPERS}/tools/small_run.py:SMALL")
    preset = replace(small, trainer=replace(small.trainer, train_steps=4, save_every=4))
    with one_device():
        training.run(training.Paths(str(data), trained), preset, Console(quiet=True))
    with pytest.raises(SystemExit, match="cameras"):
        run(trained, tmp_path / "no", "--calibrate", str(other), monkeypatch=monkeypatch)
    none = ("--calibrate", str(data), "--observations", "0")
    with pytest.raises(SystemExit, match="--observations is 0; give at least 1"):
        run(trained, tmp_path / "no", *none, monkeypatch=monkeypatch)
    assert not (tmp_path / "no").exists()
    run(trained, tmp_path / "plain", "--kind", "nf4", monkeypatch=monkeypatch)
    options = ("--kind", "nf4", "--calibrate", str(data), "--observations", "40")
    run(trained, tmp_path / "made", *options, monkeypatch=monkeypatch)
    policy, plain, made = map(load_policy, (trained, tmp_path / "plain", tmp_path / "made"))
    moments = quantize.recorded_moments(policy, policy.model.config.quantizable, str(data), 40)
    for path, seen in moments.items():
        assert np.linalg.eigvalsh(seen).min() > -1e-3 * seen.max(), path
    errors = [lost(policy.params, other.params, moments) for other in (plain, made)]
    assert errors[1] < errors[0]


def lost(params, kept, moments) -> float:
    """Norm of what products of all watched inputs differ by, of what a path gives."""
    total = 0.0
    held = {path_name(p): x for p, x in tree_leaves_with_path(kept, is_leaf=is_quantized)}
    for path, kernel in tree_leaves_with_path(params):
        name = path_name(path)
        if name in moments:
            difference = np.asarray(dequantize(name, held[name]) - kernel)
            flat = difference.reshape(len(kernel), inner_size(name, kernel.shape), -1)
            inner = flat.shape[1]
            h = moments[name][:, 0, :inner, :inner]
            scale = np.einsum("lij,lio,ljo->", h, *[np.asarray(kernel).reshape(flat.shape)] * 2)
            total += np.einsum("lij,lio,ljo->", h, flat, flat) / scale
    return float(total)


@pytest.mark.parametrize("pattern", [".", "^vision/", "^action_in/"])
def test_kernels_that_the_family_does_not_read_in_few_bits_are_refused_by_name(pattern):
    policy = load_policy(FIXTURES / "pi05", **TOLD["pi05"])
    named = "vision/embed/kernel" if pattern != "^action_in/" else "action_in/kernel"
    with pytest.raises(ValueError, match=f"names .*{named}.* family 'pi' cannot quantise"):
        quantize.quantize(policy, pattern)
    with pytest.raises(ValueError, match="cannot quantise"):
        like_model(policy.model.config.computing(quantized=pattern).build())
