"""The smallest environment that has goals, images and auto-reset: a point that must reach one of
three discs.

Discs lie 120° apart on the unit circle, turned by an angle only the image shows, so a policy that
succeeds has read image and prompt. Everything is numpy; an episode is a pure function of its seed.
"""

from typing import NamedTuple

import numpy as np

from sim.protocol import Observation, Transition

SIZE = 32
SPEED = 0.15
RADIUS = 0.2
COLOURS = np.array([[230, 60, 60], [60, 200, 80], [70, 90, 235]], np.uint8)


class Points(NamedTuple):
    """A physics state that doubles as the scene."""

    seed: np.ndarray
    goal: np.ndarray
    angle: np.ndarray
    place: np.ndarray
    time: np.ndarray


class PointWorld:
    """The `Environment` protocol in two dimensions."""

    name = "points"
    cameras = ("top",)
    state_names = ("x", "y")
    action_names = ("dx", "dy")
    fps = 8
    max_steps = 12
    goals = ("red", "green", "blue")
    prompts = tuple((f"go to the {c} disc", f"reach {c}") for c in goals)

    def reset(self, seeds):
        draws = np.array([np.random.default_rng([7, int(s)]).random(2) for s in seeds])
        n = len(seeds)
        return Points(
            seed=np.asarray(seeds, np.int64),
            goal=(draws[:, 0] * 3).astype(np.int64),
            angle=draws[:, 1] * 2 * np.pi,
            place=np.zeros((n, 2), np.float32),
            time=np.zeros(n, np.int64),
        )

    def goal(self, state):
        return state.goal

    def observe(self, state):
        return Observation(images=_draw(state, SIZE)[:, None], state=state.place)

    def step_chunk(self, state, actions):
        actions, steps = np.asarray(actions), []
        for t in range(actions.shape[1]):
            place = state.place + SPEED * np.clip(actions[:, t], -1, 1)
            state = state._replace(place=place, time=state.time + 1)
            achieved = np.linalg.norm(place[:, None] - discs(state), axis=-1) < RADIUS
            terminated = achieved[np.arange(len(place)), state.goal]
            truncated = ~terminated & (state.time >= self.max_steps)
            reward = terminated.astype(np.float32)
            steps.append(Transition(reward, terminated, truncated, achieved, place, state))
            fresh, over = self.reset(state.seed + 100_003), terminated | truncated
            state = Points(
                *(np.where(over.reshape(-1, *[1] * (a.ndim - 1)), b, a)
                  for a, b in zip(state, fresh, strict=True))
            )  # fmt: skip
        *arrays, scenes = zip(*steps, strict=True)
        scene = Points(*(np.stack(leaf, 1) for leaf in zip(*scenes, strict=True)))
        return state, Transition(*(np.stack(a, 1) for a in arrays), scene)

    def render(self, scene, size):
        return _draw(scene, size)


def discs(points: Points) -> np.ndarray:
    """Centres of the three discs [..., 3, 2]."""
    angle = points.angle[..., None] + np.arange(3) * 2 * np.pi / 3
    return np.stack([np.cos(angle), np.sin(angle)], -1).astype(np.float32)


def expert(env: PointWorld, state: Points) -> np.ndarray:
    """Full speed towards the episode's goal."""
    offset = discs(state)[np.arange(len(state.goal)), state.goal] - state.place
    return offset / np.linalg.norm(offset, axis=-1, keepdims=True)


def seeing_policy(observation: Observation, prompts: list[str], seed: int) -> np.ndarray:
    """Finds the disc of the named colour in the image and goes there: [N, 4, 2]."""
    chunks = np.zeros((len(prompts), 4, 2), np.float32)
    for i, prompt in enumerate(prompts):
        colour = next(g for g, name in enumerate(PointWorld.goals) if name in prompt)
        rows, columns = np.nonzero((observation.images[i, 0] == COLOURS[colour]).all(-1))
        if len(rows):
            target = _grid(SIZE)[rows, columns].mean(0)
            offset = target - observation.state[i]
            chunks[i] = offset / np.linalg.norm(offset)
    return chunks


def idle_policy(observation: Observation, prompts: list[str], seed: int) -> np.ndarray:
    """Stays where it is."""
    return np.zeros((len(prompts), 4, 2), np.float32)


def _grid(size: int) -> np.ndarray:
    axis = (np.arange(size) + 0.5) / size * 2.8 - 1.4
    return np.stack(np.meshgrid(axis, axis), -1).astype(np.float32)


def _draw(points: Points, size: int) -> np.ndarray:
    grid = _grid(size)
    image = np.full((*points.goal.shape, size, size, 3), 245, np.uint8)
    centres = np.concatenate([discs(points), points.place[..., None, :]], -2)
    for k, colour in enumerate([*COLOURS, np.uint8([40, 40, 40])]):
        gap = np.linalg.norm(grid - centres[..., k, None, None, :], axis=-1)
        image[gap < (RADIUS if k < 3 else RADIUS / 2)] = colour
    return image
