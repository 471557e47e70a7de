"""An evaluation finds again what it wrote down, whole, and never under another's name."""

import json
from io import StringIO

import numpy as np
import pytest

from models.files.terminal import Console
from parallel.runs.json_lines import set_damage_aside
from sim.environments.device_slots import DeviceSlots
from sim.evaluate import evaluate
from sim.journal import Journal, in_order
from sim.protocol import Start
from tests.helpers.sim.point_world import PointWorld, noisy_policy

HEADER = {"suite": "points", "tasks": ("points",), "replan_steps": 4}


@pytest.fixture(scope="module")
def episodes():
    starts = [Start("points", seed) for seed in range(6)]
    return evaluate(DeviceSlots(PointWorld(), 6), noisy_policy, starts, clips=0).episodes


def test_episodes_come_back_as_they_were(tmp_path, episodes):
    path = tmp_path / "new" / "episodes.jsonl"
    journal = Journal(path)
    assert not path.exists()
    assert journal.begin("trained", HEADER) == []
    for episode in episodes[:4]:
        journal.add("trained", episode)
    journal.begin("blank image", HEADER)
    journal.add("blank image", episodes[5])
    found = Journal(path)
    assert found.begin("trained", HEADER) == list(episodes[:4])
    assert found.begin("blank image", HEADER) == [episodes[5]]
    for one, other in zip(found.begin("trained", HEADER), episodes, strict=False):
        assert np.array_equal(one.actions, other.actions)
        assert one.reruns == other.reruns
    assert len(path.read_text().splitlines()) == 7, "what is known is not said again"


def test_another_evaluation_is_refused_by_the_field_that_differs(tmp_path, episodes):
    path = tmp_path / "episodes.jsonl"
    journal = Journal(path)
    journal.begin("trained", HEADER)
    journal.add("trained", episodes[0])
    with pytest.raises(
        ValueError, match=r"'trained' whose replan_steps is 4, but now it is 8; choose"
    ):
        Journal(path).begin("trained", HEADER | {"replan_steps": 8})
    with pytest.raises(ValueError, match=r"whose control is null, but now it is \"blank\""):
        Journal(path).begin("trained", HEADER | {"control": "blank"})


def test_what_was_begun_without_an_episode_stands_in_nobodys_way(tmp_path, episodes):
    path = tmp_path / "episodes.jsonl"
    Journal(path).begin("trained", HEADER | {"replan_steps": 99})
    journal = Journal(path)
    assert journal.begin("trained", HEADER) == []
    journal.add("trained", episodes[0])
    assert Journal(path).begin("trained", HEADER) == [episodes[0]]


def test_a_torn_last_line_is_dropped_and_a_damaged_one_named(tmp_path, episodes):
    path = tmp_path / "episodes.jsonl"
    journal = Journal(path)
    journal.begin("trained", HEADER)
    for episode in episodes[:2]:
        journal.add("trained", episode)
    whole = path.read_bytes()
    for cut in (1, 40, 150):
        path.write_bytes(whole[:-cut])
        journal = Journal(path)
        assert journal.begin("trained", HEADER) == [episodes[0]]
        journal.add("trained", episodes[1])
        assert path.read_bytes() == whole
    for damage in (b"[]", b"{}", b'{"condition": "trained", "episode": {"seed": 1}}'):
        lines = whole.splitlines()
        path.write_bytes(b"\n".join([lines[0], damage, lines[2], b""]))
        with pytest.raises(ValueError, match=r"episodes\.jsonl, line 2: not a line of an eval"):
            Journal(path)


def test_every_line_is_json(tmp_path, episodes):
    journal = Journal(tmp_path / "episodes.jsonl")
    journal.begin("trained", HEADER)
    journal.add("trained", episodes[0])
    header, row = map(json.loads, (tmp_path / "episodes.jsonl").read_text().splitlines())
    assert header["evaluates"]["replan_steps"] == 4
    assert row["episode"]["seed"] == 0


@pytest.mark.parametrize(
    "damage", [b"[]", b"{}", b"[" * 10**5, b'{"condition": "t", "episode": 1}']
)
def test_a_damaged_line_costs_its_episode_and_the_file_is_set_aside(damage, tmp_path, episodes):
    path, console = tmp_path / "episodes.jsonl", Console(file=StringIO(), width=1000)
    journal = Journal(path)
    journal.begin("trained", HEADER)
    for episode in episodes[:3]:
        journal.add("trained", episode)
    set_damage_aside(path, in_order(), console)
    assert console.file.getvalue() == ""
    lines = path.read_bytes().splitlines()
    damaged = b"\n".join([*lines[:2], damage, lines[3], b""])
    path.write_bytes(damaged)
    set_damage_aside(path, in_order(), console)
    assert f"{path}, line 3: damaged; the file was set aside as" in console.file.getvalue()
    assert console.file.getvalue().count("\n") == 1
    assert path.with_name("episodes.jsonl.damaged").read_bytes() == damaged
    assert Journal(path).begin("trained", HEADER) == [episodes[0], episodes[2]]


def test_episodes_whose_condition_lost_its_line_are_acted_again(tmp_path, episodes):
    path, console = tmp_path / "episodes.jsonl", Console(file=StringIO(), width=1000)
    journal = Journal(path)
    for name, episode in (("trained", episodes[0]), ("expert", episodes[1])):
        journal.begin(name, HEADER)
        journal.add(name, episode)
    path.write_bytes(b"{" + path.read_bytes())
    set_damage_aside(path, in_order(), console)
    assert "line 1 and 1 more: damaged" in console.file.getvalue()
    assert Journal(path).begin("trained", HEADER | {"replan_steps": 8}) == []
    assert Journal(path).begin("expert", HEADER) == [episodes[1]]
