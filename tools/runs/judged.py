"""Success rates that `tools.evaluate` left in a run's folder, as its evaluation.json has them."""

import json
from pathlib import Path
from typing import Any

from models.files.terminal import first_line
from models.files.whole_text import read_whole
from sim.statistics import Rate

NAME = "evaluation.json"
_DAMAGE = (
    *(ValueError, KeyError, TypeError, AttributeError),
    *(RecursionError, OverflowError, StopIteration),
)


def evaluations_in(run: Path) -> list[Path]:
    """The files of a run's evaluations."""
    return sorted({*run.glob(NAME), *run.glob(f"*/{NAME}")})


def read_rates(path: Path) -> tuple[str, dict[str, Rate]]:
    """The suite, and the success rate of each policy or control, the evaluated one first.

    Raises:
      ValueError: the file is damaged, or not one of tools.evaluate.
      OSError: it cannot be read.
    """
    try:
        summary = json.loads(read_whole(path))
        evaluations = summary["evaluations"]
        told = summary if "suite" in summary else next(iter(evaluations.values()))
        suite = told["suite"]
        rates = {name: _rate(found["success"]) for name, found in evaluations.items()}
        if not isinstance(suite, str):
            raise ValueError("the suite is no text")
    except _DAMAGE as error:
        raise ValueError(
            f"{path}: is damaged, or not from tools.evaluate ({type(error).__name__}: "
            f"{first_line(error)[:80]}); evaluate again, or remove the file."
        ) from None
    return suite, rates


def _rate(success: Any) -> Rate:
    counts = [success[name] for name in ("successes", "trials")]
    if not all(type(count) is int for count in counts):
        raise ValueError(f"the counts are {counts}")
    return Rate(*counts)
