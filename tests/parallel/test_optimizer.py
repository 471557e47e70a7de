import math
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tyro
from jax.sharding import PartitionSpec

from models import Pi
from models.config import from_json, to_json
from models.families.pi.model import SHARDING_RULES
from parallel.hosts.distributed import put_batch
from parallel.mesh import MeshConfig, make_mesh
from parallel.moments import Float8, decode
from parallel.optimizer import OptimizerConfig, make_optimizer, make_schedule, select, with_groups
from parallel.step import abstract_state, init_state, make_train_step
from tests.helpers.parallel.toy import OPTIMIZER, Denoiser, batch
from tools.recipes.presets import PI05

MODEL = Denoiser(hidden=512)
OWN = Path(__file__).parents[1] / "helpers/parallel/own_optimizer.py"
RULES = (
    (r"^up/kernel$", PartitionSpec(None, "fsdp")),
    (r"^down/kernel$", PartitionSpec("fsdp")),
    (r"/bias$", PartitionSpec()),
)
PARAMS = {"up": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}, "down": jnp.ones(2)}


def made(optimizer, mesh):
    """Its abstract state and its step."""
    abstract = abstract_state(MODEL, optimizer, RULES, mesh)
    step = make_train_step(MODEL, optimizer, mesh, abstract)
    return abstract, lambda state, i: step(state, put_batch(batch(i), mesh), 3)


def apart(one, other):
    """The largest distance of two trees' leaves, of the other's size."""

    def distance(x, y):
        x, y = (np.asarray(z, np.float64) for z in (x, y))
        return np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-30)

    return max(map(distance, *map(jax.tree.leaves, jax.device_get((one, other)))))


def assert_same_moments(ours, theirs, tolerance):
    """Asserts that moments agree; eight bits may round to a neighbour now and then."""
    pairs = list(zip(*map(moments, (ours, theirs)), strict=True))
    coded = [(decode(x), decode(y)) for x, y in pairs if isinstance(x, Float8)]
    if coded:
        assert apart(*zip(*coded, strict=True)) < 1e-2
        moved = [np.ravel(np.abs(x - y) > 1e-4 * np.abs(y)) for x, y in coded]
        assert np.concatenate(moved).mean() < 0.02
    assert apart(*zip(*(p for p in pairs if not isinstance(p[0], Float8)), strict=True)) < tolerance


def moments(opt_state):
    return jax.tree.leaves(jax.device_get(opt_state), is_leaf=lambda x: isinstance(x, Float8))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "moments", "move"),
    [
        ("adamw", 1e-5, 1e-5),
        ("adamw_fp8", 1e-5, 1e-5),
        ("muon", 1e-5, 1e-4),  # small singular values are enlarged, and their last bits too
        ("adafactor", 2e-3, 1e-5),
        ("schedule_free", 1e-5, 1e-5),
        (f"{OWN}:amsgrad", 1e-5, 1e-5),
    ],
    ids=["adamw", "adamw_fp8", "muon", "adafactor", "schedule_free", "own"],
)
def test_every_method_learns_and_eight_devices_do_as_one_does(name, moments, move):
    """Every step from one device's state: sums over eight devices differ in the last bit."""
    optimizer = replace(OPTIMIZER, name=name, matrices="kernel$")
    abstract, step = made(optimizer, make_mesh(devices=jax.devices()[:1]))
    spread, spread_step = made(optimizer, make_mesh(MeshConfig(data=1, fsdp=8)))
    state, losses = init_state(MODEL, optimizer, abstract, 0), []
    for i in range(20):
        before = jax.device_get(state)
        state, wanted = step(state, i)
        placed = jax.tree.map(lambda x, leaf: jax.device_put(x, leaf.sharding), before, spread)
        eight, found = spread_step(placed, i)
        for metric in ("loss", "grad_norm"):
            np.testing.assert_allclose(found[metric], wanted[metric], rtol=1e-5)
        moves = (jax.tree.map(np.subtract, x.params, before.params) for x in (eight, state))
        assert apart(*moves) < move
        assert_same_moments(eight.opt_state, state.opt_state, moments)
        losses.append(float(wanted["loss"]))
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:3])
    for leaf, shape in zip(jax.tree.leaves(eight), jax.tree.leaves(spread), strict=True):
        assert leaf.sharding.is_equivalent_to(shape.sharding, leaf.ndim)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "b1", "bytes_each"),
    [
        ("adamw", 0.9, 8.0),
        ("adamw_fp8", 0.9, 2.04),
        ("muon", 0.9, 4.64),
        ("adafactor", 0.9, 2.01),
        ("adafactor", 0, 0.01),
        ("schedule_free", 0.9, 8.0),
    ],
)
def test_states_of_pi05_take_what_is_promised_and_are_split(name, b1, bytes_each):
    optimizer = replace(PI05.optimizer, name=name, b1=b1, decay_steps=30_000)
    mesh = make_mesh(MeshConfig(data=1, fsdp=8))
    state = abstract_state(Pi(PI05.model), optimizer, SHARDING_RULES, mesh)
    parameters = sum(p.size for p in jax.tree.leaves(state.params))
    leaves = jax.tree.leaves(state.opt_state)
    total = sum(x.size * x.dtype.itemsize for x in leaves)
    local = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
    assert total / parameters == pytest.approx(bytes_each, abs=0.01)
    assert local < total / 8 + 64e6
    whole = [x.size * x.dtype.itemsize for x in leaves if x.sharding.is_fully_replicated]
    assert max(whole) <= 4 * 2**20


def test_adamw_is_optax_adamw():
    config = OptimizerConfig(warmup_steps=2, decay_steps=9, weight_decay=0.1, clip_norm=1e9)
    schedule = optax.warmup_cosine_decay_schedule(1e-4 / 3, 1e-4, 2, 9, 1e-5)
    assert_same_updates(config, optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.1))


def assert_same_updates(config, theirs):
    """Asserts that nine updates of PARAMS are those of an optimizer of optax."""
    both = make_optimizer(config), theirs
    states = [jax.jit(o.init)(PARAMS) for o in both]
    updates = [jax.jit(o.update) for o in both]
    for i in range(9):
        grads = jax.tree.map(
            lambda p, i=i: np.cos(i + np.arange(p.size, dtype=np.float32)).reshape(p.shape), PARAMS
        )
        one, other = (f(grads, s, PARAMS) for f, s in zip(updates, states, strict=True))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), one[0], other[0])
        states = [one[1], other[1]]


def test_schedule_free_evaluates_the_average_of_all_parameters_so_far_and_not_the_running_one():
    config = OptimizerConfig(
        "schedule_free", learning_rate=1e-2, schedule="constant", warmup_steps=3, decay_steps=40,
        weight_decay=0, ema_decay=0.5, rate_factors=(("^up/bias", 0), ("kernel", 0.5), (".", 1)),
    )  # fmt: skip
    abstract, step = made(config, make_mesh(devices=jax.devices()[:1]))
    state = init_state(MODEL, config, abstract, 0)
    begun, newest, weights = jax.device_get(state.params), [], []
    for i in range(8):
        before = jax.device_get(state)
        state, _ = step(state, i)
        newest.append(jax.device_get(state.opt_state.z))
        weights.append(float(state.opt_state.max_lr) ** 2)
        average = jax.tree.map(lambda *z: np.average(z, axis=0, weights=weights), *newest)
        evaluated, between = jax.device_get((state.averaged, state.params))
        for name in ("kernel", "bias"):
            x, z = average["down"][name], newest[-1]["down"][name]
            np.testing.assert_allclose(evaluated["down"][name], x, atol=1e-6)
            np.testing.assert_allclose(between["down"][name], 0.9 * x + 0.1 * z, atol=1e-6)
        np.testing.assert_array_equal(evaluated["up"]["bias"], begun["up"]["bias"])
        assert apart(newest[-1]["down"], before.opt_state.z["down"]) > 1e-4
    assert weights[0] < weights[2] == weights[-1]


def test_schedule_free_is_optaxs():
    config = OptimizerConfig(
        "schedule_free", schedule="constant", warmup_steps=2, decay_steps=9, weight_decay=0.1,
        clip_norm=1e9,
    )  # fmt: skip
    rate = make_schedule(config)
    theirs = optax.contrib.schedule_free_adamw(rate, b1=0.9, b2=0.95, weight_decay=0.1)
    assert_same_updates(config, theirs)


def test_muon_orthogonalises_each_layers_matrix_with_its_heads_joined_and_leaves_the_rest_to_adam():
    config = OptimizerConfig(name="muon", warmup_steps=0, decay_steps=9, clip_norm=1e9)
    draw = np.random.default_rng(0)
    attention = {"q": (2, 24, 3, 4), "out": (2, 3, 4, 24), "up": (2, 24, 8)}
    shapes = {"layers": {name: {"kernel": shape} for name, shape in attention.items()}}
    shapes |= {"embed": {"kernel": (24, 8)}}
    grads = jax.tree.map(
        lambda shape: jnp.asarray(draw.normal(size=shape), jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    params = jax.tree.map(np.zeros_like, grads)
    optimizer = make_optimizer(config)
    updates, _ = jax.jit(optimizer.update)(grads, jax.jit(optimizer.init)(params), params)
    flat = {"q": (2, 24, 12), "out": (2, 12, 24), "up": (2, 24, 8)}
    for name, shape in flat.items():
        update = np.asarray(updates["layers"][name]["kernel"]).reshape(shape)
        sizes = np.linalg.svd(update, compute_uv=False) / (1e-4 * 0.2 * math.sqrt(24))
        assert sizes.min() > 0.6
        assert sizes.max() < 1.3
        grad = np.asarray(grads["layers"][name]["kernel"]).reshape(shape)
        u, _, v = np.linalg.svd(grad, full_matrices=False)
        assert -np.sum(u @ v * update) > 0.9 * np.linalg.norm(u @ v) * np.linalg.norm(update)
    embed = np.asarray(updates["embed"]["kernel"])
    np.testing.assert_allclose(np.abs(embed), 1e-4, rtol=1e-3)


def test_muon_refuses_parameters_that_are_no_matrices_and_a_regex_that_finds_none():
    config = OptimizerConfig(name="muon", warmup_steps=0, decay_steps=9)
    with pytest.raises(ValueError, match=r"matrices has '\(layers\|blocks.*applies to no param"):
        select(config, PARAMS)
    biases = make_optimizer(replace(config, matrices="bias$"))
    with pytest.raises(
        ValueError, match=r"matches up/bias, of shape \(3,\), but Muon only trains matrices"
    ):
        biases.update(PARAMS, biases.init(PARAMS), PARAMS)


@pytest.mark.parametrize(
    ("schedule", "middle", "end"),
    [("cosine", 0.55, 0.1), ("linear", 0.55, 0.1), ("constant", 1, 1), ("rsqrt", 0.4082, 0.3015)],
)
def test_schedules_rise_and_then_do_what_their_name_says(schedule, middle, end):
    config = OptimizerConfig(learning_rate=1.0, schedule=schedule, warmup_steps=10, decay_steps=110)
    rate = make_schedule(config)
    np.testing.assert_allclose([rate(0), rate(5), rate(10)], [1 / 11, 6 / 11, 1], rtol=1e-6)
    np.testing.assert_allclose([rate(60), rate(110)], [middle, end], rtol=1e-3)


def test_factors_scale_steps_and_decay_spares_what_it_should():
    plain = OptimizerConfig(warmup_steps=0, decay_steps=9, weight_decay=0.5)
    grouped = replace(
        plain, rate_factors=(("^up/kernel", 0.1), (".", 1.0)), decayed="kernel$|^down$"
    )
    zero = jax.tree.map(np.zeros_like, PARAMS)
    (all_decay, some_decay) = (
        jax.device_get(jax.jit(o.update)(zero, jax.jit(o.init)(PARAMS), PARAMS)[0])
        for o in map(make_optimizer, (plain, grouped))
    )
    np.testing.assert_allclose(some_decay["up"]["kernel"], 0.1 * all_decay["up"]["kernel"])
    np.testing.assert_allclose(some_decay["down"], all_decay["down"])
    assert (some_decay["up"]["bias"] == 0).all()
    assert (all_decay["up"]["bias"] != 0).all()


def test_the_first_regex_decides_and_zero_freezes():
    moving, trained = select(
        OptimizerConfig(rate_factors=(("bias", 1.0), ("^up", 0.0), (".", 2.0))), PARAMS
    )
    assert moving == trained == {"up": {"kernel": False, "bias": True}, "down": True}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rate_factors": (("^up/kernel", 1.0),)}, r"2 of 3 match none: down, up/bias;"),
        ({"rate_factors": ((".", 1.0), ("^up", 0.0))}, r"'\^up', which applies to no parameter"),
        ({"rate_factors": ((".", 0.0),)}, "freezes every parameter"),
        ({"decayed": "nothing"}, "'nothing', which applies to no parameter"),
    ],
)
def test_groups_that_cannot_be_meant_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        select(OptimizerConfig(**change), PARAMS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rate_factors": (("(", 1.0),)}, "not a regular expression"),
        ({"decayed": "["}, "not a regular expression"),
        ({"rate_factors": ((".", -1.0),)}, "at least 0"),
    ],
)
def test_malformed_groups_are_refused_before_there_are_parameters(change, message):
    with pytest.raises(ValueError, match=message):
        make_optimizer(OptimizerConfig(decay_steps=400, **change))


def test_groups_come_from_the_command_line_and_live_in_json():
    rate_factors = ["--rate-factors", "lora_[ab]$", "1", "^vision", "0.1", ".", "0"]
    config = tyro.cli(
        OptimizerConfig, args=[*rate_factors, "--name", "adamw_fp8", "--schedule", "rsqrt"]
    )
    assert config.rate_factors == (("lora_[ab]$", 1.0), ("^vision", 0.1), (".", 0.0))
    assert from_json(OptimizerConfig, to_json(config)) == config


def test_a_users_state_that_belongs_to_no_parameter_is_refused_by_name_over_several_devices():
    optimizer = replace(OPTIMIZER, name=f"{OWN}:flat")
    abstract_state(MODEL, optimizer, RULES, make_mesh(devices=jax.devices()[:1]))
    with pytest.raises(ValueError, match=r"holds 1/mu, of shape \(\d+,\), which belongs to no par"):
        abstract_state(MODEL, optimizer, RULES, make_mesh(MeshConfig(data=1, fsdp=8)))


@pytest.mark.parametrize(
    ("name", "error", "why"),
    [
        ("sgd", ValueError, r"optimizer\.name is 'sgd'; choose one of adafactor, .*\.py:NAME"),
        (
            f"{OWN}:nothing",
            ValueError,
            "returns float; it must return an optax.GradientTransformation",
        ),
        (f"{OWN}:absent", ValueError, r"own_optimizer\.py has no 'absent'"),
        ("nowhere.py:mine", FileNotFoundError, "nowhere.py: no such file"),
    ],
)
def test_a_method_that_is_none_is_refused_with_its_name(name, error, why):
    with pytest.raises(error, match=why):
        make_optimizer(replace(OPTIMIZER, name=name))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        *(({name: x}, rf"optimizer\.{name} is {x}") for name in ("b1", "b2") for x in (1, -1, 2)),
        ({"eps": 0.0}, r"optimizer\.eps is 0\.0"),
        ({"eps": -1e-8}, r"optimizer\.eps is -1e-08"),
        ({"weight_decay": -1.0}, r"weight_decay -1\.0; .* at least 0"),
    ],
)
def test_moments_and_decays_that_no_step_survives_are_refused(change, why):
    with pytest.raises(ValueError, match=why):
        make_optimizer(replace(OPTIMIZER, **change))


def test_schedule_free_without_a_way_to_the_average_is_refused():
    with pytest.raises(ValueError, match=r"b1 is 0; with 'schedule_free' it must be above 0 and"):
        make_optimizer(replace(OPTIMIZER, name="schedule_free", b1=0))


def test_groups_of_parameters_stand_for_their_paths():
    config = OptimizerConfig(rate_factors=(("@action", 0.5), ("^value/", 2.0), (".", 0.0)))
    groups = {"vision": "vision", "action": "expert|action"}
    found = with_groups(config, groups, "policy/")
    assert found.rate_factors == (("^policy/(expert|action)", 0.5), ("^value/", 2.0), (".", 0.0))
    assert with_groups(found, groups) == found
    with pytest.raises(ValueError, match=r"names a group '@head', but the model has @vision, @act"):
        with_groups(replace(config, rate_factors=(("@head", 1.0),)), groups)
