"""Subcommands of a command, such as `validate` of `chiliad data`, and the nearest of them to a
mistyped one."""

import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

import tyro

from models.files.terminal import harmless


def no_command(name: str, known: Iterable[str], listing: str) -> str:
    """A sentence on a command that does not exist, with the nearest one, or else `listing`."""
    near = get_close_matches(name.replace("_", "-"), list(known), n=1)
    return f"there is no command {name!a}; " + (f"did you mean {near[0]}?" if near else listing)


class Commands(tyro.extras.SubcommandApp):
    """Tyro's subcommands, of which a mistyped one ends in one line."""

    def cli(self, *, args: Sequence[str] | None = None, **options: Any) -> Any:
        """Runs the subcommand that the arguments name, as tyro's `cli`."""
        given = list(sys.argv[1:] if args is None else args)
        name, known = next(iter(given), "-"), list(self._subcommands)
        if not name.startswith("-") and name.replace("_", "-") not in known:
            print(
                harmless(f"error: {no_command(name, known, '`--help` lists them.')}"),
                file=sys.stderr,
            )
            sys.exit(2)
        return super().cli(args=args, **options)
