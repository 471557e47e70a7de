"""The smallest environment that has goals, images and auto-reset: a point that must reach one of
three discs.

Discs lie 120° apart on the unit circle, turned by an angle only the image shows, so a policy that
succeeds has read image and prompt. Everything is numpy; an episode is a pure function of its seed.
`Shuffled` acts the same episodes in slots that report when they please.
"""

from typing import NamedTuple

import numpy as np

from sim.environments.device_slots import DeviceSlots
from sim.protocol import Observation, Outcome, Start, Transition

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
    action_range = ((-1.0, 1.0), (-1.0, 1.0))
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
        return Observation(images=self.pictures(state), state=state.place)

    def pictures(self, scene):
        return _draw(scene, SIZE)[:, None]

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


class Shuffled:
    """`Slots` over points that report in a random order, some much later than others, and whose
    simulator fails where `fails(start, attempt)` says so."""

    lockstep = False

    def __init__(self, count: int, seed: int = 0, fails=lambda start, attempt: False) -> None:
        self.slots = [DeviceSlots(PointWorld(), 1, expert) for _ in range(count)]
        self.spec, self.count = self.slots[0].spec, count
        self.fails, self.rng = fails, np.random.default_rng(seed)
        self.starts: list[Start] = [Start("", 0)] * count
        self.attempts: dict[Start, int] = {}
        self.told: set[int] = set()

    def begin(self, slot, start):
        self.starts[slot] = start
        self.attempts[start] = self.attempts.get(start, 0) + 1
        self.told.add(slot)
        self.slots[slot].begin(0, start)

    def send(self, slot, actions, film=False):
        self.told.add(slot)
        self.slots[slot].send(0, actions, film)

    def demonstrate(self, slot, steps, noise=0.0):
        self.told.add(slot)
        self.slots[slot].demonstrate(0, steps, noise)

    def poll(self, timeout=None):
        waiting = self.rng.permutation(sorted(self.told))
        ready = waiting[: self.rng.integers(1, len(waiting) + 1)].tolist()
        self.told -= set(ready)
        return [self._outcome(slot) for slot in ready]

    def wake(self):
        pass

    def close(self):
        pass

    def _outcome(self, slot):
        (outcome,) = self.slots[slot].poll()
        start = self.starts[slot]
        if len(outcome.reward) and self.fails(start, self.attempts[start]):
            nothing = Observation(np.zeros(0, np.uint8), np.zeros(0, np.float32))
            return Outcome(slot, nothing, 0, np.zeros(0, np.float32), error="it fell over")
        return outcome._replace(slot=slot)


def discs(points: Points) -> np.ndarray:
    """Centres of the three discs [..., 3, 2]."""
    angle = points.angle[..., None] + np.arange(3) * 2 * np.pi / 3
    return np.stack([np.cos(angle), np.sin(angle)], -1).astype(np.float32)


def expert(env: PointWorld, state: Points) -> np.ndarray:
    """Full speed towards the episode's goal."""
    offset = discs(state)[np.arange(len(state.goal)), state.goal] - state.place
    return offset / np.linalg.norm(offset, axis=-1, keepdims=True)


def seeing_policy(observation: Observation, prompts: list[str], keys: np.ndarray) -> np.ndarray:
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


def idle_policy(observation: Observation, prompts: list[str], keys: np.ndarray) -> np.ndarray:
    """Stays where it is."""
    return np.zeros((len(prompts), 4, 2), np.float32)


def noisy_policy(observation: Observation, prompts: list[str], keys: np.ndarray) -> np.ndarray:
    """Sees, but is disturbed by noise that only the keys decide, so that it sometimes fails."""
    noise = [np.random.default_rng(key).normal(size=(4, 2)) for key in keys.tolist()]
    return seeing_policy(observation, prompts, keys) + 1.8 * np.asarray(noise)


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
