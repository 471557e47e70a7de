"""Writes episodes as LeRobot v2.1 lays them out: files for each, listed in JSON lines."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data.columns import BOOKKEEPING
from data.video.encoding import VideoEncoding, write_video

CHUNK = 4
DATA = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
VIDEO = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"


def write_v21(
    root: Path,
    episodes: Sequence[tuple[dict[str, np.ndarray], dict[str, np.ndarray], str]],
    features: dict[str, dict],
    fps: int,
    version: str = "v2.1",
) -> Path:
    """A dataset of these episodes (columns, frames, task); a camera that one lacks has no file."""
    cameras = [name for name, f in features.items() if f["dtype"] == "video"]
    tasks = list(dict.fromkeys(task for *_, task in episodes))
    total = 0
    for number, (columns, frames, task) in enumerate(episodes):
        length = len(next(iter(columns.values())))
        where = {"episode_chunk": number // CHUNK, "episode_index": number}
        table = {name: _listed(values) for name, values in columns.items()}
        table |= {
            "timestamp": pa.array(np.arange(length, dtype=np.float32) / fps, pa.float32()),
            "frame_index": np.arange(length),
            "episode_index": np.full(length, number),
            "index": total + np.arange(length),
            "task_index": np.full(length, tasks.index(task)),
        }
        total += length
        path = root / DATA.format(**where)
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(table), path)
        for camera, pictures in frames.items():
            path = root / VIDEO.format(video_key=camera, **where)
            write_video(path, pictures, fps, VideoEncoding())
    (root / "meta").mkdir()
    lines = {
        "tasks": [{"task_index": i, "task": task} for i, task in enumerate(tasks)],
        "episodes": [
            {"episode_index": i, "tasks": [task], "length": len(next(iter(columns.values())))}
            for i, (columns, _, task) in enumerate(episodes)
        ],
    }
    for name, rows in lines.items():
        (root / f"meta/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    info = {
        "codebase_version": version,
        "robot_type": "test",
        "total_episodes": len(episodes),
        "total_frames": total,
        "total_tasks": len(tasks),
        "total_videos": len(episodes) * len(cameras),
        "total_chunks": -(-len(episodes) // CHUNK),
        "chunks_size": CHUNK,
        "fps": fps,
        "splits": {"train": f"0:{len(episodes)}"},
        "data_path": DATA,
        "video_path": VIDEO,
        "features": features | BOOKKEEPING,
    }
    (root / "meta/info.json").write_text(json.dumps(info))
    return root


def _listed(values: np.ndarray) -> pa.Array:
    """Vectors as lists of any length, as pandas leaves them; scalars as they are."""
    if values.ndim == 1 or values.shape[1:] == (1,):
        return pa.array(values.reshape(-1))
    return pa.array(values.tolist(), pa.list_(pa.from_numpy_dtype(values.dtype)))


def edit_lines(path, edit):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in edit(rows)))


def video(camera, episode):
    return VIDEO.format(video_key=camera, episode_chunk=episode // 4, episode_index=episode)


def parquet(episode):
    return DATA.format(episode_chunk=episode // 4, episode_index=episode)
