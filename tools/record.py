"""Records demonstrations of the simulated tabletop as a LeRobot v3.0 dataset."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from data.writer import DatasetWriter
from sim.record import Recording
from sim.scenery import Randomisation
from sim.tabletop import Tabletop


@dataclass(frozen=True)
class RecordConfig:
    """What to record and where."""

    out: Path
    """Folder to make for the dataset; must not exist, or be empty."""
    task: Literal["lift", "reach", "push", "stack", "drawer"] = "lift"
    """What the robot is told to do with the block or drawer of a colour."""
    episodes: int = 2048
    """How many successful demonstrations to keep."""
    seed: int = 0
    """Recordings with different seeds share no episode."""
    noise: float = 0.006
    """Standard deviation of what is added to the executed goal, metres."""
    image_size: int = 48
    """Edge of the cameras' pictures, pixels."""
    cameras: tuple[Literal["front", "wrist"], ...] = ("front",)
    """Whose pictures to record; the wrist's moves with the gripper."""
    random: Randomisation = field(default_factory=Randomisation)


def record_dataset(
    config: RecordConfig, progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Records the dataset; `progress` is called with (episodes kept, episodes asked for).

    Returns:
      `tried` and `kept` episodes, `frames` and `seconds`.

    Raises:
      ValueError: the folder is not empty, a number is out of range, or the expert keeps failing.
    """
    if config.episodes < 1 or config.image_size < 1 or config.noise < 0:
        raise ValueError(
            f"episodes = {config.episodes}, image_size = {config.image_size} and noise = "
            f"{config.noise}: expected at least 1, 1 and 0."
        )
    start = time.perf_counter()
    cameras = tuple(f"observation.images.{camera}" for camera in config.cameras)
    env = Tabletop(config.task, config.image_size, cameras, config.random)
    recording = Recording(env, config.episodes, config.seed, config.noise)
    shape = (config.image_size, config.image_size, 3)
    features = {
        "observation.state": _column(env.state_names),
        "action": _column(env.action_names),
        **{
            camera: {"dtype": "video", "shape": shape, "names": ["height", "width", "channels"]}
            for camera in env.cameras
        },
    }
    with DatasetWriter(
        config.out, fps=env.fps, features=features, robot_type="chiliad_tabletop"
    ) as writer:
        for episode in recording:
            writer.add_episode(*episode)
            if progress is not None:
                progress(recording.kept, config.episodes)
    return {
        "tried": recording.tried,
        "kept": recording.kept,
        "frames": writer.num_frames,
        "seconds": round(time.perf_counter() - start, 1),
    }


def main(config: RecordConfig) -> None:
    """Records with a progress bar and says what came of it."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.0f} episodes/s"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as bar:
        task = bar.add_task("Compiling", total=config.episodes, rate=0.0)

        def progress(done: int, total: int) -> None:
            elapsed = bar.tasks[task].elapsed or 0.0
            rate = done / elapsed if elapsed else 0.0
            bar.update(task, completed=done, description="Recording", rate=rate)

        summary = record_dataset(config, progress)
    Console().print(
        f"{config.out}: {summary['kept']} episodes, {summary['frames']} frames; the expert failed "
        f"in {summary['tried'] - summary['kept']} of {summary['tried']}, which were left out."
    )


def _column(names: tuple[str, ...]) -> dict[str, Any]:
    return {"dtype": "float32", "shape": (len(names),), "names": list(names)}


if __name__ == "__main__":
    try:
        main(tyro.cli(RecordConfig, prog="python -m tools.record", description=__doc__))
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"error: {error}")
