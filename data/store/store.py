"""The frame store that training reads: images at the model's size, each its own record.

Decoding random video frames costs a hundred times as much as reading records, so a dataset is
decoded once (data.store.convert). Images lie in shards of ArrayRecord (JPEG) or flat files (raw
uint8), numbers in zarr arrays (data.store.tables). Damaged bytes are never used: columns and tables
are checked against their SHA-256 at opening, each image against a CRC-32C when it is read.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import google_crc32c
import numpy as np
import simplejpeg
from array_record.python.array_record_module import ArrayRecordReader
from jaxtyping import Float32, Int64, Shaped

from data.dataset import Dataset
from data.errors import DatasetError
from data.files.checksums import Progress, compare
from data.files.folder import Folder, LocalFolder, open_folder
from data.files.partial import require_apart
from data.files.shards import OpenShards, require_room
from data.frames import Rows, Squares, fit_of
from data.store import convert, tables
from data.store.checked_tables import CheckedTable
from data.store.convert import Encoding, Settings
from data.store.description import damaged, described, kept, listed
from data.store.episode_tables import EpisodeTables
from models.config import from_json
from models.inputs.pictures import PictureFit, Size, set_border

_open = OpenShards()


@dataclass(frozen=True)
class Store(EpisodeTables):
    """A frame store on disk or in a bucket: `Frames` for any number of threads and, pickled, for
    other processes, which do not check its columns again.

    `columns` gives the number of values in a row of each column; `key` identifies the store's
    content, `digest` the dataset's, and `files` is the checksum of the list of files. Images in a
    bucket are fetched when first needed, and stay in the local cache up to its size limit
    (data/files/shards.py). `sources`: height and width of each camera's pictures before they were
    fitted, if levels stand beside them that no image file can hold.
    """

    folder: Folder
    key: str
    name: str
    digest: str
    fps: float
    cameras: tuple[str, ...]
    columns: dict[str, int]
    image_size: Size
    encoding: Encoding
    shard_frames: int
    files: str
    resize: str = "antialiased"
    every: int = 1
    sources: Mapping[str, Sequence[int]] = field(default_factory=dict)
    fits: Mapping[str, PictureFit] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """Its folder or URL."""
        return self.folder.url

    def column(self, name: str, rows: Int64[np.ndarray, "*n"]) -> Float32[np.ndarray, "*n d"]:
        """Values of a column at these frames, in the dataset's units.

        Raises:
          ValueError: there is no such column.
          DatasetError: its file is damaged.
        """
        if name not in self.columns:
            raise ValueError(f"{self.path}: no column '{name}'; there are {list(self.columns)}.")
        shape = (self._frames, self.columns[name])
        return tables.read_rows(self.folder, self.key, name, shape, rows)

    def images(self, rows: Rows, camera: str, out: Squares) -> None:
        """Fills each of `out` (C-contiguous, of the fit's dtype or uint8) with a frame's image,
        rounded to grey levels.

        Raises:
          ValueError: there is no such camera, an episode lacks it, or the store leaves out a frame.
          DatasetError: an image is damaged; names the shard's file and the frame.
        """
        rows = np.asarray(rows)
        shard, record = self._locate(rows, camera)
        fit = fit_of(self, camera)
        for number in np.unique(shard).tolist():
            here = np.flatnonzero(shard == number)
            file = convert.shard_file(self.key, number, camera, self.encoding)
            jpeg = self.encoding == "jpeg"
            read = self._read_jpegs if jpeg else partial(self._read_raw, fit.shape)
            read(file, record[here].tolist(), rows[here].tolist(), [out[i] for i in here.tolist()])
        if camera in self.sources:
            height, width = self.sources[camera]
            for square in out:
                if square.dtype != np.uint8:
                    set_border(square, fit.border, (height, width))

    def __reduce__(self) -> tuple[Callable[[str, str], "Store"], tuple[str, str]]:
        return _reopened, (self.path, self.files)

    @cached_property
    def _frames(self) -> int:
        return int(self.lengths.sum())

    def _table(self, name: str) -> CheckedTable:
        content = kept(self.folder, name, self.files)
        return CheckedTable(content, self.folder.path(name), len(self.cameras), self.columns)

    def _holds(self, name: str) -> bool:
        return name in listed(self.folder, self.files)

    @cached_property
    def _shards(self) -> Int64[np.ndarray, " shards_plus_1"]:
        return convert.shard_episodes(self.lengths, self.shard_frames)

    @cached_property
    def _before(self) -> Int64[np.ndarray, "c {len(self.lengths)}+1"]:
        """Number of images of each camera before each episode."""
        stored = convert.pictures_of(self.lengths, self.every)
        counts = np.cumsum(stored[:, None] * self.present, axis=0).T
        return np.pad(counts, ((0, 0), (1, 0)))

    def _locate(self, rows: Rows, camera: str) -> tuple[Rows, Rows]:
        """The shard that has each frame's image, and the image's number in that shard's file."""
        if camera not in self.cameras:
            raise ValueError(f"{self.path}: no camera '{camera}'; there are {list(self.cameras)}.")
        if rows.size and not 0 <= rows.min() <= rows.max() < self._frames:
            raise IndexError(f"{self.path}: frames {rows} are not all in 0..{self._frames - 1}.")
        at = self.cameras.index(camera)
        episode = np.searchsorted(self.starts, rows, "right") - 1
        absent = ~self.present[episode, at]
        if absent.any():
            raise ValueError(f"{self.path}: episode {episode[absent][0]} has no '{camera}'.")
        place = rows - self.starts[episode]
        if (left_out := place % self.every != 0).any():
            raise ValueError(
                f"{self.path}: has one image for every {self.every} frames of an episode, and none "
                f"for frame {rows[left_out][0]}; convert the dataset again."
            )
        shard = np.searchsorted(self._shards, episode, "right") - 1
        before = self._before[at]
        record = before[episode] - before[self._shards[shard]] + place // self.every
        return shard, record

    def _read_jpegs(self, file: str, records: list[int], rows: list[int], out: Squares) -> None:
        reader = _open.get(self.folder, self.key, file, _jpegs)
        for row, record, picture in zip(rows, records, out, strict=True):
            try:
                (encoded,) = reader.read(record, record + 1)  # a list costs four times as much
                if picture.dtype == np.uint8:
                    simplejpeg.decode_jpeg(encoded, "RGB", buffer=picture)
                else:
                    np.copyto(picture, simplejpeg.decode_jpeg(encoded, "RGB"))
            except (RuntimeError, IndexError, ValueError) as error:
                _open.clear()
                what = f"cannot be read ({error})"
                raise damaged(self.folder, file, f"frame {row}", what) from None

    def _read_raw(
        self, shape: tuple[int, int], file: str, records: list[int], rows: list[int], out: Squares
    ) -> None:
        stored = _open.get(self.folder, self.key, file, partial(_pictures, shape=shape))
        pictures, crcs = stored["picture"], stored["crc"]
        for row, record, picture in zip(rows, records, out, strict=True):
            if record >= len(stored):
                raise damaged(self.folder, file, f"frame {row}", "is missing")
            np.copyto(picture, pictures[record])
            read = picture if picture.dtype == np.uint8 else np.ascontiguousarray(pictures[record])
            if google_crc32c.value(read) != crcs[record]:
                what = "does not hold the bytes it was written with"
                raise damaged(self.folder, file, f"frame {row}", what)


def open_store(path: str | Path, progress: Progress | None = None) -> Store:
    """Opens a frame store in a folder or bucket, and compares its columns with the SHA-256 taken
    when they were written; columns in a bucket are fetched for this. Images are checked when they
    are read.

    Args:
      progress: called with the bytes of columns compared and the bytes in total.

    Raises:
      FileNotFoundError: there is no store, or it was not completed.
      ValueError: it was written in another format version.
      DatasetError: a file on disk is missing or was cut off, or a column is damaged.
    """
    store = _opened(open_folder(path))
    files = listed(store.folder, store.files)
    for name, (size, _) in files.items():
        if name.startswith("frames/"):
            require_room(store.folder, name, size)
    columns = {name: sums for name, sums in files.items() if name.startswith("columns/")}
    for name, what in compare(store.folder, columns, progress):
        raise damaged(store.folder, name, "checksum", what)
    return store


def verify(store: Store, progress: Progress | None = None) -> None:
    """Compares every file of a store with the SHA-256 taken when it was written.

    Args:
      progress: called with bytes read and bytes in all.

    Raises:
      DatasetError: one is missing or differs; names the file.
    """
    for error in damaged_store_files(store.folder, progress):
        raise error


def damaged_store_files(folder: Folder, progress: Progress | None = None) -> Iterator[DatasetError]:
    """All files of a store that are missing or differ from what was written.

    Args:
      progress: called with bytes read and bytes in all.

    Raises:
      ValueError: it was written in another format version.
      DatasetError: the list of files is damaged, so that no other file can be checked.
    """
    files = listed(folder, described(folder)["files"])
    for name, what in compare(folder, files, progress, "frames"):
        yield damaged(folder, name, "checksum", what)


def build_store(
    dataset: Dataset,
    path: str | Path,
    image_size: Size,
    encoding: Encoding = "jpeg",
    progress: convert.Progress | None = None,
    resize: str = "antialiased",
) -> Store:
    """Decodes every frame of `dataset` once into a store at `path`, a folder or a bucket's URL.
    Parts that an earlier call has finished there are kept.

    Args:
      progress: called after each episode with frames done and frames in all.
      resize: how images are fitted to `image_size`.

    Raises:
      ValueError: `path` holds a store or something else or lies in the dataset, the dataset has no
        camera or numeric column, or a frame cannot be decoded.
    """
    require_apart(path, [dataset.root])
    folder = open_folder(path)
    if folder.exists(convert.DESCRIPTION):
        raise ValueError(f"{path}: already exists; delete it or choose another path.")
    convert.convert(dataset, folder, Settings(image_size, encoding, resize=resize), progress)
    return open_store(path)


def cached_store(
    dataset: Dataset,
    image_size: Size,
    encoding: Encoding,
    cache_dir: str | Path,
    progress: convert.Progress | None = None,
    opening: Progress | None = None,
    resize: str = "antialiased",
    every: int = 1,
    fits: Mapping[str, PictureFit] = MappingProxyType({}),
) -> Store:
    """The store of a dataset's current content, built only if the cache lacks it.

    Its folder's name holds the content's digest, so a changed dataset gets a new store. Processes
    that ask for it at the same time wait for the one that builds it.

    Args:
      progress: called after each episode with frames decoded and frames in all.
      opening: called as `open_store` calls its `progress`.
      resize: as `build_store`.
      every: frames of an episode from one stored image to the next.
      fits: cameras whose images are fitted in another way.
    """
    settings = Settings(image_size, encoding, resize=resize, every=every, fits=fits)
    key = convert.content_key(dataset, settings)
    size = image_size if isinstance(image_size, int) else "x".join(map(str, image_size))
    path = Path(cache_dir) / f"{key}-{size}-{encoding}"
    convert.convert(dataset, LocalFolder(path), settings, progress=progress)
    return open_store(path, opening)


def _opened(folder: Folder) -> Store:
    """A store whose columns are not checked yet."""
    if not folder.exists(convert.DESCRIPTION):
        raise FileNotFoundError(
            f"{folder.path(convert.DESCRIPTION)}: missing, so {folder.url} is not a finished frame "
            "store; make one with `python -m tools.data convert`, which continues where it stopped."
        )
    fields = described(folder)
    if isinstance(folder, LocalFolder):
        _check_sizes(folder, fields["files"])
    given, size = fields.get("fits", {}), fields["image_size"]
    kind: Any = PictureFit
    built = {
        "cameras": tuple(fields["cameras"]),
        "image_size": tuple(size) if isinstance(size, list) else size,
        "fits": {camera: from_json(kind, value) for camera, value in given.items()},
    }
    return Store(folder=folder, **fields | built)


def _reopened(path: str, files: str) -> Store:
    """The store that another process has opened, and whose columns that process has checked."""
    store = _opened(open_folder(path))
    if store.files != files:
        raise DatasetError(
            store.folder.path(convert.DESCRIPTION),
            "files",
            "has changed since the store was opened; start again.",
        )
    return store


def _jpegs(path: Path) -> ArrayRecordReader:
    return ArrayRecordReader(str(path), "readahead_buffer_size:0")


def _pictures(path: Path, shape: tuple[int, int]) -> Shaped[np.ndarray, " n"]:
    """Records of `convert.raw_record`."""
    record = convert.raw_record(shape)
    pictures = path.stat().st_size // record.itemsize
    return np.asarray(np.memmap(path, record, "r", shape=(pictures,)))


def _check_sizes(folder: LocalFolder, digest: str) -> None:
    for name, (size, _) in listed(folder, digest).items():
        try:
            actual = os.stat(f"{folder.root}/{name}").st_size
        except FileNotFoundError:
            raise damaged(folder, name, "file", "is missing") from None
        if actual != size:
            raise damaged(folder, name, "size", f"is {actual} bytes, expected {size}")
