"""Pictures with a CSV become episodes, and a file's names lead nowhere else."""

import csv
import json

import numpy as np
import pytest
from PIL import Image

from data import open_dataset
from data.lerobot.importing.importing import import_dataset
from data.lerobot.importing.layout import read_layout
from data.validation.validate import validate

LAYOUT = {
    "fps": 10,
    "task": {"from": "task"},
    "episodes": "episode",
    "columns": {"observation.state": ["x", "y"], "action": ["ax"]},
    "cameras": {"observation.images.front": "front"},
}


def rows(lengths=(4, 3)):
    """Rows of episodes, whose pictures are PNG files."""
    return [
        {
            "episode": episode,
            "time": round(0.1 * step, 3),
            "x": episode,
            "y": step / 8,
            "ax": -step,
            "front": f"front/{episode}-{step}.png",
            "task": f"task {episode}",
        }
        for episode, length in enumerate(lengths)
        for step in range(length)
    ]


def write(folder, found):
    (folder / "front").mkdir(parents=True, exist_ok=True)
    for row in found:
        value = min(255, int(30 * float(row["y"]) * 8) + 40)
        Image.fromarray(np.full((16, 24, 3), value, np.uint8)).save(
            folder / "front" / row["front"].rpartition("/")[2]
        )
    with (folder / "frames.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, found[0].keys())
        writer.writeheader()
        writer.writerows(found)
    return folder


def load(folder, tmp_path, **changed):
    path = tmp_path / "layout.json"
    path.write_text(json.dumps(LAYOUT | changed))
    import_dataset([folder], tmp_path / "out", read_layout(str(path)))
    assert [p for p in validate(tmp_path / "out") if p.severity == "error"] == []
    return open_dataset(tmp_path / "out")


def test_rows_become_frames_and_values_of_a_column_episodes(tmp_path):
    found = load(write(tmp_path / "in", rows()), tmp_path)
    assert found.lengths.tolist() == [4, 3]
    assert found.prompts == (("task 0",), ("task 1",))
    assert found.columns(1)["observation.state"].tolist() == [[1, 0], [1, 0.125], [1, 0.25]]
    seen = found.frames(0, "observation.images.front")[:, 8, 8, 0].astype(int)
    assert np.abs(seen - [40, 70, 100, 130]).max() < 5


def test_times_of_rows_are_brought_to_one_rate(tmp_path):
    found = rows((6,))
    for row, at in zip(found, (5.0, 5.04, 5.1, 5.16, 5.31, 5.4), strict=True):
        row["time"] = at
    loaded = load(write(tmp_path / "in", found), tmp_path, time="time")
    assert (8 * loaded.columns(0)["observation.state"][:, 1]).tolist() == [0, 2, 3, 3, 5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({2: {"x": "a"}}, r"'x': has 'a' in line 4; give a number"),
        ({3: {"front": "front/none.png"}}, "'front': has 'front/none.png' in line 5; there is no"),
        ({3: {"front": ""}}, "'front': has '' in line 5; name a file within"),
        ({3: {"front": "../secret.png"}}, "'../secret.png' in line 5; name a file within"),
        ({3: {"front": "depth.png"}}, "'front': frame 3 .*more than 8 bits a channel.*leave this"),
        ({2: {"task": "other"}}, "'task': has 'other' in line 4; other rows"),
        ({2: {"episode": 1}}, "'episode': has '0' in line 5; sort the rows"),
        ({3: {"time": 0.05}}, "'time': time goes back in time, from 0.20 s"),
        ({3: {"time": 9}}, "'time': time is silent from 0.20 s to 9.00 s"),
    ],
)
def test_rows_that_cannot_be_read_are_named(tmp_path, change, message):
    Image.fromarray(np.zeros((16, 24, 3), np.uint8)).save(tmp_path / "secret.png")
    folder = write(tmp_path / "in", rows())
    Image.fromarray(np.zeros((16, 24), np.uint16)).save(folder / "depth.png")
    found = rows()
    for number, said in change.items():
        found[number] |= said
    with (folder / "frames.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, found[0].keys())
        writer.writeheader()
        writer.writerows(found)
    with pytest.raises(ValueError, match=message):
        load(folder, tmp_path, time="time")
    assert not (tmp_path / "out").exists()


def test_a_wrong_unit_of_time_is_said_so(tmp_path):
    found = rows((4,))
    for row in found:
        row["time"] = 1_700_000_000 * 10**9 + round(float(row["time"]) * 10**9)
    folder = write(tmp_path / "in", found)
    with pytest.raises(ValueError, match=r"'time': time is silent from 0\.00 s to 100000"):
        load(folder, tmp_path, time="time")
    read = load(folder, tmp_path, time="time", time_unit="ns")
    assert read.columns(0)["action"][:, 0].tolist() == [0, -1, -2, -3]


def test_seconds_since_1970_keep_every_row(tmp_path):
    found = rows((40,))
    for row in found:
        row["time"] = repr(1_700_000_000.123 + float(row["time"]))
    read = load(write(tmp_path / "in", found), tmp_path, time="time")
    assert read.columns(0)["action"][:, 0].tolist() == [-step for step in range(40)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"x,y\n1\n", "line 2: has 1 cells, but there are 2 columns"),
        (b"\x89PNG\r\n\x1a\n\xff\xfe", "is not a readable CSV"),
        (b"x,y\n", "has no rows"),
        (b"x,x\n1,2\n", "has a column twice"),
    ],
)
def test_a_file_that_is_no_csv_is_said_so(tmp_path, content, message):
    (tmp_path / "frames.csv").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "frames.csv", tmp_path)
