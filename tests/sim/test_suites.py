"""Suites are found by name, in a user's file and in installed packages."""

import hashlib
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from sim.environments.arm_tasks import TASKS as ARM_TASKS
from sim.environments.tabletop import Tabletop
from sim.environments.tasks import TASKS
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
    with pytest.raises(ValueError, match=r"mine\.py has no Suite named 'OTHER'; found int"):
        load_suite(f"{file}:OTHER")
    with pytest.raises(ValueError, match=r"mine\.py has no Suite named 'NONE'; found NoneType"):
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


def test_every_suite_of_ours_is_judged_by_the_starts_that_it_always_was():
    """LIBERO's are held in its own tests."""
    for name in (
        "tabletop",
        "tabletop_varied-lift",
        "tabletop_camera",
        "arm-lift",
        "arm_paraphrase",
    ):
        suite = load_suite(name)
        assert (suite.first_seed, suite.recorded_from) == (1_000_000_000, 0)
        assert suite.judged(2) == range(1_000_000_000, 1_000_000_002)


def test_a_task_that_is_named_twice_is_refused_as_its_episodes_would_count_twice():
    suite = load_suite("tabletop")
    once = suite.tasks[:2]
    assert suite.groups(once) == [(task,) for task in once]
    for together in (False, True):
        with pytest.raises(ValueError, match=rf"Task \['{once[0]}'\] of suite 'tabletop' is named"):
            replace(suite, together=together).groups((*once, once[0]))


def test_installed_packages_offer_suites(package):
    package("their_suites", "theirs = their_suites:MINE\nbroken = their_suites:OTHER")
    assert load_suite("theirs").tasks == ("one", "two")
    assert load_suite("theirs").source == "their_suites 1.0"
    with pytest.raises(ValueError, match=r"'broken' .* is of type int, not Suite"):
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("tabletop-lift", ("camera", "light", "texture", "distractors", "paraphrase")),
        ("tabletop_varied-lift", ("distractors",)),
    ],
)
def test_a_variant_of_the_tabletop_begins_alike_and_looks_or_is_told_otherwise(
    name, chosen, monkeypatch
):
    """Bodies of the task and its goal are the same, bit by bit, and so is what nothing changes."""
    monkeypatch.setattr("sim.environments.tabletop.Tabletop", partial(Tabletop, group_size=4))
    base = load_suite(name)
    seeds = np.arange(base.first_seed, base.first_seed + 4)

    def begun(suite):
        assert (suite.tasks, suite.first_seed) == (base.tasks, base.first_seed)
        assert suite.environment is not None
        env = suite.environment(base.tasks[0], 16)
        state = env.reset(seeds)
        position = np.asarray(state.physics.position)[:, : 5 + 3 * 7]
        return env, (position, *map(np.asarray, (state.goal, state.start))), env.observe(state)

    env, start, seen = begun(base)
    assert set(base.variants) == {"camera", "light", "texture", "distractors", "paraphrase"}
    for change in chosen:
        variant = load_suite(str(base.variants[change]))
        assert variant.about
        assert not variant.variants
        other, began, shown = begun(variant)
        assert all(map(np.array_equal, began, start))
        assert np.array_equal(shown.state, seen.state)
        changed = np.any(np.asarray(shown.images) != np.asarray(seen.images), axis=(1, 2, 3, 4))
        assert np.all(changed == (change != "paraphrase"))
        assert (other.prompts == env.prompts) == (change != "paraphrase")
        assert other.cameras == env.cameras


@pytest.mark.parametrize("tasks", [TASKS, ARM_TASKS], ids=["tabletop", "arm"])
def test_paraphrases_name_each_goal_in_words_of_no_recording(tasks):
    for task in tasks.values():
        recorded = {wording for wordings in task.prompts for wording in wordings}
        assert len(task.paraphrases) == len(task.goals)
        for goal, wordings in zip(task.goals, task.paraphrases, strict=True):
            assert len(set(wordings) - recorded) == len(wordings) > 1
            named = [word for word in goal.split() if word not in ("on", "open", "close")]
            assert all(word in wording.split() for word in named for wording in wordings)


def test_arms_are_told_paraphrases_and_every_suite_of_ours_says_the_range_of_its_actions():
    for name, dims in (("tabletop", 4), ("arm", 7), ("arm-lift-joint", 8), ("arm-lift-delta", 7)):
        suite = load_suite(name)
        assert len(suite.action_range) == dims
        assert all(low < high for low, high in suite.action_range)
    paraphrased = load_suite(str(load_suite("arm-lift-joint").variants["paraphrase"]))
    assert paraphrased.environment is not None
    env = paraphrased.environment("arm-lift-joint", 8)
    assert env.prompts == ARM_TASKS["lift"].paraphrases
    assert env.action_range == paraphrased.action_range


def test_recordings_of_an_arm_that_is_told_joints_are_disturbed_less():
    noise = {name: load_suite(name).noise for name in ("tabletop", "arm", "arm-lift-joint")}
    assert noise == {"tabletop": 0.015, "arm": 0.015, "arm-lift-joint": 0.003}
