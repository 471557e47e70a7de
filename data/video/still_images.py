"""Images that a LeRobot dataset keeps outside of videos: encoded in the parquet, or as files.

A cell of such a column is a struct of `bytes` and `path`; without bytes the path names a file.
Datasets give it relative to their root, relative to images/ or by its name alone.
"""

import io
import re
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Int64, UInt8
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

from data.errors import DatasetError, naming_damage, short
from data.files.folder import Folder
from data.files.limits import require_pixels, room_for
from data.files.names import is_within
from models.files.terminal import first_line


def encoded(folder: Folder, file: Any, camera: str, cells: pa.Array) -> pa.Array:
    """The cells with the bytes of every image in them; empty cells if the episode has no images.

    Raises:
      DatasetError: an image is missing; names the file and the frame.
    """
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    if not given(cells).any():
        return pa.nulls(len(cells), kind)
    contents = [
        _content(folder, file, f"column '{camera}', row {number}", cell)
        for number, cell in enumerate(cells.to_pylist())
    ]
    return pa.array([{"bytes": content, "path": None} for content in contents], kind)


def given(cells: pa.Array) -> Bool[np.ndarray, " n"]:
    """Mask of the cells of a column of images that hold bytes or a path."""
    if not pa.types.is_struct(cells.type):
        return np.asarray(cells.is_valid())
    fields = [cells.field(k) for k in range(cells.type.num_fields)]
    return np.asarray(cells.is_valid()) & np.any([np.asarray(f.is_valid()) for f in fields], axis=0)


def decode(
    folder: Folder,
    file: Any,
    camera: str,
    cells: pa.Array,
    rows: Int64[np.ndarray, " n"] | None = None,
) -> UInt8[np.ndarray, "n h w 3"]:
    """Decodes the cells of a column of images.

    Args:
      file: the parquet file that holds them, for messages.
      rows: those to decode; all if None.

    Raises:
      DatasetError: an image is missing, damaged or of another size than the first; names the file
        and the frame.
    """
    pictures = np.zeros((0, 0, 0, 3), np.uint8)
    chosen = range(len(cells)) if rows is None else rows.tolist()
    for place, number in enumerate(chosen):
        content = _content(folder, file, f"column '{camera}', row {number}", cells[number].as_py())
        sentence = (
            f"row {number} of the episode holds no readable image ({{reason}}); copy or record the "
            'dataset again, or mark a depth camera with "is_depth_map": true in its info in '
            "meta/info.json."
        )
        with naming_damage(file, f"column '{camera}'", sentence, caught=(ValueError,)):
            pixels = decode_picture(content, _FORMATS)
        if place == 0:
            pictures = room_for(file, len(chosen), pixels.shape)
        if pixels.shape != pictures.shape[1:]:
            raise DatasetError(
                file,
                f"column '{camera}'",
                f"row {number} of the episode is an image of shape {pixels.shape}, expected "
                f"{pictures.shape[1:]} like its first; write them all in one size.",
            )
        pictures[place] = pixels
    return pictures


def decode_picture(content: bytes, formats: tuple[str, ...]) -> UInt8[np.ndarray, "h w 3"]:
    """Decodes an image in one of Pillow's `formats`, turned as its EXIF orientation says (as
    OpenCV and LeRobot's reader do), without its transparency. The formats must never be all that
    Pillow knows, because it passes PostScript to Ghostscript, which runs it.

    Raises:
      ValueError: it is damaged, of another format, too large, or of more than 8 bits a channel.
    """
    try:
        with Image.open(io.BytesIO(content), formats=formats) as picture:
            require_pixels(*picture.size)
            if _is_deep(picture):
                raise ValueError(
                    f"it has more than 8 bits a channel ({picture.format}, {picture.mode}), as "
                    "depth has and colour does not; write it with 8 bits a channel if it is colour"
                )
            ImageOps.exif_transpose(picture, in_place=True)
            return np.asarray(picture.convert("RGB"))
    except UnidentifiedImageError:
        raise ValueError(f"cannot identify image file as {', '.join(formats)}") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError, MemoryError) as error:
        raise ValueError(first_line(error)) from None


def is_turned(content: bytes) -> bool:
    """True for an encoded image that its EXIF orientation turns."""
    if b"Exif" not in content and b"eXIf" not in content:
        return False
    with Image.open(io.BytesIO(content), formats=_FORMATS) as picture:
        return bool(picture.getexif().get(_ORIENTATION, 1) != 1)


_ORIENTATION = 0x0112
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "PPM")


def _is_deep(picture: ImageFile.ImageFile) -> bool:
    """True for more than 8 bits a channel, by the mode or, where Pillow would cut them off while
    decoding, by the raw mode of its tiles ("BGR;16" has 16 bits a pixel)."""
    stored = [tile.args if isinstance(tile.args, tuple) else (tile.args,) for tile in picture.tile]
    cut = (re.match(r"(?!BGR).*;(12|16|32)", str(args[0])) for args in stored if args)
    maxima = (
        args[1] for args, tile in zip(stored, picture.tile, strict=True) if tile.codec_name == "ppm"
    )
    return picture.mode.startswith(("I", "F")) or any(cut) or any(m > 255 for m in maxima)


def _content(folder: Folder, file: Any, place: str, cell: Any) -> bytes:
    """Encoded bytes of a cell."""
    if isinstance(cell, bytes):
        return cell
    content, path = (cell or {}).get("bytes"), (cell or {}).get("path")
    if isinstance(content, bytes):
        return content
    if not isinstance(path, str):
        raise DatasetError(
            file, place, "holds neither bytes nor a path; leave the episode or the camera out."
        )
    parts = PurePosixPath(path).parts
    names = [path, f"images/{path}", "/".join(parts[-3:]), f"images/{'/'.join(parts[-3:])}"]
    name = next((n for n in names if is_within(n) and folder.exists(n)), None)
    if name is None:
        raise DatasetError(
            file,
            place,
            f"names {short(path)}, which is not in {folder.url}; copy the dataset again.",
        )
    return folder.local(name).read_bytes()
