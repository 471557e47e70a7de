"""Keep the kernels of a policy's towers in few bits, for serving: float8 (e4m3) or int8 with one
scale for every 128×128 block, or NF4, nothing calibrated. Embeddings, norms and the small layers
around the towers stay as they are.

    python -m tools.quantize checkpoints/pi05_base runs/small
    python -m tools.quantize checkpoints/pi05_base runs/smaller --kind nf4
    python -m tools.quantize checkpoints/pi05_base runs/fast --activations

SOURCE is anything that Chiliad reads. What is written is a checkpoint of Chiliad's, which
`load_policy` and every command read like any other; its size and how far its actions are from
SOURCE's are printed.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import tyro

from models import PackedBatch, Policy
from models.files.own_file import run_file
from models.layers.quantized import Kind
from models.model import in_few_bits, require, told
from models.terminal import Console, guard_tracebacks
from tools.bench.models.fp8 import random_batch
from tools.command_line.ending import in_a_line
from tools.convert_checkpoint import convert
from tools.recipes.policy import DEFAULTS, PolicyOptions, load


def quantize(
    policy: Policy, pattern: str | None = None, kind: Kind = "float8", activations: bool = False
) -> Policy:
    """The policy with the stacked kernels whose path `pattern` matches in few bits; those that its
    family names, if None. Float8 kernels may have what they multiply rounded to float8 too.

    Raises:
      ValueError: the family names none, no kernel matches or one that the family does not read so,
        the policy is quantised already, or activations would be rounded for kernels of another
        kind.
    """
    config = policy.model.config
    if pattern is None:
        pattern = str(require(config, "quantizable", "tools.quantize"))
    if config.compute.quantized:
        raise ValueError(f"The policy is quantised already, at {config.compute.quantized!r}.")
    few = config.computing(
        quantized=pattern, quantized_kind=kind, quantized_activations=activations
    )
    params = jax.jit(partial(in_few_bits, few))(policy.params)
    return replace(policy, model=few.build(), params=params)


def size(params: Any) -> int:
    """Bytes of all leaves."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))


def action_error(policy: Policy, other: Policy, batch: PackedBatch) -> float:
    """Norm of the difference of the actions that both sample from the same noise, relative to the
    norm of the first's."""
    noise = jax.random.normal(jax.random.key(0), batch.actions.shape)
    actions, others = (
        np.asarray(jax.jit(told(p.model, p.processor).sample_actions)(p.params, batch, noise))
        for p in (policy, other)
    )
    return float(np.linalg.norm(others - actions) / np.linalg.norm(actions))


def main(
    source: Annotated[Path, tyro.conf.Positional],
    target: Annotated[Path, tyro.conf.Positional],
    kernels: str | None = None,
    kind: Kind = "float8",
    activations: bool = False,
    dtype: str | None = None,
    family: Path | None = None,
    options: Annotated[PolicyOptions, tyro.conf.arg(name="")] = DEFAULTS,
) -> None:
    """Quantise a policy of a family that can be, such as π.

    Args:
      source: what to read.
      target: directory to write.
      kernels: pattern for the paths of the kernels to quantise, such as '^language/'; those of all
        towers, or what the family names, if not given.
      kind: of numbers to keep them in.
      activations: round what float8 kernels multiply to float8 too, which a Hopper GPU multiplies
        as such.
      dtype: of the other parameters, as saved if not given.
      family: Python file that defines the model's family, if it is not one of ours; it runs.
      options: facts about the policy that its files do not tell.
    """
    console = Console(stderr=True)
    with in_a_line(writing=target):
        if family is not None:
            run_file(family)
        policy = load(source, options, dtype=dtype)
        small = quantize(policy, kernels, kind, activations)
        error = action_error(policy, small, random_batch(policy.model.config, rows=1, samples=1))
        convert(small, target, "chiliad")
    console.print(
        f"Wrote {target}: {size(policy.params):,} bytes became {size(small.params):,}; on a random "
        f"observation actions differ by {error:.2%}.",
        soft_wrap=True,
    )


if __name__ == "__main__":
    guard_tracebacks()
    tyro.cli(main, prog="python -m tools.quantize", description=__doc__)
