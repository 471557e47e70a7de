"""Our π0.5 compared with openpi's, with the same weights, sizes and batch: a training step, and
sampling.

Losses, gradient and sampled actions are compared first, in f32; then steps of openpi's half
(tools/bench/peers/openpi.py) and ours alternate. Two of three camera slots are real and prompts
have about 25 of 200 tokens; ours packs the rows and so never sees the rest. Widths are the released
ones with `--width real` and on a GPU: there with a few layers in bf16; on a CPU with one and with
two layers of each stack, so that their difference is what a whole layer costs.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from models import PackedBatch, Pi, PiConfig, Sample, pack
from models.families.pi.released import CAMERAS
from models.files.terminal import Console
from models.flow import flow
from models.layers.gemma import GEMMA_2B, GEMMA_300M, GemmaConfig
from models.layers.layers import Compute
from models.layers.siglip import SiglipConfig
from models.layers.stack import apart
from models.load import like_model, load_params
from parallel.optimizer import OptimizerConfig
from tools.bench.models.attention import alternate
from tools.bench.models.stepper import held_bytes, steppers
from tools.bench.peer import asking, no_peer

CONFIG = PiConfig(
    vision=SiglipConfig(width=256, depth=4, hidden=1024, heads=4),
    language=GemmaConfig(256, 4, 1024, heads=8, kv_heads=1, head_dim=32),
    expert=GemmaConfig(128, 4, 512, heads=8, kv_heads=1, head_dim=32),
    vocabulary=1024,
    compute=Compute("float32"),
)
"""π0.5 with pictures, horizon and action dims as released, in widths that two cores can train."""
_EXACT = "float32"
"""JAX's precision for f32 products that are compared; otherwise, a GPU rounds their operands."""
_PROMPT, _PROMPTS, _REAL_CAMERAS = 200, (22, 28), 2
_SEED, _ROUNDS, _WIDE_ROUNDS, _TOLERANCE = 0, 8, 3, 1e-4
_OPTIMIZER = OptimizerConfig(
    learning_rate=2.5e-5, weight_decay=1e-10, warmup_steps=1000, decay_steps=30_000, ema_decay=0.0
)
"""openpi's defaults. Our step always averages the weights too, which openpi's half does not."""

Arrays = dict[str, np.ndarray]
Width = Literal["small", "real"]


def run(
    console: Console, peer: Path | None = None, tiny: bool = False, width: Width = "small"
) -> dict[str, Any]:
    """Samples per second of a training step and of sampling, over openpi's.

    `ratio` is that of training, `sampling_ratio` that of sampling, and `remat_ratio` that of a
    training step that recomputes every layer in backward, as openpi's always does.

    Args:
      peer: a Python that has openpi.
      tiny: small pictures, and a round of each.
      width: of the layers, "small" or "real" (the released ones).

    Raises:
      ValueError: no peer is given, or losses, gradient or actions differ from openpi's.
      FileNotFoundError: there is no such Python.
    """
    if peer is None:
        raise no_peer("pi05", "openpi", "tests/fixtures/openpi/make.py")
    if jax.default_backend() == "gpu" and not tiny:
        return _told(measured(console, peer, wide(4), ("bfloat16",), _ROUNDS)["bfloat16"])
    if width == "small":
        config, rounds = (replace(CONFIG, image_size=28), 1) if tiny else (CONFIG, _ROUNDS)
        return _told(measured(console, peer, config, ("float32",), rounds)["float32"])
    rounds, dtypes = 1 if tiny else _WIDE_ROUNDS, ("float32", "bfloat16")
    size = 28 if tiny else CONFIG.image_size
    one, two = (
        measured(console, peer, replace(wide(layers), image_size=size), dtypes, rounds)
        for layers in (1, 2)
    )
    return _told(two["float32"]) | {
        "rows": [
            {"layers": layers, "dtype": dtype, **_row(case)}
            for layers, cases in ((1, one), (2, two))
            for dtype, case in cases.items()
        ],
        "layer": {dtype: _layer(one[dtype], two[dtype]) for dtype in dtypes},
    }


def wide(depth: int) -> PiConfig:
    """Released widths with `depth` layers in each stack, with the vocabulary of `CONFIG`."""
    return PiConfig(
        vision=SiglipConfig(depth=depth),
        language=replace(GEMMA_2B, depth=depth),
        expert=replace(GEMMA_300M, depth=depth),
        vocabulary=CONFIG.vocabulary,
        compute=Compute("float32"),
    )


def measured(
    console: Console, peer: Path, config: PiConfig, dtypes: Sequence[str], rounds: int
) -> dict[str, dict[str, Any]]:
    """The comparison in f32; then, for each dtype, seconds of alternating steps and samplings, and
    the bytes of a training step.

    Raises:
      ValueError: losses, gradient or actions differ from openpi's.
    """
    model, arrays = Pi(config), random_batch(config)
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        np.savez(at / "batch.npz", **arrays)  # type: ignore[arg-type]
        request = {"batch": str(at / "batch.npz"), "params": str(at / "params"), "seed": _SEED}
        request |= {"config": their_config(config), "steps": config.euler_steps}
        console.print("openpi initialises weights; then both compute the same batch")
        exact = {"JAX_DEFAULT_MATMUL_PRECISION": _EXACT}
        with asking(peer, "openpi", exact) as ask, jax.default_matmul_precision(_EXACT):
            about = ask(**request)
            gradient = ask(run="check", out=str(at / "check.npz"))["gradient"]
            params = load_params(at / "params", like_model(model))
            with np.load(at / "check.npz") as recorded:
                errors = deviations(model, params, arrays, dict(recorded), gradient)
        console.print(f"They agree within {max(errors.values()):.0e}")
        batch, found = rows(config, arrays), dict[str, dict[str, Any]]()
        told = {"fill": fill(config, arrays, batch), "errors": errors, "openpi": about}
        for dtype in dtypes:
            console.print(f"Timing steps and sampling of both in turn, in {dtype}")
            with asking(peer, "openpi") as ask:
                ask(**request | {"config": their_config(config) | {"dtype": dtype}})
                timed = config.computing(dtype=dtype)
                found[dtype] = told | _timed(ask, timed, params, batch, arrays, rounds)
    return found


def _timed(
    ask: Callable[..., dict[str, Any]],
    config: PiConfig,
    params: Any,
    batch: PackedBatch,
    arrays: Arrays,
    rounds: int,
) -> dict[str, Any]:
    cases = {"ours": (Pi(config), batch), "remat": (Pi(config.recomputing("full")), batch)}
    ours, programs = steppers(cases, _OPTIMIZER, params=params)
    training = alternate(ours | {"openpi": partial(ask, run="train")}, rounds)
    held = {name: held_bytes(program) for name, program in programs.items()}
    held["openpi"] = ask(run="bytes")["bytes"]
    del ours, programs
    sampled = sampler(Pi(config), params, batch, arrays["sample_noise"])
    sampling = alternate({"ours": sampled, "openpi": partial(ask, run="sample")}, rounds)
    return {
        "dtype": config.compute.dtype,
        "seconds": {"training": training, "sampling": sampling},
        "bytes": held,
    }


def random_batch(config: PiConfig) -> Arrays:
    """Two observations with their chunks, as openpi's half reads them."""
    draw, b = np.random.default_rng(_SEED), len(_PROMPTS)
    slots, chunk = len(CAMERAS), (config.horizon, config.action_dim)
    token_mask = np.arange(_PROMPT) < np.array(_PROMPTS)[:, None]
    tokens = draw.integers(1, config.vocabulary, (b, _PROMPT)) * token_mask
    image_mask = np.broadcast_to(np.arange(slots) < _REAL_CAMERAS, (b, slots))
    picture = (config.image_size, config.image_size, 3)
    return {
        "images": draw.integers(0, 256, (b, slots, *picture), dtype=np.uint8),
        "image_mask": image_mask,
        "tokens": tokens.astype(np.int32),
        "token_mask": token_mask,
        "state": draw.normal(size=(b, config.action_dim)).astype(np.float32),
        "actions": draw.normal(size=(b, *chunk)).astype(np.float32),
        "sample_noise": draw.normal(size=(b, *chunk)).astype(np.float32),
    }


def their_config(config: PiConfig) -> dict[str, Any]:
    """The same sizes in openpi's config format."""

    def stack(stack: GemmaConfig) -> dict[str, int]:
        return {
            "width": stack.width, "depth": stack.depth, "mlp_dim": stack.hidden,
            "num_heads": stack.heads, "num_kv_heads": stack.kv_heads, "head_dim": stack.head_dim,
        }  # fmt: skip

    vision = config.vision
    return {
        "pi05": config.time == "modulation",
        "vision": {
            "width": vision.width, "depth": vision.depth, "mlp_dim": vision.hidden,
            "num_heads": vision.heads, "patch": vision.patch,
        },
        "language": stack(config.language),
        "expert": stack(config.expert),
        "vocabulary": config.vocabulary,
        "image_size": config.image_size,
        "horizon": config.horizon,
        "action_dim": config.action_dim,
        "prompt": _PROMPT,
    }  # fmt: skip


def rows(config: PiConfig, arrays: Arrays) -> PackedBatch:
    """The batch without masked cameras and padded text, one sample a row, on the device."""
    samples = [
        Sample(
            images=tuple(arrays["images"][i][arrays["image_mask"][i]]),
            text=arrays["tokens"][i][arrays["token_mask"][i]],
            state=arrays["state"][i],
            actions=arrays["actions"][i],
            action_mask=np.ones(arrays["actions"][i].shape, bool),
            id=i,
        )
        for i in range(len(arrays["state"]))
    ]
    images, text = (
        max(len(getattr(sample, name)) for sample in samples) for name in ("images", "text")
    )
    prefix = images * config.vision.tokens(config.image_size) + text
    layout = config.layout(prefix=prefix, samples=1, images=images, text=text)
    return jax.device_put(pack([[sample] for sample in samples], layout))


def deviations(
    model: Pi, params: Any, arrays: Arrays, recorded: Arrays, gradient: float
) -> dict[str, float]:
    """Differences of losses, the gradient's global norm and sampled actions from the recorded ones,
    relative to their largest entry.

    Raises:
      ValueError: one of them exceeds 1e-4.
    """
    batch = rows(model.config, arrays)
    chunk = jnp.asarray(recorded["noise"])[:, None, None]
    time = jnp.asarray(recorded["time"])[:, None, None]

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def loss(params: Any) -> tuple[Float[Array, ""], Float[Array, "b h"]]:
        noised, target = flow.interpolate(batch.actions[:, :, None], chunk, time)
        velocity = model.field(params, batch)(noised, time).velocity
        error = (velocity - target)[:, 0, 0] ** 2
        return error.mean(), error.mean(-1)

    (_, losses), gradients = loss(params)
    sampled = sampler(model, params, batch, arrays["sample_noise"])()[:, 0]
    found = {
        "loss": (losses, recorded["loss"]),
        "gradient": (optax.tree_utils.tree_norm(gradients), np.asarray(gradient)),
        "actions": (sampled, recorded["sampled"]),
    }
    errors = {
        name: float(np.abs(np.asarray(ours) - theirs).max() / np.abs(theirs).max())
        for name, (ours, theirs) in found.items()
    }
    far = {name: error for name, error in errors.items() if not error <= _TOLERANCE}
    if far:
        raise ValueError(
            f"Our results and openpi's differ by {far} of their largest entry, expected at most "
            f"{_TOLERANCE}; speeds of different computations cannot be compared."
        )
    return errors


def rates(took: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Samples per second, and the median over the rounds of each one's ratio to openpi's."""
    return {
        name: {
            "samples/s": len(_PROMPTS) / median(times),
            "ratio": median(b / a for a, b in zip(times, took["openpi"], strict=True)),
        }
        for name, times in took.items()
    }


def fill(config: PiConfig, arrays: Arrays, batch: PackedBatch) -> dict[str, float]:
    """Share of the prefix places that hold a real image or text token."""
    real = np.asarray(batch.prefix_segment > 0)
    slots, tokens = arrays["image_mask"].shape[1], config.vision.tokens(config.image_size)
    theirs = len(arrays["state"]) * (slots * tokens + arrays["tokens"].shape[1])
    return {"ours": float(real.mean()), "openpi": float(real.sum() / theirs)}


def sampler(
    model: Pi, params: Any, batch: PackedBatch, noise: Float[np.ndarray, "b h a"]
) -> Callable[[], Float[Array, "r k h a"]]:
    """A function that samples from this noise at every call, its layers apart as in a policy that
    is served."""
    params = apart(params, model.stacked)
    start = jnp.asarray(noise).reshape(*batch.state.shape[:2], *noise.shape[1:])
    sample = jax.jit(model.sample_actions)
    return partial(sample, params, batch, start)


def _told(case: dict[str, Any]) -> dict[str, Any]:
    trained, sampled = (rates(case["seconds"][kind]) for kind in ("training", "sampling"))
    told = {key: value for key, value in case.items() if key != "seconds"}
    return {
        "ratio": trained["ours"]["ratio"],
        "remat_ratio": trained["remat"]["ratio"],
        "sampling_ratio": sampled["ours"]["ratio"],
        "ours": f"{trained['ours']['samples/s']:.2f} samples/s trained",
        "other": f"{trained['openpi']['samples/s']:.2f} by openpi; sampling "
        f"{sampled['ours']['ratio']:.2f} times",
        "unit": "samples/s",
        "training": trained,
        "sampling": sampled,
        **told,
    }


def _row(case: dict[str, Any]) -> dict[str, Any]:
    kept = ("ratio", "remat_ratio", "sampling_ratio", "training", "sampling", "bytes")
    told = _told(case)
    return {key: told[key] for key in kept}


def _layer(one: dict[str, Any], two: dict[str, Any]) -> dict[str, Any]:
    """Median seconds that each stack's second layer adds, and the ratio of openpi's to each."""
    found: dict[str, Any] = {}
    for kind in ("training", "sampling"):
        more = {
            name: median(times) - median(one["seconds"][kind][name])
            for name, times in two["seconds"][kind].items()
        }
        found[kind] = {
            name: {"seconds": each, "ratio": more["openpi"] / each} for name, each in more.items()
        }
    return found
