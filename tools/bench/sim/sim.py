"""Steps and pictures per second of every simulation backend, compared with C MuJoCo
(`mujoco.rollout`) and its renderer on the same models at the same picture size.

A step is a control step of the environment, several of the simulator's, for C MuJoCo too; all hold
still where they start. Our pictures are an observation's, with 2 x 2 rays per pixel; MuJoCo's are
of the first camera alone, with 4 samples per pixel, a sun besides its headlight and a shadow map of
512 x 512, and `caster` is our ray caster on that camera, without and with shadows. On a GPU,
batches are larger, Warp's kernels also step the tabletop, no suite runs in processes, and the rest
is measured even if MuJoCo cannot draw. Wall-clock rates are of the whole machine (C's rollout has a
thread for each core, its renderer only one), those per CPU-second of one core.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
from jaxtyping import Array, Float
from mujoco.rollout import Rollout
from rich.table import Table

from models.files.terminal import Console
from sim.protocol import Environment, Slots, Start, State
from sim.rendering.raycast import Camera, Look, Poses, geoms_of, pictures, views
from sim.simulators.offscreen import choose_renderer
from sim.suites import load_suite
from tools.bench.attempt import attempt, tell
from tools.bench.peer import asking
from tools.bench.timing import timed

_BATCHES = (1, 16, 256, 1024)
_GPU_BATCHES = (1024, 4096)
_SLOTS = (1, 16)
"""Slots of suites that take a process each."""
_LANES = 128
_CHUNK = 8
_SIZE = 48
_SECONDS = 1.5
"""Seconds that each figure is measured."""

Rates = dict[str, float]


class Backend(NamedTuple):
    """An environment on a device, and what C MuJoCo needs to do the same."""

    make: Callable[[int], Environment]
    """Makes the environment with this many lanes."""
    hold: Callable[[State], Float[Array, "n a"]]
    """Actions that change nothing."""
    model: Callable[[], mujoco.MjModel]
    """Makes the model, whose first actuators are position servos of the first joints."""
    substeps: int
    camera: Camera


def run(
    console: Console, batches: Sequence[int] | None = None, tiny: bool = False
) -> dict[str, Any]:
    """Steps and frames per second; `ratio` is the tabletop's control steps with a picture each per
    second over those of C MuJoCo and its renderer.

    Raises:
      FileNotFoundError: MuJoCo cannot draw here, and there is no GPU.
    """
    environment, on_gpu = dict(os.environ), jax.default_backend() == "gpu"
    try:
        renderer = choose_renderer(environment)
    except FileNotFoundError as missing:
        if not on_gpu:
            raise
        renderer = str(missing)
    batches = batches or ((2,) if tiny else _GPU_BATCHES if on_gpu else _BATCHES)
    seconds = 0.01 if tiny else _SECONDS
    figures: dict[str, dict[str, Any]] = {}
    for name, load in (("tabletop", _tabletop), ("arm", _arm)):
        backend = load()
        console.print(f"Timing {name} in batches of {list(batches)}")
        found, qpos = ours(backend, batches, seconds)
        figures[name] = {
            "ours": found,
            "rollout": rollouts(backend, qpos, batches, seconds),
            **drawings(backend, qpos, environment, seconds, on_gpu),
        }
        tell(console, {"figures": figures})
    if on_gpu and find_spec("warp") is not None:
        console.print("tabletop, by Warp's kernels")
        warp = attempt(lambda: ours(_tabletop("warp"), batches, seconds)[0])
        figures["tabletop by Warp"] = warp if "error" in warp else {"ours": warp}
    if not (on_gpu or tiny):
        figures["metaworld"] = _metaworld(console)
    console.print(_table(figures))
    figure = figures["tabletop"]
    at = str(max((batch for batch in batches if batch <= 256), default=batches[0]))
    ways = (figure["ours"][at], figure["rollout"][at] | figure["renderer"]["plain"])
    (clock, other), (cpu, other_cpu) = (
        [
            1 / sum(1 / way.get(f"{what}/{unit}", math.nan) for what in ("steps", "frames"))
            for way in ways
        ]
        for unit in ("s", "CPU-s")
    )
    return {
        "ratio": clock / other,
        "cpu_ratio": cpu / other_cpu,
        "ours": f"{clock:,.0f} tabletop steps with a picture each a second, batch {at}",
        "other": f"{other:,.0f} by C MuJoCo and its renderer",
        "unit": "steps with a picture/s",
        "picture": _SIZE,
        "renderer": renderer,
        "figures": figures,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }


def _metaworld(console: Console) -> dict[str, Any]:
    try:
        console.print("Timing metaworld, with a process for each slot")
        return {"ours": slots("metaworld", _SLOTS)}
    except FileNotFoundError as missing:
        console.print(f"left out: {missing}")
        return {"left out": str(missing)}


def ours(
    backend: Backend, batches: Sequence[int], seconds: float = _SECONDS
) -> tuple[dict[str, Any], Float[np.ndarray, "n nq"]]:
    """Rates of the environment by batch size, and where everything was in the last batch."""
    envs = {lanes: backend.make(lanes) for lanes in {min(batch, _LANES) for batch in batches}}
    found: dict[str, Any] = {}
    for batch in batches:
        env = envs[min(batch, _LANES)]
        state = env.reset(np.arange(batch))
        actions = jnp.repeat(backend.hold(state)[:, None], _CHUNK, axis=1)
        found[str(batch)] = {
            **rates("steps", batch * _CHUNK, partial(env.step_chunk, state, actions), seconds),
            **rates("frames", batch * len(env.cameras), partial(env.observe, state), seconds),
        }
    return found, np.asarray(state.physics.position)


def rollouts(
    backend: Backend,
    qpos: Float[np.ndarray, "n nq"],
    batches: Sequence[int],
    seconds: float = _SECONDS,
) -> dict[str, Rates]:
    """Rates of C MuJoCo by batch size."""
    model, threads = backend.model(), os.cpu_count() or 1
    full = mujoco.mjtState.mjSTATE_FULLPHYSICS
    states = np.zeros((len(qpos), mujoco.mj_stateSize(model, full)))
    for state, placed in zip(states, _placed(model, qpos), strict=True):
        mujoco.mj_getState(model, placed, state, full)
    found = {}
    with Rollout(nthread=threads) as pool:
        data = [mujoco.MjData(model) for _ in range(threads)]
        for batch in batches:
            some = np.arange(batch) % len(qpos)
            hold = qpos[some, None, : model.nu].astype(float)
            roll = partial(
                pool.rollout, model, data, states[some], hold, nstep=_CHUNK * backend.substeps
            )
            found[str(batch)] = rates("steps", batch * _CHUNK, roll, seconds)
    return found


def drawings(
    backend: Backend,
    qpos: Float[np.ndarray, "n nq"],
    environment: dict[str, str],
    seconds: float = _SECONDS,
    spared: bool = False,
) -> dict[str, dict[str, dict[str, Any]]]:
    """Rates of our ray caster and of MuJoCo's renderer, without and with shadows; if `spared`, a
    renderer that cannot draw only leaves its `error`."""
    model, qpos = backend.model(), qpos[:_LANES]
    placed = _placed(model, qpos)
    frames = Poses(
        np.stack([data.geom_xpos for data in placed]).astype(np.float32),
        np.stack([data.geom_xmat.reshape(-1, 3, 3) for data in placed]).astype(np.float32),
    )
    seen, look = views([backend.camera]), Look(model.geom_rgba[:, :3])
    away = np.subtract(backend.camera.target, backend.camera.position)
    camera = {
        "lookat": list(backend.camera.target),
        "distance": float(np.linalg.norm(away)),
        "azimuth": float(np.degrees(np.arctan2(away[1], away[0]))),
        "elevation": float(np.degrees(np.arcsin(away[2] / np.linalg.norm(away)))),
    }
    own = {key: value for key, value in environment.items() if key not in os.environ}
    own["LP_NUM_THREADS"] = "0"  # Mesa's rasteriser, in the caller's thread
    found: dict[str, dict[str, dict[str, Any]]] = {"caster": {}, "renderer": {}}
    with (
        TemporaryDirectory() as folder,
        asking(Path(sys.executable), "mujoco_renderer", own) as ask,
    ):
        file = str(Path(folder, "model.mjb"))
        mujoco.mj_saveModel(model, file, None)
        for name, shadows in (("plain", False), ("shadows", True)):
            draw = partial(pictures, geoms_of(model), size=_SIZE, samples=2, shadows=shadows)
            cast = partial(jax.jit(draw), frames, seen, look)
            found["caster"][name] = rates("frames", len(qpos), cast, seconds)
            asked = partial(
                ask,
                model=file,
                qpos=qpos.tolist(),
                camera=camera,
                fovy=backend.camera.fovy,
                size=_SIZE,
                shadows=shadows,
                seconds=seconds,
            )
            found["renderer"][name] = attempt(asked) if spared else asked()
    return found


def slots(suite: str, counts: Sequence[int]) -> dict[str, Rates]:
    """Wall-clock rates of a suite's first task in so many processes: steps in chunks without
    pictures in between, and pictures where every step is observed.

    Raises:
      FileNotFoundError: the suite is not installed.
    """
    found = load_suite(suite)
    rated: dict[str, Rates] = {}
    for count in counts:
        opened = found.open(found.tasks[:1], count, _SIZE)
        still = np.zeros((2 * _CHUNK, len(opened.spec.action_names)), np.float32)
        try:
            for slot in range(count):
                opened.begin(slot, Start(found.tasks[0], slot))
            _answers(opened)
            seconds = {}
            for steps, rounds in ((len(still), 4), (1, 30)):
                start = time.perf_counter()
                for _ in range(rounds):
                    for slot in range(count):
                        opened.send(slot, still[:steps])
                    _answers(opened)
                seconds[steps] = (time.perf_counter() - start) / rounds
        finally:
            opened.close()
        rated[str(count)] = {
            "steps/s": count * len(still) / seconds[len(still)],
            "frames/s": count * len(opened.spec.cameras) / seconds[1],
        }
    return rated


def rates(what: str, count: int, call: Callable[[], Any], seconds: float = _SECONDS) -> Rates:
    """Rates per second and CPU-second, with `count` per call; the first call only compiles."""
    jax.block_until_ready(call())
    calls, start = 0, time.perf_counter()
    with timed() as took:
        while calls < 2 or time.perf_counter() - start < seconds:
            jax.block_until_ready(call())
            calls += 1
    return {f"{what}/s": count * calls / took.wall, f"{what}/CPU-s": count * calls / took.cpu}


def _answers(opened: Slots) -> None:
    """Waits until every slot has answered."""
    waiting = set(range(opened.count))
    while waiting:
        for outcome in opened.poll():
            if outcome.error:
                raise ValueError(f"{opened.spec.name}: slot {outcome.slot} failed: {outcome.error}")
            waiting.discard(outcome.slot)


def _placed(model: mujoco.MjModel, qpos: Float[np.ndarray, "n nq"]) -> list[mujoco.MjData]:
    found = []
    for position in qpos:
        data = mujoco.MjData(model)
        data.qpos[:] = position
        mujoco.mj_forward(model, data)
        found.append(data)
    return found


def _table(figures: dict[str, dict[str, Any]]) -> Table:
    units = ("steps/s", "steps/CPU-s", "frames/s", "frames/CPU-s")
    table = Table("backend", "", "batch or shading", *units)
    for backend, kinds in figures.items():
        for kind, rows in kinds.items():
            if isinstance(rows, str):
                table.add_row(backend, kind, rows)
                continue
            for row, rated in rows.items():
                cells = (f"{rated[unit]:,.0f}" if unit in rated else "" for unit in units)
                table.add_row(backend, kind, row, *cells)
    return table


def _tabletop(impl: Literal["jax", "warp"] = "jax") -> Backend:
    from sim.environments.bodies import SUBSTEPS, Bodies
    from sim.environments.physics import model
    from sim.environments.scenery import FRONT
    from sim.environments.tabletop import Tabletop

    return Backend(
        make=lambda lanes: Tabletop("lift", image_size=_SIZE, group_size=lanes, impl=impl),
        hold=lambda state: state.physics.setpoint,
        model=partial(model, Bodies()),
        substeps=SUBSTEPS,
        camera=FRONT,
    )


def _arm() -> Backend:
    from sim.environments.arm import FRONT, Arm
    from sim.environments.arm_model import SUBSTEPS, model

    return Backend(
        make=lambda lanes: Arm("lift", image_size=_SIZE, group_size=lanes, control="joint"),
        hold=lambda state: state.physics.setpoint,
        model=model,
        substeps=SUBSTEPS,
        camera=FRONT,
    )
