"""Converts LeRobot v2.1 (and v2.0) to v3.0: the same rows and encoded frames in fewer files.

Video packets are copied, so no quality is lost and frames decode to the same bits. Statistics are
recomputed from all rows and decoded frames, which also finds damaged videos before they are in the
new dataset.
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from data.columns import BOOKKEEPING
from data.errors import DatasetError
from data.files.job import Done, run_job
from data.files.partial import partial_of, require_apart, require_leftover
from data.lerobot.dataset import LeRobotDataset
from data.lerobot.meta_writer import EpisodeTable, copy_others, info_of, kept_info
from data.lerobot.recording import DataFiles
from data.lerobot.remux import CopiedVideos
from data.statistics.pixels import Histogram

Progress = Callable[[int, int], None]


def upgrade(
    path: str | Path,
    out: str | Path,
    *,
    data_megabytes: float = 100,
    video_megabytes: float = 200,
    progress: Progress | None = None,
) -> LeRobotDataset:
    """Writes the v2.0 or v2.1 dataset at `path` as v3.0 to the folder `out`.

    Episodes are numbered from 0 without gaps, as v3.0 requires. If an episode lacks a camera, its
    metadata gives no location for it. Files of meta/ that LeRobot does not know are copied.

    Args:
      data_megabytes: size at which a new parquet file begins.
      video_megabytes: size at which a new mp4 begins.
      progress: called after each episode with the frames done and the total.

    Raises:
      ValueError: `out` is not empty or inside of `path`, the dataset is v3.0 already, or
        `<out>.partial` holds what another command has begun.
      MissingFileError, DatasetError: a file of the dataset is missing or damaged. Nothing is left
        at `out` then.
    """
    dataset, out = LeRobotDataset(path), Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out}: already exists and is not empty; choose another path.")
    require_apart(out, [path])
    if not dataset.info["codebase_version"].startswith("v2."):
        raise ValueError(
            f"{path}: is {dataset.info['codebase_version'][:80]} already; there is nothing to "
            "upgrade."
        )
    partial = partial_of(out)
    require_leftover(partial)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        limits = {"data": data_megabytes, "video": video_megabytes}
        _write(dataset, partial, limits, progress)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return LeRobotDataset(out)


def _write(
    dataset: LeRobotDataset, root: Path, limits: Mapping[str, float], progress: Progress | None
) -> None:
    features = {n: f for n, f in dataset.features.items() if n not in BOOKKEEPING} | BOOKKEEPING
    cameras = [*dataset.cameras, *dataset.depth_cameras]
    read = {*dataset.column_names, *cameras, *BOOKKEEPING}
    unknown = [name for name in features if name not in read]
    if unknown:
        raise DatasetError(
            dataset.path("meta/info.json"),
            f"feature '{unknown[0]}'",
            f"has dtype '{features[unknown[0]]['dtype']}', which cannot be converted; remove it "
            "from info.json to leave it out.",
        )
    episodes = EpisodeTable(root, features)
    stored = {n: f for n, f in features.items() if f["dtype"] != "video"}
    data = DataFiles(root, stored, limits["data"])
    videos = {
        camera: CopiedVideos(root, camera, limits["video"])
        for camera in cameras
        if features[camera]["dtype"] == "video"
    }
    tasks = dict(sorted(dataset.tasks.items()))
    counting = run_job(_Counting(dataset), range(dataset.num_episodes))
    try:
        for i in range(dataset.num_episodes):
            columns = _columns(dataset, i, list(tasks), episodes.num_frames)
            places: dict[str, int | float] = {}
            for camera, joined in videos.items():
                if dataset.has(camera)[i]:
                    path, length = dataset.video(i, camera)[0], int(dataset.lengths[i])
                    places |= joined.add(path, length, dataset.fps)
            pictures = {c: dataset.encoded(i, c) for c in cameras if c not in videos}
            places |= data.add({**columns, **pictures})
            pixels = {c: Histogram(counts) for c, counts in next(counting).items()}
            episodes.add(dataset.instructions(i), columns, pixels, places)
            if progress is not None:
                progress(episodes.num_frames, dataset.num_frames)
    finally:
        data.close()
        for video in videos.values():
            video.close()
    episodes.close()
    copy_others(dataset, root)
    counts = episodes.num_episodes, episodes.num_frames, len(tasks)
    info = kept_info(dataset) | info_of(features, dataset.fps, limits, counts)
    episodes.finish(info, list(tasks.values()))


@dataclass(frozen=True)
class _Counting:
    """Pixel counts of an episode's cameras, but for depth: the work of an upgrade that is a
    job."""

    dataset: LeRobotDataset

    def __call__(self, i: int, _: Done) -> dict[str, Int64[np.ndarray, "3 256"]]:
        seen = zip(self.dataset.cameras, self.dataset.present[i], strict=True)
        return {c: Histogram.of(self.dataset.frames(i, c)).counts for c, there in seen if there}


def _columns(
    dataset: LeRobotDataset, i: int, tasks: list[int], first: int
) -> dict[str, np.ndarray]:
    """Episode i's columns, renumbered: its first frame is number `first` of the dataset."""
    columns = dataset.columns(i)
    (told,) = (block["task_index"] for block in dataset.stream(["task_index"], [i]))
    steps = np.arange(len(told))
    unknown = told[~np.isin(told, tasks)]
    if len(unknown):
        raise DatasetError(
            dataset.path(dataset.metadata.tasks_file),
            f"task_index {unknown[0]}",
            f"is the task of episode {dataset.episode_numbers[i]} but has no text; add its "
            "instruction.",
        )
    return columns | {
        "timestamp": (steps / dataset.fps).astype(np.float32),
        "frame_index": steps,
        "episode_index": np.full(len(told), i),
        "index": first + steps,
        "task_index": np.searchsorted(tasks, told),
    }
