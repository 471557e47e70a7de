"""Bounds of the sizes and names that describe a policy.

A checkpoint with matching digests can still hold nonsense, written by a broken script or a
stranger: a size of 0 or a billion, a robot with a path for its name. Configs and processors refuse
it when they are created, before an array is allocated or a file is opened by that name.
"""

import math
import numbers
from collections.abc import Mapping
from typing import Any

LARGEST_SIZE = 2**20
"""Limit of a width, a vocabulary's share or another axis, unless said otherwise."""
LARGEST_DEPTH = 2**12
LARGEST_VOCABULARY = 2**24
LARGEST_IMAGE = 2**13
LARGEST_HORIZON = 2**14
LARGEST_DIMS = 2**12
LARGEST_DRAWS = 2**10
"""Limit of noised chunks per observation, and of Euler steps."""
LARGEST_CREW = 2**12
"""Limit of processes, or of threads of one, that a machine starts for one purpose."""

_LONGEST_NAME = 200


def check_size(name: str, value: int, most: int = LARGEST_SIZE, *, least: int = 1) -> None:
    """Raises ValueError unless a size is a whole number from `least` to `most`."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or not least <= value <= most:
        raise ValueError(f"{name} is {value}; expected a whole number from {least} to {most}.")


def check_sizes(where: str, config: object, *names: str, most: int = LARGEST_SIZE) -> None:
    """`check_size` of several fields of a config that is called `where`."""
    for name in names:
        check_size(f"{where}.{name}", getattr(config, name), most)


def check_reading(config: Any, steps: str = "euler_steps") -> None:
    """Raises ValueError unless the sizes of what a model reads, draws and acts by are sane; `steps`
    names the field with the steps in which it acts."""
    size = config.image_size
    for side in size if isinstance(size, tuple) else (size,):
        check_size("model.image_size", side, LARGEST_IMAGE)
    check_size("model.vocabulary", config.vocabulary, LARGEST_VOCABULARY)
    check_sizes("model", config, "state_dim", "action_dim", most=LARGEST_DIMS)
    check_size("model.horizon", config.horizon, LARGEST_HORIZON)
    check_sizes("model", config, "chunks", steps, most=LARGEST_DRAWS)


def check_least(least: Mapping[str, tuple[float, float]]) -> None:
    """Raises ValueError unless every field's number (the first of its two) is at least its minimum
    (the second); NaN is refused."""
    for name, (value, smallest) in least.items():
        if not value >= smallest:
            raise ValueError(f"{name} is {value}; it must be at least {smallest}.")


def check_positive(values: Mapping[str, float]) -> None:
    """Raises ValueError unless every field's number is finite and above 0."""
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} is {value}; give a number above 0.")


def check_finite(where: str, config: object, *names: str) -> None:
    """Raises ValueError unless these fields of a config that is called `where` are finite."""
    for name in names:
        if not math.isfinite(value := getattr(config, name)):
            raise ValueError(f"{where}.{name} is {value}; it must be a finite number.")


def check_decoder(where: str, config: Any) -> None:
    """Raises ValueError unless a decoder's sizes are sane, its key-value heads divide its heads,
    and rotary embeddings can halve a head."""
    check_sizes(where, config, "width", "hidden", "heads", "kv_heads", "head_dim")
    check_size(f"{where}.depth", config.depth, LARGEST_DEPTH)
    if config.heads % config.kv_heads or config.head_dim % 2:
        raise ValueError(
            f"{where}.heads is {config.heads}, kv_heads {config.kv_heads} and head_dim "
            f"{config.head_dim}; heads must be a multiple of kv_heads, and head_dim even."
        )


def check_name(what: str, name: str, *, nested: bool = False) -> None:
    """Raises ValueError unless a name can stand for a file or folder inside another and be printed:
    not empty, no path, no control characters, at most 200 bytes of UTF-8.

    Args:
      nested: it may have parts joined by "/", as "organisation/robot" has.
    """
    parts = name.split("/") if nested else [name]
    try:
        long = len(name.encode()) > _LONGEST_NAME
    except UnicodeEncodeError:
        long = True
    if (
        long
        or any(part.strip() in ("", ".", "..") for part in parts)
        or any(character in "\\" or not character.isprintable() for character in name)
        or (not nested and "/" in name)
    ):
        kind = "an empty part, '..'" if nested else "'/', '..'"
        raise ValueError(
            f"{what} is named {name[:_LONGEST_NAME]!r}; a name has 1 to {_LONGEST_NAME} bytes and "
            f"no {kind}, '\\' or control characters."
        )
