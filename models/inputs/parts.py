"""Parts of a preparation that a family chooses or brings: its reader of prompts, its fit of
pictures, its action tokens, its tokenizer.

A part is a frozen dataclass that names its kind: `class Mine(PromptReader, kind="mine")`. Its JSON
carries the kind, by which `models.config` builds it again; a user's file adds kinds of its own.
"""

import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from models.files import built_in

_KINDS: dict[str, type["InputPart"]] = {}


class InputPart:
    """Base of all parts: frozen dataclasses, equal if their fields are. Values computed from the
    fields are not pickled."""

    kind: ClassVar[str] = ""

    def __init_subclass__(cls, *, kind: str = "", **rest: Any) -> None:
        super().__init_subclass__(**rest)
        if kind:
            before = _KINDS.get(kind)
            if before is not None and file_of(before) != file_of(cls):
                raise ValueError(
                    f"{file_of(cls)} defines a part of kind '{kind}', but {file_of(before)} "
                    "already defines one of that name; give yours another name."
                )
            cls.kind, _KINDS[kind] = kind, cls

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]


def part_class(base: type[InputPart], kind: Any) -> type[InputPart]:
    """The class of parts of a kind that derives from `base`.

    Raises:
      ValueError: there is none.
    """
    if kind not in _KINDS:
        for module in built_in.PARTS:
            import_module(module)
    found = _KINDS.get(kind)
    if found is None or not issubclass(found, base):
        raise ValueError(
            f"kind is {kind!r}, which is no {base.__name__}; expected one of {kinds(base)}, or "
            "give --family path/to/file.py, the file that defines it (it will be run)."
        )
    return found


def kinds(base: type[InputPart]) -> list[str]:
    """Names of the kinds that derive from `base`, as far as their modules are imported."""
    return sorted(name for name, part in _KINDS.items() if issubclass(part, base))


def file_of(kind: type) -> str:
    """The file that defines a class, or its module's name if there is none."""
    path = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return str(Path(path).resolve()) if path else kind.__module__
