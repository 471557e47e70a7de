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
_SECONDS = 120
_BINARY = "core/ReplaceBinaryOperator_"
_OTHERS = ("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Div", "Mod_FloorDiv", "Pow_Mul")
_BITS = ("BitOr_BitAnd", "BitAnd_BitOr", "BitXor_BitAnd", "LShift_RShift", "RShift_LShift")


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
    cosmic_ray = shutil.which("cosmic-ray", path=str(Path(sys.executable).parent))
    if cosmic_ray is None:
        raise FileNotFoundError("cosmic-ray is not installed; `make mutants` installs it.")
    committed = ["git", "rev-parse", *(f"HEAD:{path}" for path in (file, *tests.split()))]
    blobs = subprocess.run(committed, cwd=ROOT, check=True, capture_output=True).stdout
    folder = ROOT / "runs" / "mutants" / f"{name}-{hashlib.sha256(blobs).hexdigest()[:8]}"
    clone, session, begun = folder / "clone", folder / "session.sqlite", folder / "begun"
    if not begun.exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        _begin(cosmic_ray, folder, file, tests)
        begun.touch()
    subprocess.run(["git", "checkout", "--quiet", "."], cwd=clone, check=True)  # a mutant was left
    ran = [cosmic_ray, "exec", folder / "config.toml", session]
    subprocess.run(ran, cwd=clone, check=True)
    with closing(sqlite3.connect(session)) as work:
        found = work.execute("select test_outcome, diff from work_results").fetchall()
    survivors = tuple(_told(diff) for outcome, diff in found if outcome == "SURVIVED")
    return Mutants(file, len(found), survivors)


def _begin(cosmic_ray: str, folder: Path, file: str, tests: str) -> None:
    chosen = "not slow and not fuzz and not drill"
    # cosmic-ray's own timeout ends a shell, whose tests would go on
    python = f"timeout {_SECONDS} {sys.executable}"
    ran = f"{python} -m pytest -q -x -m '{chosen}' -p no:cacheprovider {tests}"
    config, session = folder / "config.toml", folder / "session.sqlite"
    config.write_text(
        f'[cosmic-ray]\nmodule-path = "{file}"\ntimeout = {2 * _SECONDS}\n'
        f'excluded-modules = []\ntest-command = "{ran}"\n'
        '[cosmic-ray.distributor]\nname = "local"\n'
    )
    subprocess.run([cosmic_ray, "init", config, session], cwd=folder / "clone", check=True)
    with closing(sqlite3.connect(session)) as work:
        _thin(work)


def _thin(work: sqlite3.Connection) -> None:
    """Leaves one mutant of each binary operator."""
    for job, operator in work.execute(
        "select job_id, operator_name from mutation_specs"
    ).fetchall():
        pair = operator.removeprefix(_BINARY)
        if operator.startswith(_BINARY) and pair not in _OTHERS + _BITS:
            work.execute("delete from mutation_specs where job_id = ?", (job,))
            work.execute("delete from work_items where job_id = ?", (job,))
    work.commit()


def _told(diff: str) -> str:
    changed = re.findall(r"^([-+](?![-+]{2}) *)(.*)$", diff, re.MULTILINE)
    return "\n".join(f"    {sign[0]} {line}" for sign, line in changed)


if __name__ == "__main__":
    for name in sys.argv[1:] or TARGETS:
        made = mutants(name)
        print(f"{made.file}: {len(made.survivors)} of {made.count} mutants survive")
        print("\n\n".join(made.survivors), flush=True)
