"""Options by the names that they had before, which work for one more release with a warning."""

import sys
from collections.abc import Sequence
from typing import Any

from models.files.renamed import old_paths


def current_options(arguments: Sequence[str], *kinds: Any, **renamed: str) -> list[str]:
    """The arguments with old spellings replaced, each with a warning on stderr.

    Args:
      kinds: config classes whose fields, and those of configs in them, are the options.
      renamed: further options, old name to new (`steps="euler_steps"`).
    """
    paths = {old: new for kind in kinds for old, new in old_paths(kind)} | renamed
    names = {_option(old): _option(new) for old, new in paths.items()}
    return [_current(argument, names) for argument in arguments]


def _option(path: str) -> str:
    return "--" + path.replace("_", "-")


def _current(argument: str, names: dict[str, str]) -> str:
    name, equals, value = argument.partition("=")
    now = names.get(_option(name.removeprefix("--"))) if name.startswith("--") else None
    if now is None:
        return argument
    print(f"warning: {name} is {now} now; the next release takes only that.", file=sys.stderr)
    return f"{now}{equals}{value}"
