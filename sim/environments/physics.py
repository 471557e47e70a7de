"""Dynamics of the tabletop's bodies: MJX with a controller that follows a set point.

All tasks and environments of a process that have the same scene share its compiled model. MJX has
two implementations of the same physics: XLA's, which runs anywhere, and Warp's kernels for NVIDIA
GPUs (MuJoCo Warp), which are an optional package.
"""

from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache, partial
from importlib.util import find_spec
from io import StringIO
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import mujoco
from jaxtyping import Array, Float

from sim.environments.bodies import OPEN, SUBSTEPS, Bodies

with redirect_stdout(StringIO()):  # MJX prints that it lacks Warp, which is optional
    from mujoco import mjx

LOW, HIGH = (-0.2, -0.18, 0.006), (0.2, 0.22, 0.25)
"""Bounds of the tip, metres."""
ACTION_RANGE = tuple(zip((*LOW, 0.0), (*HIGH, 1.0), strict=True))
"""Lowest and highest value of each action: the tip's, and the gripper's from open to closed."""
SPEED = (0.025, 0.025, 0.025, 0.5)
"""Largest change of the set point in one control step: metres, and the fraction of the closing."""

Implementation = Literal["jax", "warp"]


class Physics(NamedTuple):
    """State that MJX carries from step to step, and the position that the controller holds."""

    position: Float[Array, "*n nq"]
    """Layout: see `sim.environments.bodies.Bodies`."""
    velocity: Float[Array, "*n nv"]
    acceleration: Float[Array, "*n nv"]
    """The solver's starting point."""
    setpoint: Float[Array, "*n 4"]
    """Tip x, y, z in metres and gripper, 0 open to 1 closed."""


def at_rest(bodies: Bodies, position: Float[Array, " nq"]) -> Physics:
    """State in which nothing moves and the gripper's set point is its present position, open."""
    still = jnp.zeros(bodies.nv)
    return Physics(position, still, still, jnp.append(position[:3], 0.0))


@cache
def model(bodies: Bodies) -> mujoco.MjModel:
    """The scene, compiled by MuJoCo."""
    return mujoco.MjModel.from_xml_string(bodies.mjcf())


def implementation(wanted: Implementation | Literal["auto"]) -> Implementation:
    """Chooses MJX's implementation: Warp's on an NVIDIA GPU if it is installed, else XLA's.

    Raises:
      ValueError: "warp" is requested but not installed, or there is no such implementation.
    """
    if wanted not in ("auto", "jax", "warp"):
        raise ValueError(f"impl is '{wanted}', expected 'auto', 'jax' or 'warp'.")
    installed = find_spec("warp") is not None
    if wanted == "warp" and not installed:
        raise ValueError(
            "impl 'warp' needs the package warp-lang, which is not installed: "
            "pip install 'mujoco-mjx[warp]', or choose impl 'jax'."
        )
    if wanted == "auto":
        return "warp" if installed and jax.default_backend() == "gpu" else "jax"
    return wanted


def step(
    bodies: Bodies, impl: Implementation, physics: Physics, action: Float[Array, "n 4"]
) -> Physics:
    """State of N environments one control step later, to trace.

    An action is the target of the tip and of the gripper's closing; the set point moves there by at
    most `SPEED`.
    """
    static, blank = _mjx(bodies, impl, len(action) if impl == "warp" else 1)
    return jax.vmap(partial(_step, static, blank))(physics, action)


@cache
def compiled_step(
    bodies: Bodies, impl: Implementation = "jax"
) -> Callable[[Physics, Float[Array, "n 4"]], Physics]:
    """`step`, jitted."""
    options = {"xla_backend_optimization_level": 1} if jax.default_backend() == "cpu" else None
    return jax.jit(partial(step, bodies, impl), compiler_options=options)


def _step(
    static: mjx.Model, blank: mjx.Data, physics: Physics, action: Float[Array, "4"]
) -> Physics:
    low, high, speed = jnp.array((*LOW, 0.0)), jnp.array((*HIGH, 1.0)), jnp.array(SPEED)
    goal = jnp.clip(action, low, high)
    setpoint = physics.setpoint + jnp.clip(goal - physics.setpoint, -speed, speed)
    finger = OPEN * (1 - setpoint[3])
    data = blank.replace(
        qpos=physics.position,
        qvel=physics.velocity,
        qacc_warmstart=physics.acceleration,
        ctrl=jnp.concatenate((setpoint[:3], jnp.stack((finger, finger)))),
    )
    data = jax.lax.fori_loop(0, SUBSTEPS, lambda _, d: mjx.step(static, d), data)
    return Physics(data.qpos, data.qvel, data.qacc_warmstart, setpoint)


@cache
def _mjx(bodies: Bodies, impl: Implementation, count: int) -> tuple[mjx.Model, mjx.Data]:
    """The model, and the data of one environment, of which `count` are stepped together."""
    with jax.ensure_compile_time_eval():
        static = mjx.put_model(model(bodies), impl=impl)
        if impl == "jax":
            return static, mjx.make_data(static)
        from mujoco.mjx.third_party.mujoco_warp._src.types import OverflowType

        # One iteration is intended; Warp would print a warning about it in every step.
        limits = OverflowType.ITERATIONS | OverflowType.LS_ITERATIONS
        warnings = int(static.opt._impl.warn_overflow) & ~int(limits)
        static = static.tree_replace({"opt._impl.warn_overflow": warnings})
        contacts = 8 * model(bodies).npair
        room = {"naconmax": count * contacts, "njmax": 4 * contacts + model(bodies).njnt}
        return static, mjx.make_data(model(bodies), impl=impl, **room)
