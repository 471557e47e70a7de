"""Flow matching in one time convention: t = 1 is noise, t = 0 is data, x_t = (1 − t)·a + t·ε, v = ε
− a.

Time density and its offset are π0's (arXiv 2410.24164, appendix B). Every draw derives from (key,
sample id), so what a sample is trained on does not depend on its batch, its row or its host.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt32

from models.flow.realtime_chunking import Given, Guidance, Velocity, guided


class Predicted(NamedTuple):
    """A policy's prediction for C noised chunks per sample, f32."""

    velocity: Float[Array, "r k c h a"]
    features: Float[Array, "r k c h w"]
    """Features of the action expert, from which the velocity is read."""


Field = Callable[..., Predicted]
"""Function of noised chunks [r k c h a] and their flow times [r k c], for a batch that was read
once. Families whose config has `rtc_max_delay` also accept a time for each step, [r k c h]."""

Ahead = Callable[[Float[Array, " s"]], Any]
"""Function of a sampler's flow times, which gives what the network computes of a time alone: a tree
of arrays [s, ...]. Computed for all steps at once, it reads its weights once, not once a step."""

Solver = Literal["euler", "ab2"]
"""Integrator of the flow; both evaluate the velocity once a step. "euler": Euler's method, which
the peers use. "ab2": the second-order method of Adams and Bashforth, which also uses the step
before, as the multistep solvers of diffusion do (PNDM, arXiv 2202.09778)."""

_DELAYS = 2**31
"""Number folded into a step's key, so that delays are drawn independently of times and noise."""


def draw(
    key: PRNGKeyArray, sample_id: Int[Array, "*b"], chunks: int, shape: tuple[int, ...]
) -> tuple[Float[Array, "*b c"], Float[Array, "*b c h a"]]:
    """Flow times in [0.001, 1] with density ∝ √t, and unit noise: `chunks` of each per sample."""

    def one(sample_id: Array) -> tuple[Array, Array]:
        time_key, noise_key = jax.random.split(jax.random.fold_in(key, sample_id))
        time = jax.random.uniform(time_key, (chunks,)) ** (1 / 1.5) * 0.999 + 0.001
        return time, jax.random.normal(noise_key, (chunks, *shape))

    flat = jax.vmap(one)(sample_id.reshape(-1))
    time, noise = (x.reshape(*sample_id.shape, *x.shape[1:]) for x in flat)
    return time, noise


def delays(
    key: PRNGKeyArray, sample_id: Int[Array, "*b"], chunks: int, most: int
) -> Int[Array, "*b c"]:
    """Numbers of given first steps for `chunks` chunks per sample, each from 0 to `most` with equal
    probability (arXiv 2512.05964, algorithm 1)."""
    key = jax.random.fold_in(key, _DELAYS)

    def one(sample_id: Array) -> Array:
        return jax.random.randint(jax.random.fold_in(key, sample_id), (chunks,), 0, most + 1)

    return jax.vmap(one)(sample_id.reshape(-1)).reshape(*sample_id.shape, chunks)


def noise(keys: UInt32[Array, "*b 2"], shape: tuple[int, ...]) -> Float[Array, "*b h a"]:
    """Unit noise; each chunk's noise depends only on its own key (for threefry, any two words)."""

    def one(key: Array) -> Array:
        return jax.random.normal(jax.random.wrap_key_data(key, impl="threefry2x32"), shape)

    return jax.vmap(one)(keys.reshape(-1, 2)).reshape(*keys.shape[:-1], *shape)


def interpolate(
    actions: Float[Array, "*#b h a"],
    noise: Float[Array, "*b h a"],
    time: Float[Array, "*b"] | Float[Array, "*b h"],
) -> tuple[Float[Array, "*b h a"], Float[Array, "*b h a"]]:
    """The noised chunk x_t and its target velocity; each step may have its own time."""
    t = time[..., None] if time.ndim == noise.ndim - 1 else time[..., None, None]
    return (1 - t) * actions + t * noise, noise - actions


def times(steps: int) -> Float[np.ndarray, " k"]:
    """Flow times of `steps` equal steps from t = 1, f32, each counted down from the one before.

    openpi counts in the same way, and π0's embedding of time has angles of up to 1,570, where the
    last bit matters. The end of the last step may be off 0 by some 1e-7.
    """
    return np.add.accumulate(np.array([1, *[-1 / steps] * (steps - 1)], np.float32))


def integrate(
    velocity: Velocity,
    noise: Float[Array, "*b h a"],
    steps: int,
    guidance: Guidance | None = None,
    solver: Solver = "euler",
    ahead: Ahead | None = None,
) -> Float[Array, "*b h a"]:
    """Integrates the flow from t = 1 to its end at t = 0, in `steps` equal steps, pulled by
    `guidance` if given. With `ahead`, the velocity's third argument is that of its step.

    Every step evaluates the velocity once, at its beginning, and so never at t = 0, which training
    leaves out. "ab2" advances by 3/2 of this velocity less 1/2 of the previous step's; its first
    step, which has none before it, is an Euler step.

    Raises:
      ValueError: as `check_guided`.
    """
    if guidance is not None:
        check_guided(solver, steps, guidance.limit)
        velocity = guided(velocity, guidance)
    size, at = np.float32(1 / steps), jnp.asarray(times(steps))
    known = (at,) if ahead is None else (at, ahead(at))

    def euler(x: Array, known: tuple[Any, ...]) -> tuple[Array, None]:
        return x - velocity(x, *known) * size, None

    def ab2(carry: _Ab2, now: tuple[tuple[Any, ...], Array]) -> tuple[_Ab2, None]:
        known, weight = now
        v = velocity(carry.x, *known)
        return _Ab2(carry.x - (v + weight * (v - carry.before)) * size, v), None

    if solver == "euler":
        return jax.lax.scan(euler, noise, known)[0]
    weight = jnp.where(jnp.arange(steps) > 0, np.float32(0.5), 0)
    return jax.lax.scan(ab2, _Ab2(noise, jnp.zeros_like(noise)), (known, weight))[0].x


def check_solver(name: str, solver: Solver) -> None:
    """Raises ValueError, naming the field, unless the solver exists."""
    if solver not in get_args(Solver):
        raise ValueError(f"{name} is '{solver}'; expected one of {list(get_args(Solver))}.")


def check_guided(solver: Solver, steps: int, limit: float) -> None:
    """Raises ValueError unless the solver is stable under guidance with weights of up to `limit`.
    At a distance y from the guidance, v is up to limit · y. Steps of "ab2" reduce this distance
    only if they are at most 1 / limit long, Euler's up to 2 / limit."""
    if solver == "ab2" and steps < limit:
        raise ValueError(
            f"solver is 'ab2' with {steps} steps, which overshoots when chunks are guided with "
            f"weights of up to {limit:g}; use at least as many steps, solver 'euler', or chunking "
            "'none'."
        )


def sample(
    field: Field,
    noise: Float[Array, "r k h a"],
    steps: int,
    guidance: Guidance | Given | None = None,
    solver: Solver = "euler",
    ahead: Ahead | None = None,
) -> Float[Array, "r k h a"]:
    """`integrate` for a policy: a chunk for each of the batch's samples. If `guidance` is a
    `Given`, the chunk begins with exactly the given actions, which are read at flow time 0, so that
    nothing is computed `ahead`; otherwise its part for a step is the field's third argument."""
    if isinstance(guidance, Given):
        given, still = guidance, guidance.steps[..., None]

        def continued(x: Array, t: Array) -> Array:
            time = jnp.where(given.steps, 0, t)
            return jnp.where(still, 0, field(x[:, :, None], time[:, :, None]).velocity[:, :, 0])

        return integrate(continued, jnp.where(still, given.actions, noise), steps, None, solver)

    def velocity(x: Array, t: Array, *ahead: Any) -> Array:
        time = jnp.full((*x.shape[:2], 1), t)
        return field(x[:, :, None], time, *ahead).velocity[:, :, 0]

    return integrate(velocity, noise, steps, guidance, solver, ahead)


class _Ab2(NamedTuple):
    """A noised chunk, and the velocity of the step that led to it."""

    x: Float[Array, "*b h a"]
    before: Float[Array, "*b h a"]
