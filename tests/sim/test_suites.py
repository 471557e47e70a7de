"""Suites are found by name, in a user's file and in installed packages."""

import hashlib
import sys

import pytest

from sim.suites import load_suite

SUITE = """
from sim.suite import Suite
MINE = Suite("mine", ("one", "two"), 5, lambda tasks, count, size: (tasks, count, size))
OTHER = 3
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Installs a package whose metadata offers suites; call it with the entry points' lines."""

    def install(name: str, lines: str):
        (tmp_path / f"{name}.py").write_text(SUITE)
        metadata = tmp_path / f"{name}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[chiliad.suites]\n{lines}\n")

    monkeypatch.syspath_prepend(tmp_path)
    yield install
    for name in ("their_suites", "rival_suites"):
        sys.modules.pop(name, None)


def test_a_users_file_holds_a_suite(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(SUITE)
    suite = load_suite(f"{file}:MINE")
    assert (suite.name, suite.tasks, suite.episodes) == ("mine", ("one", "two"), 5)
    assert suite.open(("one",), 2, 64) == (("one",), 2, 64)
    with pytest.raises(ValueError, match=r"mine\.py has no Suite named 'OTHER', it has int"):
        load_suite(f"{file}:OTHER")
    with pytest.raises(ValueError, match=r"mine\.py has no Suite named 'NONE', it has NoneType"):
        load_suite(f"{file}:NONE")
    with pytest.raises(FileNotFoundError, match=r"nowhere\.py: no such file"):
        load_suite(str(tmp_path / "nowhere.py:MINE"))


def test_a_suite_tells_what_brought_it_and_a_changed_file_shows(tmp_path):
    file = tmp_path / "mine.py"
    sources = []
    for text in (SUITE, SUITE, SUITE + "# another\n"):
        file.write_text(text)
        sources.append(load_suite(f"{file}:MINE").source)
    assert sources[0] == sources[1] == f"sha256:{hashlib.sha256(SUITE.encode()).hexdigest()}"
    assert sources[2] != sources[0]
    assert load_suite("tabletop-lift").source == ""


def test_installed_packages_offer_suites(package):
    package("their_suites", "theirs = their_suites:MINE\nbroken = their_suites:OTHER")
    assert load_suite("theirs").tasks == ("one", "two")
    assert load_suite("theirs").source == "their_suites 1.0"
    with pytest.raises(ValueError, match=r"'broken' .* is no Suite, it is int"):
        load_suite("broken")
    with pytest.raises(ValueError, match=r"Unknown suite 'thiers'.*tabletop.*'theirs'.*\.py:NAME"):
        load_suite("thiers")


def test_a_suite_that_two_packages_offer_is_refused(package):
    package("their_suites", "theirs = their_suites:MINE")
    package("rival_suites", "theirs = rival_suites:MINE")
    with pytest.raises(ValueError, match=r"'theirs' is offered by .*rival_suites.*uninstall"):
        load_suite("theirs")


@pytest.mark.parametrize("name", ["tabletop-fly", "metaworld-fly", "gym", "gym:", "fly", ""])
def test_the_error_about_an_unknown_suite_says_what_there_is(name):
    with pytest.raises(ValueError, match=rf"Unknown suite '{name}'; (choose|give) \w+"):
        load_suite(name)


def test_the_tabletop_is_one_suite_and_each_of_its_tasks_another():
    family, lift = load_suite("tabletop"), load_suite("tabletop-lift")
    assert lift.tasks == ("tabletop-lift",)
    assert {"tabletop-reach", "tabletop-lift", "tabletop-push"} <= set(family.tasks)
    assert family.first_seed == lift.first_seed == 1_000_000_000


def test_recordings_of_an_arm_that_is_told_joints_are_disturbed_less():
    noise = {name: load_suite(name).noise for name in ("tabletop", "arm", "arm-lift-joint")}
    assert noise == {"tabletop": 0.015, "arm": 0.015, "arm-lift-joint": 0.003}
