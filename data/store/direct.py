"""Training on a dataset as is: images are decoded when a batch needs them, without a store.

Use this for a first look or if disk space is short; training from a frame store costs a fraction of
it. Numbers lie beside seek tables in a cache. Encoded images in the parquet are copied there too,
because reading one of them from parquet means reading hundreds (LeRobot v2 and v3 layouts).
"""

import hashlib
import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import google_crc32c
import numpy as np

from data.dataset import Dataset
from data.errors import DatasetError
from data.files import cached
from data.files.checksums import Sums, compare, sums_of
from data.files.folder import LocalFolder
from data.files.names import path_within
from data.frames import Rows, Squares, fit_of
from data.lerobot.dataset import LeRobotDataset
from data.store import tables
from data.store.checked_tables import CheckedTable
from data.store.convert import FILES, FORMAT
from data.store.episode_tables import DatasetTables
from data.video.seek import SeekTable, read_table, rgb, seek_table, write_table
from data.video.shrink import shrink_with_pad, shrinks
from data.video.still_images import is_turned
from models.inputs.pictures import Antialiased, PictureFit, Size

_PICTURES = ".bin"
_SIGNATURES = {b"\x89PN": "png", b"\xff\xd8\xff": "mjpeg"}


def open_direct(
    dataset: Dataset,
    image_size: Size,
    cache_dir: str | Path,
    resize: str = "antialiased",
    exact: bool = False,
    fits: Mapping[str, PictureFit] = MappingProxyType({}),
) -> "Direct":
    """Opens a LeRobot dataset for training without decoding it first.

    The first time, its numbers and any images in its parquet are copied to `cache_dir`, under a
    name that holds the content's digest. Seek tables of videos are added as frames are read.
    Numbers are checked against their checksums at each opening, images when they are read.

    Args:
      exact: shrinks images with Pillow, to the last bit as a store and an acting policy do.
        Otherwise no value differs by more than one grey level, in a quarter of the time.
      fits: cameras whose images are fitted in another way.

    Raises:
      ValueError: the dataset has another format, or has no camera or no numeric column.
      DatasetError: a file of it, or of what was copied, is missing or damaged.
    """
    if not isinstance(dataset, LeRobotDataset):
        raise ValueError(
            f"{dataset.name}: only LeRobot datasets can be read without a frame store; make one "
            "with `python -m tools.data convert`."
        )
    if not dataset.cameras or not tables.numeric_columns(dataset):
        raise ValueError(
            f"{dataset.root}: has no {'numeric column' if dataset.cameras else 'camera'}; a policy "
            "learns from images and numbers, so record both."
        )
    cache = Path(cache_dir)
    content = f"{FORMAT} {dataset.digest}{' subtasks' if dataset.has_subtasks else ''}"
    key = hashlib.sha256(content.encode()).hexdigest()[:16]
    folder = cache / f"{key}-straight"
    cached.make_folder(folder, lambda made: _write(dataset, made))
    for name, what in compare(LocalFolder(folder), _sums(folder)):
        raise _damaged(folder, name, what)
    return Direct(dataset, image_size, folder, cache / "seek", resize, exact, dict(fits))


@dataclass(frozen=True)
class Direct(DatasetTables):
    """`Frames` of a dataset's own videos and images; make it with `open_direct`.

    `folder` has its numbers and images, `seek` the seek tables of videos.
    """

    dataset: LeRobotDataset
    image_size: Size
    folder: Path
    seek: Path
    resize: str = "antialiased"
    exact: bool = False
    fits: Mapping[str, PictureFit] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def images(self, rows: Rows, camera: str, out: Squares) -> None:
        """Fills each of `out` (of the fit's dtype or wider) with a frame's image.

        Raises:
          ValueError: there is no such camera, or an episode lacks it.
          MissingFileError: a video is missing.
          DatasetError: an image cannot be decoded; names the file and the frame.
        """
        if camera not in self.cameras:
            raise ValueError(f"{self.name}: no camera '{camera}'; there are {list(self.cameras)}.")
        rows = np.asarray(rows)
        episode = np.searchsorted(self.starts, rows, "right") - 1
        absent = ~self.present[episode, self.cameras.index(camera)]
        if absent.any():
            raise ValueError(f"{self.name}: episode {episode[absent][0]} has no '{camera}'.")
        read = self._read_stored if self._is_stored(camera) else self._read_videos
        read(camera, fit_of(self, camera), episode, rows - self.starts[episode], out)

    def __reduce__(self) -> tuple[Any, ...]:
        fit = self.resize, self.exact, self.fits
        return Direct, (self.dataset, self.image_size, self.folder, self.seek, *fit)

    def _is_stored(self, camera: str) -> bool:
        return self.dataset.features[camera]["dtype"] == "image"

    def _read_videos(
        self, camera: str, fit: PictureFit, episode: Rows, step: Rows, out: Squares
    ) -> None:
        wanted: dict[Path, list[tuple[float, int]]] = defaultdict(list)
        for number, i in enumerate(episode.tolist()):
            with self._lock:
                path, start = self.dataset.video(i, camera)
            wanted[path].append((start, number))
        for path, places in wanted.items():
            starts, numbers = (np.array(values) for values in zip(*places, strict=True))
            table = seek_table(path, self.seek)
            frames = table.at(starts, step[numbers], self.fps)
            self._fill(fit, table, frames, [out[k] for k in numbers.tolist()])

    def _read_stored(
        self, camera: str, fit: PictureFit, episode: Rows, step: Rows, out: Squares
    ) -> None:
        table = self._pictures(camera)
        for i, k, square in zip(episode.tolist(), step.tolist(), out, strict=True):
            frame = np.searchsorted(table.pts, [self.starts[i] + k])
            try:
                self._fill(fit, table, frame, [square])
            except DatasetError:
                raise DatasetError(
                    self.dataset.root,
                    f"camera '{camera}', episode {i}, frame {k}",
                    f"is not a readable image; delete {self.folder}, which is then made again, or "
                    "if that does not help, copy or record the dataset again.",
                ) from None

    def _fill(self, fit: PictureFit, table: SeekTable, frames: Rows, out: Squares) -> None:
        """Decodes frames of a file, each once, into their squares."""
        squares = defaultdict(list)
        for frame, square in zip(frames.tolist(), out, strict=True):
            squares[frame].append(square)
        fast = isinstance(fit, Antialiased) and not self.exact
        for frame, picture in table.decode(sorted(squares)):
            first, *others = squares[frame]
            if fast and shrinks(picture, fit.shape):
                shrink_with_pad(picture, first)
            else:
                np.copyto(first, fit(rgb(picture)))
            for square in others:
                np.copyto(square, first)

    def _pictures(self, camera: str) -> SeekTable:
        """Seek table of a camera's encoded images, which were copied from the parquet."""
        with self._lock:
            if camera not in self._tables:
                encoded = _encoded_file(self.folder, camera)
                self._tables[camera] = read_table(encoded.with_suffix(".arrow"), encoded)
            return self._tables[camera]

    def _table(self, name: str) -> CheckedTable:
        file = self.folder / name
        content = file.read_bytes()
        if hashlib.sha256(content).hexdigest() != _sums(self.folder)[name][1]:
            raise _damaged(self.folder, name, "does not hold the bytes it was written with")
        return CheckedTable(content, file, len(self.cameras), self._dims)

    def _holds(self, name: str) -> bool:
        return name in _sums(self.folder)

    @cached_property
    def _tables(self) -> dict[str, SeekTable]:
        return {}


def _write(dataset: LeRobotDataset, folder: Path) -> None:
    """Writes everything that is read except videos."""
    folder.mkdir()
    tables.write(dataset, folder)
    for camera in dataset.cameras:
        if dataset.features[camera]["dtype"] == "image":
            _copy_pictures(dataset, camera, _encoded_file(folder, camera))
    checked = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.suffix != _PICTURES]
    names = [path.relative_to(folder).as_posix() for path in checked]
    cached.write_json(folder / FILES, sums_of(folder, names))


def _sums(folder: Path) -> Sums:
    """Size and SHA-256 of everything copied except images, which have checksums in their tables."""
    try:
        return cached.read_json(folder / FILES)
    except FileNotFoundError:
        raise _damaged(folder, FILES, "is missing") from None
    except DatasetError:
        raise _damaged(folder, FILES, "does not hold the bytes it was written with") from None


def _damaged(folder: Path, name: str, what: str) -> DatasetError:
    return DatasetError(
        folder / name, "checksum", f"{what}; delete {folder}, and it is copied again."
    )


def _copy_pictures(dataset: LeRobotDataset, camera: str, path: Path) -> None:
    """Copies the encoded images of a camera end to end into a file, and writes a seek table of them
    in which an image's time is the frame's number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sizes = np.zeros(dataset.num_frames, np.int64)
    crcs = np.zeros(dataset.num_frames, np.uint32)
    kinds: set[str] = set()
    row = 0
    with path.open("wb") as file:
        for episode, length in enumerate(dataset.lengths.tolist()):
            if dataset.present[episode, dataset.cameras.index(camera)]:
                pictures = dataset.encoded(episode, camera).field("bytes").to_pylist()
                for number, picture in enumerate(pictures, row):
                    sizes[number] = len(picture)
                    crcs[number] = google_crc32c.value(picture)
                    kinds.add("" if is_turned(picture) else _SIGNATURES.get(picture[:3], ""))
                    file.write(picture)
            row += length
    if len(kinds) != 1 or "" in kinds:
        raise DatasetError(
            dataset.root,
            f"camera '{camera}'",
            "holds images other than PNG or JPEG, a mix of both, or some that EXIF turns; make a "
            "frame store instead, with `python -m tools.data convert`.",
        )
    rows = np.flatnonzero(sizes)
    each = np.arange(len(rows))
    offset = np.cumsum(sizes) - sizes
    table = SeekTable(
        path, kinds.pop(), b"", Fraction(1), offset[rows], sizes[rows], rows, each, each, crcs[rows]
    )
    write_table(table, path.with_suffix(".arrow"))


def _encoded_file(folder: Path, camera: str) -> Path:
    return path_within(folder, f"pictures/{camera}{_PICTURES}")
