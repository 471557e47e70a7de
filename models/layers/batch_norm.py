"""Batch normalisation (Ioffe and Szegedy, arXiv 1502.03167) whose statistics are parameters that no
optimizer moves: running ones, which every training step moves, or frozen ones.

In a training step, whose parameters `training` wraps, a `BatchNorm` normalises by its batch's
statistics; their sums come back as the "gradient" of the running ones, and `advance` enters them.
Everywhere else it normalises by the running statistics, and no sample changes another.
"""

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import get_abstract_mesh
from jaxtyping import Array, Bool, Float

from models.sharding import path_name

DECAY = 0.9
"""Share of the running statistics that a step keeps; 1 less PyTorch's momentum."""
EPSILON = 1e-5
_RUNNING = re.compile(r"(^|/)running/(mean|variance|batches)$")
_FROZEN = re.compile(r"(^|/)frozen/(scale|bias|mean|variance)$")


class ChannelStatistics(NamedTuple):
    """Mean and (biased) variance of each channel, and the number of steps that they were taken
    over. In their places, a batch has its sums: of its values' distances from the running mean, of
    the squares of these distances, and the number of values."""

    mean: Float[Array, "*l c"]
    variance: Float[Array, "*l c"]
    batches: Float[Array, "*l"]


class BatchNorm(nnx.Module):
    """(x − mean) / √(variance + 1e-5) · scale + bias in each channel.

    In training, mean and variance are those of the values that are present in the batch, on
    whichever devices they lie; under accumulation, in the micro-batch. The running statistics take
    the sums over all micro-batches: they become `DECAY · running + (1 − DECAY) · batch`, with the
    batch's unbiased variance, as PyTorch's. They depend neither on the number of devices nor, in
    layers that follow no other BatchNorm, on that of micro-batches; later layers see what their
    micro-batch's statistics made of their inputs.
    """

    def __init__(self, width: int):
        self.scale, self.bias = nnx.Param(jnp.ones(width)), nnx.Param(jnp.zeros(width))
        new = ChannelStatistics(jnp.zeros(width), jnp.ones(width), jnp.zeros(()))
        self.running = nnx.Dict({name: nnx.Param(x) for name, x in new._asdict().items()})

    @jax.named_scope("norm")
    def __call__(
        self, x: Float[Array, "*b c"], present: Bool[Array, "..."]
    ) -> Float[Array, "*b c"]:
        """x normalised in f32, then in its own dtype.

        Args:
          present: the entries of x's first dimensions that count, such as [n] for pictures
            [n, h, w, c].

        Raises:
          ValueError: `present` has other dimensions than those with which x begins; or the layer is
            trained where a device sees only its part of the batch, such as on pipeline stages.
        """
        if present.ndim >= x.ndim or present.shape != x.shape[: present.ndim]:
            raise ValueError(
                f"BatchNorm takes `present` {list(present.shape)} for x {list(x.shape)}; give it "
                "the first dimensions of x, and at most all but the channels."
            )
        held = [self.running[name].get_value() for name in ChannelStatistics._fields]
        if isinstance(held[0], Learning):
            _check_whole()
            running = ChannelStatistics(*(leaf.running for leaf in held))
            sums = _sums(x, jax.lax.stop_gradient(running.mean), present)
            mean, variance = _moments(sums, jax.lax.stop_gradient(running))
            x = _recorded(x, running, jax.lax.stop_gradient(sums))
        else:
            mean, variance, _ = jax.lax.stop_gradient(held)
        return _normalised(x, mean, variance, self.scale[...], self.bias[...])


class FrozenBatchNorm(nnx.Module):
    """Batch normalisation as a tower that was trained elsewhere has it, such as ACT's ResNet: mean,
    variance, scale and bias are parameters that never train, whatever the optimizer is told."""

    def __init__(self, width: int):
        zeros, ones = jnp.zeros(width), jnp.ones(width)
        new = {"scale": ones, "bias": zeros, "mean": zeros, "variance": ones}
        self.frozen = nnx.Dict({name: nnx.Param(x) for name, x in new.items()})

    @jax.named_scope("norm")
    def __call__(self, x: Float[Array, "*b c"]) -> Float[Array, "*b c"]:
        """x normalised in f32, then in its own dtype."""
        names = ("mean", "variance", "scale", "bias")
        return _normalised(x, *(self.frozen[name][...] for name in names))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Learning:
    """An array of running statistics in a training step."""

    running: Float[Array, "..."]


def training(params: Any) -> Any:
    """The parameters with which a training step computes its loss."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: Learning(x) if is_running(path) else x, params
    )


def advance(updated: Any, params: Any, gradients: Any) -> Any:
    """`updated` with its running statistics replaced: those of `params`, moved towards the
    batch's by the sums in `gradients`, which are neither divided nor clipped. Where these are 0,
    nothing moves."""

    def moved(path: tuple[Any, ...], new: Any, old: Any, sums: Any) -> Any:
        if not _is_statistics(new):
            return new
        running, added = ChannelStatistics(**old), ChannelStatistics(**sums)
        seen, count = added.batches > 0, added.batches[..., None]
        mean, variance = _moments(added, running)
        batch = mean, variance * count / jnp.maximum(count - 1, 1)
        mean, variance = (
            jnp.where(seen[..., None], DECAY * x + (1 - DECAY) * y, x)
            for x, y in zip(running, batch, strict=False)
        )
        return ChannelStatistics(mean, variance, running.batches + seen)._asdict()

    return jax.tree_util.tree_map_with_path(
        moved, updated, params, gradients, is_leaf=_is_statistics
    )


def is_running(path: tuple[Any, ...]) -> bool:
    """True if a key path of `jax.tree_util` leads to running statistics."""
    return _RUNNING.search(path_name(path)) is not None


def is_frozen(path: tuple[Any, ...]) -> bool:
    """True if a key path of `jax.tree_util` leads to a parameter of a `FrozenBatchNorm`."""
    return _FROZEN.search(path_name(path)) is not None


def _check_whole() -> None:
    if manual := get_abstract_mesh().manual_axes:
        raise ValueError(
            f"BatchNorm is trained in a part of the program that splits the batch over mesh axis "
            f"{', '.join(manual)} by hand, so it cannot take the whole batch's statistics; use "
            "FrozenBatchNorm in layers that pipeline stages share, or train without stages."
        )


def _sums(x: Array, origin: Array, present: Array) -> ChannelStatistics:
    there = present.reshape(*present.shape, *[1] * (x.ndim - present.ndim))
    y = jnp.where(there, x.astype(jnp.float32) - origin, 0)
    axes = tuple(range(x.ndim - 1))
    count = jnp.sum(jnp.broadcast_to(there, (*x.shape[:-1], 1)), dtype=jnp.float32)
    return ChannelStatistics(y.sum(axes), (y * y).sum(axes), count)


def _moments(sums: ChannelStatistics, running: ChannelStatistics) -> tuple[Array, Array]:
    """Mean and variance of the values summed; the running ones where there are none."""
    count = sums.batches[..., None]
    shift = sums.mean / jnp.maximum(count, 1)
    variance = jnp.maximum(sums.variance / jnp.maximum(count, 1) - shift**2, 0)
    return running.mean + shift, jnp.where(count > 0, variance, running.variance)


def _normalised(x: Array, mean: Array, variance: Array, scale: Array, bias: Array) -> Array:
    y = (x.astype(jnp.float32) - mean) * jax.lax.rsqrt(variance + EPSILON)
    return (y * scale + bias).astype(x.dtype)


@jax.custom_vjp
def _recorded(x: Array, running: ChannelStatistics, sums: ChannelStatistics) -> Array:
    """x; the "gradient" of `running` is `sums`."""
    return x


_recorded.defvjp(
    lambda x, running, sums: (x, sums),
    lambda sums, g: (g, sums, jax.tree.map(jnp.zeros_like, sums)),
)


def _is_statistics(x: Any) -> bool:
    return isinstance(x, dict) and x.keys() == set(ChannelStatistics._fields)
