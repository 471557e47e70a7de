"""JSON that others wrote, read as an object or refused with an error that names its file.

A parser takes any input: `[[],[],…` costs 30 bytes of memory for each byte, deep nesting reaches
the recursion limit, and of two entries with the same name one is lost. No file that a tool wrote
has these.
"""

import json
import re
from pathlib import Path
from typing import Any

from models.files.lfs import pointer_in

LARGEST_BYTES = 32 * 2**20
"""Limit of a file's size: PaliGemma's tokenizer.json has 17 MB, an index of 10,000 shards 10 MB."""

DEEPEST = 100
"""Limit of nested levels; files of the field have ten."""
_STRINGS = re.compile(rb'"(?:[^"\\]+|\\.?)*+"?', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is not a regular file, too large, not JSON, or not an object.
    """
    if not file.exists():
        raise FileNotFoundError(f"{file} does not exist; the checkpoint is incomplete.")
    if not file.is_file():
        raise ValueError(f"{file} is not a regular file; copy or download it again.")
    with file.open("rb") as opened:
        return parse_json(opened.read(LARGEST_BYTES + 1), str(file))


def parse_json(text: bytes, where: str) -> dict[str, Any]:
    """The object in a JSON text.

    Raises:
      ValueError: as `read_json`; the message begins with `where`.
    """
    if len(text) > LARGEST_BYTES:
        raise ValueError(f"{where} has more than {LARGEST_BYTES} bytes of JSON; expected a few kB.")
    if told := pointer_in(text):
        raise ValueError(f"{where} {told}")
    try:
        value = loads(text, object_pairs_hook=_unique)
    except ValueError as error:
        why = str(error)[:200]
        raise ValueError(f"{where}: not JSON ({why}); copy or download it again.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where} holds a {type(value).__name__}; expected a JSON object.")
    return value


def loads(text: bytes | str, **how: Any) -> Any:
    """`json.loads` of what others wrote: ValueError also where it is nested so deep that a parser,
    or whoever goes through its value, reaches the recursion limit."""
    text = text.encode() if isinstance(text, str) else text
    depth = 0
    if text.count(b"[") + text.count(b"{") > DEEPEST:
        for bracket in _STRINGS.sub(b"", text).translate(None, _NO_BRACKETS):
            depth += 1 if bracket in b"[{" else -1
            if depth > DEEPEST:
                raise ValueError(f"it is nested too deep, beyond {DEEPEST} levels")
    return json.loads(text, **how)


def section(values: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    """The object at `name` in another, {} where it is absent or null.

    Raises:
      ValueError: the value is not an object.
    """
    found = values.get(name)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ValueError(f"{where}: {name} is {str(found)[:80]!r}; expected a JSON object.")
    return found


def whole(values: dict[str, Any], name: str, default: int, where: str, least: int = 1) -> int:
    """The whole number at `name`, the default where it is absent.

    Raises:
      ValueError: the value is not a whole number, or is below `least`.
    """
    found = values.get(name, default)
    if type(found) is not int or found < least:
        raise ValueError(
            f"{where}: {name} is {str(found)[:80]!r}; expected a whole number of at least {least}."
        )
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice[:80]!r} appears twice in one object")
    return values
