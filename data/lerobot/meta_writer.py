"""Writes the meta/ folder of a LeRobot v3.0 dataset: episodes, tasks, info and statistics, in the
forms that LeRobot's own reader depends on.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data.files.checksums import write_checksums
from data.lerobot.dataset import VERSION, LeRobotDataset
from data.lerobot.recording import DATA_PATH, FILES_PER_CHUNK, VIDEO_PATH
from data.statistics import stats
from data.statistics.pixels import Histogram

VIDEO_FIELDS = {
    "chunk_index": pa.int64(),
    "file_index": pa.int64(),
    "from_timestamp": pa.float64(),
    "to_timestamp": pa.float64(),
}
"""Columns that locate an episode in a camera's videos."""
IMPORTED = "meta/imported.json"
"""File of a dataset that tells what it was imported from."""

_PATH = "meta/episodes/chunk-000/file-000.parquet"
_EPISODES_PER_ROW_GROUP = 500
_INT, _FLOAT = pa.int64(), pa.float64()


class EpisodeTable:
    """meta/episodes, which grows by `add` and is complete after `close`. Counts its episodes and
    frames.

    Args:
      root: the dataset's folder.
      features: features of the episodes, bookkeeping included; dtype "video" or "image" for images.
    """

    def __init__(self, root: Path, features: Mapping[str, Mapping[str, Any]]) -> None:
        self.root, self.num_episodes, self.num_frames = root, 0, 0
        self._numeric = [n for n, f in features.items() if f["dtype"] not in _NOT_NUMERIC]
        self._schema = _schema(features)
        self._pixels: dict[str, tuple[int, Histogram]] = {}
        self._rows: list[dict[str, Any]] = []
        self._file: pq.ParquetWriter | None = None

    def add(
        self,
        tasks: Sequence[str],
        values: Mapping[str, np.ndarray],
        pixels: Mapping[str, Histogram],
        places: Mapping[str, int | float],
    ) -> None:
        """Adds the next episode.

        Args:
          tasks: its instructions.
          values: its numeric columns, each [T, *shape], for their statistics.
          pixels: counts of each level in the images of each camera that it has.
          places: the columns that locate its rows and images.
        """
        length = len(values["index"])
        row: dict[str, Any] = {"episode_index": self.num_episodes, "tasks": list(tasks)}
        row |= {
            "length": length,
            "dataset_from_index": self.num_frames,
            "dataset_to_index": self.num_frames + length,
            "meta/episodes/chunk_index": 0,
            "meta/episodes/file_index": 0,
        }
        for camera, seen in pixels.items():
            frames, before = self._pixels.get(camera, (0, Histogram()))
            self._pixels[camera] = frames + length, before + seen.weighed(length)
            row |= _flat(camera, seen.stats(length))
        self._rows.append(row | dict(places) | _statistics(values, self._numeric))
        self.num_episodes += 1
        self.num_frames += length
        if len(self._rows) == _EPISODES_PER_ROW_GROUP:
            self._write()

    def close(self) -> None:
        """Writes the rows still in memory, and the footer."""
        if self._rows:
            self._write()
        if self._file is not None:
            self._file.close()

    def finish(
        self, info: Mapping[str, Any], tasks: Sequence[str], subtasks: Sequence[str] = ()
    ) -> None:
        """Writes the last files of the dataset: its texts, info.json, statistics and checksums.
        Statistics are exact over all frames; for cameras, over the counted ones of the frames that
        have the camera."""
        write_tasks(self.root, tasks)
        if subtasks:
            write_tasks(self.root, subtasks, "subtask")
        write_json(self.root / "meta/info.json", info)
        written = {c: seen.stats(frames) for c, (frames, seen) in self._pixels.items()}
        written |= stats.compute(LeRobotDataset(self.root))
        plain = {n: {k: v.tolist() for k, v in s.items()} for n, s in written.items()}
        write_json(self.root / "meta/stats.json", plain)
        write_checksums(self.root)

    def _write(self) -> None:
        if self._file is None:
            path = self.root / _PATH
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = pq.ParquetWriter(path, self._schema, write_page_checksum=True)
        self._file.write_table(pa.Table.from_pylist(self._rows, schema=self._schema))
        self._rows = []


def write_tasks(root: Path, tasks: Sequence[str], kind: str = "task") -> None:
    """Writes meta/tasks.parquet as pandas writes a frame indexed by the instructions, which is how
    LeRobot looks them up; with `kind` "subtask", meta/subtasks.parquet."""
    index, number = "__index_level_0__", f"{kind}_index"
    table = pa.table({number: pa.array(range(len(tasks)), pa.int64()), index: list(tasks)})

    def described(name: str | None, field: str, pandas: str, numpy: str) -> dict[str, Any]:
        kinds = {"pandas_type": pandas, "numpy_type": numpy, "metadata": None}
        return {"name": name, "field_name": field, **kinds}

    pandas = {
        "index_columns": [index],
        "column_indexes": [],
        "columns": [
            described(number, number, "int64", "int64"),
            described(None, index, "unicode", "object"),
        ],
        "creator": {"library": "pyarrow", "version": pa.__version__},
        "pandas_version": "2.0.0",
    }
    table = table.replace_schema_metadata({"pandas": json.dumps(pandas)})
    pq.write_table(table, root / f"meta/{kind}s.parquet", write_page_checksum=True)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON file as LeRobot does."""
    path.write_text(json.dumps(content, indent=4, ensure_ascii=False))


def info_of(
    features: Mapping[str, Mapping[str, Any]],
    fps: float,
    limits: Mapping[str, float],
    counts: tuple[int, int, int],
) -> dict[str, Any]:
    """Everything in info.json that follows from the written files.

    Args:
      limits: megabytes at which a new file of "data" and of "video" begins.
      counts: episodes, frames and tasks.
    """
    episodes, frames, tasks = counts
    videos = any(feature["dtype"] == "video" for feature in features.values())
    return {
        "codebase_version": VERSION,
        "total_episodes": episodes,
        "total_frames": frames,
        "total_tasks": tasks,
        "chunks_size": FILES_PER_CHUNK,
        "data_files_size_in_mb": limits["data"],
        "video_files_size_in_mb": limits["video"],
        "fps": fps,
        "splits": {"train": f"0:{episodes}"},
        "data_path": DATA_PATH,
        "video_path": VIDEO_PATH if videos else None,
        "features": features,
    }


def kept_info(source: LeRobotDataset) -> dict[str, Any]:
    """A dataset's info.json without the fields that v3.0 does not have."""
    return {k: v for k, v in source.info.items() if k not in _V21_ONLY}


def copy_others(source: LeRobotDataset, root: Path, but: Sequence[str] = ()) -> None:
    """Copies the files of a dataset's meta/ that no writer makes again, except those in `but` and
    what GR00T's readers keep there about the old frames."""
    for name in source.folder.list("meta/*"):
        last = name.rpartition("/")[2]
        if name not in but and last not in _OWN and not last.startswith(_MADE_ANEW):
            shutil.copyfile(source.folder.local(name), root / name)


_V21_ONLY = ("total_videos", "total_chunks")
_OWN = ("info.json", "stats.json", "checksums.json", "recording.jsonl", "imported.json")
_MADE_ANEW = ("tasks.", "episodes", "stats_gr00t.", "steps_")
_NOT_NUMERIC = ("string", "video", "image")


def _schema(features: Mapping[str, Mapping[str, Any]]) -> pa.Schema:
    fields = {"episode_index": _INT, "tasks": pa.list_(pa.string()), "length": _INT}
    fields |= {f"data/{name}": _INT for name in ("chunk_index", "file_index")}
    fields |= {"dataset_from_index": _INT, "dataset_to_index": _INT}
    for camera, feature in features.items():
        if feature["dtype"] == "video":
            fields |= {f"videos/{camera}/{name}": kind for name, kind in VIDEO_FIELDS.items()}
    for name, feature in features.items():
        dtype = feature["dtype"]
        if dtype != "string":
            kinds = dict.fromkeys(stats.STATISTICS, pa.list_(_FLOAT))
            if dtype in ("video", "image"):
                kinds = dict.fromkeys(stats.STATISTICS, pa.list_(pa.list_(pa.list_(_FLOAT))))
            elif np.dtype(dtype).kind != "f":
                extreme = pa.list_(pa.bool_() if dtype == "bool" else _INT)
                kinds |= {"min": extreme, "max": extreme}
            kinds["count"] = pa.list_(_INT)
            fields |= {f"stats/{name}/{key}": kind for key, kind in kinds.items()}
    fields |= {f"meta/episodes/{name}": _INT for name in ("chunk_index", "file_index")}
    return pa.schema(fields.items())


def _statistics(values: Mapping[str, np.ndarray], names: Sequence[str]) -> dict[str, list]:
    """Statistics of all numeric columns of an episode at once: one call for many small columns."""
    parts = [values[name].reshape(len(values[name]), -1) for name in names]
    described = stats.describe(np.concatenate([p.astype(np.float64) for p in parts], axis=1))
    flat: dict[str, list] = {}
    first = 0
    for name, part in zip(names, parts, strict=True):
        piece = {k: v[first : first + part.shape[1]] for k, v in described.items() if k != "count"}
        if part.dtype.kind != "f":
            piece |= {k: piece[k].astype(part.dtype) for k in ("min", "max")}
        flat |= _flat(name, piece | {"count": described["count"]})
        first += part.shape[1]
    return flat


def _flat(name: str, feature_stats: Mapping[str, np.ndarray]) -> dict[str, list]:
    return {f"stats/{name}/{key}": value.tolist() for key, value in feature_stats.items()}
