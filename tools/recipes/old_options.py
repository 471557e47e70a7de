"""Options under the names they had one release ago: taken, with a warning, so that scripts have a
release's time to change."""

import sys
from collections.abc import Mapping, Sequence

EULER_STEPS = {"--steps": "--euler-steps"}
"""Of commands whose `--steps` were the flow sampler's, while others' are updates."""


def renamed(arguments: Sequence[str], names: Mapping[str, str]) -> list[str]:
    """The command line with today's names of options (`--old value` or `--old=value`); each old
    one is warned of on stderr."""
    found = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name in names:
            print(
                f"warning: {name} is called {names[name]} now; the old name goes with the next "
                f"release.",
                file=sys.stderr,
            )
            name = names[name]
        found.append(name + equals + value)
    return found
