"""Writes LeRobot v3.0 datasets that LeRobot's own reader opens: parquet, mp4 and their metadata.

During the recording, every episode has its own files (data/lerobot/growing.py), so a finished
episode is never lost, whatever ends the recording. At the end the episodes are joined in
`<path>.partial`, without re-encoding, and the two folders are exchanged.
"""

import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from data.columns import BOOKKEEPING, arrow_type
from data.files.exchange import exchange
from data.files.names import require_plain
from data.files.partial import EDITED, partial_of, require_leftover
from data.lerobot.dataset import VERSION, LeRobotDataset
from data.lerobot.growing import USUAL, GrowingDataset, is_growing
from data.lerobot.meta_writer import IMPORTED, EpisodeTable, info_of, write_json
from data.lerobot.metadata import is_depth
from data.lerobot.recording import DataFiles, video_info
from data.lerobot.remux import CopiedVideos
from data.lerobot.subtasks import INDEX
from data.video.encoding import EncodedFrames, VideoEncoding

Pictures = UInt8[np.ndarray, "_t _h _w 3"] | EncodedFrames


class DatasetWriter:
    """Writer of a LeRobot dataset, a context manager. When its block ends without error, the
    episodes are joined into few files. After an error, finished episodes stay at `path`, where the
    dataset can be opened and `resume` continues it; if there are none, nothing stays.

    Args:
      path: the folder to create; must not exist, or be empty.
      fps: frames per second, the same in every episode.
      features: per feature name its `dtype`, `shape` and `names` as in info.json; dtype "video"
        for cameras (shape (H, W, 3)), a numpy type for columns of shape (n,).
      robot_type: name for info.json that is allowed in file names.
      subtasks: every frame has a subtask, as LeRobot's `subtask_index`.
      data_megabytes: size at which a new parquet file begins.
      video_megabytes: size at which a new mp4 begins.
      resume: `path` may also hold an interrupted recording.
      about: plain data that determines what is recorded; must be the same on resuming.
      encoding: codec and quality of the videos; h264 of high quality by default, which is fast to
        write and to read.

    Attributes:
      origin: plain data, if any, that the finished dataset keeps in meta/imported.json.

    Raises:
      ValueError: `path` is not empty, or holds a recording of something else, `<path>.partial`
        holds what another command has begun, or a feature or the robot's name cannot be written.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        fps: int,
        features: Mapping[str, Mapping[str, Any]],
        robot_type: str | None = None,
        subtasks: bool = False,
        data_megabytes: float = 100,
        video_megabytes: float = 200,
        resume: bool = False,
        about: Any = None,
        encoding: VideoEncoding = USUAL,
    ) -> None:
        self.path = Path(path)
        _require_free(self.path, resume)
        require_plain(robot_type or "unknown", "Robot")
        if not isinstance(fps, int) or fps < 1:
            raise ValueError(f"fps is {fps!r}; give a whole number of frames per second, from 1.")
        if not isinstance(encoding, VideoEncoding):
            raise ValueError(f"encoding is {encoding!r}; give a VideoEncoding, or leave it out.")
        self.fps, self.robot_type = fps, robot_type
        self.features = {name: _checked(name, f) for name, f in features.items()}
        if not self.features:
            raise ValueError("The features are empty; declare the columns and cameras to write.")
        self._cameras = [n for n, f in self.features.items() if f["dtype"] == "video"]
        self._given = [n for n in self.features if n not in self._cameras]
        self._made = BOOKKEEPING | ({INDEX: BOOKKEEPING["task_index"]} if subtasks else {})
        if taken := [name for name in self._made if name in self.features]:
            raise ValueError(
                f"Feature '{taken[0]}' is a column that the writer adds itself; choose another "
                "name."
            )
        self._columns = {n: self.features[n] for n in self._given} | self._made
        self.origin: Mapping[str, Any] | None = None
        self._limits = {"data": data_megabytes, "video": video_megabytes}
        self._partial = partial_of(self.path)
        require_leftover(self._partial, whole=is_growing(self.path))
        self._grown = GrowingDataset(
            self.path,
            self.features | self._made,
            fps,
            {"robot_type": robot_type, "recorded": about},
            encoding,
        )

    @property
    def num_episodes(self) -> int:
        """Episodes added so far."""
        return self._grown.num_episodes

    @property
    def num_frames(self) -> int:
        """Frames added so far."""
        return self._grown.num_frames

    @property
    def notes(self) -> list[dict[str, Any]]:
        """Notes given with the episodes so far, including those before an interruption."""
        return self._grown.notes

    def add_episode(
        self,
        columns: Mapping[str, np.ndarray],
        frames: Mapping[str, Pictures],
        task: str,
        subtasks: Sequence[str] = (),
        note: Mapping[str, Any] | None = None,
    ) -> None:
        """Appends an episode of T frames, which is on disk on return.

        Args:
          columns: every feature that is not a camera, [T, *shape]; bookkeeping columns are made
            here.
          frames: every camera's frames, or the video that was made of them
            (data/video/encoding.py), whose file is moved.
          task: the robot's instruction.
          subtasks: the subtask of every frame, in words, if the writer has subtasks.
          note: plain data that `notes` returns; not part of the dataset.

        Raises:
          ValueError: a column or camera is missing, of a wrong shape or type, not finite, or an
            integer beyond its type; names the episode, the column and the step. Nothing of the
            episode is written then.
        """
        values = self._check(columns, frames, task)
        length = len(next(iter(values.values())))
        self._check_subtasks(subtasks, length)
        encoded = [name for name in frames if isinstance(frames[name], EncodedFrames)]
        if encoded and self._grown.encoding != USUAL:
            raise ValueError(
                f"'{encoded[0]}' comes as a video of the usual encoding; leave out `encoding`, or "
                "give its frames."
            )
        steps = np.arange(length)
        values |= {
            "timestamp": (steps / self.fps).astype(np.float32),
            "frame_index": steps,
            "episode_index": np.full(length, self.num_episodes),
            "index": self.num_frames + steps,
            "task_index": np.full(length, self._number(self._grown.tasks, task)),
        }
        if INDEX in self._made:
            numbers = [self._number(self._grown.subtasks, text) for text in subtasks]
            values[INDEX] = np.array(numbers, np.int64)
        info = self._info(self.num_episodes + 1, self.num_frames + length)
        self._grown.add(task, values, frames, info, note or {})

    def __enter__(self) -> "DatasetWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._grown.close()

    def _finish(self) -> None:
        if self.num_episodes == 0:
            raise ValueError(f"{self.path}: no episode was added, so there is no dataset to write.")
        require_leftover(self._partial, whole=True)  # an edit may have begun meanwhile
        shutil.rmtree(self._partial, ignore_errors=True)
        try:
            self._join(self._partial)
            exchange(self._partial, self.path)
        finally:
            shutil.rmtree(self._partial, ignore_errors=True)

    def _join(self, root: Path) -> None:
        """Writes the dataset with all episodes end to end in as few files as possible."""
        episodes = EpisodeTable(root, self.features | self._made)
        data = DataFiles(root, self._columns, self._limits["data"])
        videos = {c: CopiedVideos(root, c, self._limits["video"]) for c in self._cameras}
        try:
            for task, values, pixels, paths in self._grown.finished():
                length = len(values["index"])
                places: dict[str, int | float] = dict(data.add(values))
                for camera, path in paths.items():
                    places |= videos[camera].add(path, length, self.fps)
                episodes.add([task], values, pixels, places)
            data.close()
            for video in videos.values():
                video.close()
        finally:
            data.abandon()
            for video in videos.values():
                with suppress(OSError):  # a full disk, which ended the recording
                    video.close()
        episodes.close()
        if self.origin is not None:
            write_json(root / IMPORTED, self.origin)
        info = self._info(self.num_episodes, self.num_frames)
        episodes.finish(info, list(self._grown.tasks), list(self._grown.subtasks))

    @staticmethod
    def _number(texts: dict[str, int], text: str) -> int:
        return texts.setdefault(text, len(texts))

    def _info(self, episodes: int, frames: int) -> dict[str, Any]:
        features = {
            name: f | {"info": video_info(f["shape"], self.fps, self._grown.encoding.codec)}
            if f["dtype"] == "video"
            else f
            for name, f in (self.features | self._made).items()
        }
        begin = {"codebase_version": VERSION, "robot_type": self.robot_type}
        counts = episodes, frames, len(self._grown.tasks)
        return begin | info_of(features, self.fps, self._limits, counts)

    def _check_subtasks(self, subtasks: Sequence[str], length: int) -> None:
        expected = length if INDEX in self._made else 0
        if len(subtasks) != expected or not all(text.strip() for text in subtasks):
            raise ValueError(
                f"Episode {self.num_episodes} has {len(subtasks)} subtasks, expected {expected}: "
                "one non-empty text per frame if the writer was made with subtasks, else none."
            )

    def _check(
        self, columns: Mapping[str, np.ndarray], frames: Mapping[str, Pictures], task: str
    ) -> dict[str, np.ndarray]:
        where = f"Episode {self.num_episodes}"
        if not isinstance(task, str) or not task.strip():
            raise ValueError(f"{where} has task {task!r}; give the robot's instruction as text.")
        for what, given, expected in (
            ("columns", set(columns), set(self._given)),
            ("cameras", set(frames), set(self._cameras)),
        ):
            if given != expected:
                raise ValueError(
                    f"{where} has {what} {sorted(given)}, but the features declare "
                    f"{sorted(expected)}; give exactly those."
                )
        length = _length(next(iter({**columns, **frames}.values()), ()))
        if length == 0:
            raise ValueError(f"{where} has no frames; leave it out.")
        values = {
            name: _checked_column(where, name, columns[name], length, self.features[name])
            for name in self._given
        }
        for camera in self._cameras:
            picture, shape = frames[camera], (length, *self.features[camera]["shape"])
            if not hasattr(picture, "dtype"):
                raise ValueError(
                    f"{where}, camera '{camera}': frames are {type(picture).__name__}, expected an "
                    f"array of uint8 {shape}."
                )
            if picture.dtype != np.uint8 or picture.shape != shape:
                raise ValueError(
                    f"{where}, camera '{camera}': frames are {picture.dtype} {picture.shape}, "
                    f"expected uint8 {shape}."
                )
        return values


def finished_recording(path: Path) -> LeRobotDataset | None:
    """The dataset that a recording at `path` has become, None if there is none or it is still being
    recorded. What a kill after the last step left in `<path>.partial` is removed.

    Raises:
      ValueError: an edit of it was interrupted.
    """
    if is_growing(path) or not (path / "meta/info.json").is_file():
        return None
    if (path / EDITED).is_file():
        raise ValueError(
            f"{path}: its edit --in-place was interrupted; run the same edit command again to "
            "finish it."
        )
    left = partial_of(path)
    if is_growing(left):  # its files before they were joined
        shutil.rmtree(left)
    return LeRobotDataset(path)


def _length(given: Any) -> int:
    return given.length if isinstance(given, EncodedFrames) else len(given)


def _require_free(path: Path, resume: bool) -> None:
    """Raises ValueError if nothing can be recorded at `path`."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if path.is_dir() and is_growing(path):
        if resume:
            return
        raise ValueError(
            f"{path}: already exists and holds a recording that was cut off; continue it with "
            "--resume (in Python, resume=True), or choose another path."
        )
    more = " but holds nothing to resume" if resume else ""
    raise ValueError(
        f"{path}: already exists and is not empty{more}; choose another path or delete it."
    )


def _checked(name: str, feature: Mapping[str, Any]) -> dict[str, Any]:
    require_plain(name, "Feature")
    try:
        dtype, shape = feature["dtype"], tuple(int(n) for n in feature["shape"])
    except (KeyError, TypeError, ValueError):
        raise ValueError(
            f"Feature '{name}' is {feature!r}; give its dtype and its shape, such as (n,)."
        ) from None
    if name in BOOKKEEPING:
        raise ValueError(
            f"Feature '{name}' is a column that the writer adds itself; choose another name."
        )
    if is_depth(feature):
        raise ValueError(
            f"Feature '{name}' is a depth camera, which cannot be written; write it as a column of "
            "numbers, or leave it out."
        )
    if dtype == "video":
        if len(shape) != 3 or shape[2] != 3 or shape[0] % 2 or shape[1] % 2:
            raise ValueError(
                f"Feature '{name}' has shape {shape}; a video needs (height, width, 3) "
                "with even height and width."
            )
    elif arrow_type(dtype) is None or len(shape) != 1 or shape[0] < 1:
        raise ValueError(
            f"Feature '{name}' has dtype '{dtype}' and shape {shape}; give 'video' or a numpy "
            "type, and for the latter a shape (n,)."
        )
    return {"dtype": dtype, "shape": shape, "names": feature.get("names")}


def _checked_column(
    where: str, name: str, given: np.ndarray, length: int, feature: Mapping[str, Any]
) -> np.ndarray:
    value, shape = np.asarray(given), (length, *feature["shape"])
    if value.shape == (length,) and shape == (length, 1):
        value = value[:, None]
    if value.shape != shape:
        raise ValueError(f"{where}, column '{name}': shape is {value.shape}, expected {shape}.")
    if feature["dtype"] == "string":
        return value
    if not np.can_cast(value.dtype, feature["dtype"], "same_kind"):
        raise ValueError(
            f"{where}, column '{name}': type is {value.dtype}, expected {feature['dtype']}."
        )
    told, value = value, value.astype(feature["dtype"])
    if value.dtype.kind in "iu" and (told != value).any():
        step = int(np.argmax((told != value).any(axis=1)))
        raise ValueError(
            f"{where}, column '{name}', step {step}: value {told[step].tolist()} does not fit "
            f"{feature['dtype']}; declare a wider type."
        )
    if value.dtype == np.uint64 and value.max() > np.iinfo(np.int64).max:
        raise ValueError(
            f"{where}, column '{name}': {value.max()} does not fit the statistics, which are "
            "int64; declare a float type."
        )
    bad = ~np.isfinite(value).all(axis=1)
    if bad.any():
        step = int(np.argmax(bad))
        raise ValueError(
            f"{where}, column '{name}', step {step}: value {value[step].tolist()} is not finite; "
            "leave the episode out or repair the recording."
        )
    return value
