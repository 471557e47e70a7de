"""Former names of options, which work for one more release with a warning."""

import sys
from collections.abc import Sequence
from typing import Any

from models.files.renamed import old_paths, old_values
from models.files.terminal import harmless


def current_options(arguments: Sequence[str], *kinds: Any, **renamed: str) -> list[str]:
    """The arguments with old spellings of options and values replaced, each with a warning on
    stderr.

    Args:
      kinds: configs or their classes; their fields, and those of nested ones, are the options.
      renamed: further options, old name to new (`steps="euler_steps"`).
    """
    paths = {old: new for kind in kinds for old, new in old_paths(kind)} | renamed
    names = {_option(old): _option(new) for old, new in paths.items()}
    values = {_option(path): new for kind in kinds for path, new in old_values(kind)}
    found: list[str] = []
    for argument in arguments:
        if found and argument in values.get(found[-1], {}):
            argument = _warned(argument, values[found[-1]][argument], f"{found[-1]} ")
        elif argument.startswith("--"):
            name, equals, value = argument.partition("=")
            if (old := _option(name.removeprefix("--"))) in names:
                name = _warned(name, names[old])
            if value in values.get(_option(name.removeprefix("--")), {}):
                value = _warned(value, values[_option(name.removeprefix("--"))][value], f"{name}=")
            argument = f"{name}{equals}{value}"
        found.append(argument)
    return found


def with_value(arguments: Sequence[str], flag: str, value: str) -> list[str]:
    """The arguments with a value after a flag that took none before, with a warning on stderr."""
    found = list(arguments)
    if flag in found:
        at = found.index(flag) + 1
        if at == len(found) or found[at].startswith("--"):
            _warned(flag, f"{flag} {value}")
            found.insert(at, value)
    return found


def _option(path: str) -> str:
    return "--" + path.replace("_", "-")


def _warned(old: str, new: str, where: str = "") -> str:
    sentence = (
        f"warning: {where}{old} is now {where}{new}; the next release accepts only the new form."
    )
    print(harmless(sentence), file=sys.stderr)
    return new
