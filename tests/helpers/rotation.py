"""CI's choice of slow tests and drills, as all of them take hours (`make everything`): the slow
tests of packages that changed or import what changed, as far as they fit into their minutes, and by
the commit's hash a fifth of the other slow tests, a tenth of the drills, and of docs/families.md a
row whose folder changed and another.

    python -m pytest -m 'slow or drill' --since COMMIT

Shares cost alike: seconds are of the last whole run (tests/seconds.json). A file of slow tests is
taken whole, since its tests share what they compile, unless it takes over `LONG`; its tests are
then taken one by one, as drills are. All workers choose the same.
"""

import json
import subprocess
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import pytest

from tests.helpers.arrows import ARROWS

ROOT = Path(__file__).resolve().parents[2]
SECONDS = ROOT / "tests" / "seconds.json"
"""Seconds of each file of slow tests, of each test of a long one, and of each drill, in the last
whole run."""
SLOW, DRILLS = 5, 10
"""Shares: one in so many of the slow tests that no change touched, and of the drills."""
LONG = 240.0
"""Seconds from which a file's slow tests are taken one by one."""
MOST = 12 * 60.0
"""Seconds, by that table, of slow tests that are taken because their packages changed."""
_USUAL = 20.0
"""Seconds of what is not in the table."""
_PAGES = ("docs", "notebooks", ".ci")


def touched(paths: Iterable[str]) -> frozenset[str]:
    """Packages whose slow tests a change of these files may fail: the package itself, and those
    that import it; for a page tools, whose tests run the commands on it; for any other file all."""
    found: set[str] = set()
    for path in paths:
        top, *below = path.split("/")
        tested = below[below[:1] == ["helpers"] :][:1]
        if top in ARROWS:
            found |= {top, *(package for package, below in ARROWS.items() if top in below)}
        elif top == "tests" and tested and tested[0] in ARROWS:
            found |= set(tested)
        else:
            found |= {"tools"} if top in _PAGES or path.endswith(".md") else ARROWS.keys()
    return frozenset(found)


def changed(since: str, root: Path = ROOT) -> list[str]:
    """Files in which the checked out commit differs from an earlier one.

    Raises:
      ValueError: there is no such commit here, as in a clone without history.
    """
    return _git(root, "diff", "--name-only", "--no-renames", since, "HEAD").splitlines()


def head(root: Path = ROOT) -> str:
    """The checked out commit, by whose hash, as a number, it is chosen."""
    return _git(root, "rev-parse", "HEAD")


def deal(seconds: Mapping[str, float], hands: int) -> list[set[str]]:
    """Names dealt into so many hands that cost alike: the costliest first, each to the hand that
    has the least."""
    dealt: list[set[str]] = [set() for _ in range(hands)]
    sums = [0.0] * hands
    for name in sorted(seconds, key=lambda name: (-seconds[name], name)):
        least = sums.index(min(sums))
        dealt[least].add(name)
        sums[least] += seconds[name]
    return dealt


def chosen(
    slow: Mapping[str, float], drills: Mapping[str, float], packages: Collection[str], number: int
) -> set[str]:
    """Names of the files of slow tests, or of tests of long ones, and of the drills, that a commit
    takes.

    Args:
      slow: seconds of each file of slow tests, or of a long one's tests.
      drills: seconds of each drill.
      packages: those whose slow tests a change may fail.
      number: the commit's.
    """
    theirs = {file: cost for file, cost in slow.items() if package(file) in packages}
    others = {file: cost for file, cost in slow.items() if file not in theirs}
    hands = max(1, -int(-sum(theirs.values()) // MOST))
    return {
        *deal(theirs, hands)[number % hands],
        *deal(others, SLOW)[number % SLOW],
        *deal(drills, DRILLS)[number % DRILLS],
    }


def rows_chosen(rows: Iterable[tuple[str, str]], paths: Sequence[str], number: int) -> set[str]:
    """Names of the rows, each given with the folder of its family, that a commit takes: one of
    those whose folder changed, and one of all."""
    every = sorted(rows)
    theirs = [row for row in every if any(path.startswith(row[1]) for path in paths)]
    return {some[number % len(some)][0] for some in (theirs, every) if some}


def package(name: str, of_all: str = "tools") -> str:
    """The package that a test or test file tests; those that test all are tools', which imports
    all, or `of_all`'s."""
    folder = name.split("/")[1]
    return folder if folder in ARROWS else of_all


def take(items: Sequence[pytest.Item], since: str) -> list[pytest.Item]:
    """The slow tests, drills and rows of `items` that the checked out commit takes, the files that
    take longest first, so that workers end together."""
    known = json.loads(SECONDS.read_text(encoding="utf-8"))
    apart = {_file(name) for name in known["slow"] if "::" in name}
    names = {item: _name(item, apart) for item in items if _part(item)}
    cost = {name: known.get(_part(item), {}).get(name, _USUAL) for item, name in names.items()}
    slow, drills = (
        {name: cost[name] for item, name in names.items() if _part(item) == part}
        for part in ("slow", "drills")
    )
    paths, number = changed(since), int(head(), 16)
    taken = chosen(slow, drills, touched(paths), number)
    taken |= rows_chosen({_row(item) for item in items} - {None}, paths, number)
    files = Counter[str]()
    for name in taken:
        files[_file(name)] += cost[name]
    kept = [item for item, name in names.items() if name in taken]
    return sorted(kept, key=lambda item: (-files[_file(item.nodeid)], _file(item.nodeid)))


def _part(item: pytest.Item) -> str:
    if _row(item):
        return "rows"
    if item.get_closest_marker("drill"):
        return "drills"
    return "slow" if item.get_closest_marker("slow") else ""


def _row(item: pytest.Item) -> tuple[str, str] | None:
    marker = item.get_closest_marker("row")
    return marker and marker.args


def _name(item: pytest.Item, apart: Collection[str]) -> str:
    if row := _row(item):
        return row[0]
    file = _file(item.nodeid)
    return item.nodeid if _part(item) == "drills" or file in apart else file


def _file(name: str) -> str:
    return name.split("::")[0]


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()
