"""Index of an RLDS dataset's episodes: their locations, lengths and prompts.

TFDS's metadata only counts records, so one pass over the shards finds the rest. The pass skips the
images, and the result is kept on disk, by a digest of the files that were scanned.
"""

import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader
from jaxtyping import Bool, Int64

from data.dataset import Runs
from data.errors import DatasetError, naming_damage
from data.files import cached
from data.files.folder import Folder, LocalFolder
from data.rlds.features import STEPS, Leaf
from data.rlds.tf_example import Read, feature_spans, feature_values
from data.rlds.tfrecord import RecordSpan, masked_crc, read_record, record_spans
from models.files.terminal import logger

_FORMAT = 2
_INSTRUCTION = re.compile(r"(.*/)?(natural_)?language_instruction(_\d+)?")

_log = logger(__name__)


class Index(NamedTuple):
    """For each episode: its shard, its number and place in the shard, its steps, cameras and
    runs."""

    shard: Int64[np.ndarray, " e"]
    number: Int64[np.ndarray, " e"]
    span: Int64[np.ndarray, "e 3"]
    lengths: Int64[np.ndarray, " e"]
    present: Bool[np.ndarray, "e c"]
    runs: Runs
    prompts: tuple[tuple[str, ...], ...]


def find_index(
    description: bytes,
    folder: Folder,
    shards: Sequence[str],
    records: Sequence[int],
    leaves: Sequence[Leaf],
    cache_dir: Path,
) -> Index:
    """The index of a dataset's shards, made if `cache_dir` has none for exactly these files.

    Args:
      description: bytes of the metadata, from which the index also follows.
      records: number of records in each shard.

    Raises:
      MissingFileError: a shard is missing.
      DatasetError: one is damaged or holds something else; names it and the record.
    """
    name = hashlib.sha256(f"{_FORMAT}:".encode() + description)
    for shard in shards:
        name.update(f"{folder.path(shard)}:{folder.size(shard)}\n".encode())
        if isinstance(folder, LocalFolder):
            name.update(b"%d\n" % folder.local(shard).stat().st_mtime_ns)
    kept = cache_dir / f"rlds-{name.hexdigest()[:32]}.npz"
    if kept.is_file():
        return _load(kept)
    if len(shards) > 1:
        _log.info("Looking for the episodes in %d files of %s", len(shards), folder.url)
    with ThreadPoolExecutor() as pool:
        paths = pool.map(folder.local, shards)
        index = _join(list(pool.map(_scan, paths, records, [leaves] * len(shards))))
    _save(index, kept)
    return index


def read_episode(path: Path, number: int, span: RecordSpan) -> bytes:
    """The Example of an episode, checked against the checksum that the index holds."""
    if not _is_array_record(path):
        return read_record(path, number, span)
    data = _array_record(path, number)
    if masked_crc(data) != span.checksum:
        raise DatasetError(path, f"record {number}", "has changed; open the dataset again.")
    return data


class _Episode(NamedTuple):
    span: RecordSpan
    length: int
    present: list[bool]
    wordings: list[tuple[int, tuple[str, ...]]]  # frames of each run, and its prompts


def _scan(path: Path, records: int, leaves: Sequence[Leaf]) -> list[_Episode]:
    found = []
    for number, (span, read) in enumerate(_records(path)):
        sentence = "is not the episode that features.json describes: {reason}; download it again."
        with naming_damage(path, f"record {number}", sentence, caught=(ValueError,)):
            found.append(_episode(span, read, leaves))
    if len(found) != records:
        raise DatasetError(
            path,
            "file",
            f"holds {len(found)} records, but dataset_info.json says {records}; download it again.",
        )
    return found


def _records(path: Path) -> Iterator[tuple[RecordSpan, Read]]:
    if _is_array_record(path):
        for number in range(_of_array(path, lambda reader: reader.num_records())):
            data = _array_record(path, number)
            yield RecordSpan(0, len(data), masked_crc(data)), partial(_slice, data)
        return
    spans = record_spans(path)
    with path.open("rb") as file:
        for span in spans:
            yield span, partial(_pread, file.fileno(), span.offset)


def _array_record(path: Path, number: int) -> bytes:
    return _of_array(path, lambda reader: reader.read([number])[0])


def _of_array(path: Path, read: Callable[[ArrayRecordReader], Any]) -> Any:
    sentence = "is not a valid ArrayRecord file ({reason}); download it again."
    with naming_damage(path, "file", sentence, caught=(RuntimeError, ValueError, IndexError)):
        return read(ArrayRecordReader(str(path)))


def _slice(data: bytes, at: int, size: int) -> bytes:
    return data[at : at + size]


def _pread(file: int, offset: int, at: int, size: int) -> bytes:
    return os.pread(file, size, offset + at)


def _episode(span: RecordSpan, read: Read, leaves: Sequence[Leaf]) -> _Episode:
    places = feature_spans(read, span.size)

    def values(key: str) -> Any:
        return feature_values(read(*places[key])) if key in places else []

    counted = [
        (leaf.size, leaf.key)
        for leaf in leaves
        if leaf.key in places and leaf.key.startswith(STEPS) and leaf.is_column
        and leaf.kind == "tensor" and leaf.encoding == "none" and leaf.size
    ]  # fmt: skip
    if not counted:
        raise ValueError("it has no numeric feature by which to count its steps")
    size, key = min(counted)
    length, rest = divmod(len(values(key)), size)
    if rest or not length:
        raise ValueError(
            f"'{key}' has {len(values(key))} values, expected {size} in each of one or more steps"
        )
    spoken = [leaf.key for leaf in leaves if _is_instruction(leaf) and leaf.key in places]
    texts = [values(key) for key in spoken]
    for key, text in zip(spoken, texts, strict=True):
        if len(text) != length:
            raise ValueError(f"'{key}' has {len(text)} texts in {length} steps")
    spoken_runs = groupby(zip(*texts, strict=True)) if texts else [((), range(length))]
    wordings = [(len(list(frames)), _wordings(said)) for said, frames in spoken_runs]
    present = [
        bool((list(values(f"episode_metadata/has_{leaf.key.rsplit('/', 1)[-1]}")) or [1])[0])
        for leaf in leaves
        if leaf.is_camera and leaf.key.startswith(STEPS)
    ]
    return _Episode(span, length, present, wordings)


def _wordings(said: Sequence[bytes]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text.decode() for text in said if text.strip())) or ("",)


def _is_instruction(leaf: Leaf) -> bool:
    return leaf.kind == "text" and _INSTRUCTION.fullmatch(leaf.key.removeprefix(STEPS)) is not None


def _join(shards: Sequence[list[_Episode]]) -> Index:
    episodes = [(s, n, found) for s, shard in enumerate(shards) for n, found in enumerate(shard)]
    prompts: dict[tuple[str, ...], int] = {}
    runs = []
    for number, (_, _, found) in enumerate(episodes):
        first = 0
        for length, wordings in found.wordings:
            runs.append((number, first, length, prompts.setdefault(wordings, len(prompts))))
            first += length
    return Index(
        shard=np.array([s for s, _, _ in episodes], np.int64),
        number=np.array([n for _, n, _ in episodes], np.int64),
        span=np.array([found.span for _, _, found in episodes], np.int64).reshape(-1, 3),
        lengths=np.array([found.length for _, _, found in episodes], np.int64),
        present=np.array([found.present for _, _, found in episodes], bool),
        runs=Runs(*np.array(runs, np.int64).reshape(-1, 4).T),
        prompts=tuple(prompts),
    )


def _save(index: Index, path: Path) -> None:
    arrays = index._asdict() | {"runs": np.stack(index.runs)}
    arrays["prompts"] = np.frombuffer(json.dumps(index.prompts).encode(), np.uint8)
    with io.BytesIO() as file:
        np.savez(file, **arrays)
        cached.write_bytes(path, file.getvalue())


def _load(path: Path) -> Index:
    with np.load(io.BytesIO(cached.read_bytes(path).tobytes())) as arrays:
        found = dict(arrays)
    prompts = tuple(tuple(wordings) for wordings in json.loads(found["prompts"].tobytes()))
    return Index(**found | {"runs": Runs(*found["runs"]), "prompts": prompts})


def _is_array_record(path: Path) -> bool:
    return ".array_record" in path.name
