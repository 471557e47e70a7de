"""A mixture with its datasets opened: the feeds that plan and loader take, the held-out episodes,
and each robot's embodiment with its statistics.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64

from data.frames import Feed, Frames
from data.mixture.embodiments import RobotStats, embodiment_stats
from data.mixture.frame_filter import read_filter
from data.mixture.mixture import DatasetConfig, Known, Mixture, Reading, RobotConfig, resolve
from data.mixture.relabelled import RelabelledFrames
from data.mixture.sample_weights import drawn_episodes, sample_weights, stored_column
from data.mixture.split import Episodes, split_episodes
from data.packing.curriculum import Weight
from data.statistics.scaling import normalizer
from models import Embodiment, Normalizer, Scaling
from models.config import to_json


class Scales(NamedTuple):
    """Normalizers of a robot's states and actions."""

    state: Normalizer
    actions: Normalizer


@dataclass(frozen=True)
class Mixed:
    """An opened mixture. `names`, `feeds`, `weights`, `sample_weights` (of all frames; None if they
    are equal), `training` and `held_out` (episodes) have one entry per dataset; `embodiments` and
    `stats` have one per robot. `digest` identifies all content and settings."""

    names: tuple[str, ...]
    feeds: tuple[Feed, ...]
    weights: tuple[Weight, ...]
    sample_weights: tuple[Float64[np.ndarray, " _n"] | None, ...]
    training: tuple[Episodes, ...]
    held_out: tuple[Episodes, ...]
    embodiments: tuple[Embodiment, ...]
    stats: tuple[RobotStats, ...]
    digest: str


def mix(
    mixture: Mixture,
    frames: Sequence[Frames],
    horizon: int,
    *,
    holdout: float = 0.0,
    seed: int = 0,
    cache: Path | None = None,
    state_scaling: Scaling = "quantile",
    action_scaling: Scaling = "quantile",
    kept: Mapping[str, Scales] | None = None,
    before: int = 0,
) -> Mixed:
    """Makes a mixture ready for planning and loading.

    Args:
      frames: the opened datasets, in the mixture's order.
      horizon: steps of an action chunk.
      holdout: share of each dataset's episodes that is held out; 0 holds none out.
      seed: the seed of that choice.
      cache: folder that keeps computed statistics.
      state_scaling, action_scaling: for robots whose settings do not give them.
      kept: every robot's scales by its name, instead of scales from its datasets.
      before: as `resolve`.

    Raises:
      ValueError, FileNotFoundError: as `resolve`; or a dataset has too few episodes to hold any
        out; or the datasets of one robot differ in their dims from each other or from its kept
        scales.
    """
    robots, readings = resolve(mixture, [Known.of(shown) for shown in frames], horizon, before)
    feeds = tuple(map(_feed, mixture.datasets, frames, readings))
    weights = tuple(
        sample_weights(config, shown.lengths, reading.episodes, stored_column(shown))
        for config, shown, reading in zip(mixture.datasets, frames, readings, strict=True)
    )
    drawn = [
        drawn_episodes(own, shown.starts, reading.episodes)
        for own, shown, reading in zip(weights, frames, readings, strict=True)
    ]
    splits = [
        _split(config.path, shown, chosen, holdout, seed)
        for config, shown, chosen in zip(mixture.datasets, frames, drawn, strict=True)
    ]
    training, held_out = (tuple(part) for part in zip(*splits, strict=True))
    stats, embodiments = [], []
    for number, robot in enumerate(robots):
        own = [n for n, feed in enumerate(feeds) if feed.embodiment == number]
        found = embodiment_stats(
            [feeds[n] for n in own],
            [training[n] for n in own],
            robot.relative,
            whole=not any(
                mixture.datasets[n].episodes or len(drawn[n]) < len(readings[n].episodes)
                for n in own
            ),
            cache=cache,
        )
        stats.append(found)
        if kept is None:
            scales = _own_scales(robot, found, state_scaling, action_scaling)
        else:
            dims = found.state["mean"].size, found.actions["mean"].size
            scales = for_dims(robot.name, kept[robot.name], *dims)
        embodiments.append(
            Embodiment(
                name=robot.name,
                cameras=robot.cameras,
                state=scales.state,
                actions=scales.actions,
                relative=robot.relative,
            )
        )
    return Mixed(
        names=tuple(_unlike([shown.name for shown in frames])),
        feeds=feeds,
        weights=tuple(config.weight for config in mixture.datasets),
        sample_weights=weights,
        training=training,
        held_out=held_out,
        embodiments=tuple(embodiments),
        stats=tuple(stats),
        digest=_digest(mixture, feeds, weights, (*training, *held_out)),
    )


def for_dims(robot: str, kept: Scales, states: int, actions: int) -> Scales:
    """Kept scales of so many dims of state and actions, without padding.

    Raises:
      ValueError: they are of other dims.
    """
    fitted = Scales(kept.state.cut(states), kept.actions.cut(actions))
    for what, scale, dims in (("state", fitted.state, states), ("action", fitted.actions, actions)):
        if len(scale.offset) != dims:
            raise ValueError(
                f"embodiment '{robot}': the given statistics have {len(scale.offset)} {what} dims, "
                f"but its data has {dims}; choose the columns that the policy was trained with, or "
                "leave --statistics out."
            )
    return fitted


def _own_scales(robot: RobotConfig, stats: RobotStats, state: Scaling, actions: Scaling) -> Scales:
    return Scales(
        normalizer(stats.state, f"{robot.name}, state", robot.state_scaling or state),
        normalizer(stats.actions, f"{robot.name}, action", robot.action_scaling or actions),
    )


def _unlike(names: list[str]) -> Iterator[str]:
    """The names, numbered where several are the same."""
    for n, name in enumerate(names):
        yield name if names.count(name) == 1 else f"{name} {names[:n].count(name) + 1}"


def _feed(config: DatasetConfig, frames: Frames, reading: Reading) -> Feed:
    shown = frames
    kept = read_filter(config.frames, frames.lengths) if config.frames else None
    told = reading.prompts != frames.prompts
    if reading.increments or told or config.every > 1 or kept is not None:
        increments, step = reading.increments, reading.step
        shown = RelabelledFrames(frames, reading.prompts, increments, step, config.every, kept)
    return Feed(
        frames=shown,
        embodiment=reading.embodiment,
        cameras=reading.cameras,
        ahead=reading.ahead,
        state=config.state,
        actions=config.actions,
        transform=reading.transform,
        step=reading.step,
    )


def _split(
    path: str, frames: Frames, chosen: Episodes, holdout: float, seed: int
) -> tuple[Episodes, Episodes]:
    """Chosen episodes to train on and to hold out."""
    if not holdout:
        return chosen, np.zeros(0, np.int64)
    training, held_out = (np.intersect1d(x, chosen) for x in split_episodes(frames, holdout, seed))
    if not len(training) or not len(held_out):
        raise ValueError(
            f"{path}: of the {len(chosen)} chosen episodes, {len(held_out)} would be held out, but "
            "some must be held out and some left; choose more episodes, another data.holdout, or 0 "
            "to hold none out."
        )
    return training, held_out


def _digest(
    mixture: Mixture,
    feeds: Sequence[Feed],
    weights: Sequence[Float64[np.ndarray, " _n"] | None],
    episodes: Sequence[Episodes],
) -> str:
    """Digest of a mixture's datasets by their content, wherever they are stored."""
    settings: Any = to_json(replace(mixture, datasets=()))
    for robot in settings["embodiments"]:  # keeps digests of runs saved before these fields
        for name in ("state_scaling", "action_scaling"):
            if robot[name] is None:
                del robot[name]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for feed, config, own in zip(feeds, mixture.datasets, weights, strict=True):
        digest.update(feed.frames.digest.encode())
        digest.update(repr((feed.cameras, feed.ahead, feed.state, feed.actions)).encode())
        digest.update(repr((config.weight, feed.transform, feed.frames.prompts)).encode())
        if config.every > 1:
            digest.update(repr(config.every).encode())
        if config.frames:
            for column in feed.frames.runs:
                digest.update(np.ascontiguousarray(column, np.int64).tobytes())
        if own is not None:
            digest.update(own.tobytes())
        if isinstance(feed.frames, RelabelledFrames) and feed.frames.sums_parts(feed.ahead):
            digest.update(b"increments of parts of frames")
    for array in episodes:
        digest.update(np.ascontiguousarray(array, np.int64).tobytes())
    return digest.hexdigest()[:16]
