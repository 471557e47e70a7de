"""Noise schedules of diffusion, and two samplers that remove the noise: DDPM (Ho et al., arXiv
2006.11239), and DDIM (Song et al., arXiv 2010.02502), which adds none of its own.

Times count down from T − 1, where nearly all is noise. Constants are rounded to f32 where the
released policies' training (diffusers) rounds them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, PRNGKeyArray

from models.files.bounds import check_size

Betas = Literal["squaredcos_cap_v2", "linear", "scaled_linear", "sigmoid"]
Sampler = Literal["ddpm", "ddim"]
Target = Literal["epsilon", "sample"]


@dataclass(frozen=True)
class NoiseConfig:
    """Noise of training, and its removal in acting.

    `times`: T, steps of the noise in training. `betas`: the schedule of the variances that they
    add, from `beta_start` to `beta_end` where it has ends. `predicts`: what the network tells of a
    noised chunk, its noise ("epsilon") or the chunk itself ("sample"). `clip`: bound of denoised
    entries in every step of the sampler, 0 for none.

    Raises:
      ValueError: a value is not one of those, or out of bounds.
    """

    times: int = 100
    betas: Betas = "squaredcos_cap_v2"
    beta_start: float = 1e-4
    beta_end: float = 0.02
    sampler: Sampler = "ddpm"
    predicts: Target = "epsilon"
    clip: float = 1.0

    def __post_init__(self) -> None:
        check_size("noise.times", self.times)
        for name, known in (("betas", Betas), ("sampler", Sampler), ("predicts", Target)):
            if getattr(self, name) not in get_args(known):
                raise ValueError(
                    f"noise.{name} is {str(getattr(self, name))[:80]!r}; expected one of "
                    f"{list(get_args(known))}."
                )
        if not (0 < self.beta_start <= self.beta_end < 1 and self.clip >= 0):
            raise ValueError(
                f"noise.beta_start is {self.beta_start}, beta_end {self.beta_end} and clip "
                f"{self.clip}; give ascending betas between 0 and 1, and a clip of at least 0."
            )

    @property
    def kept(self) -> Float32[np.ndarray, " times"]:
        """Share of a chunk's variance that is left at each time, ᾱ."""
        return np.cumprod(np.float32(1) - self._variances, dtype=np.float32)

    @property
    def _variances(self) -> Float32[np.ndarray, " times"]:
        count, low, high = self.times, self.beta_start, self.beta_end
        if self.betas == "squaredcos_cap_v2":
            left = np.cos((np.arange(count + 1) / count + 0.008) / 1.008 * np.pi / 2) ** 2
            return np.minimum(1 - left[1:] / left[:-1], 0.999).astype(np.float32)
        if self.betas == "linear":
            return np.linspace(low, high, count, dtype=np.float32)
        if self.betas == "scaled_linear":
            return np.linspace(low**0.5, high**0.5, count, dtype=np.float32) ** 2
        rising = 1 / (1 + np.exp(-np.linspace(-6, 6, count, dtype=np.float32)))
        return rising * np.float32(high - low) + np.float32(low)


Denoiser = Callable[[Float[Array, "*b h a"], Int[Array, ""]], Float[Array, "*b h a"]]
"""Function of noised chunks and their time, which returns what the network `predicts`."""
StepNoise = Callable[[Float[Array, "*b h a"], Int[Array, ""]], Float[Array, "*b h a"]]
"""Function of the noise that sampling starts from and of the number of a step, which returns the
unit noise that DDPM adds in that step."""


def draw(
    key: PRNGKeyArray, sample_id: Int[Array, "*b"], count: int, shape: tuple[int, ...], times: int
) -> tuple[Int[Array, "*b c"], Float[Array, "*b c h a"]]:
    """Times below `times`, all equally often, and unit noise: `count` of both for each sample."""

    def one(sample_id: Array) -> tuple[Array, Array]:
        time_key, noise_key = jax.random.split(jax.random.fold_in(key, sample_id))
        time = jax.random.randint(time_key, (count,), 0, times)
        return time, jax.random.normal(noise_key, (count, *shape))

    flat = jax.vmap(one)(sample_id.reshape(-1))
    time, noise = (x.reshape(*sample_id.shape, *x.shape[1:]) for x in flat)
    return time, noise


def noised(
    config: NoiseConfig,
    actions: Float[Array, "*#b h a"],
    noise: Float[Array, "*b h a"],
    time: Int[Array, "*b"],
) -> tuple[Float[Array, "*b h a"], Float[Array, "*#b h a"]]:
    """Chunks noised up to a time, and what the network is to tell of them."""
    kept = jnp.asarray(config.kept)[time][..., None, None]
    mixed = jnp.sqrt(kept) * actions + jnp.sqrt(1 - kept) * noise
    return mixed, noise if config.predicts == "epsilon" else actions


def denoise(
    config: NoiseConfig,
    predict: Denoiser,
    start: Float[Array, "*b h a"],
    steps: int,
    step_noise: StepNoise | None = None,
) -> Float[Array, "*b h a"]:
    """Chunks from unit noise, in `steps` evaluations of the network at times that lie T // steps
    apart and end at 0.

    Args:
      step_noise: for "ddpm", `drawn_from` if None.
    """
    added_in = step_noise or drawn_from
    times = np.arange(steps)[::-1] * (config.times // steps)
    now = config.kept[times]

    def step(x: Array, at: tuple[Array, ...]) -> tuple[Array, None]:
        number, time, kept, left = at
        told = predict(x, time)
        if config.predicts == "sample":
            chunk, noise = told, (x - jnp.sqrt(kept) * told) / jnp.sqrt(1 - kept)
        else:
            chunk, noise = (x - jnp.sqrt(1 - kept) * told) / jnp.sqrt(kept), told
        chunk = jnp.clip(chunk, -config.clip, config.clip) if config.clip else chunk
        if config.sampler == "ddim":
            return jnp.sqrt(left) * chunk + jnp.sqrt(1 - left) * noise, None
        alpha = kept / left
        mean = jnp.sqrt(left) * (1 - alpha) * chunk + jnp.sqrt(alpha) * (1 - left) * x
        variance = jnp.maximum((1 - left) / (1 - kept) * (1 - alpha), 1e-20)
        added = jnp.where(time > 0, jnp.sqrt(variance), 0) * added_in(start, number)
        return mean / (1 - kept) + added, None

    known = np.arange(steps), times, now, np.append(now[1:], np.float32(1))
    return jax.lax.scan(step, start, tuple(map(jnp.asarray, known)))[0]


def drawn_from(start: Float[Array, "*b h a"], step: Int[Array, ""]) -> Float[Array, "*b h a"]:
    """Unit noise for a step, of each chunk from the noise that it starts from alone: whatever is
    sampled with it, and with the same key, a chunk is the same."""

    def one(chunk: Array) -> Array:
        bits = jax.lax.bitcast_convert_type(chunk.astype(jnp.float32), jnp.uint32).reshape(-1)
        mixed = bits * (2 * jnp.arange(bits.size, dtype=jnp.uint32) + 1)
        key = jax.random.fold_in(jax.random.key(0), mixed.sum(dtype=jnp.uint32))
        return jax.random.normal(jax.random.fold_in(key, step), chunk.shape)

    return jax.vmap(one)(start.reshape(-1, *start.shape[-2:])).reshape(start.shape)
