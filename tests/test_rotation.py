"""CI's choice of slow tests and drills: what changed is tested, nothing is left out for ever, and
the minutes hold whatever changed."""

import json
import subprocess
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.helpers import rotation
from tests.helpers.arrows import ARROWS
from tests.helpers.rotation import (
    DRILLS,
    MOST,
    ROOT,
    SLOW,
    changed,
    chosen,
    deal,
    touched,
)

FILES = {
    f"tests/{folder}/test_{i}.py": 20.0 + 7 * i
    for folder in ("models", "data", "parallel", "sim", "rl", "tools", "client", "e2e")
    for i in range(12)
}
PLACES = {f"tests/rl/test_drill.py::test_{i}": 5.0 * i for i in range(60)}


def test_hands_cost_alike_and_hold_every_name_once() -> None:
    hands = deal(FILES, 5)
    assert sorted(name for hand in hands for name in hand) == sorted(FILES)
    costs = [sum(FILES[name] for name in hand) for hand in hands]
    assert max(costs) - min(costs) <= max(FILES.values())


def test_all_slow_tests_of_what_changed_are_taken_with_a_share_of_the_others() -> None:
    found = chosen(FILES, PLACES, {"sim"}, number=7)
    assert {file for file in FILES if file.startswith("tests/sim/")} <= found
    others = {file for file in found & FILES.keys() if not file.startswith("tests/sim/")}
    assert 0 < len(others) < len(FILES) / 3
    assert 0 < len(found & PLACES.keys()) < len(PLACES) / 5


def test_the_minutes_hold_where_every_package_changed() -> None:
    assert sum(FILES.values()) > 3 * MOST
    for number in range(20):
        found = chosen(FILES, PLACES, ARROWS, number)
        assert sum(FILES[file] for file in found & FILES.keys()) <= MOST + max(FILES.values())


@pytest.mark.parametrize("packages", [(), ("sim",), tuple(ARROWS)])
def test_nothing_is_left_out_for_ever(packages: tuple[str, ...]) -> None:
    taken = [chosen(FILES, PLACES, packages, number) for number in range(SLOW * DRILLS * 4)]
    assert set.union(*taken) == {*FILES, *PLACES}


@pytest.mark.parametrize(
    ("path", "packages"),
    [
        ("models/flow/flow.py", ARROWS.keys() - {"client"}),
        ("sim/suite.py", {"sim", "rl", "tools"}),
        ("client/chiliad_client/arm.py", {"client"}),
        ("tests/rl/test_run.py", {"rl"}),
        ("tests/helpers/rl/toy.py", {"rl"}),
        ("tests/conftest.py", ARROWS.keys()),
        ("constraints/py311.txt", ARROWS.keys()),
        ("docs/results/data/rl.json", {"tools"}),
        (".ci/landed", {"tools"}),
        ("README.md", {"tools"}),
    ],
)
def test_a_change_touches_its_package_and_those_that_import_it(path: str, packages: set) -> None:
    assert touched([path]) == packages


def test_slow_tests_and_drills_are_taken_by_their_marks_and_the_longest_file_first(
    tmp_path, monkeypatch
) -> None:
    def item(name: str, *marks: str, row: tuple[str, ...] = ()) -> Mock:
        known = dict.fromkeys(marks, Mock()) | ({"row": Mock(args=row)} if row else {})
        return Mock(nodeid=name, get_closest_marker=known.get)

    short, long, longest = (f"tests/sim/test_{n}.py::test_0" for n in ("short", "long", "longest"))
    drills = [f"tests/rl/test_drill.py::test_{i}" for i in range(rotation.DRILLS)]
    fast = item("tests/sim/test_long.py::test_1")
    items = [item(short, "slow"), item(long, "slow"), item(longest, "slow"), fast]
    items += [item(name, "slow", "drill") for name in drills]
    rows = [("here", "sim/suite"), ("there", "models/there"), ("elsewhere", "models/elsewhere")]
    cells = {row: [f"tests/tools/test_rows.py::test_{i}[{row[0]}]" for i in "ab"] for row in rows}
    items += [item(name, "drill", row=row) for row, names in cells.items() for name in names]
    seconds = tmp_path / "seconds.json"
    slow = {"tests/sim/test_long.py": 100, longest: 200, longest.replace("0", "1"): 200}
    seconds.write_text(json.dumps({"slow": slow, "drills": {}}))
    monkeypatch.setattr(rotation, "SECONDS", seconds)
    monkeypatch.setattr(rotation, "changed", lambda since: ["sim/suite.py"])
    found = [item.nodeid for item in rotation.take(items, "a commit")]
    whole = [row[0] for row, names in cells.items() if {*names} <= {*found}]
    assert "here" in whole
    assert len(whole) <= 2
    assert len([name for name in found if "test_rows" in name]) == 2 * len(whole)
    others = [name for name in found if name not in drills and "test_rows" not in name]
    assert others == [longest, long, short]
    assert len({*found} & {*drills}) == 1


def test_what_changed_is_what_all_commits_since_changed(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        done = subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)
        return done.stdout.decode().strip()

    git("init", "-q")
    for name in ("landed", "first", "second"):
        (tmp_path / name).touch()
        git("add", name)
        git("commit", "-qm", name)
    assert changed(git("rev-parse", "HEAD~2"), tmp_path) == ["first", "second"]
    with pytest.raises(ValueError, match="git diff"):
        changed("0" * 40, tmp_path)


def test_what_landed_last_is_a_commit_before_this_one() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no history here")
    landed = (ROOT / ".ci" / "landed").read_text().strip()
    ancestor = ["git", "merge-base", "--is-ancestor", landed, "HEAD"]
    assert subprocess.run(ancestor, cwd=ROOT).returncode == 0
