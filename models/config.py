"""Conversion of frozen dataclasses to JSON values and back. A run or policy is rebuilt from its
files alone, and errors in what a user wrote name the field that is wrong."""

import dataclasses
import reprlib
import sys
import types
import typing
from typing import Any, TypeVar

from models.files.renamed import current
from models.inputs.parts import InputPart, part_class
from models.model import ModelConfig, family_config, family_of

T = TypeVar("T")


def to_json(config: Any) -> Any:
    """A dataclass tree as dicts, lists and scalars; a model's config carries its `family`, a part
    of a preparation its `kind`."""
    if dataclasses.is_dataclass(config):
        named: dict[str, Any] = {"family": config.family} if isinstance(config, ModelConfig) else {}
        if isinstance(config, InputPart):
            named = {"kind": config.kind}
        values = {f.name: to_json(getattr(config, f.name)) for f in dataclasses.fields(config)}
        return named | values
    if isinstance(config, tuple):
        return [to_json(item) for item in config]
    return config


def from_json(kind: type[T], value: Any, where: str = "config") -> T:
    """The inverse of `to_json` for dataclasses, tuples, dicts, optionals, literals, scalars, and
    unions of a scalar and a tuple.

    A `ModelConfig` is built as the family that its values name, an `InputPart` as their kind. A
    class may say how older files name its fields: `from_older(values)` gives today's.

    Raises:
      ValueError: a family or kind is unknown or not `kind`'s, or a field is unknown, missing, of
        another type, not finite or refused by its dataclass; the message gives the field's path.
    """
    return _build(kind, value, where)


def model_config(value: Any, where: str = "model") -> ModelConfig:
    """A model's config from JSON, of the family that the JSON names; raises as `from_json`."""
    return _build(ModelConfig, value, where)


def _build(kind: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and issubclass(kind, ModelConfig):
        _check(isinstance(value, dict), kind.__name__, value, where)
        kind, value = _of_family(kind, value, where)
    if isinstance(kind, type) and issubclass(kind, InputPart):
        _check(isinstance(value, dict), kind.__name__, value, where)
        kind, value = _of_kind(kind, value, where)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        _check(isinstance(value, dict), kind.__name__, value, where)
        value, hints = current(kind, value, where), typing.get_type_hints(kind)
        value = getattr(kind, "from_older", lambda values: values)(value)
        fields = {f.name: f for f in dataclasses.fields(kind)}
        unknown = sorted(set(value) - set(fields))
        required = {
            n
            for n, f in fields.items()
            if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        }
        missing = sorted(required - set(value))
        if unknown or missing:
            raise ValueError(
                f"{where} does not describe a {kind.__name__}: unknown fields {unknown}, missing "
                f"fields {missing} (its fields are {sorted(fields)}); fix it, or read it with the "
                "version that wrote it."
            )
        built = {n: _build(hints[n], v, f"{where}.{n}") for n, v in value.items()}
        try:
            return kind(**built)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    if origin is tuple:
        _check(isinstance(value, list | tuple), "list", value, where)
        (item, *rest) = arguments
        kinds = [item] * len(value) if rest == [...] else [item, *rest]
        _check(len(kinds) == len(value), f"list of {len(kinds)}", value, where)
        parts = enumerate(zip(kinds, value, strict=True))
        return tuple(_build(k, v, f"{where}[{i}]") for i, (k, v) in parts)
    if origin is dict:
        _check(isinstance(value, dict), "table", value, where)
        return {name: _build(arguments[1], v, f"{where}.{name}") for name, v in value.items()}
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        kinds = [k for k in arguments if k is not type(None)]
        several = isinstance(value, list | tuple)
        fitting = [k for k in kinds if (typing.get_origin(k) is tuple) == several]
        return _build((fitting or kinds)[0], value, where)
    if origin is typing.Literal:
        _check(value in arguments, f"one of {list(arguments)}", value, where)
    if kind in (bool, int, float, str):
        number = kind is float and isinstance(value, int) and not isinstance(value, bool)
        _check(type(value) is kind or number, kind.__name__, value, where)
        if kind is float:
            _check(abs(value) <= sys.float_info.max, "a finite number", value, where)
    return value


def _of_family(kind: Any, value: dict[str, Any], where: str) -> tuple[Any, dict[str, Any]]:
    """The config class that the values belong to, and the values without their family's name."""
    name = family_of(value)
    if kind is ModelConfig:
        try:
            kind = family_config(name)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    else:
        _check("family" not in value or name == kind.family, repr(kind.family), name, where)
    return kind, {n: v for n, v in value.items() if n != "family"}


def _of_kind(kind: Any, value: dict[str, Any], where: str) -> tuple[Any, dict[str, Any]]:
    """The class of parts that the values belong to, and the values without their kind's name."""
    try:
        found = part_class(kind, value.get("kind"))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return found, {n: v for n, v in value.items() if n != "kind"}


def _check(holds: bool, expected: str, value: Any, where: str) -> None:
    if not holds:
        raise ValueError(f"{where} is {reprlib.repr(value)}, expected {expected}.")
