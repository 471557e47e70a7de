"""Mutants of what must be exact, by cosmic-ray: each differs in one operator, number, comparison or
decorator from the code, and a test must fail for it (docs/results/mutants.md).

    python -m tests.helpers.mutants staleness quantiles      # or `make mutants`, all of `TARGETS`

Works on a clone, so what is committed is mutated and nothing here is changed. A binary operator is
replaced by one other alone (`+` by `-`), as the rest of cosmic-ray's choices rarely tell more. The
same command goes on with what an interrupted one left in runs/mutants, as long as the file and its
tests are committed as they were.
"""

import hashlib
import re
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
TARGETS = {
    "staleness": ("rl/host/staleness.py", "tests/rl/host/test_staleness.py"),
    "quantiles": ("data/statistics/quantiles.py", "tests/data/statistics/test_quantiles.py"),
    "checkpoint": (
        "parallel/checkpoint.py",
        "tests/parallel/test_checkpoint.py tests/parallel/test_damage.py "
        "tests/parallel/test_failed_save.py",
    ),
    "packing": ("data/packing/packing.py", "tests/data/packing/test_packing.py"),
    "attention": ("models/attention/attention.py", "tests/models/attention/test_attention.py"),
}
"""Files by name, each with the tests that must notice."""


@dataclass(frozen=True)
class Mutants:
    """Mutants of a file: how many there were, and the lines before and after of those that no test
    noticed."""

    file: str
    count: int
    survivors: tuple[str, ...]


def mutants(name: str) -> Mutants:
    """Makes the mutants of a target, one after another, and has its tests run on each."""
    file, tests = TARGETS[name]
    if find_spec("cosmic_ray") is None:
        raise ModuleNotFoundError("cosmic-ray is not installed; `make mutants` installs it.")
    committed = ["git", "rev-parse", *(f"HEAD:{path}" for path in (file, *tests.split()))]
    blobs = subprocess.run(committed, cwd=ROOT, check=True, capture_output=True).stdout
    folder = ROOT / "runs" / "mutants" / f"{name}-{hashlib.sha256(blobs).hexdigest()[:8]}"
    clone, session = folder / "clone", folder / "session.sqlite"
    if not session.exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    subprocess.run(["git", "checkout", "--quiet", "."], cwd=clone, check=True)  # a mutant was left
    made = [sys.executable, "-m", "tests.helpers.mutate", session, file, *tests.split()]
    subprocess.run(made, cwd=clone, check=True)
    with closing(sqlite3.connect(session)) as work:
        found = work.execute("select test_outcome, diff from work_results").fetchall()
    survivors = tuple(_told(diff) for outcome, diff in found if outcome == "SURVIVED")
    return Mutants(file, len(found), survivors)


def _told(diff: str) -> str:
    changed = re.findall(r"^([-+](?![-+]{2}) *)(.*)$", diff, re.MULTILINE)
    return "\n".join(f"    {sign[0]} {line}" for sign, line in changed)


if __name__ == "__main__":
    for name in sys.argv[1:] or TARGETS:
        made = mutants(name)
        print(f"{made.file}: {len(made.survivors)} of {made.count} mutants survive")
        print("\n\n".join(made.survivors), flush=True)
