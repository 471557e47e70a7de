"""Open-loop evaluation of a checkpoint's policy: its chunks beside those recorded in a dataset,
with baselines, what the policy reacts to, and a page.

Run it with `python -m tools.evaluate --data PATH`, or call `run` from a notebook or a script. If a
policy fails here, you need no robot to see it; a policy that passes must still be tried in closed
loop. It reads any dataset and works with any family of models, through `Policy` alone.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int64, UInt8
from PIL import Image

from data import Dataset
from data.dataset import use_format
from data.mixture.recorded import Divisible, RecordedEpisode, read_pictures, read_recorded
from data.mixture.split import split_episodes
from data.video.video import encode_mp4
from models.checkpoints import own
from models.config import to_json
from models.files.own_file import run_file
from models.files.terminal import Console, Progress, say
from models.files.whole_text import write_whole
from models.inputs.observation import RobotObservation
from models.requests import Request
from parallel.runs.atomic import replace_text
from parallel.runs.run_lock import locked
from sim.clips import ENCODING
from sim.open_loop import POLICY, OpenLoop, RecordedChunks
from sim.report.open_loop import CameraLook, OpenLoopReport, ShownEpisode, render_open_loop
from tools.command_line.versions import versions
from tools.recipes.bound_recording import (
    BoundRecording,
    Pictures,
    bound,
    changed_requests,
    one_of,
    opened,
    request,
)
from tools.recipes.policy import LoadConfig

RESULTS, PAGE = "open_loop.json", "report.html"

_PICTURES, _HEIGHT = 240, 160
"""Largest number of pictures in a video, and their height in pixels."""
_GRID = 8
"""Rows and columns into which pictures are cut to be covered."""


@dataclass(frozen=True)
class OpenLoopConfig(LoadConfig):
    """Policy, recording and size of an open-loop evaluation."""

    data: str
    """Folder or URL of a dataset of any format, or the file of a mixture of one dataset, which says
    how to read it."""
    checkpoint: Path
    """Run directory, one of its checkpoints, or any other that models.load_policy reads."""
    out: Path
    """Folder for open_loop.json and report.html."""
    episodes: tuple[int, ...] = ()
    """Episodes to evaluate, numbered from 0; default: those that the checkpoint's run held out, or
    all if it held out none."""
    most_episodes: int = 32
    """Largest number of episodes when --episodes names none; they are evenly spaced."""
    observations: int = 512
    """Approximate limit on the observations to predict from, spread evenly over the episodes."""
    shown: int = 4
    """Number of worst episodes to show with video and with what the policy looks at."""
    batch: int = 8
    """Observations per batch."""
    data_format: str = ""
    """Your own format to read the dataset with, path/to/file.py:NAME; the file is run."""


def run(config: OpenLoopConfig, console: Console) -> OpenLoop:
    """Evaluates a checkpoint on a recording, and writes open_loop.json and report.html.

    Raises:
      ValueError, FileNotFoundError: no such dataset, episode or checkpoint, they do not fit each
        other, something is not finite, or another run is at work in the folder.
    """
    _check(config)
    if config.family is not None:
        run_file(config.family)
    if config.data_format:
        use_format(config.data_format)
    with locked(config.out, console):
        settings, dataset = opened(config.data)
        policy = config.load(config.checkpoint)
        recording = bound(policy, settings, dataset)
        episodes, choice = chosen_episodes(config, dataset)
        with Progress(console=console, transient=True) as progress:
            predicting = progress.bar("Predicting")
            result, shown = evaluate_recording(config, recording, episodes, predicting)
        about = {"data": config.data, "checkpoint": str(config.checkpoint), "episodes": choice}
        text = json.dumps(about | {"result": result.to_json()}, indent=2) + "\n"
        replace_text(config.out / RESULTS, text)
        page = render_open_loop(
            OpenLoopReport(
                title="Predicted and recorded actions",
                data=f"{config.checkpoint} on {config.data}",
                choice=choice,
                result=result,
                shown=shown,
                config=to_json(config) | {"model": to_json(policy.model.config)},
                versions=versions(),
                encode=partial(encode_mp4, options=ENCODING),
            )
        )
        write_whole(config.out / PAGE, page)
    for name, errors in result.errors.items():
        console.print(f"  {name}: {errors.mean:.3g}")
    for finding in result.findings():
        say(console, f"  {finding}")
    console.print(f"Report: {config.out / PAGE}")
    return result


def chosen_episodes(config: OpenLoopConfig, dataset: Dataset) -> tuple[list[int], str]:
    """The episodes to look at, in order, and a few words on why these.

    Raises:
      ValueError: there is no such episode, or none at all.
    """
    count = len(dataset.lengths)
    if config.episodes:
        strange = [e for e in config.episodes if not 0 <= e < count]
        if strange:
            raise ValueError(
                f"{config.data}: there is no episode {strange[0]}; choose from 0 to {count - 1}."
            )
        return sorted(set(config.episodes)), "chosen by hand"
    if not count:
        raise ValueError(f"{config.data}: has no episodes; give a dataset with some.")
    holdout, seed = _held_out_share(config.checkpoint)
    if not holdout:
        return _some(np.arange(count), config), "not held out: the run may have trained on them"
    _, held = split_episodes(Divisible(dataset), holdout, seed)
    return _some(held, config), "held out, if the checkpoint's run was trained on this dataset"


def evaluate_recording(
    config: OpenLoopConfig,
    recording: BoundRecording,
    episodes: Sequence[int],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[OpenLoop, list[ShownEpisode]]:
    """Figures over all the episodes, and the worst of them to look at.

    Raises:
      ValueError, DatasetError: the recording cannot be read, or something is not finite.
    """
    policy = recording.policy.varied(sizes=(config.batch,))
    recording = replace(recording, policy=policy)
    dataset, reading = recording.dataset, recording.reading
    lengths = dataset.lengths[list(episodes)]
    every = max(1, -(-int(lengths.sum()) // config.observations))
    seen = [
        read_recorded(
            dataset, recording.settings, reading, e, np.arange(0, dataset.lengths[e], every)
        )
        for e in episodes
        if dataset.lengths[e]
    ]
    robot = recording.robot
    told = RecordedChunks(
        episode=np.concatenate([np.full(len(one.at), one.episode) for one in seen]),
        frame=np.concatenate([one.at for one in seen]),
        actions=np.concatenate([one.actions for one in seen]),
        valid=np.concatenate([one.valid for one in seen]),
        before=np.concatenate([one.before for one in seen]),
        scale=np.array(robot.actions.scale),
        names=recording.action_names,
    )
    states = np.concatenate([one.state for one in seen])
    changes = changed_requests(recording, states.mean(0), [p for one in seen for p in one.prompts])
    shown_count = min(config.shown, len(seen))
    cells = (_GRID - 1) ** 2 * sum(camera is not None for camera in reading.cameras)
    total = len(told.frame) * len(changes) + shown_count * cells
    done = 0
    predicted: dict[str, list[np.ndarray]] = {name: [] for name in changes}
    for one in seen:
        pictures = read_pictures(dataset, reading, one.episode, one.at)
        for name, change in changes.items():
            predicted[name].append(policy.sample_actions(list(change(one, pictures))))
            done += len(one.at)
            progress(done, total)
    far = np.abs(robot.state(robot.converted(states))).max(0)
    result = OpenLoop(
        recorded=told,
        predicted={name: np.concatenate(chunks) for name, chunks in predicted.items()},
        state=dict(zip(recording.state_names, far.tolist(), strict=True)),
        prompts=tuple(prompt for one in seen for prompt in one.prompts),
        horizon_seconds=(reading.ahead[-1] - reading.ahead[0]) / _fps(recording),
    )
    by_number = {one.episode: i for i, one in enumerate(seen)}
    shown = []
    for e in result.worst[:shown_count]:
        one, chunks = seen[by_number[e]], predicted[POLICY][by_number[e]]
        shown.append(_shown(recording, one, chunks))
        done += cells
        progress(done, total)
    return result, shown


def _check(config: OpenLoopConfig) -> None:
    for name in ("most_episodes", "observations", "batch"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} is {getattr(config, name)}; give at least 1.")
    if config.shown < 0:
        raise ValueError(f"shown is {config.shown}; give 0 or more.")


def _held_out_share(checkpoint: Path) -> tuple[float, int]:
    """Share of episodes that the checkpoint's run held out (0 for other codes'), and its seed."""
    try:
        values: Any = own.read_json(own.find(checkpoint), "config")
    except FileNotFoundError:
        return 0.0, 0
    return values.get("data", {}).get("holdout", 0.0), values.get("trainer", {}).get("seed", 0)


def _some(episodes: Int64[np.ndarray, " e"], config: OpenLoopConfig) -> list[int]:
    count = min(len(episodes), config.most_episodes)
    return episodes[np.linspace(0, len(episodes) - 1, count).round().astype(int)].tolist()


def _fps(recording: BoundRecording) -> float:
    return recording.settings.fps or recording.dataset.fps


def _shown(
    recording: BoundRecording, one: RecordedEpisode, chunks: Float[np.ndarray, "n h a"]
) -> ShownEpisode:
    """An episode with its video, and what the policy looked at in its worst observation."""
    scale = np.array(recording.robot.actions.scale)
    off = (np.abs(chunks - one.actions) / scale).mean(-1)
    worst = int(np.where(one.valid, off, 0).sum(1).argmax())
    dataset, reading = recording.dataset, recording.reading
    skipped = max(1, -(-len(one.whole) // _PICTURES))
    frames = np.arange(0, len(one.whole), skipped)
    both = np.append(frames, one.at[worst])
    pictures = read_pictures(dataset, reading, one.episode, both)
    film = np.concatenate(
        [_smaller(of_camera[:-1]) for of_camera in pictures if of_camera is not None], axis=2
    )
    return ShownEpisode(
        episode=one.episode,
        prompt=one.prompts[0],
        pictures=film,
        fps=_fps(recording) / skipped,
        actions=one.whole,
        at=one.at,
        predicted=chunks,
        valid=one.valid,
        ahead=reading.ahead,
        looks=tuple(_looks(recording, one, worst, pictures)),
    )


def _looks(
    recording: BoundRecording, one: RecordedEpisode, i: int, pictures: Pictures
) -> Iterator[CameraLook]:
    """Change of observation i's chunk when parts of its pictures are covered; none with a past."""
    if recording.policy.session().lookback:
        return
    scale = np.array(recording.robot.actions.scale)
    shown = one_of(recording.robot.cameras, pictures, -1)
    key, state = (one.episode, int(one.at[i])), one.state[i]

    def ask(images: dict[str, np.ndarray]) -> Request:
        seen = RobotObservation(images, one.prompts[i], state)
        return request(recording, seen, key, state)

    (plain,) = recording.policy.sample_actions([ask(shown)])
    for camera, picture in shown.items():
        covered = [ask(shown | {camera: part}) for part in covered_parts(picture)]
        changed = recording.policy.sample_actions(covered)
        change = (np.abs(changed - plain) / scale).mean((1, 2))
        yield CameraLook(key[1], camera, _smaller(picture[None])[0], heat_of(change))


def covered_parts(picture: UInt8[np.ndarray, "h w 3"]) -> Iterator[UInt8[np.ndarray, "h w 3"]]:
    """Copies of the picture, each with another square of two by two cells of a grid of eight in its
    mean colour, row by row."""
    height, width = picture.shape[:2]
    rows, columns = (np.linspace(0, n, _GRID + 1).round().astype(int) for n in (height, width))
    colour = picture.mean((0, 1)).round().astype(np.uint8)
    for row in range(_GRID - 1):
        for column in range(_GRID - 1):
            part = picture.copy()
            part[rows[row] : rows[row + 2], columns[column] : columns[column + 2]] = colour
            yield part


def heat_of(change: Float[np.ndarray, " n"]) -> Float[np.ndarray, "g g"]:
    """For each cell the mean change of the squares that cover it, as `covered_parts` orders
    them."""
    total, count = np.zeros((_GRID, _GRID)), np.zeros((_GRID, _GRID))
    for at, value in enumerate(change.tolist()):
        row, column = divmod(at, _GRID - 1)
        total[row : row + 2, column : column + 2] += value
        count[row : row + 2, column : column + 2] += 1
    return total / count


def _smaller(pictures: UInt8[np.ndarray, "n _h _w 3"]) -> UInt8[np.ndarray, "n _h2 _w2 3"]:
    height, width = pictures.shape[1:3]
    size = max(1, round(width * _HEIGHT / height)), _HEIGHT
    resized = [Image.fromarray(x).resize(size, Image.Resampling.BILINEAR) for x in pictures]
    return np.stack([np.asarray(x) for x in resized])
