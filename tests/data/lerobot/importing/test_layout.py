"""Layouts say what is wrong with them by key, and the guide's examples are layouts."""

import json
import re
from pathlib import Path

import pytest

from data.lerobot.importing.known import KNOWN
from data.lerobot.importing.layout import CameraSource, TaskSource, read_layout

GUIDE = Path(__file__).parents[4] / "docs/importing.md"
PLAIN = {"fps": 10, "columns": {"action": "a"}}


def written(folder, said):
    path = folder / "layout.json"
    path.write_text(said if isinstance(said, str) else json.dumps(said))
    return str(path)


@pytest.mark.parametrize("name", KNOWN)
def test_known_layouts_are_read_with_what_is_given_in_place_of_theirs(name):
    read = read_layout(name, task="lift", fps=7, robot="mine")
    assert (read.task, read.fps, read.robot) == (TaskSource("lift"), 7, "mine")
    assert {"action", "*"} & set(read.columns)
    assert read.cameras


def test_the_guides_examples_are_layouts(tmp_path):
    examples = re.findall(r"```json\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert len(examples) == 3
    aloha, topics, sheet = (read_layout(written(tmp_path, said)) for said in examples)
    assert (aloha.fps, aloha.robot) == (50, "mobile_aloha")
    assert topics.columns["observation.state"][0].names == ("shoulder", "elbow", "gripper")
    assert (sheet.time, sheet.episodes) == ("seconds", "episode")
    for name in KNOWN:
        assert f"| `{name}` |" in GUIDE.read_text()


def test_a_name_goes_before_a_pattern_that_fits_it_too(tmp_path):
    cameras = {"front": {"from": "x/front", "turned": True}, "*": "x/*"}
    read = read_layout(written(tmp_path, PLAIN | {"cameras": cameras}))
    found = read.resolved(["a", "x/front", "x/back"], Path("file")).cameras
    assert found == {
        "front": CameraSource("x/front", turned=True),
        "back": CameraSource("x/back"),
    }


@pytest.mark.parametrize(
    ("sources", "names", "found"),
    [
        (["r#_x", "r#_y"], ["r0_x", "r0_y", "r1_x", "r1_y"], ["r0_x", "r0_y", "r1_x", "r1_y"]),
        (["joint#1", "joint#2"], ["joint#1", "joint#2"], ["joint#1", "joint#2"]),
        (["joint#1", "r#_x"], ["joint#1", "r0_x"], ["joint#1", "r0_x"]),
    ],
)
def test_a_number_sign_is_a_pattern_unless_a_name_has_it(tmp_path, sources, names, found):
    read = read_layout(written(tmp_path, PLAIN | {"columns": {"action": sources}}))
    assert [s.path for s in read.resolved(names, Path("file")).columns["action"]] == found


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "is not a JSON object"),
        ({"columns": {"action": "a"}}, r"layout: fps is 0; give .* here or with --fps"),
        (PLAIN | {"fps": 29.97}, r"layout\.fps is 29\.97, expected int"),
        (PLAIN | {"fps": True}, r"layout\.fps is True, expected int"),
        ({"fps": 10, "columns": {}}, r"layout\.columns is \{\}; give"),
        ({"fps": 10, "columns": {"action": []}}, r"columns is \{'action': \[\]\}; give"),
        ({"fps": 10, "columns": 3}, r"layout\.columns is 3, expected table"),
        (PLAIN | {"cameras": "x/*"}, r"layout\.cameras is 'x/\*', expected table"),
        (PLAIN | {"camera": {}}, r"unknown fields \['camera'\]"),
        (PLAIN | {"like": "nosuch"}, "like: is 'nosuch'; give one of aloha"),
        (PLAIN | {"columns": {"action": 3}}, r"columns\.action\[0\]\.path is 3, expected str"),
        (PLAIN | {"columns": {"action": ""}}, r"columns\.action\[0\]: from is empty; give a path"),
        (
            PLAIN | {"columns": {"action": {"from": "a", "dim": [0]}}},
            r"columns\.action\[0\] .* unknown fields \['dim'\]",
        ),
        (PLAIN | {"columns": {"action": {"from": "a", "dims": [-1]}}}, r"dims is \[-1\]; give"),
        (
            PLAIN | {"cameras": {"c": {"from": "a", "colour": "hsv"}}},
            r"cameras\.c\.colour is 'hsv', expected one of \['rgb', 'bgr'\]",
        ),
        (PLAIN | {"cameras": {"c": {"from": "a", "turned": 180}}}, r"turned is 180, expected bool"),
        (PLAIN | {"task": {"file": "("}}, r"layout\.task: file is not a regular expression"),
        (PLAIN | {"task": {"file": "a"}}, "file is a pattern with 0 groups; give it exactly one"),
        (PLAIN | {"task": 3}, r"layout\.task\.path is 3, expected str"),
        (PLAIN | {"silence": 0}, "silence is 0; give seconds"),
        (PLAIN | {"gaps": "fill"}, r"gaps is 'fill', expected one of \['refuse', 'cut'\]"),
    ],
)
def test_a_layout_that_is_not_understood_is_named_by_its_key(tmp_path, said, message):
    with pytest.raises(ValueError, match=message):
        read_layout(written(tmp_path, said))


def test_a_layout_that_is_not_there_is_said_so():
    with pytest.raises(ValueError, match="--layout is 'alhoa', neither a file nor one of aloha"):
        read_layout("alhoa")
