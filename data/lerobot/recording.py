"""Writes the parquet files of a recording, each of which grows by episodes until the next file
begins.

Names, numbering and sizes are LeRobot v3.0's. Each `add` returns the episode's location, as columns
of its metadata.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data.columns import arrow_type
from data.video.video import PIXEL_FORMAT

FILES_PER_CHUNK = 1000
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"


def features_of(
    columns: Mapping[str, np.ndarray],
    frames: Mapping[str, np.ndarray],
    names: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, dict[str, Any]]:
    """Features, as in info.json, of an episode's columns [T, n] and images uint8 [T, h, w, 3];
    `names`: names of the dims, for columns that have some."""
    found: dict[str, dict[str, Any]] = {
        name: {"dtype": str(x.dtype), "shape": x.shape[1:], "names": (names or {}).get(name)}
        for name, x in columns.items()
    }
    return found | {camera: video_feature(x.shape[1:]) for camera, x in frames.items()}


def video_feature(shape: Sequence[int]) -> dict[str, Any]:
    """Feature of a camera with images of shape (h, w, 3)."""
    return {"dtype": "video", "shape": tuple(shape), "names": ["height", "width", "channels"]}


class DataFiles:
    """The parquet files of the frames: one row group per episode, and a new file beyond the size
    limit."""

    def __init__(
        self, root: Path, columns: Mapping[str, Mapping[str, Any]], megabytes: float
    ) -> None:
        self.root, self.limit = root, megabytes * 2**20
        self.chunk, self.file, self.size = 0, -1, 0
        self.schema = pa.schema([(name, _column_type(f)) for name, f in columns.items()])
        self.writer: pq.ParquetWriter | None = None

    def add(self, values: Mapping[str, np.ndarray | pa.Array]) -> dict[str, int]:
        size = sum(value.nbytes for value in values.values())
        if self.writer is None or self.size + size > self.limit:
            self.close()
            self.chunk, self.file, self.size = *next_file(self.chunk, self.file), 0
            path = self.root / DATA_PATH.format(chunk_index=self.chunk, file_index=self.file)
            path.parent.mkdir(parents=True, exist_ok=True)
            self.writer = pq.ParquetWriter(path, self.schema, write_page_checksum=True)
        arrays = [_arrow(values[field.name], field.type) for field in self.schema]
        table = pa.Table.from_arrays(arrays, schema=self.schema)
        self.writer.write_table(table, row_group_size=max(1, len(table)))
        self.size += size
        return {"data/chunk_index": self.chunk, "data/file_index": self.file}

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()

    def abandon(self) -> None:
        """Leaves what was written, so that a full disk does not fail again at the end."""
        if self.writer is not None and self.writer.is_open:
            with suppress(OSError):
                self.writer.close()
            self.writer.is_open = False


def video_info(size: Sequence[int], fps: float, codec: str) -> dict[str, Any]:
    """Description of a camera's videos as in info.json; `size` begins with height and width."""
    return {
        "video.height": size[0],
        "video.width": size[1],
        "video.codec": codec,
        "video.pix_fmt": PIXEL_FORMAT,
        "video.is_depth_map": False,
        "video.fps": fps,
        "video.channels": 3,
        "has_audio": False,
    }


def next_file(chunk: int, file: int) -> tuple[int, int]:
    """Chunk and number of the file after this one."""
    return (chunk + 1, 0) if file == FILES_PER_CHUNK - 1 else (chunk, file + 1)


def _column_type(feature: Mapping[str, Any]) -> pa.DataType:
    if feature["dtype"] == "image":
        return pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    kind, (*outer, n) = arrow_type(feature["dtype"]), tuple(feature["shape"]) or (1,)
    if outer:
        for _ in (*outer, n):
            kind = pa.list_(kind)
        return kind
    return kind if n == 1 else pa.list_(pa.field("element", kind), n)


def _arrow(values: np.ndarray | pa.Array, kind: pa.DataType) -> pa.Array:
    if isinstance(values, pa.Array):
        return values.cast(kind)
    if not pa.types.is_nested(kind):
        return pa.array(values.reshape(-1), kind)
    if not pa.types.is_fixed_size_list(kind):
        return pa.array(values.tolist(), kind)
    flat = pa.array(values.reshape(-1), kind.value_type)
    return pa.FixedSizeListArray.from_arrays(flat, type=kind)
