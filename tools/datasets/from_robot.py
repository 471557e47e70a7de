"""The command `python -m tools.data from-robot`: makes a LeRobot dataset from what
`chiliad_client.EpisodeRecorder` recorded on a robot.

Columns are kept as recorded, including ticks at which the robot was held or stopped: `mode` marks
these ticks, and `delta_t` shows where the loop missed some.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from zipfile import BadZipFile

import numpy as np
import simplejpeg
import tyro
from jaxtyping import UInt8

from data.errors import DatasetError
from data.lerobot.recording import features_of
from data.lerobot.writer import DatasetWriter
from data.statistics.difference import DELTA_T
from data.video.encoding import even
from models.files.terminal import Console, counted, say
from tools.command_line.bars import progress
from tools.command_line.ending import in_a_line

SeenPath = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SEEN")]
OutPath = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]

_IMAGES = "observation.images."
_KEPT = ("mode", "age")
"""Integer columns that are kept beside the action and the observation."""


@dataclass(frozen=True)
class RobotEpisode:
    """An episode of T ticks: columns [T, n], frames by camera, its rate and its prompt."""

    columns: Mapping[str, np.ndarray]
    frames: Mapping[str, UInt8[np.ndarray, "t h w 3"]]
    hz: float
    prompt: str


def read_robot_episode(file: Path) -> RobotEpisode:
    """An episode of a robot's recording.

    Raises:
      DatasetError: the file is damaged or something else; the message names it and the problem.
    """
    try:
        with np.load(file) as content:
            pictures: dict[str, list[str]] = {}
            for name in sorted(content.files):
                if name.startswith(_IMAGES):
                    pictures.setdefault(name.rpartition("/")[0], []).append(name)
            numbers = {
                name: content[name].astype(np.float32)
                for name in content.files
                if name == "action" or (name.startswith("observation.") and "/" not in name)
            }
            whole = {name: content[name].astype(np.int64)[:, None] for name in _KEPT}
            seconds = content["seconds"]
            waits = np.diff(seconds, prepend=seconds[:1])[:, None].astype(np.float32)
            return RobotEpisode(
                {**numbers, **whole, DELTA_T: waits},
                {
                    camera: np.stack([even(_picture(content[name])) for name in names])
                    for camera, names in pictures.items()
                },
                float(content["hz"]),
                str(content["task"]),
            )
    except (OSError, ValueError, KeyError, BadZipFile) as error:
        sentence = f"cannot be read ({error}); is it an episode that EpisodeRecorder wrote?"
        raise DatasetError(file, "episode", sentence) from None


def write_robot_dataset(seen: Path, out: Path) -> Iterator[int]:
    """Writes the episodes of a robot's recording as a LeRobot dataset; yields how many are done.

    Raises:
      FileNotFoundError: there are none.
      ValueError: `out` exists, or an episode does not fit the first.
    """
    files = sorted(seen.glob("episode_*.npz"))
    if not files:
        raise FileNotFoundError(
            f"{seen}: has no episode_*.npz files; give a folder that chiliad-client's "
            "EpisodeRecorder wrote."
        )
    first = read_robot_episode(files[0])
    features = features_of(first.columns, first.frames)
    with DatasetWriter(out, fps=round(first.hz), features=features) as writer:
        for number, file in enumerate(files):
            episode = read_robot_episode(file)
            if episode.hz != first.hz:
                raise ValueError(
                    f"{file}: was recorded at {episode.hz:g} Hz, but {files[0].name} at "
                    f"{first.hz:g}; a dataset has one rate, so put episodes of different rates "
                    "into separate folders."
                )
            prompt = episode.prompt.strip() or "(no prompt)"
            writer.add_episode(episode.columns, episode.frames, prompt)
            yield number + 1


def from_robot_command(seen: SeenPath, out: OutPath) -> None:
    """Make a LeRobot dataset from what chiliad-client recorded on a robot.

    Args:
        seen: Folder that an EpisodeRecorder wrote.
        out: Folder to create.
    """
    total = len(list(seen.glob("episode_*.npz")))
    with in_a_line(writing=out), progress("Writing", "episodes") as report:
        for done in write_robot_dataset(seen, out):
            report(done, total)
    say(Console(), f"{out}: {counted(total, 'episode')}.")


def _picture(stored: Any) -> UInt8[np.ndarray, "_h _w 3"]:
    """A picture as stored, decoded if it is stored as the bytes of a JPEG."""
    return simplejpeg.decode_jpeg(stored, "RGB") if isinstance(stored, bytes) else stored
