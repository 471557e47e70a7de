"""Versions that nobody changes, whatever the learner donates and whoever reads."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.host.weights import Weights, WeightsReader


def tree(value):
    return {
        "expert": {"w": jnp.full((4, 4), value), "steps": jnp.int32(value)},
        "base": jnp.full(3, 7.0),
    }


TRAINED = {"expert": {"w": True, "steps": True}, "base": False}


def test_a_snapshot_outlives_what_it_was_taken_from():
    params = tree(1.0)
    weights = Weights(params)
    reader = WeightsReader(weights)
    update = jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)
    seen = [reader.read(0)]
    for version in (1, 2):
        params = update(params)
        weights.publish(params, version)
        seen.append(reader.read(version))
    update(params)
    assert params["expert"]["w"].is_deleted()
    assert [one.version for one in seen] == [0, 1, 2]
    assert [float(one.params["expert"]["w"][0, 0]) for one in seen] == [1.0, 2.0, 3.0]
    assert [float(one.params["base"][0]) for one in seen] == [7.0, 8.0, 9.0]
    assert len(weights.latencies) == 2
    assert min(weights.latencies) >= 0


def test_only_what_is_trained_is_copied_and_the_rest_is_shared():
    params = tree(1.0)
    weights = Weights(params, trained=TRAINED)
    first, second = WeightsReader(weights), WeightsReader(weights)
    weights.publish({**tree(2.0), "base": jnp.zeros(3)}, 1)
    for reader in (first, second):
        read = reader.read(1).params
        assert read["base"] is params["base"]
        assert float(read["expert"]["w"][0, 0]) == 2.0
    assert first.read(1).params["expert"]["w"] is second.read(1).params["expert"]["w"]


def test_floats_that_are_trained_are_cast_and_nothing_else():
    for dtype in (jnp.float32, jnp.bfloat16):
        params = tree(1.0)
        params["expert"]["w"] = params["expert"]["w"].astype(dtype)
        weights = Weights(params, trained=TRAINED, dtype=jnp.bfloat16)
        read = WeightsReader(weights).read(0).params
        assert read["expert"]["w"].dtype == jnp.bfloat16
        assert read["expert"]["steps"].dtype == jnp.int32
        assert read["base"] is params["base"]
        params["expert"]["w"].delete()
        np.testing.assert_array_equal(np.asarray(read["expert"]["w"], np.float32), np.ones((4, 4)))


def test_a_reader_puts_each_version_and_once_the_frozen_base_onto_its_device():
    device, placed = jax.devices()[1], []

    def place(part):
        placed.append(len(jax.tree.leaves(part)))
        return jax.device_put(part, device)

    weights = Weights(tree(1.0), trained=TRAINED)
    reader = WeightsReader(weights, place)
    weights.publish(tree(2.0), 1)
    read = reader.read(0)
    reader.read(0)
    assert all(leaf.devices() == {device} for leaf in jax.tree.leaves(read.params))
    assert placed == [1, 2, 2]


def test_a_version_is_staged_once_for_all_its_readers_and_joined_by_each():
    staged = []

    def stage(part):
        staged.append(len(jax.tree.leaves(part)))
        return "staged", len(staged)

    weights = Weights(tree(1.0), trained=TRAINED, stage=stage)
    readers = [
        WeightsReader(weights, join=lambda moving, base: (moving[1], base[1])) for _ in range(2)
    ]
    assert [reader.read(0).params for reader in readers] == [(2, 1), (2, 1)]
    weights.publish(tree(2.0), 1)
    weights.publish(tree(3.0), 2)
    assert [reader.read(2).params for reader in readers] == [(3, 1), (3, 1)]
    assert staged == [1, 2, 2]


def test_readers_take_a_version_over_one_at_a_time_and_only_those_who_must_wait():
    moving, arrived, release = [0], threading.Event(), threading.Event()

    def slow(part):
        moving[0] += 1
        if weights.version:
            arrived.set()
            assert release.wait(60)
        return part

    weights = Weights(tree(1.0))
    first, second, third = (
        WeightsReader(weights, slow),
        WeightsReader(weights),
        WeightsReader(weights),
    )
    weights.publish(tree(2.0), 1)
    got = {}
    takes = threading.Thread(target=lambda: got.update(first=first.read(0).version))
    takes.start()
    assert arrived.wait(60)
    assert second.read(0).version == 0  # goes on meanwhile
    must = threading.Thread(target=lambda: got.update(third=third.read(1).version))
    must.start()
    must.join(0.05)
    assert must.is_alive()
    release.set()
    takes.join(60)
    must.join(60)
    assert got == {"first": 1, "third": 1}
    assert second.read(0).version == 1


def test_versions_only_go_up_and_one_that_was_not_published_is_not_read():
    weights = Weights(tree(1.0), version=3)
    with pytest.raises(ValueError, match="Version 3 is not newer than version 3"):
        weights.publish(tree(2.0), 3)
    with pytest.raises(RuntimeError, match="Version 4 of the policy is needed, but 3 is"):
        WeightsReader(weights).read(4)
