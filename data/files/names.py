"""Checks names from a dataset before any of them becomes part of a path.

The author of a dataset chose the names of its files, features, cameras and robots and the templates
of its paths, and may have chosen `../../.bashrc`. A name must lead to a file inside the folder, on
disk or in a bucket, or it is refused; a symbolic link inside a local dataset is its owner's choice.
"""

import re
from functools import lru_cache
from pathlib import Path
from string import Formatter

from data.errors import short

LONGEST_NAME = 200
"""Most UTF-8 bytes of a name; leaves room for what files add to it."""

_LONGEST_PART, _LONGEST_PATH = 230, 1000
_UNPRINTABLE = r"\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff"
_NOT_OF_FILES = re.compile(rf"[\\{_UNPRINTABLE}]|\A[A-Za-z]:")
_PARTS_THAT_LEAD_AWAY = ("//", "/./", "/../")
_NAME = re.compile(rf"(?!\.\Z)(?!.*\.\.)[^/\\{_UNPRINTABLE}]+")
_NUMBER = re.compile(r"0?\d{0,2}d?")
_GLOB = re.compile(r"[*?\[\]]")


def file_within(name: object) -> str:
    """A name such as "data/chunk-000/file-000.parquet", which stays inside its folder.

    Raises:
      ValueError: it is absolute or has parts that are empty, "." or "..", backslashes, control
        characters or more bytes than file systems take.
    """
    if not isinstance(name, str) or not is_within(name):
        raise ValueError(
            f"{short(name)} is not the name of a file inside the folder (it is absolute, or has "
            "'..', empty or overlong parts, backslashes or control characters)"
        )
    return name


def is_within(name: str) -> bool:
    """True if `file_within` accepts this name."""
    if _NOT_OF_FILES.search(name) or _is_long(name):
        return False
    framed = f"/{name}/"
    return not any(part in framed for part in _PARTS_THAT_LEAD_AWAY)


def plain_name(name: object) -> str:
    """A name of a feature or camera that may be part of the name of a file or folder.

    Raises:
      ValueError: it is empty or ".", longer than `LONGEST_NAME`, or has "/", a backslash, ".." or
        control characters.
    """
    if (
        not isinstance(name, str)
        or not _NAME.fullmatch(name)
        or (4 * len(name) > LONGEST_NAME and len(name.encode()) > LONGEST_NAME)
    ):
        raise ValueError(
            f"{short(name)} cannot be used as a file name (it is empty, over {LONGEST_NAME} bytes, "
            "or has '/', '\\', '..' or control characters)"
        )
    return name


def require_plain(name: object, what: str) -> None:
    """Raises ValueError if `plain_name` does not accept this name of `what`."""
    try:
        plain_name(name)
    except ValueError as error:
        raise ValueError(f"{what} {error}; choose another name.") from None


def path_within(root: Path, name: str) -> Path:
    """Path of a file with this name in `root`.

    Raises:
      ValueError: the name leads out of `root`.
    """
    return root / file_within(name)


def fill(template: object, **values: str | int) -> str:
    """The file name that a template gives, such as "file-{file_index:03d}.parquet".

    Raises:
      ValueError: the template has fields other than `values`, or formats a field with more than a
        number's width of two digits; or the name leads out of the folder.
    """
    _parsed(template, tuple(values), tuple(map(type, values.values())))
    return file_within(str(template).format(**values))


def pattern(template: object, **kinds: type) -> str:
    """A glob pattern of all names that a template gives for fields of these types.

    Raises:
      ValueError: as `fill`.
    """
    parsed = _parsed(template, tuple(kinds), tuple(kinds.values()))
    return file_within("".join(text + ("*" if field else "") for text, field in parsed))


def _parsed(
    template: object, fields: tuple[str, ...], kinds: tuple[type, ...]
) -> tuple[tuple[str, str | None], ...]:
    if not isinstance(template, str) or len(template) > _LONGEST_PATH:
        raise ValueError(f"{short(template)} is not a template for file names")
    return _parsed_text(template, fields, kinds)


@lru_cache(64)
def _parsed_text(
    template: str, fields: tuple[str, ...], kinds: tuple[type, ...]
) -> tuple[tuple[str, str | None], ...]:
    """Text and the field after it; every field is known and has a plain format."""
    kind_of = dict(zip(fields, kinds, strict=True))
    found = []
    for text, field, spec, conversion in Formatter().parse(template):
        known = field is None or (
            field in kind_of
            and conversion is None
            and (not spec or (kind_of[field] is int and _NUMBER.fullmatch(spec)))
        )
        if not known or _GLOB.search(text):
            raise ValueError(
                f"{short(template)} has a wildcard, or placeholders other than "
                f"{', '.join(fields)} (numbers may have a format such as :03d)"
            )
        found.append((text, field))
    return tuple(found)


def _is_long(name: str) -> bool:
    if len(name) <= _LONGEST_PART and name.isascii():
        return False
    encoded = name.encode()
    return len(encoded) > _LONGEST_PATH or max(map(len, encoded.split(b"/"))) > _LONGEST_PART
