"""A point in a square that is told to go up or down, traced like the tabletop but without physics,
for tests of what acts and learns on the device."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sim.environments.grouped import episode_key, restarted, scanned
from sim.protocol import TRAIN_SEEDS, Observation, Transition
from sim.suite import Suite


class PointState(NamedTuple):
    seed: jax.Array
    episode: jax.Array
    step: jax.Array
    aim: jax.Array
    place: jax.Array


class Point:
    """An episode is won within 0.2 of an edge and lost after `max_steps`."""

    name = "point"
    cameras = ("side", "front")
    state_names = ("x", "y", "twice x")
    action_names = ("right", "up")
    image_size = 8
    prompts = (("push the red block", "push"), ("pull",))
    goals = ("up", "down")
    action_range = ((-1.0, 1.0), (-1.0, 1.0))
    fps = 10

    def __init__(self, max_steps: int = 7, speed: float = 0.2) -> None:
        self.max_steps, self.speed = max_steps, speed

    def goal(self, state):
        return state.aim

    def scene(self, state):
        return state.place

    def pure_reset(self, seeds):
        return jax.vmap(self._fresh)(seeds, jnp.zeros(len(seeds), jnp.int32))

    def pure_pictures(self, scene):
        shades = jnp.uint8(128 + 100 * jnp.tanh(scene[:, :1] + scene[:, 1:] * jnp.arange(384)))
        return shades.reshape(-1, 2, 8, 8, 3)

    def pure_observe(self, state):
        return Observation(self.pure_pictures(state.place), _felt(state.place))

    def pure_step(self, state, actions):
        return scanned(self._one, state, actions)

    def reset(self, seeds):
        return self.pure_reset(jnp.asarray(seeds, jnp.uint32))

    step_chunk, observe, pictures = pure_step, pure_observe, pure_pictures

    def _one(self, state, action):
        place = state.place + self.speed * jnp.tanh(action)
        achieved = jnp.stack([place[:, 1] > 0.8, place[:, 1] < -0.8], 1)
        won = jnp.take_along_axis(achieved, state.aim[:, None], 1)[:, 0]
        late = ~won & (state.step + 1 >= self.max_steps)
        after = state._replace(step=state.step + 1, place=place)
        fresh = jax.vmap(self._fresh)(state.seed, state.episode + 1)
        happened = Transition(won * 1.0, won, late, achieved, _felt(place), place)
        return restarted(won | late, fresh, after), happened

    def _fresh(self, seed, episode):
        draws = jax.random.uniform(episode_key(seed, episode), (3,))
        aim, place = jnp.int32(draws[0] * 2), draws[1:] - 0.5
        return PointState(seed, episode, jnp.int32(0), aim, place)


def _felt(place):
    return jnp.concatenate([place, 2 * place[:, :1]], 1)


SUITE = Suite(
    "point",
    ("point",),
    4,
    open=None,
    first_seed=TRAIN_SEEDS.stop,
    environment=lambda task, size: Point(),
)
