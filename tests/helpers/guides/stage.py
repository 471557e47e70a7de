"""The suite that stands in for every simulator where commands of the guides run, and the presets
that stand in for those that they name: the same architectures and options, sizes of a test."""

import dataclasses
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax.numpy as jnp
import numpy as np

from models.load import inspect_params
from parallel.mesh import MeshConfig
from sim.environments.device_slots import DeviceSlots
from sim.suite import Suite
from tests.helpers.models import groot17_case, rule_weights
from tests.helpers.models.groot_whole import FIXTURES, lerobots_folder
from tests.helpers.rl.point import Point
from tests.helpers.tools.small_run import HOSTS, MODEL, SMALL
from tools.recipes import presets
from tools.recipes.presets import RunConfig


class Stage(Point):
    """A point between two edges, drawn as large as a policy asks."""

    cameras = ("observation.images.front",)

    def __init__(self, size: int) -> None:
        super().__init__()
        self.image_size = size

    def pure_pictures(self, scene):
        across = jnp.linspace(-1, 1, self.image_size)
        near = jnp.abs(across - scene[:, :1]), jnp.abs(across - scene[:, 1:])
        dot = (near[1][:, :, None] < 0.2) & (near[0][:, None] < 0.2)
        picture = jnp.where(dot, 255, 30).astype(jnp.uint8)[:, None, ..., None]
        return jnp.broadcast_to(picture, (*picture.shape[:4], 3))

    pictures = pure_pictures

    def render(self, scene, size):
        seen = Stage(size).pure_pictures(jnp.reshape(scene, (-1, 2)))[:, 0]
        return seen.reshape(*scene.shape[:-1], size, size, 3)


class Libero(Stage):
    """The same with LIBERO's cameras, and as many dims of state and actions."""

    cameras = ("observation.images.image", "observation.images.image2")
    state_names = tuple(f"s{i}" for i in range(8))
    action_names = tuple(f"a{i}" for i in range(7))
    action_range = ((-1.0, 1.0),) * 7

    def pure_pictures(self, scene):
        return jnp.repeat(super().pure_pictures(scene), 2, axis=1)

    def pure_observe(self, state):
        seen = super().pure_observe(state)
        return seen._replace(images=self.pure_pictures(state.place), state=_padded(seen.state))

    def pure_step(self, state, actions):
        state, happened = super().pure_step(state, actions[..., :2])
        return state, happened._replace(state=_padded(happened.state))

    observe, pictures, step_chunk = pure_observe, pure_pictures, pure_step


def _padded(state):
    return jnp.pad(state, [(0, 0)] * (state.ndim - 1) + [(0, 5)])


def _expert(env: Stage, state: Any) -> np.ndarray:
    up = np.where(np.asarray(state.aim) == 0, 1.0, -1.0)
    return np.stack([np.asarray(state.place)[:, 0], 2 * up], 1)


def _open(tasks: tuple[str, ...], count: int, size: int) -> DeviceSlots:
    return DeviceSlots(Stage(size), count, _expert)


STAGE = Suite(
    "stage",
    ("point",),
    2,
    _open,
    first_seed=1_000_000_000,
    slots=2,
    environment=lambda task, size: Stage(size),
    phases=lambda task, goal, actions: ("go there",) * len(actions),
    action_range=Point.action_range,
)
SUITE = replace(
    STAGE,
    variants={
        name: replace(STAGE, name=name)
        for name in ("camera", "paraphrase", "object", "swap", "task")
    },
    cheaper=lambda every, smooth: SUITE,
)


def _open_one(tasks: tuple[str, ...], count: int, size: int) -> DeviceSlots:
    env = Stage(size)
    (env.name,) = tasks
    return DeviceSlots(env, count, _expert)


APART = replace(STAGE, tasks=("point", "apart", "other"), open=_open_one, together=False)
LIBERO = replace(
    STAGE,
    open=lambda tasks, count, size: DeviceSlots(Libero(size), count, None),
    environment=None,
    action_range=Libero.action_range,
)


def _small(preset: RunConfig, **changed: Any) -> RunConfig:
    """The preset at a test's sizes on as many devices as its command names."""
    return replace(
        preset,
        rows=SMALL.rows,
        trainer=SMALL.trainer,
        data=replace(preset.data, encoding="raw", holdout=0.3),
        mesh=MeshConfig(),
        **changed,
    )


def _sized(stack: Any, like: Any) -> Any:
    """The stack with the other's numbers."""
    numbers = {
        field.name: value
        for field in dataclasses.fields(stack)
        if type(value := getattr(like, field.name)) in (int, tuple)
    }
    return replace(stack, **numbers, remat="none")


def _like(preset: RunConfig, folder: Any) -> RunConfig:
    """The preset with the sizes of a released folder's fixture."""
    model: Any = preset.model
    sizes = inspect_params(folder).config
    sized = {
        field.name: _sized(value, getattr(sizes, field.name))
        if dataclasses.is_dataclass(value)
        else getattr(sizes, field.name)
        for field in dataclasses.fields(model)
        if field.name != "compute"
        and (hasattr(value := getattr(model, field.name), "remat") or type(value) is int)
    }
    sized["euler_steps" if model.euler_steps else "max_decoding_steps"] = 2
    return _small(preset, model=model.changed(**sized).computing(dtype="float32"))


OPENPI = FIXTURES / "released" / "openpi" / "pi05"
FAST = FIXTURES / "pi0_fast" / "openpi" / "pi0_fast"
TINY = replace(
    HOSTS, model=MODEL.changed(horizon=8, euler_steps=2), data=replace(HOSTS.data, holdout=0.3)
)
TABLETOP = _small(presets.TABLETOP, model=TINY.model.changed(film_order=True, state_dim=16))
METAWORLD = LIBERO_TINY = TINY
PI05 = _like(presets.PI05, OPENPI)
PI05_QLORA = _like(presets.PI05_QLORA, OPENPI)
PI0_FAST = _like(presets.PI0_FAST, FAST)
PI0_FAST_TINY = _small(
    presets.PI0_FAST_TINY,
    model=presets.PI0_FAST_TINY.model.changed(
        vision=MODEL.vision, language=MODEL.language, image_size=16, vocabulary=700, horizon=4
    ),
)
with TemporaryDirectory() as folder:
    released = lerobots_folder(Path(folder) / "groot")
    GROOT = _like(presets.GROOT, released)
    GROOT_QLORA = _like(presets.GROOT_QLORA, released)
    GROOT17 = _like(presets.GROOT17, groot17_case.folder("checkpoint", Path(folder)))
    smol = rule_weights.whole(FIXTURES / "smolvla" / "two_cameras", Path(folder) / "smolvla")
    SMOLVLA = _like(presets.SMOLVLA, smol)
GROOT_TINY = _small(presets.GROOT_TINY)
