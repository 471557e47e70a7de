"""The command `python -m tools.data from-robot`: makes a LeRobot dataset from what
`chiliad_client.EpisodeRecorder` recorded on a robot.

Columns are kept as recorded, including ticks at which the robot was held or stopped: `mode` marks
these ticks, and `delta_t` shows where the loop missed some.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from zipfile import BadZipFile

import numpy as np
import simplejpeg
import tyro
from jaxtyping import UInt8

from data.errors import DatasetError, require_content, short
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
    """An episode of T ticks: columns [T, n], frames by camera, its rate, prompt and robot (empty if
    unknown), and names of the dims of some columns."""

    columns: Mapping[str, np.ndarray]
    frames: Mapping[str, UInt8[np.ndarray, "t h w 3"]]
    hz: float
    prompt: str
    robot: str
    names: Mapping[str, Sequence[str]]


def read_robot_episode(file: Path) -> RobotEpisode:
    """An episode of a robot's recording.

    Raises:
      DatasetError: the file is damaged or something else; the message names it and the problem.
    """
    if not file.is_file():
        raise DatasetError(file, "episode", "is a pipe, device or broken link; copy it again.")
    require_content(file)
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
                str(content["robot"]) if "robot" in content else "",
                _names(content, numbers),
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
    features, about = features_of(first.columns, first.frames, first.names), _about(first)
    fps, robot = round(first.hz), first.robot or None
    with DatasetWriter(out, fps=fps, features=features, robot_type=robot) as writer:
        for number, file in enumerate(files):
            episode = read_robot_episode(file)
            if (told := _about(episode)) != about:
                raise ValueError(
                    f"{file}: was recorded {told}, but {files[0].name} {about}; a dataset has one "
                    "rate and robot, so put episodes of others into separate folders."
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
    size = sum(file.stat().st_size for file in seen.glob("episode_*.npz"))
    with in_a_line(writing=out), progress("Writing", "episodes") as report:
        for done in write_robot_dataset(seen, out):
            report(done, total)
    made = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    say(
        Console(),
        f"{out}: {counted(total, 'episode')}, {made / 1e6:.1f} MB (of {size / 1e6:.1f} MB).",
    )


def _names(content: Any, columns: Mapping[str, np.ndarray]) -> dict[str, list[str]]:
    """Names of the dims of some columns, of which there are as many as dims."""
    names = json.loads(str(content["names"])) if "names" in content else {}
    lists = list(names.values()) if isinstance(names, dict) else [None]
    if not all(isinstance(dims, list) and all(isinstance(n, str) for n in dims) for dims in lists):
        raise ValueError(f"names is {short(names)}, not a list of texts for each column")
    for name, dims in names.items():
        if name in columns and len(dims) != columns[name].shape[1]:
            raise ValueError(f"{name} has {columns[name].shape[1]} dims and {len(dims)} names")
    return names


def _about(episode: RobotEpisode) -> str:
    """Rate, robot and names, which all episodes of a dataset share, in words."""
    names = "; ".join(f"{name}: {', '.join(dims)}" for name, dims in episode.names.items())
    robot = f" of robot '{episode.robot}'" * bool(episode.robot)
    return f"at {episode.hz:g} Hz{robot}" + f" with {names}" * bool(names)


def _picture(stored: Any) -> UInt8[np.ndarray, "_h _w 3"]:
    """A picture as stored, decoded if it is stored as the bytes of a JPEG."""
    return simplejpeg.decode_jpeg(stored, "RGB") if isinstance(stored, bytes) else stored
