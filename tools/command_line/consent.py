"""The question whether a mixture's file may run the Python that it names."""

import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

from data.mixture.relabelled import Transform
from data.mixture.trust import Consent, always, remember, remembered
from models.files.terminal import Console, say


def consent(trust: bool, alone: bool, console: Console) -> Consent:
    """Consent to everything with `--trust`; otherwise to what the user has agreed to before. A
    process that is `alone` and at a terminal also asks now."""
    if trust:
        return always
    asks = alone and console.is_terminal and sys.stdin is not None and sys.stdin.isatty()
    return partial(_ask, console) if asks else remembered


def _ask(console: Console, mixture: Path, transform: Transform) -> bool:
    if remembered(mixture, transform):
        return True
    say(
        console,
        f"{mixture} names '{transform.function}' of {Path(transform.file).resolve()} as a "
        "transform, a program that runs with your rights.",
    )
    try:
        answer = console.input(
            "Run it now, and from now on as long as its content stays the same? [y/N] "
        )
    except EOFError:
        return False
    agreed = answer.strip().lower() in ("y", "yes")
    if agreed:
        with suppress(OSError):  # without a folder to remember it in, the next run asks again
            remember(mixture, transform)
    return agreed
