"""The frame store that training reads: pictures at the model's size, each a record of its own.

Decoding video at random costs a hundred times what reading a record costs, so a dataset is decoded
once. Pictures lie in ArrayRecord files (JPEG or raw), states and actions in zarr arrays
(tensorstore); `store.json` says which dataset, by its content, and is written last.
"""

import fcntl
import hashlib
import io
import json
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tensorstore as ts
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter
from jaxtyping import Float32, Int64, Shaped, UInt8
from PIL import Image

from data.lerobot import Dataset, open_dataset
from data.stats import Stats, describe
from models.processor import resize_with_pad

Encoding = Literal["jpeg", "raw"]
Progress = Callable[[int, int], None]

STATE, ACTION = "observation.state", "action"

_FORMAT = 1
_JPEG_QUALITY = 95
_ROWS_PER_CHUNK = 1 << 16


@dataclass(frozen=True)
class Store:
    """A frame store on disk, readable by any number of threads and, pickled, by other processes.

    `cameras` are full LeRobot names; `prompts` the distinct instructions; `digest` names the
    dataset's content.
    """

    path: Path
    source: str
    digest: str
    fps: int
    cameras: tuple[str, ...]
    prompts: tuple[str, ...]
    image_size: int
    encoding: Encoding

    @property
    def name(self) -> str:
        """Where it comes from."""
        return self.source

    @cached_property
    def alike(self) -> Int64[np.ndarray, "e"]:
        """For each episode the first one with the same states and actions."""
        return _alike(self.starts, self.lengths, self.states, self.actions)

    @cached_property
    def runs(self) -> Runs:
        """Every episode is one run."""
        numbers = np.arange(len(self.lengths))
        return Runs(numbers, np.zeros_like(numbers), self.lengths, self.tasks)

    @cached_property
    def lengths(self) -> Int64[np.ndarray, "e"]:
        """Frames of each episode."""
        return self._array("lengths")

    @cached_property
    def starts(self) -> Int64[np.ndarray, "e"]:
        """Number of each episode's first frame; frames are numbered through all episodes."""
        return np.cumsum(self.lengths) - self.lengths

    @cached_property
    def tasks(self) -> Int64[np.ndarray, "e"]:
        """Which of `prompts` each episode has."""
        return self._array("tasks")

    @cached_property
    def states(self) -> Float32[np.ndarray, "n s"]:
        """Robot state at every frame, in the dataset's units."""
        return self._array("states")

    @cached_property
    def actions(self) -> Float32[np.ndarray, "n a"]:
        """Action taken at every frame, in the dataset's units."""
        return self._array("actions")

    def prompt(self, episode: int) -> str:
        """What the robot was told to do in that episode."""
        return self.prompts[self.tasks[episode]]

    def images(
        self, frame: int, cameras: Sequence[str] | None = None
    ) -> tuple[UInt8[np.ndarray, "s s 3"], ...]:
        """Pictures of a frame by `cameras` (all, if None), black-padded squares of
        `image_size`."""
        return tuple(
            self._decode(self._readers[camera].read([int(frame)])[0])
            for camera in cameras or self.cameras
        )

    def stats(self, episodes: Sequence[int] | None = None) -> dict[str, Stats]:
        """Exact statistics of states and actions over the given episodes (all, if None)."""
        rows = np.arange(len(self.states))
        if episodes is not None:
            spans = [rows[self.starts[e] : self.starts[e] + self.lengths[e]] for e in episodes]
            rows = np.concatenate(spans)
        return {STATE: describe(self.states[rows]), ACTION: describe(self.actions[rows])}

    def __reduce__(self) -> tuple[Callable[[Path], "Store"], tuple[Path]]:
        return open_store, (self.path,)

    @cached_property
    def _readers(self) -> dict[str, Any]:
        return {
            camera: ArrayRecordReader(str(_frames(self.path, camera))) for camera in self.cameras
        }

    def _array(self, name: str) -> np.ndarray:
        return ts.open(_zarr(self.path, name), open=True, read=True).result().read().result()

    def _decode(self, record: bytes) -> UInt8[np.ndarray, "s s 3"]:
        if self.encoding == "jpeg":
            return np.asarray(Image.open(io.BytesIO(record), formats=("JPEG",)))
        return np.frombuffer(record, np.uint8).reshape(self.image_size, self.image_size, 3)


def open_store(path: str | Path) -> Store:
    """Opens a frame store.

    Raises:
      FileNotFoundError: there is none, or it was not completed.
      ValueError: it was written in another format version.
    """
    path = Path(path)
    description = path / "store.json"
    if not description.is_file():
        raise FileNotFoundError(
            f"{description}: missing, so {path} is no frame store; make one with "
            "`python -m tools.data convert`."
        )
    fields = json.loads(description.read_text())
    if fields["format"] != _FORMAT:
        raise ValueError(
            f"{description}: format is {fields['format']}, this version reads {_FORMAT}; "
            "delete the store and convert the dataset again."
        )
    fields |= {"cameras": tuple(fields["cameras"]), "prompts": tuple(fields["prompts"])}
    return Store(path=path, **{k: v for k, v in fields.items() if k != "format"})


def build_store(
    dataset: Dataset,
    path: str | Path,
    image_size: int,
    encoding: Encoding = "jpeg",
    progress: Progress | None = None,
) -> Store:
    """Decodes every frame of `dataset` once into a store at `path`.

    Args:
      progress: called after each episode with frames done and frames in all.

    Raises:
      ValueError: `path` exists, the dataset has no state, action or camera, or a frame cannot be
        decoded. Nothing is left at `path` then.
    """
    path = Path(path)
    if path.exists():
        raise ValueError(f"{path}: already exists; delete it or choose another path.")
    missing = {STATE, ACTION} - set(dataset.column_names)
    if missing or not dataset.cameras:
        raise ValueError(
            f"{dataset.root / 'meta/info.json'}: no feature {sorted(missing) or 'of dtype video'}; "
            f"a policy needs '{STATE}', '{ACTION}' and a camera, rename yours in the dataset."
        )
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _write(dataset, partial, image_size, encoding, progress)
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return open_store(path)


def cached_store(
    dataset_path: str | Path,
    image_size: int,
    encoding: Encoding,
    cache_dir: str | Path,
    progress: Progress | None = None,
) -> Store:
    """The store of a dataset's present content, built only if the cache lacks it.

    Its folder's name holds the content's digest, so a changed dataset gets a new store; processes
    that ask at once wait for the one that builds.
    """
    dataset, cache = open_dataset(dataset_path), Path(cache_dir)
    path = cache / f"{content_digest(dataset.root)[:16]}-{image_size}-{encoding}"
    cache.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return open_store(path)
        return build_store(dataset, path, image_size, encoding, progress)


def content_digest(root: Path) -> str:
    """SHA-256 over metadata and parquet bytes and the sizes of the videos, hexadecimal."""
    digest = hashlib.sha256()
    for folder in ("meta", "data", "videos"):
        for file in sorted(p for p in (root / folder).rglob("*") if p.is_file()):
            digest.update(f"{file.relative_to(root)}:{file.stat().st_size}\n".encode())
            if folder != "videos":
                with file.open("rb") as content:
                    while block := content.read(1 << 20):
                        digest.update(block)
    return digest.hexdigest()


def _write(
    dataset: Dataset, path: Path, size: int, encoding: Encoding, progress: Progress | None
) -> None:
    prompts: dict[str, int] = {}
    tasks = [prompts.setdefault(dataset.task(i), len(prompts)) for i in range(dataset.num_episodes)]
    _write_array(path, "states", dataset.column(STATE).astype(np.float32))
    _write_array(path, "actions", dataset.column(ACTION).astype(np.float32))
    _write_array(path, "lengths", dataset.lengths)
    _write_array(path, "tasks", np.array(tasks, np.int64))
    (path / "frames").mkdir()
    writers = {
        camera: ArrayRecordWriter(str(_frames(path, camera)), "group_size:1,uncompressed")
        for camera in dataset.cameras
    }
    done = 0
    with ThreadPoolExecutor() as pool:
        for episode in range(dataset.num_episodes):
            for camera, writer in writers.items():
                frames = dataset.frames(episode, camera)
                for record in pool.map(lambda frame: _encoded(frame, size, encoding), frames):
                    writer.write(record)
            done += int(dataset.lengths[episode])
            if progress is not None:
                progress(done, dataset.num_frames)
    for writer in writers.values():
        writer.close()
    description = {
        "format": _FORMAT,
        "source": str(dataset.root),
        "digest": content_digest(dataset.root),
        "fps": dataset.fps,
        "cameras": dataset.cameras,
        "prompts": list(prompts),
        "image_size": size,
        "encoding": encoding,
    }
    (path / "store.json").write_text(json.dumps(description, indent=2, ensure_ascii=False))


def _write_array(path: Path, name: str, array: np.ndarray) -> None:
    chunk = [_ROWS_PER_CHUNK, *array.shape[1:]]
    layout = {"schema": {"chunk_layout": {"chunk": {"shape": chunk}}}}
    spec = _zarr(path, name) | layout
    store = ts.open(spec, create=True, dtype=array.dtype, shape=array.shape).result()
    store.write(array).result()


def _encoded(frame: UInt8[np.ndarray, "_h _w 3"], size: int, encoding: Encoding) -> bytes:
    picture = resize_with_pad(frame, size)
    if encoding == "raw":
        return picture.tobytes()
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "JPEG", quality=_JPEG_QUALITY, subsampling=0)
    return buffer.getvalue()


def _frames(path: Path, camera: str) -> Path:
    return path / "frames" / f"{camera}.array_record"


def _zarr(path: Path, name: str) -> dict[str, Any]:
    return {"driver": "zarr3", "kvstore": f"file://{(path / 'columns' / name).absolute()}/"}


def _alike(
    starts: Int64[np.ndarray, "e"],
    lengths: Int64[np.ndarray, "e"],
    *columns: Shaped[np.ndarray, "n _d"],
) -> Int64[np.ndarray, "e"]:
    """For each episode the first one that has the same values in all `columns`."""
    seen: dict[bytes, int] = {}
    first = []
    for episode, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        values = b"".join(column[start : start + length].tobytes() for column in columns)
        first.append(seen.setdefault(hashlib.sha256(values).digest(), episode))
    return np.array(first, np.int64)
