"""Demonstrations: scripted experts act in batches, and what a policy would have seen is kept.

The executed action carries a few millimetres of noise and the label does not, so that a policy
also learns the way back. An episode ends when its goal is achieved: no idle tail, whose labels a
policy could copy from where it is. Episodes in which the expert fails are left out and counted.
"""

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int, UInt8

from sim.experts import expert
from sim.protocol import Environment
from sim.tabletop import TRAIN_SEEDS, Tabletop, proprioception

_SEEDS_PER_RECORDING = 1_000_000


class Episode(NamedTuple):
    """T steps; row t of the columns is what was seen at t and what the expert then wanted."""

    columns: dict[str, np.ndarray]
    """"observation.state" and "action" f32 [T, …]."""
    frames: dict[str, UInt8[np.ndarray, "t h w 3"]]
    """By camera."""
    task: str
    """One wording of the goal, chosen by the episode's seed."""


@dataclass
class Recording:
    """Iterate it for `episodes` successful episodes; meanwhile `tried` and `kept` count.

    Args:
      env: where to act.
      episodes: how many to keep.
      seed: recordings with different seeds share no episode.
      noise: standard deviation of what is added to the executed goal on each axis, metres.

    Raises:
      ValueError: the seed is out of range, or the expert fails so often that a million tries do
        not suffice.
    """

    env: Tabletop
    episodes: int
    seed: int = 0
    noise: float = 0.006
    tried: int = 0
    kept: int = 0

    def __post_init__(self) -> None:
        recordings = len(TRAIN_SEEDS) // _SEEDS_PER_RECORDING
        if not 0 <= self.seed < recordings:
            raise ValueError(
                f"The recording's seed is {self.seed}, expected 0 … {recordings - 1}; choose "
                "another."
            )

    def __iter__(self) -> Iterator[Episode]:
        self.tried = self.kept = 0
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            batches = self._batches(pool)
            while self.kept < self.episodes:
                for episode in next(batches):
                    self.tried += 1
                    if episode is not None:
                        self.kept += 1
                        yield episode
                    if self.kept == self.episodes:
                        break

    def _batches(self, pool: ThreadPoolExecutor) -> Iterator[list[Episode | None]]:
        """Batches in order, a few acted ahead of the reader, none that it cannot need."""
        first = TRAIN_SEEDS.start + self.seed * _SEEDS_PER_RECORDING
        starts = iter(range(first, first + _SEEDS_PER_RECORDING - self.env.lanes, self.env.lanes))
        pending: deque[Future[list[Episode | None]]] = deque()
        while True:
            missing = -(-(self.episodes - self.kept) // self.env.lanes)
            ahead = min(missing, (os.cpu_count() or 1) + 1) - len(pending)
            for start in islice(starts, max(0, ahead)):
                seeds = start + np.arange(self.env.lanes)
                pending.append(pool.submit(_batch, self.env, seeds, self.noise))
            if not pending:
                raise ValueError(
                    f"{self.env.name}: {self.kept} of {self.tried} episodes succeeded, "
                    f"{self.episodes} were asked for; lower `noise` or ask for fewer."
                )
            yield pending.popleft().result()


def wording(env: Environment, goal: int, seed: int) -> str:
    """How an episode with this seed words its goal; evaluation chooses alike."""
    wordings = env.prompts[goal]
    return wordings[int(np.random.default_rng(seed).random() * len(wordings))]


def _batch(env: Tabletop, seeds: Int[np.ndarray, "n"], noise: float) -> list[Episode | None]:
    """One episode per seed, None where the expert failed."""
    state = env.reset(seeds)
    goals = np.asarray(env.goal(state))
    disturbance = np.zeros((env.max_steps, len(seeds), len(env.action_names)), np.float32)
    disturbance[..., :3] = np.stack([_noise(seed, env.max_steps, noise) for seed in seeds], 1)
    scenes, states, labels, successes, ends = [], [], [], [], []
    for step in range(env.max_steps):
        scenes.append(jax.tree.map(np.asarray, env.scene(state)))
        states.append(np.asarray(proprioception(state.physics)))
        labels.append(np.asarray(expert(env, state)))
        state, happened = env.step_chunk(state, (labels[-1] + disturbance[step])[:, None])
        successes.append(np.asarray(happened.terminated)[:, 0])
        ends.append(successes[-1] | np.asarray(happened.truncated)[:, 0])
        if np.any(ends, 0).all():
            break
    length = np.argmax(ends, 0) + 1
    success = np.stack(successes)[length - 1, np.arange(len(seeds))]
    kept = np.arange(len(scenes)) < np.where(success, length, 0)[:, None]
    seen = jax.tree.map(lambda *steps: np.stack(steps, 1)[kept], *scenes)
    frames = np.split(env.pictures(seen), np.cumsum(kept.sum(1))[:-1])
    state_rows, label_rows = np.stack(states, 1), np.stack(labels, 1)
    return [
        Episode(
            {"observation.state": state_rows[i][kept[i]], "action": label_rows[i][kept[i]]},
            {camera: frames[i][:, c] for c, camera in enumerate(env.cameras)},
            wording(env, int(goals[i]), int(seed)),
        )
        if success[i]
        else None
        for i, seed in enumerate(seeds)
    ]


def _noise(seed: int, steps: int, size: float) -> Float[np.ndarray, "t 3"]:
    return np.random.default_rng((int(seed), 1)).normal(size=(steps, 3)) * size
