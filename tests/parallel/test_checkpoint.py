from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.checkpoints import own
from parallel import checkpoint
from parallel.hosts.distributed import put_batch
from parallel.mesh import MeshConfig, make_mesh
from parallel.step import abstract_state, init_state, make_train_step
from tests.helpers.parallel.toy import OPTIMIZER, RULES, Denoiser, batch

MESH = make_mesh(MeshConfig(data=4, fsdp=2))
ABSTRACT = abstract_state(Denoiser(), OPTIMIZER, RULES, MESH)


def fresh(seed=0):
    return init_state(Denoiser(), OPTIMIZER, ABSTRACT, seed)


def write(directory, steps=(1,), keep=3):
    with checkpoint.CheckpointWriter(directory, {"model": "toy"}, {"words": ["a"]}, keep) as writer:
        for step in steps:
            writer.save(step, fresh(step), {"next": step})


def same(ours, other):
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def test_state_comes_back_whole_in_the_shardings_asked_for(tmp_path):
    write(tmp_path)
    for mesh in (MESH, make_mesh(MeshConfig(fsdp=4)), make_mesh(devices=jax.devices()[:1])):
        abstract = abstract_state(Denoiser(), OPTIMIZER, RULES, mesh)
        state = checkpoint.restore(tmp_path, abstract)
        assert jax.tree.structure(state) == jax.tree.structure(abstract)
        assert same(state, fresh(1))
        placed = jax.tree.map(lambda x, a: x.sharding == a.sharding, state, abstract)
        assert all(jax.tree.leaves(placed))
    assert own.read_json(tmp_path, "position") == {"next": 1}
    assert own.read_json(tmp_path, "config") == {"model": "toy"}
    assert own.read_json(tmp_path, "assets") == {"words": ["a"]}


def test_a_path_with_dots_saves_and_loads(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with checkpoint.CheckpointWriter(Path("../run/checkpoints"), {}, {}) as writer:
        writer.save(3, {"ema": {"w": jnp.arange(4.0)}}, {})
    for place in (Path("../run"), Path("../here/../run/checkpoints/3"), tmp_path / "run"):
        np.testing.assert_array_equal(own.restore_params(place)["w"], np.arange(4.0))


def test_a_save_under_way_does_not_see_later_steps(tmp_path):
    step = make_train_step(Denoiser(), OPTIMIZER, MESH, ABSTRACT)
    state = fresh()
    with checkpoint.CheckpointWriter(tmp_path, {}, {}) as writer:
        writer.save(0, state, {})
        for i in range(5):
            state, _ = step(state, put_batch(batch(i), MESH), 0)
    assert same(checkpoint.restore(tmp_path, ABSTRACT), fresh())
    assert not same(state.params, fresh().params)


def test_the_average_or_the_parameters_load_alone(tmp_path):
    step = make_train_step(Denoiser(), OPTIMIZER, MESH, ABSTRACT)
    state, _ = step(fresh(), put_batch(batch(0), MESH), 0)
    with checkpoint.CheckpointWriter(tmp_path / "checkpoints", {}, {}) as writer:
        writer.save(1, state, {})
    like = jax.eval_shape(Denoiser().init, jax.random.key(0))
    assert same(own.restore_params(tmp_path, like=like), state.ema)
    assert same(own.restore_params(tmp_path, "params"), state.params)
    assert not same(state.ema, state.params)


def test_only_the_last_checkpoints_stay(tmp_path):
    write(tmp_path, steps=(2, 4, 6, 10), keep=2)
    assert checkpoint.steps(tmp_path) == [6, 10]
    assert checkpoint.latest(tmp_path) == 10
    assert own.find(tmp_path / "6") == tmp_path / "6"


def test_half_written_checkpoints_are_ignored_and_cleared_by_the_next_writer(tmp_path):
    write(tmp_path, steps=(3,))
    half = tmp_path / "5.orbax-checkpoint-tmp"
    (tmp_path / "3").rename(half)
    assert checkpoint.latest(tmp_path) is None
    write(tmp_path, steps=(4,))
    assert [path.name for path in tmp_path.iterdir()] == ["4"]


def test_no_checkpoint_is_an_error_that_names_the_path(tmp_path):
    for path in (tmp_path, tmp_path / "missing", tmp_path / "checkpoints" / "7"):
        with pytest.raises(FileNotFoundError, match=f"{path} holds no complete checkpoint"):
            own.restore_params(path)


def test_a_checkpoint_of_another_model_names_the_first_parameter_that_differs(tmp_path):
    write(tmp_path)
    other = abstract_state(Denoiser(hidden=64), OPTIMIZER, RULES, MESH)
    message = r"another model: params/down/kernel has shape \(32, 12\) in it but \(64, 12\) in this"
    with pytest.raises(ValueError, match=message) as error:
        checkpoint.restore(tmp_path, other)
    assert "12 of 19 arrays differ" in str(error.value)
    with pytest.raises(ValueError, match=r"down/kernel has shape .* \(3 of 4 arrays differ\)"):
        own.restore_params(tmp_path, like=other.params)
