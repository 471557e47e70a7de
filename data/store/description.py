"""Description of a frame store: `store.json` and the list of its files, checked when read.

Checksums reveal damage, but say nothing about who wrote a store. One from a bucket may give any
type and any number where training takes a size, so every field is also checked against its range.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any, cast, get_args

from data.errors import DatasetError, naming_damage, short
from data.files.checksums import Sums, as_sums, is_sha256
from data.files.folder import Folder
from data.files.limits import MOST_FRAMES, MOST_PIXELS
from data.files.names import file_within, plain_name
from data.lerobot.metadata import is_fps
from data.store import convert
from models.config import from_json
from models.inputs.parts import part_class
from models.inputs.pictures import PictureFit

_MOST_WIDTH = 1 << 28
"""Largest number of values in a row of a column."""


def described(folder: Folder) -> dict[str, Any]:
    """The fields of `store.json` except its format and sum.

    Raises:
      ValueError: it was written in another format version.
      DatasetError: it is damaged, or a field has a value that no conversion writes; names the
        field.
    """
    path = folder.path(convert.DESCRIPTION)
    try:
        fields = json.loads(folder.local(convert.DESCRIPTION).read_text())
        version, summed = fields["format"], fields.get("sum")
        sound = summed == convert.checksum(fields)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        version, sound, fields = convert.FORMAT, False, {}
    if version != convert.FORMAT:
        raise ValueError(
            f"{path}: format is {short(version)}, but this version reads {convert.FORMAT}; delete "
            "the store and convert the dataset again."
        )
    if not sound:
        raise DatasetError(
            path,
            "sum",
            "does not match the rest of the file; delete the file and convert again, which keeps "
            "the images.",
        )
    for name, check in _CHECKS.items():
        try:
            check(fields.get(name, convert.DEFAULTS.get(name)))
        except (ValueError, TypeError) as error:
            raise DatasetError(
                path,
                name,
                f"is {short(fields.get(name))}, {error}; delete the store and convert again.",
            ) from None
    return {name: fields[name] for name in _CHECKS if name in fields}


def listed(folder: Folder, digest: str) -> Sums:
    """Size and SHA-256 of every file of a store, from the list that has the SHA-256 `digest`.

    Raises:
      DatasetError: the list is damaged, or is no list of files.
    """
    content = sound(folder, convert.FILES, digest)
    path, sentence = folder.path(convert.FILES), "{reason}; delete the store and convert again."
    with naming_damage(path, "files", sentence, caught=(ValueError, RecursionError)):
        return as_sums(json.loads(content))


def kept(folder: Folder, name: str, digest: str) -> bytes:
    """A small file of a store, checked against the list of files, which has the SHA-256 `digest`.

    Raises:
      DatasetError: it is damaged or not listed.
    """
    files = listed(folder, digest)
    if name not in files:
        raise DatasetError(
            folder.path(convert.FILES),
            "files",
            f"does not list {name}; delete the store and convert again.",
        )
    return sound(folder, name, files[name][1])


def sound(folder: Folder, name: str, digest: str) -> bytes:
    """A file's bytes, which must have this SHA-256.

    Raises:
      DatasetError: they have another.
    """
    content = folder.local(name).read_bytes()
    if hashlib.sha256(content).hexdigest() != digest:
        raise damaged(folder, name, "checksum", "does not hold the bytes it was written with")
    return content


def damaged(folder: Folder, name: str, field: str, what: str) -> DatasetError:
    """An error about one of a store's files that says which part to make again."""
    part = name.split("/")[1] if name.startswith("frames/") else "*-tables"
    return DatasetError(
        folder.path(name),
        field,
        f"{what}; delete parts/{part}.json and {convert.DESCRIPTION} there and convert again, "
        "which remakes only this part.",
    )


def _expect(good: bool, what: str) -> None:
    if not good:
        raise ValueError(f"expected {what}")


def _check_key(key: object) -> None:
    good = isinstance(key, str) and re.fullmatch("[0-9a-f]{16}", key) is not None
    _expect(good, "16 hexadecimal digits")


def _check_digest(digest: object) -> None:
    _expect(is_sha256(digest), "a SHA-256")


def _check_cameras(cameras: Any) -> None:
    _expect(isinstance(cameras, list) and bool(cameras), "names of cameras")
    _expect(len(set(map(plain_name, cameras))) == len(cameras), "each name once")


def _check_columns(columns: Any) -> None:
    told = isinstance(columns, Mapping) and bool(columns)
    _expect(told, "columns and their numbers of values")
    for name, width in columns.items():
        _check_number(width, _MOST_WIDTH, f"of {plain_name(name)} ")


def _check_encoding(encoding: object) -> None:
    known = get_args(convert.Encoding)
    _expect(encoding in known, f"one of {known}")


def _check_size(size: object) -> None:
    _expect(not isinstance(size, list) or len(size) == 2, "a side, or a height and a width")
    for side in size if isinstance(size, list) else [size]:
        _check_number(side, math.isqrt(MOST_PIXELS))


def _check_fits(fits: Any) -> None:
    _expect(isinstance(fits, Mapping), "cameras and how their pictures are fitted")
    for name, value in fits.items():
        from_json(cast(Any, PictureFit), value, plain_name(name))


def _check_sources(sources: Any) -> None:
    _expect(isinstance(sources, Mapping), "cameras and the height and width of their pictures")
    for name, size in sources.items():
        pair = isinstance(size, list) and len(size) == 2
        _expect(pair, f"a height and a width of {plain_name(name)}")
        for number in size:
            _check_number(number, MOST_PIXELS, f"of {plain_name(name)} ")


def _check_number(number: object, most: int, of: str = "") -> None:
    good = type(number) is int and 1 <= number <= most
    _expect(good, f"{of}a whole number from 1 to {most}")


_CHECKS = {
    "key": _check_key,
    "name": file_within,
    "digest": _check_digest,
    "fps": lambda fps: _expect(is_fps(fps), "a positive number"),
    "cameras": _check_cameras,
    "columns": _check_columns,
    "image_size": _check_size,
    "encoding": _check_encoding,
    "shard_frames": lambda number: _check_number(number, MOST_FRAMES),
    "files": _check_digest,
    "resize": lambda kind: part_class(PictureFit, kind),
    "sources": _check_sources,
    "every": lambda number: _check_number(number, MOST_FRAMES),
    "fits": _check_fits,
}
"""Check of each field."""
