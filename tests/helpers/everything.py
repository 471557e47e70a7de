"""All tests of this Python, part by part: hours.

    make everything      # or, in any environment, python -m tests.helpers.everything

Slow tests and drills are a part for each package. After each part, docs/results/suite.md says what
ran, where and when; tests/seconds.json how long each file of slow tests and each drill took, by
which CI deals them out (tests/helpers/rotation.py). A part that passed on this commit with these
versions is not run again, so the command goes on where it was stopped.
"""

import json
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree.ElementTree import Element, parse

import pytest

from tests.helpers.arrows import ARROWS
from tests.helpers.rotation import LONG, ROOT, SECONDS, head, package
from tools.bench import pages
from tools.command_line.versions import versions

RUNS = ROOT / "docs" / "results" / "data" / "suite.json"
_FOLDERS = {package: (f"tests/{package}",) for package in ARROWS} | {
    "others": ("tests", *(f"--ignore=tests/{package}" for package in ARROWS))
}
PARTS = {
    "fast": ("not slow and not fuzz and not drill", ("tests",)),
    **{f"slow, {of}": ("slow and not fuzz and not drill", _FOLDERS[of]) for of in _FOLDERS},
    **{f"drills, {of}": ("drill and not fuzz", _FOLDERS[of]) for of in _FOLDERS},
    "fuzz": ("fuzz", ("tests",)),
}
"""Each part's tests: their markers, and where they are. Those marked `gpu` skip where there is
none."""


def main() -> None:
    """Runs the parts that have not passed on this commit, and exits with 1 if a test failed."""
    found = versions()
    here = {key: found[key] for key in ("python", "jax", "hardware")} | {"commit": head()}
    for part, words in PARTS.items():
        known = json.loads(RUNS.read_text(encoding="utf-8"))
        if any(run.items() >= {**here, "part": part, "failed": 0}.items() for run in known["runs"]):
            print(f"{part}: passed on this commit.", flush=True)
            continue
        last = [run["minutes"] for run in known["runs"] if run["part"] == part]
        print(part, *(f"took {minutes} minutes before" for minutes in last[-1:]), flush=True)
        if ran := run_part(*words, ROOT):
            told, seconds = ran
            _write(RUNS, kept(known, here | {"part": part} | told))
            _write(SECONDS, timed(json.loads(SECONDS.read_text(encoding="utf-8")), part, seconds))
            pages.main()
    runs = json.loads(RUNS.read_text(encoding="utf-8"))["runs"]
    sys.exit(any(run["failed"] and run.items() >= here.items() for run in runs))


def run_part(
    markers: str, where: Sequence[str], root: Path
) -> tuple[dict[str, Any], dict[str, dict[str, float]]] | None:
    """Runs the tests of these markers and places under `root`; gives the counts, minutes, date and
    load, and the seconds of each file, or each test of a long one ("slow"), and of each test
    ("drills"); nothing where there is no such test.

    Raises:
      ValueError: pytest did not come to its end.
    """
    load, since = os.getloadavg()[0], time.monotonic()
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words = [*where, "-m", markers, "-n2", "--dist", "loadfile", f"--junitxml={report}"]
        status = subprocess.run([sys.executable, "-m", "pytest", *words], cwd=root).returncode
        if status == pytest.ExitCode.NO_TESTS_COLLECTED:
            return None
        if status not in (0, 1):
            raise ValueError(f"pytest ended with {status}, so its counts are not of all tests.")
        cases = list(parse(report).iter("testcase"))
    counts = Counter(_outcome(case) for case in cases)
    told = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        **{outcome: counts[outcome] for outcome in ("passed", "skipped", "failed")},
        "minutes": round((time.monotonic() - since) / 60, 1),
        "load_before": round(load, 1),
    }
    tests, files = _sums(cases, _test), _sums(cases, _file)
    long = {file for file, cost in files.items() if cost > LONG}
    whole = {file: cost for file, cost in files.items() if file not in long}
    apart = {name: cost for name, cost in tests.items() if name.split("::")[0] in long}
    return told, {"slow": whole | apart, "drills": tests}


def timed(
    known: Mapping[str, Mapping[str, float]], part: str, seconds: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    """The seconds with those of a part in the place of all that were known of its package."""
    kind, _, of = part.partition(", ")
    if kind not in seconds:
        return dict(known)
    others = {name: cost for name, cost in known[kind].items() if package(name, "others") != of}
    return {**known, kind: dict(sorted({**others, **seconds[kind]}.items()))}


def kept(known: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """The record with a run in the place of the last one of its part and versions."""
    same = ("python", "jax", "part")
    others = [old for old in known["runs"] if any(old[key] != run[key] for key in same)]
    order = list(PARTS)
    runs = sorted([*others, run], key=lambda r: (r["python"], r["jax"], order.index(r["part"])))
    return {"runs": runs}


def _outcome(case: Element) -> str:
    kinds = {child.tag for child in case}
    failed = kinds & {"failure", "error"}
    return "failed" if failed else "skipped" if "skipped" in kinds else "passed"


def _sums(cases: Iterable[Element], name: Any) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for case in cases:
        sums[name(case)] += float(case.attrib["time"])
    return {key: round(sums[key], 1) for key in sorted(sums)}


def _file(case: Element) -> str:
    return case.attrib["classname"].replace(".", "/") + ".py"


def _test(case: Element) -> str:
    return f"{_file(case)}::{case.attrib['name']}"


def _write(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
