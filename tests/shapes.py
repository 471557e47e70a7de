"""Checks of jaxtyped signatures at run time, which jaxtyping's import hook puts on our functions.

Only hints of arrays are checked, by shape and dtype: all others are mypy's, and tests break some on
purpose.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from types import UnionType
from typing import Any, Union, get_args, get_origin

import jax
import jaxtyping
import numpy as np
from beartype import beartype
from jaxtyping import AbstractArray

_KINDS = jax.Array | np.ndarray | np.generic


def install(packages: Sequence[str]) -> None:
    """Has the packages checked from their next import on.

    Functions and dataclasses without an array stay as they are: loops call some a million times.
    """
    jaxtyped = jaxtyping.jaxtyped

    def where_arrays_are(*, typechecker: Any) -> Callable:
        check = jaxtyped(typechecker=typechecker)
        return lambda thing: check(thing) if any(map(_holds_array, _hints(thing))) else thing

    jaxtyping.jaxtyped = where_arrays_are
    jaxtyping.install_import_hook(packages, "tests.shapes.check_arrays")


def check_arrays(function: Callable) -> Callable:
    """`function` with its arrays checked by beartype at every call.

    A dataclass that is a pytree is not checked when it is made: JAX rebuilds it of whatever its
    leaves have become, such as shapes, shardings, None, or arrays with one more axis under vmap.
    """
    hints = function.__annotations__.items()
    arrays = {name: _of_either_kind(hint) for name, hint in hints if _holds_array(hint)}
    if not arrays:
        return function
    function.__annotations__ = arrays
    checked = beartype(function)
    if function.__name__ != "__init__":
        return checked

    @functools.wraps(function)
    def init(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (function if _is_pytree(self) else checked)(self, *args, **kwargs)

    return init


def _hints(thing: Any) -> list[Any]:
    if dataclasses.is_dataclass(thing):
        return [field.type for field in dataclasses.fields(thing)]
    return [] if isinstance(thing, type) else list(thing.__annotations__.values())


def _holds_array(hint: Any) -> bool:
    return _is_array(hint) or any(map(_holds_array, get_args(hint)))


def _is_array(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, AbstractArray)


def _of_either_kind(hint: Any) -> Any:
    """The hint with numpy's arrays allowed for JAX's and the other way about: JAX's functions take
    both, a batch on the host is numpy's, and which it is, mypy knows."""
    if _is_array(hint):
        return hint.dtype[_KINDS, hint.dim_str] if hint.array_type in get_args(_KINDS) else hint
    parts = tuple(map(_of_either_kind, get_args(hint)))
    if not parts:
        return hint
    origin = get_origin(hint)
    return Union[parts] if origin is UnionType else origin[parts]  # noqa: UP007


def _is_pytree(value: Any) -> bool:
    return not jax.tree_util.all_leaves([value])
