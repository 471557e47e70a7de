"""All tests of this Python, part by part: hours.

    make everything      # or, in any environment, python -m tests.helpers.everything

After each part, docs/results/suite.md says what ran, where and when; tests/seconds.json how long
each file of slow tests and each drill took, by which CI deals them out (tests/helpers/rotation.py).
A part that passed on this commit with these versions is not run again, so the command goes on where
it was stopped.
"""

import json
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree.ElementTree import Element, parse

from tests.helpers.rotation import ROOT, SECONDS, head
from tools.bench import pages
from tools.command_line.versions import versions

RUNS = ROOT / "docs" / "results" / "data" / "suite.json"
PARTS = {
    "fast": "not slow and not fuzz and not drill",
    "slow": "slow and not fuzz and not drill",
    "drills": "drill and not fuzz",
    "fuzz": "fuzz",
}
"""Each part's tests, by their markers. Those marked `gpu` skip where there is none."""


def main() -> None:
    """Runs the parts that have not passed on this commit, and exits with 1 if a test failed."""
    found = versions()
    here = {key: found[key] for key in ("python", "jax", "hardware")} | {"commit": head()}
    for part, markers in PARTS.items():
        known = json.loads(RUNS.read_text(encoding="utf-8"))
        if any(run.items() >= {**here, "part": part, "failed": 0}.items() for run in known["runs"]):
            print(f"{part}: passed on this commit.", flush=True)
            continue
        last = [run["minutes"] for run in known["runs"] if run["part"] == part]
        print(f"{part}: about {max(last, default=60):.0f} minutes", flush=True)
        told, seconds = run_part(markers, ROOT)
        _write(RUNS, kept(known, here | {"part": part} | told))
        if part in ("slow", "drills"):
            _write(SECONDS, json.loads(SECONDS.read_text(encoding="utf-8")) | {part: seconds[part]})
        pages.main()
    runs = json.loads(RUNS.read_text(encoding="utf-8"))["runs"]
    sys.exit(any(run["failed"] and run.items() >= here.items() for run in runs))


def run_part(markers: str, root: Path) -> tuple[dict[str, Any], dict[str, dict[str, float]]]:
    """Runs the tests under `root` with these markers; gives the counts, minutes, date and load, and
    the seconds of each file ("slow") and of each test ("drills").

    Raises:
      ValueError: pytest did not come to its end.
    """
    load, since = os.getloadavg()[0], time.monotonic()
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words = ["-m", markers, "-n", "2", "--dist", "loadfile", f"--junitxml={report}"]
        status = subprocess.run([sys.executable, "-m", "pytest", *words], cwd=root).returncode
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
    return told, {"slow": _sums(cases, _file), "drills": _sums(cases, _test)}


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
