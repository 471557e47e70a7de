"""Conversion of a dataset into a frame store, as parts that any machine can make in any order.

Each part, a shard of consecutive episodes or the tables, is a pure function of the dataset's
content and the settings: the same bytes from any run, under a name that holds the digest of both. A
part's manifest is written after its files and `store.json` after all parts, so parts finished
before a crash are kept, and the others are made again.
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from math import isqrt
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import google_crc32c
import numpy as np
import simplejpeg
from array_record.python.array_record_module import ArrayRecordWriter
from jaxtyping import Int64, UInt8

from data.dataset import Dataset, picture_shape
from data.errors import DatasetError
from data.files.checksums import as_sums, sums_of
from data.files.folder import Folder, LocalFolder
from data.files.job import Done, adding_up, cores, in_threads, run_job
from data.files.limits import MOST_PIXELS
from data.files.names import path_within
from data.frames import fit_of
from data.lake.ranges import shard_episodes
from data.store import tables
from models.config import to_json
from models.files.address import whole
from models.inputs.parts import part_class
from models.inputs.pictures import PictureFit, Size, in_grey_levels, shape_of

Encoding = Literal["jpeg", "raw"]
Progress = Callable[[int, int], None]

FORMAT = 3
DESCRIPTION, FILES = "store.json", "files.json"
DEFAULTS: dict[str, Any] = {"resize": "antialiased", "every": 1, "sources": {}, "fits": {}}
"""Settings that stores leave out if they have these values."""
SUFFIX = {"jpeg": ".array_record", "raw": ".rgb"}

_QUALITY, _SUBSAMPLING = 95, "420"
_SCRATCH, _LOCK = ".making-", ".lock"
_BLOCK = 16


@dataclass(frozen=True)
class Settings:
    """Settings of stored images: their size in pixels; their encoding; about how many frames of
    each camera a shard covers (a quarter of a gigabyte as JPEG at 224 pixels); the kind of
    `PictureFit` by which images are fitted to that size, rounded to grey levels; the frames of
    an episode from one stored image to the next, as a mixture's `every` draws them; and cameras
    whose images are fitted in another way.

    Raises:
      ValueError: no image has that size, or there is no such fit.
    """

    image_size: Size
    encoding: Encoding = "jpeg"
    shard_frames: int = 16384
    resize: str = "antialiased"
    every: int = 1
    fits: Mapping[str, PictureFit] = field(default_factory=dict)

    def __post_init__(self) -> None:
        most = isqrt(MOST_PIXELS)
        if not all(1 <= side <= most for side in shape_of(self.image_size)):
            raise ValueError(
                f"The image size is {self.image_size}; give the side of the images in pixels, 1 to "
                f"{most}."
            )
        part_class(PictureFit, self.resize)

    @property
    def non_defaults(self) -> dict[str, Any]:
        """The settings as stores give them, without those that equal `DEFAULTS`, as in stores made
        before there was a choice."""
        values = vars(self) | {"fits": {name: to_json(fit) for name, fit in self.fits.items()}}
        return {k: v for k, v in values.items() if (k, v) not in DEFAULTS.items()}


class WorkUnit(NamedTuple):
    """A unit of work: the shard of episodes `first` to `stop`, or the tables (`stop` is 0).
    `pictures` measures how much work it is."""

    name: str
    first: int
    stop: int
    pictures: int

    @property
    def manifest(self) -> str:
        """The file that marks the part as finished, with the size and SHA-256 of each of its
        files."""
        return f"parts/{self.name}.json"


@dataclass(frozen=True)
class PartMaking:
    """A conversion as a job, with parts as its units and images as the measure of work."""

    dataset: Dataset
    settings: Settings
    folder: Folder

    def __call__(self, part: WorkUnit, done: Done) -> None:
        """Makes one part in a scratch folder, moves its files into place and writes its manifest.

        Args:
          done: called after each episode of a camera with the number of images made.

        Raises:
          DatasetError: a frame or column cannot be read; names the file.
        """
        with _scratch(self.folder) as scratch:
            if part.stop:
                _write_shard(self.dataset, part, self.settings, scratch, done)
            else:
                tables.write(self.dataset, scratch)
            files = (path for path in scratch.rglob("*") if path.is_file())
            names = sorted(path.relative_to(scratch).as_posix() for path in files)
            manifest = sums_of(scratch, names)
            for name in names:
                _place(scratch, name, self.folder)
            _write_json(manifest, scratch, part.manifest, self.folder)


def content_key(dataset: Dataset, settings: Settings) -> str:
    """Identifies a store by its content: 16 hexadecimal digits of a SHA-256 over the dataset's
    digest and everything that decides the bytes made from it."""
    content = [FORMAT, _QUALITY, _SUBSAMPLING, dataset.digest, *settings.non_defaults.values()]
    if getattr(dataset, "has_subtasks", False):  # stores made before they were read lack them
        content.append("subtasks")
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def pictures_of(lengths: Int64[np.ndarray, " e"], every: int) -> Int64[np.ndarray, " e"]:
    """Number of stored images of a camera in episodes of these lengths."""
    return -(-lengths // every)


def parts_of(dataset: Dataset, settings: Settings) -> list[WorkUnit]:
    """All parts of a store: its tables and its shards."""
    key = content_key(dataset, settings)
    stored = pictures_of(dataset.lengths, settings.every)
    pictures = np.pad(np.cumsum(stored * dataset.present.sum(axis=1)), (1, 0))
    firsts = shard_episodes(dataset.lengths, settings.shard_frames)
    shards = [
        WorkUnit(
            f"{key}-{number:05d}", int(first), int(stop), int(pictures[stop] - pictures[first])
        )
        for number, (first, stop) in enumerate(pairwise(firsts))
    ]
    return [WorkUnit(f"{key}-tables", 0, 0, 0), *shards]


def convert(
    dataset: Dataset,
    folder: Folder,
    settings: Settings,
    progress: Progress | None = None,
) -> None:
    """Makes the parts of a store that `folder` does not have yet, then writes its description. Runs
    as a job (data/files/job.py), in threads by default.

    Every thread has its own dataset and about four cores, because decoding, which releases Python's
    lock, takes a quarter of the work. A thread holds at most two decoded episodes of a camera.

    Args:
      progress: called with the frames done and the frames in total.

    Raises:
      ValueError: the folder holds something else, or the dataset has no camera or column.
      DatasetError: a frame cannot be decoded; names the file. Finished parts stay.
    """
    if not dataset.cameras or not tables.numeric_columns(dataset):
        raise ValueError(
            f"{dataset.root}: has no {'numeric column' if dataset.cameras else 'camera'}; a policy "
            "learns from images and numbers, so record both."
        )
    parts = parts_of(dataset, settings)
    _require_ours(folder, parts)
    with _alone(folder):
        if folder.exists(DESCRIPTION):
            return
        finished = folder.list("parts/*.json")
        total, frames = sum(part.pictures for part in parts), int(dataset.lengths.sum())

        def report(pictures: int, total: int) -> None:
            if progress is not None:
                progress(frames * pictures // max(total, 1), frames)

        told = adding_up(report, total)
        told(sum(part.pictures for part in parts if part.manifest in finished))
        todo = [part for part in parts if part.manifest not in finished]
        if isinstance(folder, LocalFolder):  # others may have another working directory
            folder = LocalFolder(whole(folder.root))
        here = in_threads(max(1, (os.cpu_count() or 1) // 4))
        for _ in run_job(PartMaking(dataset, settings, folder), todo, told, here):
            pass
        _describe(dataset, folder, settings, parts)


def checksum(description: Mapping[str, Any]) -> str:
    """Hexadecimal SHA-256 over the content of `store.json` except its "sum", which is this
    value."""
    told = {name: value for name, value in description.items() if name != "sum"}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def shard_file(key: str, shard: int, camera: str, encoding: Encoding) -> str:
    """Name of a store's file for a camera's images of a shard."""
    return f"frames/{key}-{shard:05d}/{camera}{SUFFIX[encoding]}"


def raw_record(shape: tuple[int, int]) -> np.dtype:
    """A record of a raw shard: an image, and the CRC-32C of its bytes."""
    return np.dtype([("picture", np.uint8, (*shape, 3)), ("crc", "<u4")])


def _write_shard(
    dataset: Dataset,
    part: WorkUnit,
    settings: Settings,
    folder: Path,
    done: Done,
) -> None:
    """Writes the images of a shard, those of each camera in frame order. While an episode of a
    camera is encoded, the next one is decoded."""
    key, number = part.name.rsplit("-", 1)
    encoding = settings.encoding
    with ThreadPoolExecutor(cores()) as pool, ExitStack() as closing:
        writers: dict[str, Any] = {}

        def encode(
            frames: UInt8[np.ndarray, "t h w 3"], fit: PictureFit
        ) -> list[Future[list[bytes]]]:
            blocks = (frames[i : i + _BLOCK] for i in range(0, len(frames), _BLOCK))
            return [pool.submit(_encoded, block, fit, encoding) for block in blocks]

        def write(camera: str, blocks: list[Future[list[bytes]]]) -> None:
            if camera not in writers:
                path = path_within(folder, shard_file(key, int(number), camera, encoding))
                writers[camera] = closing.enter_context(_writer(path, encoding))
            for block in blocks:
                for record in block.result():
                    writers[camera].write(record)
                done(len(block.result()))

        lengths = dataset.lengths
        seen = np.argwhere(dataset.present[part.first : part.stop])
        waiting: tuple[str, list[Future[list[bytes]]]] | None = None
        for i, c in seen.tolist():
            camera = dataset.cameras[c]
            decoding = pool.submit(dataset.frames, part.first + i, camera)
            if waiting is not None:
                write(*waiting)
            frames, fit = decoding.result(), fit_of(settings, camera)
            if fit.border and frames.shape[1:3] != picture_shape(dataset.features[camera]):
                raise DatasetError(
                    str(dataset.root),
                    f"episode {part.first + i}, {camera}",
                    f"has pictures of {frames.shape[1]} × {frames.shape[2]} pixels, but the shape "
                    f"of {camera} in its features is another; correct it.",
                )
            if len(frames) != lengths[part.first + i]:
                raise DatasetError(
                    str(dataset.root),
                    f"episode {part.first + i}, {camera}",
                    f"has {len(frames)} frames, expected {lengths[part.first + i]}; copy the "
                    "dataset again.",
                )
            waiting = camera, encode(frames[:: settings.every], fit)
        if waiting is not None:
            write(*waiting)


def _encoded(
    frames: UInt8[np.ndarray, "t h w 3"], fit: PictureFit, encoding: Encoding
) -> list[bytes]:
    pictures = (np.ascontiguousarray(in_grey_levels(fit(frame))) for frame in frames)
    if encoding == "raw":
        return [_with_crc(picture.tobytes()) for picture in pictures]
    return [simplejpeg.encode_jpeg(p, _QUALITY, "RGB", _SUBSAMPLING) for p in pictures]


def _with_crc(picture: bytes) -> bytes:
    return picture + google_crc32c.value(picture).to_bytes(4, "little")


@contextmanager
def _writer(path: Path, encoding: Encoding) -> Iterator[ArrayRecordWriter | BinaryIO]:
    path.parent.mkdir(parents=True, exist_ok=True)
    if encoding == "raw":
        with path.open("wb") as file:
            yield file
        return
    writer = ArrayRecordWriter(str(path), "group_size:1,uncompressed")
    try:
        try:
            yield writer
        finally:
            writer.close()
    except RuntimeError as error:
        raise _of_the_disk(error, path) from error


def _of_the_disk(error: RuntimeError, path: Path) -> Exception:
    """The operating system's error that ArrayRecord's message contains, if any."""
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE):
        if os.strerror(number) in str(error):
            return OSError(number, os.strerror(number), str(path))
    return error


def _require_ours(folder: Folder, parts: Sequence[WorkUnit]) -> None:
    """Raises ValueError if the folder holds something that is no part of this store."""
    strange = sorted(set(folder.list("parts/*.json")) - {part.manifest for part in parts})
    if isinstance(folder, LocalFolder) and folder.root.is_dir():
        names = sorted(path.name for path in folder.root.iterdir())
        strange += [n for n in names if n not in _ENTRIES and not n.startswith(_SCRATCH)]
    if strange:
        raise ValueError(
            f"{folder.url}: holds '{strange[0]}', which does not belong to the store to be written "
            "there; delete the folder or choose another."
        )


def _describe(
    dataset: Dataset, folder: Folder, settings: Settings, parts: Sequence[WorkUnit]
) -> None:
    """Writes the list of the store's files and, last, the store's description."""
    files: dict[str, tuple[int, str]] = {}
    for part in parts:
        try:
            files |= as_sums(json.loads(folder.local(part.manifest).read_text()))
        except (ValueError, RecursionError):
            raise DatasetError(
                folder.path(part.manifest), "file", "is damaged; delete it and convert again."
            ) from None
    bordered = (camera for camera in dataset.cameras if fit_of(settings, camera).border)
    sources = {camera: picture_shape(dataset.features[camera]) for camera in bordered}
    description = {
        "format": FORMAT,
        "key": content_key(dataset, settings),
        "name": dataset.name,
        "digest": dataset.digest,
        "fps": dataset.fps,
        "cameras": dataset.cameras,
        "columns": tables.numeric_columns(dataset),
        **settings.non_defaults,
        **({"sources": sources} if sources else {}),
        "files": hashlib.sha256(_json(files)).hexdigest(),
    }
    with _scratch(folder) as scratch:
        _write_json(files, scratch, FILES, folder)
        _write_json(description | {"sum": checksum(description)}, scratch, DESCRIPTION, folder)


_ENTRIES = (
    "parts",
    "frames",
    "columns",
    *tables.FILES,
    *tables.OPTIONAL,
    FILES,
    DESCRIPTION,
    _LOCK,
)


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1, ensure_ascii=False).encode()


def _write_json(value: Any, scratch: Path, name: str, folder: Folder) -> None:
    path = scratch / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_json(value))
    _place(scratch, name, folder)


def _place(scratch: Path, name: str, folder: Folder) -> None:
    if isinstance(folder, LocalFolder):
        place = path_within(folder.root, name)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(scratch / name, place)
    else:
        folder.put(scratch / name, name)


@contextmanager
def _scratch(folder: Folder) -> Iterator[Path]:
    """A new folder for files that are then moved into place at once."""
    root = folder.root if isinstance(folder, LocalFolder) else None
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=root) as scratch:
        yield Path(scratch)


@contextmanager
def _alone(folder: Folder) -> Iterator[None]:
    """Keeps a second process from converting to the same local folder, and removes what a killed
    process or a lost node has left."""
    if not isinstance(folder, LocalFolder):
        yield
        return
    folder.root.mkdir(parents=True, exist_ok=True)
    with (folder.root / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _sweep(folder.root)
        yield
        _sweep(folder.root)


def _sweep(root: Path) -> None:
    for left in root.glob(f"{_SCRATCH}*"):
        shutil.rmtree(left)
