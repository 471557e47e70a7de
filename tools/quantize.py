"""Store the kernels of a policy's towers in few bits, for serving: float8 (e4m3) or int8 with one
scale for every 128×128 block, or NF4. Embeddings, norms and the small layers around the towers do
not change.

    python -m tools.quantize checkpoints/pi05_base runs/small
    python -m tools.quantize checkpoints/pi05_base runs/smaller --kind nf4
    python -m tools.quantize checkpoints/pi05_base runs/fast --activations
    python -m tools.quantize runs/mine runs/small --kind nf4 --calibrate datasets/mine

Without --calibrate, each number is rounded by itself. With it, observations of the policy's robot
are used to round numbers together, so that some make up for the errors of others (GPTQ,
arXiv 2210.17323). SOURCE is anything that Chiliad reads. The result is a Chiliad checkpoint, which
every command and `load_policy` read like any other. The command prints its size and how far its
actions are from SOURCE's.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import tyro

from data.mixture.recorded import read_pictures, read_recorded
from models import PackedBatch, Policy
from models.files.terminal import Console, Progress, guard_tracebacks, say
from models.layers.calibrated import Moments, calibrated_kernel, watched
from models.layers.quantized import Kernel, Kind, Rounding
from models.model import bind_processor, quantize_params, require
from models.requests import Request
from parallel.planning.random_batch import random_batch
from tools.command_line.ending import in_a_line
from tools.command_line.options import cli
from tools.convert_checkpoint import convert
from tools.recipes.bound_recording import bound, opened, recorded_requests
from tools.recipes.policy import DEFAULTS, PolicyOptions, load

_OBSERVATIONS = 256


def quantize(
    policy: Policy,
    pattern: str | None = None,
    kind: Kind = "float8",
    activations: bool = False,
    rounding: Callable[[str], Rounding] | None = None,
) -> Policy:
    """The policy with its stacked kernels in few bits: those whose path matches `pattern`, or those
    that its family names if None. With `activations`, what float8 kernels multiply is rounded to
    float8 too. `rounding`, called with the pattern, gives the function that rounds the matching
    kernels; None rounds number by number.

    Raises:
      ValueError: the family names no kernels, no kernel matches, or one matches that the family
        cannot read in few bits; the policy is quantised already; activations would be rounded for
        kernels that are not float8; or as `rounding`.
    """
    config = policy.model.config
    if pattern is None:
        pattern = str(require(config, "quantizable", "tools.quantize"))
    if config.compute.quantized:
        raise ValueError(
            f"The policy is already quantised, at {config.compute.quantized!r}; give the one "
            "that it was quantised from."
        )
    few = config.computing(
        quantized=pattern, quantized_kind=kind, quantized_activations=activations
    )
    if rounding is None:
        params = jax.jit(partial(quantize_params, few))(policy.params)
    else:
        jax.eval_shape(partial(quantize_params, few), policy.params)  # raises its errors at once
        params = quantize_params(few, policy.params, rounding(pattern))
    return replace(policy, model=few.build(), params=params)


def recorded_moments(
    policy: Policy,
    pattern: str,
    data: str,
    observations: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Moments:
    """Moments of the kernels whose path matches `pattern`, over about `observations` observations
    of a dataset, from all its episodes and evenly spread in each; fewer if it has fewer frames.
    Observations that fill up a batch count again, and padding of a text counts as its tokens do.

    Args:
      progress: called with (episodes done, episodes).

    Raises:
      ValueError, FileNotFoundError, DatasetError: there is no such dataset, it has no frames, or it
        is not of the policy's robot.
    """
    if observations < 1:
        raise ValueError(f"--observations is {observations}; give at least 1.")
    recording = bound(policy, *opened(data))
    lengths = recording.dataset.lengths
    if not (total := int(lengths.sum())):
        raise ValueError(f"{data}: has no frames; give a dataset with some.")
    params, moments = watched(policy.params, pattern)
    watching = replace(recording.policy, params=params)
    frames = np.linspace(0, total, min(observations, total), endpoint=False)
    asked: list[Request] = []
    ends = np.cumsum(lengths)
    episodes = np.searchsorted(ends, frames, "right")
    for done, e in enumerate(chosen := np.unique(episodes), 1):
        at = (frames[episodes == e] - (ends[e] - lengths[e])).astype(np.int64)
        one = read_recorded(recording.dataset, recording.settings, recording.reading, int(e), at)
        pictures = read_pictures(recording.dataset, recording.reading, int(e), at)
        asked += recorded_requests(recording, one, pictures)
        if len(asked) >= policy.sizes[-1] or done == len(chosen):
            watching.sample_actions(asked)
            asked = []
        progress(done, len(chosen))
    jax.effects_barrier()
    return moments


def size(params: Any) -> int:
    """Bytes of all leaves."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))


def action_error(policy: Policy, other: Policy, batch: PackedBatch) -> float:
    """Norm of the difference between the actions that both policies sample from the same noise,
    relative to the norm of the first's actions."""
    noise = jax.random.normal(jax.random.key(0), batch.actions.shape)
    actions, others = (
        np.asarray(
            jax.jit(bind_processor(p.model, p.processor).sample_actions)(p.params, batch, noise)
        )
        for p in (policy, other)
    )
    return float(np.linalg.norm(others - actions) / np.linalg.norm(actions))


def main(
    source: Annotated[Path, tyro.conf.Positional],
    target: Annotated[Path, tyro.conf.Positional],
    kernels: str | None = None,
    kind: Kind = "float8",
    activations: bool = False,
    calibrate: str | None = None,
    observations: int | None = None,
    dtype: str | None = None,
    family: Path | None = None,
    options: Annotated[PolicyOptions, tyro.conf.arg(name="")] = DEFAULTS,
) -> None:
    """Quantise a policy of a family that can be, such as π.

    Args:
      source: checkpoint to read.
      target: directory to write.
      kernels: pattern for the paths of the kernels to quantise, such as '^language/'; default:
        those of all towers, or what the family names.
      kind: kind of numbers to store them in.
      activations: also round what float8 kernels multiply to float8; a Hopper GPU multiplies
        float8 directly.
      calibrate: LeRobot dataset of the policy's robot, or a mixture's file with one dataset, whose
        observations are used to round numbers together.
      observations: number of these observations that the policy acts on, spread over all episodes;
        default: 256.
      dtype: dtype of the other parameters; default: as saved by Chiliad, float32 for other codes.
      family: Python file that defines the model's family, if not one of ours; the file is run.
      options: facts about the policy that its files do not contain.
    """
    console = Console(stderr=True)
    with in_a_line(writing=target):
        if observations is not None and calibrate is None:
            raise ValueError(
                "--observations needs --calibrate, the dataset that they are taken from."
            )
        policy = load(source, options, dtype=dtype, family=family)
        with Progress(console=console, transient=True) as progress:
            rounding = None
            if calibrate is not None:
                count = _OBSERVATIONS if observations is None else observations
                rounding = partial(_calibrated, policy, calibrate, count, progress)
            small = quantize(policy, kernels, kind, activations, rounding)
        error = action_error(policy, small, random_batch(policy.model.config, rows=1, samples=1))
        convert(small, target, "chiliad")
    say(
        console,
        f"Wrote {target}: {size(policy.params):,} bytes became {size(small.params):,}; on a random "
        f"observation actions differ by {error:.2%}.",
    )


def _calibrated(
    policy: Policy, data: str, observations: int, progress: Progress, pattern: str
) -> Rounding:
    acted = progress.bar("Acting on recorded observations")
    moments = recorded_moments(policy, pattern, data, observations, acted)
    kernels = progress.add_task("Rounding kernels", total=len(moments))

    def rounding(path: str, kernel: Any, kind: Kind) -> Kernel:
        made = jax.block_until_ready(calibrated_kernel(moments, path, kernel, kind))
        progress.advance(kernels)
        return made

    return rounding


if __name__ == "__main__":
    guard_tracebacks()
    cli(main, prog="python -m tools.quantize", description=__doc__)
