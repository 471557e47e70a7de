"""Any gymnasium environment by its id, with any kind of observations and actions.

An episode succeeds if the environment's info says so ("success" or "is_success"). Without that, if
its registration names a `reward_threshold`, it succeeds if its return reaches the threshold by the
end; otherwise, if it terminates with a positive reward.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

Path = tuple[str, ...]
"""Keys of a part of the observation, outermost first; a key may contain dots."""


class Simulator:
    """The simulator of one task, the environment's own.

    Args:
      tasks: the environment's id alone; "module:ID" imports the module that registers it.
      size: pixels along the edge of a picture; the environment's pictures are scaled, and padded if
        they are not square.
      prompts: wordings of the task.
      max_steps: longest episode; None: as registered, else 1000.
      arguments: arguments of the environment's constructor.
      cameras: names of cameras by the keys of their pictures, where they are not the usual ones.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        size: int,
        prompts: Sequence[str],
        max_steps: int | None = None,
        arguments: dict[str, Any] | None = None,
        cameras: dict[str, str] | None = None,
    ) -> None:
        (environment,) = tasks
        made: dict[str, Any] = {"disable_env_checker": True, **(arguments or {})}
        if max_steps is not None:
            made["max_episode_steps"] = max_steps
        self.env = gymnasium.make(environment, **made)
        self.size, self.cameras = size, cameras or {}
        self.prompts = list(prompts)
        self.environment = environment
        parts = dict(_parts(self.env.observation_space))
        self.pictures = [path for path, space in parts.items() if _is_picture(space)]
        self.numbers = [path for path in parts if path not in self.pictures]
        self.widths = [_width(environment, path, parts[path]) for path in self.numbers]
        self.drawn = not self.pictures and "rgb_array" in self.env.metadata.get("render_modes", ())
        if self.drawn:
            self.env.close()
            self.env = gymnasium.make(environment, **{"render_mode": "rgb_array"} | made)
        self.act = _Actions(environment, self.env.action_space)
        registered = self.env.spec
        self.max_steps = (registered and registered.max_episode_steps) or max_steps or 1000
        self.threshold = registered.reward_threshold if registered else None

    def spec(self) -> dict[str, Any]:
        """Properties of the environment. Cameras are named like the observation's pictures, or
        "render"; states and actions are in the environment's units."""
        cameras = (
            ["render"] if self.drawn else [".".join(path) or "image" for path in self.pictures]
        )
        return {
            "name": f"gym:{self.environment}",
            "tasks": [self.environment],
            "cameras": [self.cameras.get(x, f"observation.images.{x}") for x in cameras],
            "picture": [self.size, self.size],
            "state_names": [
                f"{'.'.join(path) or 'state'}_{i}"
                for path, width in zip(self.numbers, self.widths, strict=True)
                for i in range(width)
            ],
            "action_names": [f"action_{i}" for i in range(self.act.width)],
            "fps": int(self.env.metadata.get("render_fps") or 30),
            "max_steps": self.max_steps,
            "goals": [self.environment],
            "prompts": [self.prompts],
        }

    def reset(self, task: str, seed: int) -> int:
        """Starts the episode that the environment makes from this seed."""
        self.seen, _ = self.env.reset(seed=seed)
        self.total, self.steps = 0.0, 0
        return 0

    def observe(self) -> tuple[np.ndarray, np.ndarray]:
        """Pictures [c, size, size, 3] and state [s]."""
        images = np.zeros((len(self.pictures) + self.drawn, self.size, self.size, 3), np.uint8)
        for i, path in enumerate(self.pictures):
            images[i] = scaled(_part(self.seen, path), self.size)
        if self.drawn:
            images[0] = scaled(self.env.render(), self.size)
        numbers = [np.ravel(_part(self.seen, path)) for path in self.numbers]
        return images, np.concatenate([np.zeros(0, np.float32), *numbers])

    def step(self, action: np.ndarray) -> tuple[float, bool, bool, bool]:
        """Acts once; the last of `max_steps` ends the episode even if no limit is registered."""
        self.seen, reward, terminated, truncated, info = self.env.step(self.act(action))
        self.steps += 1
        truncated = truncated or (self.steps == self.max_steps and not terminated)
        self.total += float(reward)
        said = info.get("success", info.get("is_success"))
        if said is not None:
            success = bool(said)
        elif self.threshold is not None:
            success = bool(terminated or truncated) and self.total >= self.threshold
        else:
            success = bool(terminated) and float(reward) > 0
        return float(reward), bool(terminated), bool(truncated), success

    def film(self, size: int) -> np.ndarray:
        """The first camera's picture."""
        if self.drawn:
            return scaled(self.env.render(), size)
        if not self.pictures:
            return np.zeros((size, size, 3), np.uint8)
        return scaled(_part(self.seen, self.pictures[0]), size)


class _Actions:
    """Converts numbers [width] to an environment's actions: within its bounds and in its shape. For
    discrete actions, it takes the one with the greatest number."""

    def __init__(self, environment: str, space: spaces.Space) -> None:
        if not isinstance(space, spaces.Box | spaces.Discrete):
            raise ValueError(
                f"{environment} takes actions {space}, expected a Box or Discrete space; wrap it."
            )
        self.space = space
        self.width = int(space.n) if isinstance(space, spaces.Discrete) else math.prod(space.shape)

    def __call__(self, action: np.ndarray) -> Any:
        if isinstance(self.space, spaces.Discrete):
            return int(self.space.start + np.argmax(action))
        shaped = np.reshape(action, self.space.shape)
        return np.clip(shaped, self.space.low, self.space.high).astype(self.space.dtype)


def scaled(picture: np.ndarray, size: int) -> np.ndarray:
    """A picture [h, w, 3] as [size, size, 3], averaged over areas, with black padding if it is not
    square."""
    edge = max(picture.shape[:2])
    high, wide = (max(1, round(size * n / edge)) for n in picture.shape[:2])
    small: np.ndarray = picture.astype(np.float32)
    for axis, (old, new) in enumerate(zip(picture.shape[:2], (high, wide), strict=True)):
        firsts = np.arange(new) * old // new
        counts = np.maximum(1, np.diff(np.append(firsts, old)))
        shape = [1, 1, 1]
        shape[axis] = new
        small = np.add.reduceat(small, firsts, axis) / counts.reshape(shape)
    out = np.zeros((size, size, 3), np.uint8)
    top, left = (size - high) // 2, (size - wide) // 2
    out[top : top + high, left : left + wide] = np.rint(small)
    return out


def _parts(space: spaces.Space, path: Path = ()) -> Iterator[tuple[Path, spaces.Space]]:
    """The leaves of a space of dictionaries by their keys; a plain space has no keys."""
    if not isinstance(space, spaces.Dict):
        yield path, space
        return
    for key, inner in space.items():
        yield from _parts(inner, (*path, key))


def _part(observation: Any, path: Path) -> Any:
    for key in path:
        observation = observation[key]
    return observation


def _is_picture(space: spaces.Space) -> bool:
    return (
        isinstance(space, spaces.Box)
        and space.dtype == np.uint8
        and len(space.shape) == 3
        and space.shape[2] == 3
    )


def _width(environment: str, path: Path, space: spaces.Space) -> int:
    if not isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiBinary):
        raise ValueError(
            f"{environment} observes '{'.'.join(path)}' as {space}; expected images (uint8 "
            "[h, w, 3]) or spaces of numbers, so wrap it."
        )
    return math.prod(space.shape)
