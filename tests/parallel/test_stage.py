"""The pipelined π0.5 and GR00T compute what one device does."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, use_abstract_mesh

from models.families.groot.head import SHARDING_RULES
from models.families.groot.model import Groot, GrootConfig
from models.inputs.packed_batch import Sample, pack
from models.layers.dit import TransformerConfig
from models.layers.float8.fp8 import is_history
from models.layers.layers import Compute, Lora
from models.layers.pipeline import Pipeline
from models.layers.qwen.qwen3 import QwenConfig
from models.layers.siglip import SiglipConfig
from models.sharding import shardings
from parallel.mesh import MeshConfig, make_mesh, rows_sharding
from tests.helpers.parallel import small_pi

pytestmark = pytest.mark.slow

GROOT = GrootConfig(
    vision=SiglipConfig(width=16, depth=1, hidden=32, heads=2, patch=4),
    language=QwenConfig(16, depth=2, hidden=32, heads=2, kv_heads=1, head_dim=8, remat="full"),
    adapter=TransformerConfig(depth=2, heads=2, head_dim=8, remat="full"),
    dit=TransformerConfig(depth=4, heads=2, head_dim=8, remat="full"),
    image_size=8,
    vocabulary=64,
    embodiments=2,
    state_dim=4,
    action_dim=4,
    horizon=4,
    future_tokens=2,
    positions=8,
    hidden=16,
    compute=Compute(dtype="float32"),
)


def piped(microbatches, repeats=1, config=small_pi.CONFIG):
    compute = replace(config.compute, pipeline=Pipeline(microbatches, repeats))
    return replace(config, compute=compute)


@pytest.fixture(scope="module")
def one_device():
    return small_pi.losses(make_mesh(devices=jax.devices()[:1]))


@pytest.mark.parametrize(
    ("mesh", "accumulation", "pipeline"),
    [
        (MeshConfig(context=2, tensor=2, stage=2), 1, (4, 2)),
        pytest.param(MeshConfig(data=2, fsdp=2, stage=2), 2, (1, 1), marks=pytest.mark.drill),
        pytest.param(MeshConfig(fsdp=2, stage=4), 1, (2, 1), marks=pytest.mark.drill),
        pytest.param(MeshConfig(fsdp=4, stage=2), 2, (2, 2), marks=pytest.mark.drill),
    ],
)
def test_stages_beside_other_axes_give_the_losses_of_one_device(
    one_device, mesh, accumulation, pipeline
):
    """Micro-batches and repeats that are not the default, which `test_axes` runs."""
    found = small_pi.train(make_mesh(mesh), accumulation, config=piped(*pipeline)).losses
    np.testing.assert_allclose(found, one_device, rtol=1e-5)


@pytest.mark.drill
def test_histories_and_adapters_pass_the_stages():
    """With float8, LoRA, repeats and two accumulated micro-batches, of which the second has the
    first one's scales. Sums in another order make float8 round a value otherwise now and then, on
    two data-parallel devices too, which changes a gradient by up to 0.02: of ten batches three must
    have the gradient of one device to 1e-5, and all to 0.05."""
    lora = Lora(2, 2.0)
    stacks = {
        name: replace(getattr(small_pi.CONFIG, name), attention_lora=lora, mlp_lora=lora)
        for name in ("language", "expert")
    }
    config = replace(small_pi.CONFIG, compute=Compute("float32", fp8="delayed"), **stacks)
    on_one = make_mesh(devices=jax.devices()[:1]), 2
    on_stages = make_mesh(MeshConfig(data=2, stage=2), jax.devices()[:4]), 2
    errors = []
    for batch in range(10):
        ours = small_pi.train(*on_stages, 1, piped(2, 2, config), first=batch).state
        theirs = small_pi.train(*on_one, 1, config, first=batch).state
        gradients = [small_pi.gradient(state) for state in (ours, theirs)]
        errors.append(np.linalg.norm(np.subtract(*gradients)) / np.linalg.norm(gradients[1]))
        found, expected = (expert_histories(state)[..., 0] for state in (ours, theirs))
        np.testing.assert_allclose(found, expected, rtol=0.05)
    assert np.sort(errors)[2] < 1e-5
    assert max(errors) < 0.05
    after_three = small_pi.train(*on_stages, 3, piped(2, 2, config)).state
    assert (expert_histories(after_three)[..., :3] > 0).all()


def expert_histories(state):
    """Histories [n, steps] of the expert, each of whose layers something reads."""
    leaves = jax.tree_util.tree_leaves_with_path(state.params["expert"]["layers"])
    found = [np.asarray(leaf) for path, leaf in leaves if is_history(path)]
    return np.concatenate([x.reshape(-1, x.shape[-1]) for x in found])


def groot_batch():
    layout, rng = GROOT.layout(prefix=16, samples=2, images=2), np.random.default_rng(0)
    rows = [
        [
            Sample(
                images=tuple(rng.integers(0, 256, (1, 8, 8, 3), dtype=np.uint8)),
                text=rng.integers(1, 60, 1 + (row + slot) % 3).astype(np.int32),
                state=rng.normal(size=4).astype(np.float32),
                actions=rng.normal(size=(4, 4)).astype(np.float32),
                action_mask=np.ones((4, 4), bool),
                id=2 * row + slot,
            )
            for slot in range(1 + row % 2)
        ]
        for row in range(8)
    ]
    return pack(rows, layout)


def test_groot_on_stages_has_the_loss_and_gradients_of_one_device():
    rng, abstract = np.random.default_rng(1), jax.eval_shape(Groot(GROOT).init, jax.random.key(0))
    params = jax.tree.map(lambda x: rng.normal(scale=0.2, size=x.shape).astype("f4"), abstract)

    def run(mesh, config):
        def loss(params, batch):
            with use_abstract_mesh(mesh.abstract_mesh):
                return Groot(config).loss(params, batch, jax.random.key(0))[0]

        placed = shardings(abstract, SHARDING_RULES, mesh)
        step = jax.jit(
            jax.value_and_grad(loss),
            in_shardings=(placed, rows_sharding(mesh)),
            out_shardings=(NamedSharding(mesh, PartitionSpec()), placed),
        )
        return jax.device_get(step(params, groot_batch()))

    one = run(make_mesh(devices=jax.devices()[:1]), GROOT)
    mesh = make_mesh(MeshConfig(data=2, stage=2), jax.devices()[:4])
    leaves = [*zip(*map(jax.tree.leaves, (run(mesh, piped(4, 1, GROOT)), one)), strict=True)]
    near = 1e-5 * max(np.abs(other).max() for _, other in leaves[1:])  # some gradients are 0
    for ours, other in leaves:
        np.testing.assert_allclose(ours, other, rtol=1e-4, atol=near)
