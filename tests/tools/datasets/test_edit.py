"""The command that edits datasets: what is typed becomes the edit, mistakes one sentence."""

import json
import subprocess
import sys

import pytest

from data import open_dataset
from data.edit.plan import Edit, Trim
from data.video.encoding import VideoEncoding
from data.view.view import write_page
from tests.helpers.data.recording import make_episode, write
from tools.data import app
from tools.datasets.edit import EditOptions, read_edit


@pytest.fixture
def dataset(tmp_path):
    return write(tmp_path / "set", [make_episode(number, 4 + number) for number in range(4)])


def test_typed_options_become_the_edit():
    options = EditOptions(
        delete="3, 7-9",
        keep="0-9",
        order="2",
        split=(("a", "0.25"), ("b", "1-2")),
        trim=(("all", "10-"), ("3", "-89"), ("1-2", "5-6")),
        task=(("all", "x"), ("0,1", "y=z")),
        codec="av1",
        crf=30,
        keyframes=4,
    )
    assert read_edit(options) == Edit(
        delete=(3, 7, 8, 9),
        keep=tuple(range(10)),
        order=(2,),
        splits=(("a", 0.25), ("b", (1, 2))),
        trims=(Trim(None, 10, None), Trim((3,), 0, 90), Trim((1, 2), 5, 7)),
        tasks=((None, "x"), ((0, 1), "y=z")),
        encoding=VideoEncoding("av1", 30, 4),
    )
    assert read_edit(EditOptions()) == Edit()
    assert read_edit(EditOptions(keep="")).keep == ()


def test_a_list_that_browse_saved_is_read_from_its_file(tmp_path):
    saved = tmp_path / "flagged.txt"
    saved.write_text("3,7-9\n")
    assert read_edit(EditOptions(delete=str(saved))).delete == (3, 7, 8, 9)
    saved.write_text("3;7")
    with pytest.raises(ValueError, match=r"--delete .*flagged.txt is '3;7'; give episodes"):
        read_edit(EditOptions(delete=str(saved)))
    with pytest.raises(FileNotFoundError, match=r"--keep: none.txt is missing; save it from"):
        read_edit(EditOptions(keep="none.txt"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delete": "3;4"}, r"--delete is '3;4'; give episodes as in 3,7-9\."),
        ({"keep": "9-7"}, "--keep has the range 9-7, which ends before it begins"),
        ({"keep": "0-999999999"}, "--keep names episode 999999999; give numbers below 10000000"),
        ({"trim": (("0", "10"),)}, "--trim 0 is '10'; give frames as in"),
        ({"split": (("a", "0.x"),)}, "--split a is '0.x'"),
        ({"crf": 3}, "--crf is given without --codec"),
        ({"codec": "h264", "crf": 60}, r"crf is 60, but h264 takes 0 \(best\) to 51"),
        ({"codec": "h264", "keyframes": 0}, "keyframe interval is 0"),
    ],
)
def test_malformed_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        read_edit(EditOptions(**options))


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    """Lines of any length, whatever the paths of temporary folders."""
    monkeypatch.setenv("COLUMNS", "1000")


def test_the_command_writes_a_dataset_and_says_what_it_is(dataset, tmp_path, capsys):
    text = '<img src=x onerror="alert(1)">[red]'
    out = tmp_path / "new"
    app.cli(
        args=["edit", str(dataset), "--delete", "1", "--task", "0", text, "--out", str(out)],
    )
    said = capsys.readouterr().out
    assert f"{out}: LeRobot v3.0, 3 episodes, 17 frames, videos copied." in said
    assert open_dataset(out).task(0) == text
    write_page(open_dataset(out), 0, tmp_path / "page.html")
    assert "<img" not in (tmp_path / "page.html").read_text()


def test_in_place_is_asked_for_by_name(dataset, capsys, monkeypatch):
    with pytest.raises(ValueError, match=r"Give either --out with a folder for .*, or --in-place"):
        app.cli(args=["edit", str(dataset), "--delete", "0"])
    with pytest.raises(ValueError, match=r"is for one dataset on disk, not .*; give --out"):
        app.cli(args=["edit", str(dataset), str(dataset), "--in-place"])
    with pytest.raises(
        ValueError, match=r"--out is .*, which is a dataset to edit; choose another"
    ):
        app.cli(args=["edit", str(dataset), "--delete", "0", "--out", f"{dataset}/../set"])
    assert open_dataset(dataset).num_episodes == 4
    monkeypatch.chdir(dataset)
    app.cli(args=["edit", ".", "--delete", "0", "--in-place"])
    assert "set.old is the dataset as it was" in capsys.readouterr().out
    assert open_dataset(dataset).num_episodes == 3


def test_a_mistake_ends_the_command_with_one_line(dataset, tmp_path):
    command = [sys.executable, "-m", "tools.data", "edit", str(dataset), "--delete", "0-3"]
    ended = subprocess.run(
        [*command, "--out", str(tmp_path / "new")], capture_output=True, text=True, timeout=200
    )
    assert ended.returncode == 1
    assert ended.stderr == "error: The edit removes all 4 episodes; keep at least one.\n"
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_idle_frames_are_told_drawn_and_written(dataset, tmp_path, capsys):
    out, page = tmp_path / "idle.json", tmp_path / "idle.html"
    app.cli(args=["idle", str(dataset), "--json", str(out), "--plot", str(page)])
    said = capsys.readouterr().out
    assert "0 frames (0.0 %) still (within 1 % of each dimension's range" in said
    assert json.loads(out.read_text())["keep"] == {}
    assert page.read_text().count('class="idle"') == 4
