"""The environment that a run of RL learns in, as its checkpoints record it: every field of the
slots' `Spec`, and the digest of the file or the version of the package that brought the suite.

A run resumed in another environment of the same name would continue with the advantages, optimizer
moments and curves of the first, and nothing would look wrong.
"""

import json
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from models.checkpoints import own
from models.config import to_json
from models.files.terminal import Console
from sim.protocol import Spec
from sim.suite import Suite

Json = Any
FIELD = "environment"
"""Name of the environment's entry in the config that checkpoints hold."""


def describe(specs: Sequence[Spec], suite: Suite) -> Json:
    """Properties of the environment that a resumed run must match, as JSON: those of the spec, or
    of each spec by its tasks if there are several."""
    first, *others = (to_json(spec) for spec in specs)
    told = {" ".join(spec.tasks): to_json(spec) for spec in specs} if others else first
    return json.loads(json.dumps({"suite": suite.name, "source": suite.source} | told))


def check_environment(path: Path, found: Json, console: Console) -> None:
    """Refuses to continue from the checkpoint at `path` in an environment other than its own.

    Checkpoints of early versions do not record theirs; a message says so, and the run continues.

    Raises:
      ValueError: a field differs; the message has both values.
    """
    saved = own.read_json(path, "config").get(FIELD)
    if saved is None:
        console.print(
            f"{path} does not record its environment (early versions did not), so there is no way "
            f"to tell whether it has changed since.",
            soft_wrap=True,
        )
        return
    for name in sorted(set(saved) | set(found)):
        if saved.get(name) != found.get(name):
            raise ValueError(
                f"{path} was trained in a different environment: its {name} was "
                f"{_short.repr(saved.get(name))} and is {_short.repr(found.get(name))} now. "
                f"Restore the environment as it was, or start a new run from this one: "
                f"--checkpoint {path} with another --out, without --resume."
            )


_short = reprlib.Repr()
_short.maxstring, _short.maxother = 200, 200
