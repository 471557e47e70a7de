"""Episodes whose frames are rows of arrays: in groups of HDF5, in zarr, in the columns of a CSV.

Lengths and types are checked before anything is read.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from jaxtyping import Bool, Int64, UInt8

from data.errors import DatasetError, naming_damage, short
from data.files.limits import most_values, require_budget, require_pixels, room_for
from data.frames import usual_columns
from data.lerobot.importing.clock import SECOND, align
from data.lerobot.importing.layout import CameraSource, ColumnSource, ImportLayout, TimeUnit
from data.lerobot.importing.recording import CheckedRecording, ImportedEpisode, PendingEpisode
from data.video.still_images import decode_picture
from models.files.terminal import logger

PICTURES = ("JPEG", "PNG", "WEBP", "BMP")
"""Image encodings that are read."""
_LONGEST = 9e18
_log = logger(__name__)
_UNITS: Mapping[TimeUnit, int] = {"s": SECOND, "ms": 10**6, "us": 10**3, "ns": 1}


class RowArray(Protocol):
    """An array on disk; a slice of it is read when it is taken."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    def __getitem__(self, rows: Any) -> Any: ...


def check_rows(
    file: Path,
    episode: str,
    layout: ImportLayout,
    arrays: Mapping[str, RowArray],
    size: Callable[[str], int],
) -> int:
    """Checks the arrays of an episode; returns its number of frames.

    Args:
      episode: its name in the file, for messages.
      layout: without patterns.
      arrays: by path.
      size: bytes on disk in which the array at a path is stored; its declared sizes are checked
        against them.

    Raises:
      DatasetError: arrays differ in length, or one has a type or shape that cannot be read.
    """
    size = cache(size)
    columns = {s.path: name for name, sources in layout.columns.items() for s in sources}
    columns |= {layout.time: "time"} if layout.time else {}
    cameras = {camera.path: name for name, camera in layout.cameras.items()}
    lengths = {path: _length(file, episode, path, arrays[path]) for path in (*columns, *cameras)}
    if len(set(lengths.values())) > 1:
        first, *others = lengths
        other = next(path for path in others if lengths[path] != lengths[first])
        raise DatasetError(
            file,
            f"{episode}'{other}'",
            f"has {lengths[other]} frames, but '{first}' has {lengths[first]}; cut both to the "
            "frames that belong together, or leave the episode out.",
        )
    for path, name in columns.items():
        array = arrays[path]
        if array.dtype.kind not in "fiub" or len(array.shape) > 2 or 0 in array.shape[1:]:
            raise DatasetError(
                file,
                f"{episode}'{path}'",
                f"is {array.dtype} of shape {array.shape}; column '{name}' needs numbers of shape "
                "(frames,) or (frames, n).",
            )
        if math.prod(array.shape) > most_values(size(path)):
            raise DatasetError(
                file,
                f"{episode}'{path}'",
                f"claims to have shape {array.shape}, far more than a file of {size(path)} bytes "
                "holds; copy it again.",
            )
    for path in cameras:
        _check_pictures(file, f"{episode}'{path}'", arrays[path])
    for path, array in arrays.items():
        chunk = getattr(array, "chunks", None) or (1, *array.shape[1:])
        asked = array.dtype.itemsize * max(math.prod(chunk), math.prod(array.shape[1:]))
        require_budget(file, f"{episode}'{path}'", asked, size(path))
    return next(iter(lengths.values()))


class Unwritten(NamedTuple):
    """Chunks of an array that are not there: so many of all, and the rows that lack some. `zeros`:
    they may be chunks of zeros, which the format leaves out."""

    chunks: int
    of: int
    rows: Bool[np.ndarray, " t"]
    zeros: bool = False


def unwritten(
    shape: Sequence[int], chunk: Sequence[int], there: Iterable[tuple[int, ...]]
) -> Unwritten | None:
    """The chunks of an array that are not among those that are there; None if all are.

    Args:
      there: their places in the grid of chunks, as far as they lie in it.
    """
    grid = tuple(-(-n // size) for n, size in zip(shape, chunk, strict=True))
    counts = Counter(
        place[0]
        for place in set(there)
        if len(place) == len(grid) and all(k < n for k, n in zip(place, grid, strict=True))
    )
    total, whole = math.prod(grid), math.prod(grid[1:])
    if counts.total() == total:
        return None
    lacking = np.array([counts[k] < whole for k in range(grid[0])])
    return Unwritten(total - counts.total(), total, lacking.repeat(chunk[0])[: shape[0]])


def require_written(
    file: Path, episode: str, layout: ImportLayout, lost: Callable[[str], Unwritten | None]
) -> None:
    """Warns of chunks that are not there, if they may be zeros, or are less than half of a
    camera's, which are read as black.

    Args:
      layout: without patterns.
      lost: what is not there of the array at a path.

    Raises:
      DatasetError: others of a column's, or most of a camera's, were never written, and would be
        read as zeros.
    """
    for path in dict.fromkeys([*layout.column_paths, *layout.camera_paths]):
        if (found := lost(path)) is None:
            continue
        said = (
            f"{found.chunks} of {found.of} chunks were never written (the first from row "
            f"{int(found.rows.argmax())} on)"
        )
        column = path in layout.column_paths
        if not found.zeros and (column or 2 * found.chunks > found.of):
            raise DatasetError(
                file,
                f"{episode}'{path}'",
                f"{said}, and would be read as zeros: the recording was cut off or not wholly "
                "copied; copy it again, cut it to the rows that are there or, if those are zeros "
                "that zarr left out, write them with write_empty_chunks.",
            )
        read = "zeros, as zarr leaves out chunks of zeros" if column else "black images"
        _log.warning("%s, %s'%s': %s; they are read as %s.", file, episode, path, said, read)


def require_filled(file: Path, episode: str, columns: Mapping[str, np.ndarray]) -> None:
    """Checks that an episode does not end in rows that were allocated and never filled; warns where
    it has no state, as a robot at rest may be sent zeros.

    Raises:
      DatasetError: it ends in rows of zeros in all columns.
    """
    filled = np.flatnonzero(np.any([values.any(axis=1) for values in columns.values()], axis=0))
    count = len(next(iter(columns.values())))
    rows = count - 1 - (int(filled[-1]) if len(filled) else -1)
    if rows < 2:
        return
    said = f"the last {rows} of {count} are zeros in all columns, as rows that were never written"
    if not usual_columns(columns)[0]:
        _log.warning("%s, %s: %s are.", file, episode.strip() or "rows", said)
        return
    raise DatasetError(
        file,
        episode.strip() or "rows",
        f"{said} are; cut the recording to those that were, or leave it out.",
    )


def without_depth(
    layout: ImportLayout, resolved: ImportLayout, arrays: Mapping[str, RowArray]
) -> ImportLayout:
    """The resolved layout without the depth cameras that only a pattern of `layout` names."""
    cameras = {
        name: camera
        for name, camera in resolved.cameras.items()
        if name in layout.cameras or not _is_depth(arrays[camera.path])
    }
    return replace(resolved, cameras=cameras)


def described(
    episodes: int,
    layout: ImportLayout,
    arrays: Mapping[str, RowArray],
    names: Iterable[str] = (),
) -> CheckedRecording:
    """Description of so many episodes of such arrays; encoded images have no shape yet.

    Args:
      layout: without patterns.
      arrays: by path, checked by `check_rows`.
      names: of all that is there.
    """
    shapes: dict[str, tuple[int, ...] | None] = {
        name: (sum(len(s.dims or range(_dims(arrays[s.path]))) for s in sources),)
        for name, sources in layout.columns.items()
    }
    for name, camera in layout.cameras.items():
        shape = arrays[camera.path].shape
        shapes[name] = tuple(shape[1:]) if len(shape) == 4 else None
    types = {
        name: column_type([arrays[source.path].dtype for source in sources])
        for name, sources in layout.columns.items()
    }
    return CheckedRecording(episodes, shapes, types, layout.unused(names))


def read_rows(
    file: Path,
    episode: str,
    layout: ImportLayout,
    arrays: Mapping[str, RowArray],
    rows: slice,
    task: str,
    at: Int64[np.ndarray, " t"] | None,
) -> ImportedEpisode:
    """An episode with this instruction.

    Args:
      rows: rows of the episode, with start and stop given.
      at: rows to keep, counted from the first of them; all if None.

    Raises:
      DatasetError: the data is not as declared.
    """
    columns = {
        name: _read_column(file, episode, sources, arrays, rows)
        for name, sources in layout.columns.items()
    }
    frames = {
        name: _read_pictures(file, episode, camera, arrays[camera.path], rows)
        for name, camera in layout.cameras.items()
    }
    if at is not None:
        columns = {name: values[at] for name, values in columns.items()}
        frames = {name: values[at] for name, values in frames.items()}
    return ImportedEpisode(columns, frames, task, dim_names(layout))


def pending(
    file: Path,
    episode: str,
    layout: ImportLayout,
    times: np.ndarray | None,
    read: Callable[[Int64[np.ndarray, " t"] | None], ImportedEpisode],
) -> list[PendingEpisode]:
    """One episode of all rows or, if their times are given, one for each stretch without a gap.

    Raises:
      DatasetError: as `stretches`.
    """
    title = f"{file}, {episode.strip()}" if episode else str(file)
    if times is None:
        return [PendingEpisode(title, partial(read, None))]
    return [
        PendingEpisode(f"{title}, part {number}", partial(read, rows), left_out)
        for number, (rows, left_out) in enumerate(stretches(file, episode, times, layout))
    ]


def as_column(parts: list[np.ndarray]) -> np.ndarray:
    """Arrays [T, n] side by side, floats as float32."""
    return np.concatenate(parts, axis=1).astype(column_type([part.dtype for part in parts]))


def column_type(types: Sequence[np.dtype | str]) -> str:
    """Type of a column whose parts have these types; float32 for all floats."""
    common = np.result_type(*(np.dtype(one) for one in types))
    return "float32" if common.kind == "f" else common.name


def chosen(file: Path, place: str, values: np.ndarray, dims: tuple[int, ...] | None) -> np.ndarray:
    """The `dims` of the last axis; all if None."""
    if dims is None:
        return values
    if max(dims) >= values.shape[-1]:
        raise DatasetError(
            file,
            place,
            f"has {values.shape[-1]} dims, but the layout selects dims {list(dims)}; correct "
            "the layout.",
        )
    return values[..., list(dims)]


def dim_names(layout: ImportLayout) -> dict[str, tuple[str, ...]]:
    """Names of the columns' dimensions, for columns whose sources all have names."""
    return {
        name: tuple(text for source in sources for text in source.names or ())
        for name, sources in layout.columns.items()
        if all(source.names for source in sources)
    }


def placed(
    file: Path,
    place: str,
    pictures: np.ndarray | None,
    number: int,
    count: int,
    picture: UInt8[np.ndarray, "h w 3"],
) -> np.ndarray:
    """The `count` images of an episode, with this one filled in."""
    if pictures is None:
        pictures = room_for(file, count, picture.shape)
    if picture.shape != pictures.shape[1:]:
        raise DatasetError(
            file,
            place,
            f"frame {number} is an image of shape {picture.shape}, but earlier ones have "
            f"{pictures.shape[1:]}; write them all in one size.",
        )
    pictures[number] = picture
    return pictures


def oriented(
    pictures: UInt8[np.ndarray, "t h w 3"], camera: CameraSource
) -> UInt8[np.ndarray, "t h w 3"]:
    """Images as RGB, the right way up."""
    if camera.colour == "bgr":
        pictures = pictures[..., ::-1]
    return pictures[:, ::-1, ::-1] if camera.turned else pictures


def stretches(
    file: Path, episode: str, times: np.ndarray, layout: ImportLayout
) -> list[tuple[Int64[np.ndarray, " t"], float]]:
    """Rows in use at the ticks of the layout's rate, for each stretch without a gap, and the
    seconds left out, all counted with the last stretch.

    Raises:
      DatasetError: times go backwards, are not finite, or have a gap.
    """
    place = f"{episode}'{layout.time}'"
    if not np.isfinite(times).all():
        raise DatasetError(file, place, "has times that are not finite; repair the recording.")
    scale = _UNITS[layout.time_unit]
    since = (times if times.dtype.kind == "f" else times.astype(np.int64)).reshape(-1)
    since = since - since[0]
    if float(np.abs(since).max()) * scale > _LONGEST:
        raise DatasetError(
            file, place, f"spans centuries in '{layout.time_unit}'; give another \"time_unit\"."
        )
    stamps = np.round(since * scale).astype(np.int64)
    sentence = (
        '{reason}; repair it, or set "gaps": "cut" in the layout to cut the recording at gaps.'
    )
    with naming_damage(file, place, sentence, caught=(ValueError,)):
        found = align({"time": stamps}, layout.fps, layout.silence, layout.gaps)
    if not found:
        raise DatasetError(
            file, place, "has no two frames without a gap between them; leave it out."
        )
    return [(stretch.messages["time"], stretch.left_out) for stretch in found]


def _read_column(
    file: Path,
    episode: str,
    sources: tuple[ColumnSource, ...],
    arrays: Mapping[str, RowArray],
    rows: slice,
) -> np.ndarray:
    """The values of one column, [T, n]: those of its sources side by side, floats as float32."""
    parts = []
    for source in sources:
        values = np.asarray(arrays[source.path][rows])
        values = values.reshape(len(values), -1)
        parts.append(chosen(file, f"{episode}'{source.path}'", values, source.dims))
    return as_column(parts)


def _read_pictures(
    file: Path, episode: str, camera: CameraSource, array: RowArray, rows: slice
) -> UInt8[np.ndarray, "t h w 3"]:
    """Images of a camera as RGB, the right way up."""
    place = f"{episode}'{camera.path}'"
    if len(array.shape) == 4:
        room_for(file, rows.stop - rows.start, array.shape[1:])
        pictures = np.asarray(array[rows])
        if pictures.dtype != np.uint8:
            pictures = _to_bytes(file, place, pictures)
        return oriented(pictures, camera)
    decoded: np.ndarray | None = None
    for number in range(rows.stop - rows.start):
        cell = array[rows.start + number]
        sentence = (
            f"frame {number} holds no readable image ({{reason}}); copy it again, or leave this "
            "camera out of the layout."
        )
        with naming_damage(file, place, sentence, caught=(ValueError,)):
            picture = decode_picture(bytes(np.asarray(cell)), PICTURES)
        decoded = placed(file, place, decoded, number, rows.stop - rows.start, picture)
    if decoded is None:
        raise DatasetError(file, place, "holds no images; leave the episode out.")
    return oriented(decoded, camera)


def _dims(array: RowArray) -> int:
    return array.shape[1] if len(array.shape) > 1 else 1


def _length(file: Path, episode: str, path: str, array: RowArray) -> int:
    if not array.shape or array.shape[0] < 1:
        raise DatasetError(
            file,
            f"{episode}'{path}'",
            f"has shape {array.shape}, so it has no frames; leave the episode out.",
        )
    return int(array.shape[0])


def _is_depth(array: RowArray) -> bool:
    """True for images of one channel of more than 8 bits."""
    flat = len(array.shape) == 3 or (len(array.shape) == 4 and array.shape[3] == 1)
    return flat and array.dtype.kind in "uif" and array.dtype.itemsize > 1


def _check_pictures(file: Path, place: str, array: RowArray) -> None:
    shape, kind = array.shape, array.dtype.kind
    encoded = (len(shape) == 2 and array.dtype == np.uint8) or (len(shape) == 1 and kind in "OSV")
    if not encoded and not (len(shape) == 4 and shape[3] == 3 and kind in "uif"):
        raise DatasetError(
            file,
            place,
            f"is {array.dtype} of shape {shape}; a camera needs images of shape (frames, height, "
            "width, 3) in uint8, or JPEG or PNG bytes of each frame.",
        )
    if not encoded:
        with naming_damage(file, place, "{reason}.", caught=(ValueError,)):
            require_pixels(shape[2], shape[1])


def _to_bytes(file: Path, place: str, pictures: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        found = pictures.astype(np.uint8)
    if not (found == pictures).all():
        raise DatasetError(
            file,
            place,
            f"has {pictures.dtype} images with values such as "
            f"{short(float(pictures[found != pictures][0]))}; write them as uint8 from 0 to 255.",
        )
    return found
