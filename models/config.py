"""Frozen dataclasses to JSON values and back, so that a run or policy is rebuilt from its files
alone."""

import dataclasses
import types
import typing
from typing import Any, TypeVar

T = TypeVar("T")


def to_json(config: Any) -> Any:
    """A dataclass tree as dicts, lists and scalars."""
    if dataclasses.is_dataclass(config):
        return {f.name: to_json(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, tuple):
        return [to_json(item) for item in config]
    return config


def from_json(kind: type[T], value: Any, where: str = "config") -> T:
    """The inverse of `to_json` for dataclasses, tuples, optionals and scalars.

    Raises:
      ValueError: a field is unknown or missing; the message gives its path.
    """
    return _build(kind, value, where)


def _build(kind: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        fields = {f.name: f for f in dataclasses.fields(kind)}
        unknown = sorted(set(value) - set(fields))
        required = {n for n, f in fields.items() if f.default is dataclasses.MISSING}
        missing = sorted(required - set(value))
        if unknown or missing:
            raise ValueError(
                f"{where} does not describe a {kind.__name__}: unknown fields {unknown}, "
                f"missing fields {missing}; it was written by another version."
            )
        return kind(**{n: _build(hints[n], v, f"{where}.{n}") for n, v in value.items()})
    if origin is tuple:
        (item, *rest) = typing.get_args(kind)
        kinds = [item] * len(value) if rest == [...] else [item, *rest]
        return tuple(_build(k, v, where) for k, v in zip(kinds, value, strict=True))
    if origin in (typing.Union, types.UnionType) and value is not None:
        (inner,) = (k for k in typing.get_args(kind) if k is not type(None))
        return _build(inner, value, where)
    return value
