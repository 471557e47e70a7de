"""openpi's half of a benchmark: its own pi0 or pi0.5, trained and sampled one step at a time.

Run by the Python of an environment that has openpi, never imported by ours:
tests/fixtures/openpi/make.py says how to make one. With jaxtyping==0.2.36, openpi's model also runs
on newer JAX, Flax and Orbax, if both halves are to have the same XLA. It reads one JSON object a
line on stdin and answers each with one on stdout, so that a benchmark can alternate its own steps
with openpi's and a drifting machine slows both alike. The caller sets XLA_FLAGS.

First line, answered by {"versions": {...}, "parameters": n}:

    {"config": {...}, "batch": "batch.npz", "params": "DIR", "seed": 0, "steps": 10}

  config  pi05; vision {width, depth, mlp_dim, num_heads, patch}; language and expert {width, depth,
          mlp_dim, num_heads, num_kv_heads, head_dim}; vocabulary; image_size; horizon; action_dim;
          prompt (tokens a prompt is padded to): tests/fixtures/openpi/*/config.json are examples;
          dtype, of computing, f32 if not given.
  batch   images uint8 [b, 3, h, w, 3], image_mask bool [b, 3], tokens int32 [b, prompt], token_mask
          bool [b, prompt], state [b, action_dim], actions and sample_noise [b, horizon,
          action_dim]; may be left out if nothing but act is run
  params  an Orbax directory in openpi's format. Where nothing is there yet, random weights, every
          leaf perturbed, are written to it, for the caller to load. Without `params`, the model has
          openpi's initial weights in `dtype`, and no file is written

Then any of these, in any order. The first train and the first sample compile, so time the later
ones; seconds are from the call until its result is ready, pictures being floats on device already.

    {"run": "check", "out": "PATH.npz"}   -> {"loss": mean, "gradient": global norm} on the weights
          as read, and PATH.npz: noise [b, horizon, action_dim] and time [b] as compute_loss drew
          them (time 1 is noise), loss [b, horizon], sampled [b, horizon, action_dim]
    {"run": "train"}   -> {"seconds": s, "loss": mean}: value and gradient, clipping and AdamW as in
          openpi's training (its schedule's rates, its key folded with the step), without
          augmentation and without the average of weights (EMA)
    {"run": "bytes"}   -> {"bytes": n}: of the training step's compiled program, its arguments,
          results that take no argument's place, and temporaries
    {"run": "sample"}  -> {"seconds": s}: `steps` Euler steps from sample_noise
    {"run": "act", "batch": n}   -> {"seconds": s}: from n observations on the host (uint8 pictures,
          the last camera slot empty, a prompt of 25 tokens, state) to their chunks on the host,
          with the steps that openpi's Policy.infer takes between its transforms

The script ends when stdin ends.
"""

# ruff: noqa: E402

import json
import sys
import time
import types
from collections.abc import Iterator
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:] = [path for path in sys.path if Path(path).resolve() != HERE]  # holds this openpi.py
answers, sys.stdout = sys.stdout, sys.stderr
for name in ("safetensors", "torch", "torch.nn", "torch.nn.functional", "openpi.models_pytorch"):
    sys.modules[name] = types.ModuleType(name)  # imported by openpi, used only by its PyTorch half
vars(sys.modules["torch"]).update(Tensor=type("Tensor", (), {}), uint8=None)
vars(sys.modules["openpi.models_pytorch"]).update(pi0_pytorch=None)

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx, traverse_util
from openpi.models import gemma, siglip
from openpi.models import model as openpi_model
from openpi.models.pi0_config import Pi0Config
from openpi.shared import array_typing, nnx_utils
from openpi.training import optimizer

_PROMPT_TOKENS = 25


def build(config: dict[str, Any]) -> Pi0Config:
    """openpi's config of the sizes asked for, its tables of variants patched."""
    variants = {name: gemma.Config(**config[name]) for name in ("language", "expert")}
    vision = dict(config["vision"])
    patch, size = vision.pop("patch"), config["image_size"]
    gemma.get_config = variants.__getitem__
    gemma.PALIGEMMA_VOCAB_SIZE = config["vocabulary"]
    siglip.decode_variant = lambda _: vision | {"patch_size": (patch, patch)}
    openpi_model.IMAGE_RESOLUTION = (size, size)
    openpi_model.preprocess_observation.__kwdefaults__["image_resolution"] = (size, size)
    return Pi0Config(
        dtype=config.get("dtype", "float32"),
        paligemma_variant="language",
        action_expert_variant="expert",
        action_dim=config["action_dim"],
        action_horizon=config["horizon"],
        max_token_len=config["prompt"],
        pi05=config["pi05"],
    )


def write_random(config: Pi0Config, path: Path, seed: int) -> None:
    """Writes openpi's initial weights with noise in every leaf."""
    draw = np.random.default_rng(seed)
    weights = nnx.state(config.create(jax.random.key(seed))).to_pure_dict()
    noisy = jax.tree.map(lambda w: w + 0.02 * draw.standard_normal(w.shape, np.float32), weights)
    with ocp.PyTreeCheckpointer() as writer:
        writer.save(path.resolve(), {"params": noisy})


def read_params(path: Path) -> dict[str, Any]:
    """Weights as openpi's tree, without the last key `value` that its training writes."""
    with ocp.PyTreeCheckpointer() as reader:
        leaves = traverse_util.flatten_dict(reader.restore(path.resolve())["params"])
    return traverse_util.unflatten_dict(
        {
            keys[:-1] if keys[-1] == "value" else keys: jnp.asarray(np.asarray(leaf))
            for keys, leaf in leaves.items()
        }
    )


def read_batch(path: str) -> tuple[openpi_model.Observation, jax.Array, jax.Array]:
    """Observation, actions and the sampler's noise, on the device."""
    batch = dict(np.load(path))
    cameras = list(enumerate(openpi_model.IMAGE_KEYS))
    observation = openpi_model.Observation.from_dict(
        {
            "image": {key: batch["images"][:, i] for i, key in cameras},
            "image_mask": {key: batch["image_mask"][:, i] for i, key in cameras},
            "state": batch["state"],
            "tokenized_prompt": batch["tokens"],
            "tokenized_prompt_mask": batch["token_mask"],
        }
    )
    return jax.tree.map(jnp.asarray, (observation, batch["actions"], batch["sample_noise"]))


def observations(config: Pi0Config, size: int, draw: np.random.Generator) -> dict[str, Any]:
    """`size` observations on the host in the format of `Observation.from_dict`."""
    cameras, side = openpi_model.IMAGE_KEYS, openpi_model.IMAGE_RESOLUTION
    real = {key: np.full(size, key != cameras[-1]) for key in cameras}
    tokens = draw.integers(1, gemma.PALIGEMMA_VOCAB_SIZE, (size, config.max_token_len), np.int32)
    return {
        "image": {
            key: draw.integers(0, 256, (size, *side, 3), np.uint8) * np.uint8(real[key][0])
            for key in cameras
        },
        "image_mask": real,
        "state": draw.normal(size=(size, config.action_dim)).astype(np.float32),
        "tokenized_prompt": tokens,
        "tokenized_prompt_mask": np.broadcast_to(
            np.arange(config.max_token_len) < _PROMPT_TOKENS, tokens.shape
        ),
    }


def serve(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Answers the first request, then each line of stdin."""
    config, key = build(request["config"]), jax.random.key(request["seed"])
    if "params" in request:
        params = Path(request["params"])
        if not params.exists():
            write_random(config, params, request["seed"])
        model = config.load(read_params(params))
    else:
        initial = nnx.state(config.create(key)).to_pure_dict()
        model = config.load(jax.tree.map(lambda w: w.astype(config.dtype), initial))
    if "batch" in request:
        observation, actions, sample_noise = read_batch(request["batch"])
    draw = np.random.default_rng(request["seed"])
    graph, weights = nnx.split(model)
    schedule = optimizer.CosineDecaySchedule()
    update = optimizer.create_optimizer(optimizer.AdamW(), schedule)
    sampler = nnx_utils.module_jit(model.sample_actions, static_argnames="num_steps")

    @nnx.value_and_grad(has_aux=True)
    def gradient(model: Any, key: jax.Array, *batch: Any) -> tuple[jax.Array, jax.Array]:
        loss = model.compute_loss(key, *batch)
        return loss.mean(), loss

    @partial(jax.jit, donate_argnums=0)
    def train_step(state: Any, *batch: Any) -> tuple[Any, jax.Array]:
        step, weights, moments = state
        model = nnx.merge(graph, weights)
        (loss, _), grads = gradient(model, jax.random.fold_in(key, step), *batch)
        updates, moments = update.update(grads, moments, weights)
        return (step + 1, optax.apply_updates(weights, updates), moments), loss

    def sample() -> jax.Array:
        sampled = sampler(key, observation, num_steps=request["steps"], noise=sample_noise)
        return jax.block_until_ready(sampled)

    def act(inputs: dict[str, Any], key: jax.Array) -> np.ndarray:
        seen = openpi_model.Observation.from_dict(jax.tree.map(jnp.asarray, inputs))
        return np.asarray(sampler(key, seen, num_steps=request["steps"]))

    def check(out: str) -> dict[str, float]:
        (mean, loss), grads = nnx.jit(gradient)(model, key, observation, actions)
        _, noise_key, time_key = jax.random.split(key, 3)  # as compute_loss draws
        noise = jax.random.normal(noise_key, actions.shape)
        moment = jax.random.beta(time_key, 1.5, 1, actions.shape[:1]) * 0.999 + 0.001
        np.savez(out, noise=noise, time=moment, loss=loss, sampled=sample())
        return {"loss": float(mean), "gradient": float(optax.global_norm(grads))}

    packages = ("rlinf-openpi", "jax", "flax", "optax")
    yield {
        "versions": {package: version(package) for package in packages},
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(weights)),
    }

    @cache
    def begun() -> Any:
        return jnp.zeros((), jnp.int32), jax.tree.map(jnp.copy, weights), update.init(weights)

    @cache
    def compiled() -> Any:
        with array_typing.disable_typechecking():  # of its dataclasses, which JAX fills otherwise
            return train_step.lower(begun(), observation, actions).compile()

    state, acting = None, key
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["run"] == "act":
            inputs = observations(config, asked["batch"], draw)
            acting, drawn = jax.random.split(acting)
        start = time.perf_counter()
        if asked["run"] == "check":
            yield check(asked["out"])
        elif asked["run"] == "train":
            state, loss = jax.block_until_ready(compiled()(state or begun(), observation, actions))
            yield {"seconds": time.perf_counter() - start, "loss": float(loss)}
        elif asked["run"] == "bytes":
            sizes = compiled().memory_analysis()
            kept = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
            yield {"bytes": sizes.argument_size_in_bytes + kept + sizes.temp_size_in_bytes}
        elif asked["run"] == "sample":
            sample()
            yield {"seconds": time.perf_counter() - start}
        elif asked["run"] == "act":
            act(inputs, drawn)
            yield {"seconds": time.perf_counter() - start}
        else:
            raise ValueError(
                f"run is {asked['run']!r}; expected check, train, bytes, sample or act."
            )


if __name__ == "__main__":
    for answer in serve(json.loads(sys.stdin.readline())):
        print(json.dumps(answer), file=answers, flush=True)
