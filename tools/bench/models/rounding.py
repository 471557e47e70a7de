"""Error of a trained policy's actions, and its success, with products rounded to float8
(docs/results/fp8.md). Kernels have one scale per tensor, output or block, in one tower or several.
Activations have scales computed as they come or from other observations. Finally, all towers'
kernels are kept as by `tools.quantize`, calibrated on other observations or not.

An error is the distance of a chunk from the unrounded policy's, from the same noise. The policy is
the demo's; success is measured on validation starts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from models import Policy, load_policy
from models.layers import fp8
from models.layers.calibrated import calibrated_kernel, watched
from models.layers.float8.scales import block_scales, in_blocks, spread
from models.layers.quantized import Kind, Rounding, inner_size
from models.model import require
from models.sharding import path_name
from models.terminal import Console, track
from sim.suites import load_suite
from tools.bench.attempt import tell
from tools.bench.learn import VALIDATION
from tools.bench.models.solver import Recorded, check_trained, recorded
from tools.quantize import quantize
from tools.recipes.conditions import Condition, evaluate_all

_LANGUAGE = ("language/layers/attention", "language/layers/mlp")
_EXPERT = ("expert/layers/attention", "expert/layers/mlp")
TOWERS: Mapping[str, tuple[str, ...]] = {
    "language": _LANGUAGE,
    "language, expert": (*_LANGUAGE, *_EXPERT),
    "language, expert, vision": (*_LANGUAGE, *_EXPERT, "vision/blocks"),
    "those and the embedding": (*_LANGUAGE, *_EXPERT, "vision/blocks", "embedding"),
}
SCALES: Mapping[str, tuple[int | None, int | None]] = {
    "tensor": (None, None),
    "output": (None, 1),
    "block of 128": (128, 128),
    "block of 32": (32, 32),
}
"""Rows and columns of a kernel's matrix that share a scale; None: all of them."""
_JUDGED = "block of 128"
ACTIVATIONS: Mapping[str, fp8.Recipe] = {
    "a tensor's, from other observations": "delayed",
    "a tensor's": "current",
    "of 128 places": "block",
}
"""Recipes by the scales of activations; kernels have one per tensor, or one per block."""
KINDS: Sequence[Kind] = get_args(Kind)


@dataclass(frozen=True)
class RoundingSizes:
    """Policies, each a run in `runs` that has its dataset beside it and acts in a suite; numbers of
    observations for errors, and of starts for success."""

    policies: Mapping[str, str]
    runs: Path = Path("runs")
    observations: int = 512
    starts: int = 128


SIZES = RoundingSizes({"demo": "tabletop-lift"})


def run(console: Console, sizes: RoundingSizes = SIZES) -> dict[str, Any]:
    """Errors and success by policy; `ratio` is the first policy's error with one scale per tensor
    over that with one per block, for kernels and activations.

    Raises:
      FileNotFoundError: a policy is not there.
    """
    check_trained(sizes.runs, sizes.policies)
    found = {name: _measured(sizes.runs / name, sizes, console) for name in sizes.policies}
    first = next(iter(found.values()))["activations"]
    tensor, block = first["a tensor's"], first["of 128 places"]
    return {
        "ratio": tensor["error"] / block["error"],
        "ours": f"an error of {block['error']:.2%} with a scale for a block",
        "other": f"{tensor['error']:.2%} with one for a tensor",
        "unit": "of the actions' standard deviation",
        "observations": sizes.observations,
        "policies": found,
    }


def _measured(folder: Path, sizes: RoundingSizes, console: Console) -> dict[str, Any]:
    policy, suite = load_policy(folder), sizes.policies[folder.name]
    both = recorded(policy, folder, 2 * sizes.observations)
    seen, others = (
        Recorded(jax.tree.map(lambda x, at=at: x[at::2], both.batch), both.noise[at::2], both.dims)
        for at in (0, 1)
    )
    exact = _actions(policy, seen)

    def error(changed: Policy) -> float:
        found = _actions(changed, seen)
        return float(np.sqrt(np.mean((found - exact) ** 2)) / exact.std())

    def success(changed: Policy, name: str) -> dict[str, Any]:
        chosen = replace(load_suite(suite), first_seed=VALIDATION)
        wanted = [Condition(name, changed, clips=0)]
        rate = evaluate_all(chosen, wanted, console, episodes=sizes.starts)[name].success
        return {"successes": rate.successes, "episodes": rate.trials, "success": rate.value}

    kernels: dict[str, dict[str, Any]] = {scale: {} for scale in SCALES}
    for scale in track(SCALES, f"{folder}: kernels", console=console):
        for towers in TOWERS:
            changed = replace(policy, params=rounded(policy.params, towers, scale))
            judged = success(changed, towers) if scale == _JUDGED else {}
            kernels[scale][towers] = {"error": error(changed), **judged}
            tell(console, {"policies": {folder.name: {"kernels": kernels}}})
    activations: dict[str, Any] = {"none": {"error": 0.0, **success(policy, "none")}}
    for scale, recipe in track(ACTIVATIONS.items(), f"{folder}: activations", console=console):
        changed = computed(policy, recipe, others)
        activations[scale] = {"error": error(changed), **success(changed, scale)}
    kept: dict[str, Any] = {}
    pattern = str(require(policy.model.config, "quantizable", "keeping kernels in few bits"))
    by_others = _calibrated(policy, others, pattern)
    for kind in track(KINDS, f"{folder}: kernels kept in few bits", console=console):
        for name, rounding in (("", None), (", calibrated", lambda _: by_others)):
            changed = quantize(policy, pattern, kind, rounding=rounding)
            kept[kind + name] = {"error": error(changed), **success(changed, kind + name)}
    return {"suite": suite, "kernels": kernels, "activations": activations, "kept": kept}


def rounded(params: Any, towers: str, scale: str) -> Any:
    """The parameters with the kernels of `TOWERS[towers]` rounded to float8 with
    `SCALES[scale]`."""
    rows, columns = SCALES[scale]

    def matrix(x: Float[Array, "m n"]) -> Float[Array, "m n"]:
        block = (rows or x.shape[0], columns or x.shape[1])
        scales = block_scales(x, block)
        return in_blocks(x, scales, block).astype(x.dtype) * spread(scales, block, x.shape)

    def leaf(path: tuple[Any, ...], x: Array) -> Array:
        name = path_name(path)
        if not name.startswith(TOWERS[towers]) or not name.endswith(("/kernel", "embedding")):
            return x
        if x.ndim == 2:
            return matrix(x)
        return jax.vmap(matrix)(x.reshape(len(x), inner_size(name, x.shape), -1)).reshape(x.shape)

    return jax.tree_util.tree_map_with_path(leaf, params)


def computed(policy: Policy, recipe: fp8.Recipe, others: Recorded) -> Policy:
    """The policy with the products of all blocks in float8. "delayed" has the scales that one
    gradient of the loss finds for `others` and the chunks that the policy gives for them."""
    model = policy.model.config.computing(fp8=recipe).build()
    if recipe != "delayed":
        return replace(policy, model=model)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    held = {path_name(p): leaf for p, leaf in jax.tree_util.tree_leaves_with_path(policy.params)}
    params = jax.tree_util.tree_map_with_path(
        lambda path, x: held.get(path_name(path), jnp.zeros(x.shape, x.dtype)), shapes
    )
    chunks = policy.model.sample_actions(policy.params, others.batch, others.noise[:, None])
    batch = replace(others.batch, actions=chunks, action_mask=jnp.ones(chunks.shape, bool))
    key = jax.random.key(0)
    found = jax.jit(jax.grad(lambda p: model.loss(p, batch, key)[0]))(params)
    return replace(policy, model=model, params=fp8.advance(params, params, found))


def _calibrated(policy: Policy, others: Recorded, pattern: str) -> Rounding:
    params, moments = watched(policy.params, pattern)
    _actions(replace(policy, params=params), others)
    jax.effects_barrier()
    return partial(calibrated_kernel, moments)


def _actions(policy: Policy, seen: Recorded) -> Float[np.ndarray, "r h a"]:
    """Normalised chunks, of only the dims that the robot has."""
    sample = jax.jit(policy.model.sample_actions)
    found = sample(policy.params, seen.batch, seen.noise[:, None])
    return np.asarray(found)[:, 0, :, : seen.dims]
