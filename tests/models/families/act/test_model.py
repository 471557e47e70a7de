"""ACT's draws are each sample's own, its ResNet's statistics are the batch's, and it is the same on
eight devices, in bf16 and with its layers apart."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.families.act.model import ActConfig
from models.inputs.embodiment import Embodiment
from models.inputs.packed_batch import pack
from models.layers import stack
from models.layers.batch_norm import training
from models.layers.vision.resnet import ResnetConfig
from models.model import rules_of
from models.sharding import shardings
from parallel.hosts.distributed import put_batch
from parallel.mesh import MeshConfig, make_mesh

CONFIG = ActConfig(
    tower=ResnetConfig(norm="group", width=16), width=16, heads=2, hidden=24, encoder_depth=2,
    vae_depth=1, latent=4, kl_weight=1.0, dropout=0.3, image_size=32, cameras=2, state_dim=3,
    action_dim=2, horizon=4, n_action_steps=4,
)  # fmt: skip
ROBOT = Embodiment.in_model_units(("front", "wrist"), 3, 2)
KEY = jax.random.key(5)


def samples(config, count=4):
    draw, processor = np.random.default_rng(0), config.processor([ROBOT])
    return [
        processor.sample(
            [
                draw.integers(0, 256, (32, 32, 3), np.uint8) if i or camera else None
                for camera in range(2)
            ],
            draw.normal(size=3).astype(np.float32),
            "",
            actions=draw.normal(size=(4, 2)).astype(np.float32),
            id=7 + i,
        )
        for i in range(count)
    ]


def packed(config, rows):
    every, most = samples(config), max(map(len, rows))
    layout = config.layout(prefix=8, samples=most, images=2 * most)
    return jax.tree.map(jnp.asarray, pack([[every[i] for i in row] for row in rows], layout))


def made(config):
    model = config.build()
    return model, jax.jit(model.init)(jax.random.key(0))


def shares(model, params, batch):
    """Each sample's share of the loss, by its place in the rows."""

    def one(weight):
        return model.loss(params, replace(batch, weight=weight), KEY)

    single = np.eye(batch.weight.size, dtype=np.float32).reshape(-1, *batch.weight.shape)
    return np.array([jax.jit(one)(weight * batch.weight) for weight in single])[:, 0]


def test_draws_of_dropout_and_latent_are_each_samples_own():
    model, params = made(CONFIG)
    alone = shares(model, params, packed(CONFIG, [(0,), (1,), (2,), (3,)]))
    together = shares(model, params, packed(CONFIG, [(3, 0), (2, 1)]))
    np.testing.assert_allclose(together, alone[[3, 0, 2, 1]], rtol=1e-5)
    batch = packed(CONFIG, [(0,), (1,)])
    other = shares(model, params, replace(batch, sample_id=batch.sample_id + 50))
    assert np.abs(other - alone[:2]).min() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["group", "running"])
def test_eight_devices_learn_what_one_does(norm):
    config = replace(CONFIG, tower=replace(CONFIG.tower, norm=norm), dropout=0.0)
    model, params = made(config)
    batch = packed(config, [(i % 4,) for i in range(8)])

    def learnt(mesh):
        placed = jax.device_put(params, shardings(params, rules_of(model), mesh))
        spread = put_batch(jax.tree.map(np.asarray, batch), mesh)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            loss = lambda p, b: model.loss(training(p), b, KEY)[0]  # noqa: E731
            return jax.jit(jax.value_and_grad(loss))(placed, spread)

    one = learnt(make_mesh(devices=jax.devices()[:1]))
    eight = learnt(make_mesh(MeshConfig(data=2, fsdp=2, tensor=2)))
    np.testing.assert_allclose(eight[0], one[0], rtol=1e-5)
    largest = max(np.abs(x).max() for x in jax.tree.leaves(one[1]))
    for a, b in zip(jax.tree.leaves(one[1]), jax.tree.leaves(eight[1]), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=2e-5 * largest)


def test_layers_apart_act_the_same_and_bf16_nearly_so():
    model, params = made(replace(CONFIG, pre_norm=True))
    batch, noise = packed(CONFIG, [(0,), (1,)]), jnp.zeros((2, 1, 4, 2))
    acted = jax.jit(model.sample_actions)(params, batch, noise)
    apart = jax.jit(model.sample_actions)(stack.apart(params, model.stacked), batch, noise)
    np.testing.assert_allclose(apart, acted, atol=1e-5)
    half = replace(CONFIG, pre_norm=True).computing(dtype="bfloat16").build()
    np.testing.assert_allclose(
        jax.jit(half.sample_actions)(params, batch, noise), acted, atol=0.05 * np.abs(acted).max()
    )
    assert np.isfinite(jax.jit(half.loss)(params, batch, KEY)[0])


def test_configs_that_cannot_be_built_are_refused():
    for changes, message in (
        ({"width": 18}, "a multiple of 4 and of heads"),
        ({"environment_dim": 4}, "at most model.state_dim"),
        ({"cameras": 0}, "cameras is 0, and environment_dim too"),
        ({"picture_scales": CONFIG.picture_scales * 3}, "has 3 entries; give 0, 1 or 2"),
        ({"activation": "glu"}, "activation is 'glu'"),
        ({"dropout": 1.0}, "a share below 1"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(CONFIG, **changes)
    with pytest.raises(ValueError, match=r"reads 1; raise --model\.cameras"):
        replace(CONFIG, cameras=1).processor([ROBOT])
