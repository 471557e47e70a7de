"""meta/ of LeRobot v2.0 and v2.1: separate files for each episode, listed in JSON lines.

An episode has the cameras whose video file exists; the metadata does not say which.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj
from jaxtyping import Bool

from data.errors import DatasetError, naming_damage
from data.files.folder import Folder
from data.files.limits import MOST_FRAMES
from data.lerobot.metadata import file_name, file_pattern, one_text_each

_BLOCK_BYTES = 1 << 26


class MetadataV21:
    """`Metadata` of a v2.0 or v2.1 dataset (see data/lerobot/metadata.py).

    Raises:
      MissingFileError, DatasetError: a file of it is missing or damaged; names file and key.
    """

    listing = "meta/episodes.jsonl"
    tasks_file = "meta/tasks.jsonl"
    wanders = False

    def __init__(self, folder: Folder, info: Mapping[str, Any], videos: tuple[str, ...]) -> None:
        self._folder, self._info = folder, info
        kinds = {"episode_index": pa.int64(), "length": pa.int64(), "tasks": pa.list_(pa.string())}
        table = _read_lines(folder, self.listing, kinds)
        order = np.argsort(table["episode_index"].to_numpy(), kind="stable")
        table = table.take(order)
        self.numbers, self.lengths = (
            table[name].to_numpy() for name in ("episode_index", "length")
        )
        least, most = min(self.numbers[0], self.lengths.min()), self.lengths.max()
        if (np.diff(self.numbers) <= 0).any() or least < 0 or most > MOST_FRAMES:
            raise DatasetError(
                folder.path(self.listing),
                "episode_index, length",
                "are negative or impossibly large, or an episode is listed twice; correct the "
                "lines.",
            )
        self.texts = table["tasks"].combine_chunks()
        self.num_data_files = len(self.numbers)
        self.hints = np.arange(self.num_data_files)
        self._chunk = info.get("chunks_size", 1000)
        if not isinstance(self._chunk, int) or self._chunk < 1:
            raise DatasetError(
                folder.path("meta/info.json"),
                "chunks_size",
                f"is {self._chunk!r}, expected the number of episodes in a folder; correct it.",
            )

    def data_file(self, file: int) -> str:
        return self._name("data_path", file)

    def video(self, episode: int, camera: str) -> tuple[str, float]:
        return self._name("video_path", episode, video_key=camera), 0.0

    def has_video(self, camera: str) -> Bool[np.ndarray, " e"]:
        files = self._videos
        episodes = range(len(self.numbers))
        return np.array([self.video(i, camera)[0] in files for i in episodes], bool)

    def tasks(self) -> dict[int, str]:
        kinds = {"task_index": pa.int64(), "task": pa.string()}
        table = _read_lines(self._folder, self.tasks_file, kinds)
        pairs = (table[name].to_pylist() for name in kinds)
        return one_text_each(self._folder.path(self.tasks_file), *pairs)

    def _name(self, field: str, episode: int, **values: str) -> str:
        number = int(self.numbers[episode])
        values_of = {"episode_chunk": number // self._chunk, "episode_index": number, **values}
        return file_name(self._folder, self._info, field, **values_of)

    @cached_property
    def _videos(self) -> set[str]:
        return set(self._folder.list(file_pattern(self._folder, self._info, "video_path")))


def _read_lines(folder: Folder, name: str, kinds: Mapping[str, pa.DataType]) -> pa.Table:
    """The given keys of a file of JSON lines; only "tasks" may be absent."""
    path, file = folder.local(name), folder.path(name)
    sentence = (
        f"does not hold JSON lines of {', '.join(kinds)} ({{reason}}); correct the line or copy "
        "the file again."
    )
    damage = (pa.ArrowException, OSError, UnicodeDecodeError)
    with naming_damage(file, "file", sentence, caught=damage):
        table = pj.read_json(
            path,
            pj.ReadOptions(block_size=_BLOCK_BYTES),
            pj.ParseOptions(pa.schema(kinds.items()), unexpected_field_behavior="ignore"),
        )
        for column in table.columns:
            flat = pc.list_flatten(column) if pa.types.is_list(column.type) else column
            if pa.types.is_string(flat.type):
                flat.cast(pa.binary()).cast(pa.string())  # raises unless it is valid UTF-8
    empty = [key for key in kinds if key != "tasks" and table[key].null_count]
    if empty or len(table) == 0:
        raise DatasetError(
            file,
            f"key '{(empty or list(kinds))[0]}'",
            f"is missing in one or more of {len(table)} lines; copy the file again.",
        )
    return table
