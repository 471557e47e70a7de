import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data import open_dataset
from data.store.store import open_store
from tests.helpers.data.recording import FEATURES, make_episode, write
from tests.helpers.data.v21 import write_v21
from tools.data import (
    app,
    browse_command,
    convert_command,
    diff_command,
    stats_command,
    validate_command,
    verify_command,
    view_command,
)

RLDS = Path(__file__).parents[1] / "fixtures/rlds/tfrecord"


@pytest.fixture
def dataset(tmp_path):
    return write(tmp_path / "dataset", [make_episode(number, 5 + number) for number in range(4)])


def run(*arguments):
    command = [sys.executable, "-m", "tools.data", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=500)


@pytest.mark.parametrize("command", ["validate", "stats", "view", "browse", "convert"])
def test_help_of_every_command_says_what_it_does(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        app.cli(args=[command, "--help"])
    assert "Folder of the dataset" in capsys.readouterr().out


def test_a_sound_dataset_passes(dataset, tmp_path, capsys):
    with pytest.raises(SystemExit, match="0"):
        validate_command(str(dataset), tmp_path / "found.json")
    assert "0 errors, 0 warnings" in capsys.readouterr().out
    assert json.loads((tmp_path / "found.json").read_text()) == []


def test_a_damaged_dataset_fails_and_the_findings_are_written(dataset, tmp_path):
    next(dataset.glob("videos/*/*/*.mp4")).unlink()
    result = run("validate", dataset, "--json", tmp_path / "found.json")
    assert result.returncode == 1
    (found,) = json.loads((tmp_path / "found.json").read_text())
    assert found["severity"] == "error"
    assert found["file"].endswith(".mp4")


def test_statistics_are_shown_and_written(dataset, tmp_path, capsys):
    stats_command((str(dataset),), tmp_path / "stats.json")
    assert "4 episodes, 26 frames at 20 fps" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "stats.json").read_text())["action"]["q99"]) == 3


@pytest.mark.slow
def test_two_datasets_are_compared_at_the_command_line(dataset, tmp_path, capsys):
    other = write(tmp_path / "other", [make_episode(number, 6) for number in range(2)])
    diff_command(str(dataset), str(other), tmp_path / "diff.json")
    out = capsys.readouterr().out
    assert "differences that matter" in out
    assert "observation.images.front" in out
    found = json.loads((tmp_path / "diff.json").read_text())
    assert found["first"]["frames"] == 26
    assert found["second"]["frames"] == 12
    assert run("diff", dataset, other).returncode == 0


def test_an_rlds_dataset_is_described_and_seen_alike(tmp_path, capsys):
    stats_command((str(RLDS),))
    assert "5 episodes" in capsys.readouterr().out
    view_command(str(RLDS), 3, tmp_path / "page.html")
    assert "öffne die Schublade" in (tmp_path / "page.html").read_text()


def test_datasets_of_one_robot_are_described_together(dataset, tmp_path, capsys):
    other = write(tmp_path / "other", [make_episode(7, 9)])
    stats_command((str(dataset), str(other)), tmp_path / "stats.json")
    assert f"test: {dataset}, {other} together" in capsys.readouterr().out
    written = json.loads((tmp_path / "stats.json").read_text())
    counts = [s["action"]["count"] for s in written["datasets"].values()]
    assert counts == [[26], [9]]
    assert written["robots"]["test"]["action"]["count"] == [35]
    values = np.concatenate([open_dataset(path).column("action") for path in (dataset, other)])
    assert np.allclose(
        written["robots"]["test"]["action"]["q99"], np.quantile(values, 0.99, axis=0)
    )


def test_a_narrow_dimension_is_warned_of_below_its_table(tmp_path, capsys):
    episode = make_episode(0, 6)
    episode.columns["action"][:, 1] = 0.5
    stats_command((str(write(tmp_path / "d", [episode])),))
    assert "warning action[1]: hardly changes (0.5..0.5)" in capsys.readouterr().out


def test_an_episode_becomes_a_page_or_a_recording_or_both(dataset, tmp_path, monkeypatch):
    pytest.importorskip("rerun")
    monkeypatch.chdir(tmp_path)
    view_command(str(dataset), 2)
    assert "push it" in (tmp_path / "episode-2.html").read_text()
    view_command(str(dataset), 1, rerun=tmp_path / "one.rrd")
    assert (tmp_path / "one.rrd").stat().st_size > 1000
    assert not (tmp_path / "episode-1.html").exists()
    view_command(str(dataset), 1, tmp_path / "one.html", tmp_path / "both.rrd")
    assert (tmp_path / "one.html").exists()
    assert (tmp_path / "both.rrd").exists()


@pytest.mark.slow
def test_a_converted_store_opens_and_is_not_overwritten(dataset, tmp_path):
    arguments = ("convert", dataset, tmp_path / "s", "--image-size", 16, "--encoding", "raw")
    assert run(*arguments).returncode == 0
    assert open_store(tmp_path / "s").image_size == 16
    again = run(*arguments)
    assert again.returncode == 1
    assert "already exists" in again.stderr


def test_a_side_that_no_picture_has_is_refused_before_anything_is_written(dataset, tmp_path):
    for size in ("0", "8193"):
        with pytest.raises(SystemExit, match=f"image size is {size}; give the side .* 1 to 8192"):
            app.cli(args=["convert", str(dataset), str(tmp_path / "s"), "--image-size", size])
    assert not (tmp_path / "s").exists()


def test_convert_turns_v21_into_v30(tmp_path):
    source = write_v21(tmp_path / "old", [make_episode(n, 5 + n) for n in range(3)], FEATURES, 20)
    convert_command(str(source), str(tmp_path / "new"), to="v3.0")
    new = open_dataset(tmp_path / "new")
    assert new.info["codebase_version"] == "v3.0"
    assert np.array_equal(new.column("action"), open_dataset(source).column("action"))


def test_convert_lets_several_workers_write_to_a_bucket(dataset, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = f"memory://{tmp_path.name}/s"
    convert_command(str(dataset), url, image_size=16, workers=2)
    assert open_store(url).lengths.tolist() == [5, 6, 7, 8]


@pytest.fixture
def store(dataset, tmp_path):
    convert_command(str(dataset), str(tmp_path / "s"), image_size=16, encoding="raw")
    return tmp_path / "s"


def test_verify_passes_a_sound_store_and_a_sound_dataset(store, dataset, capsys):
    for path in (store, dataset):
        with pytest.raises(SystemExit, match="0"):
            verify_command(str(path))
        assert f"0 damaged files in {path}." in capsys.readouterr().out.replace("\n", "")


def test_verify_lists_every_damaged_file_of_a_store_that_cannot_be_opened(store, capsys):
    picture = next(store.glob("frames/*/*.rgb"))
    column = store / "columns/action/c/0/0"
    for file in (picture, column):
        content = bytearray(file.read_bytes())
        content[7] ^= 1
        file.write_bytes(content)
    with pytest.raises(ValueError, match="columns/action"):
        open_store(store)
    with pytest.raises(SystemExit, match="1"):
        verify_command(str(store))
    shown = capsys.readouterr().out
    assert all(f"{file}, checksum: does not hold" in shown for file in (picture, column))
    assert "2 damaged files" in shown


def test_verify_lists_damaged_files_of_a_dataset(dataset, capsys):
    video = next(dataset.glob("videos/*/*/*.mp4"))
    video.write_bytes(video.read_bytes()[:-1])
    with pytest.raises(SystemExit, match="1"):
        verify_command(str(dataset))
    assert f"{video}, checksum: the file has " in capsys.readouterr().out


def test_verify_refuses_what_has_no_sums(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has neither store\.json nor meta/checksums"):
        verify_command(str(tmp_path))


def test_verify_reads_a_store_in_a_bucket(dataset, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = f"memory://{tmp_path.name}/s"
    convert_command(str(dataset), url, image_size=16, encoding="raw")
    with pytest.raises(SystemExit, match="0"):
        verify_command(url)
    assert f"0 damaged files in {url}." in capsys.readouterr().out


def test_a_dataset_is_browsed_beside_another(dataset, tmp_path, capsys):
    other = write(tmp_path / "other", [make_episode(9, 6)])
    browse_command(str(dataset), tmp_path / "page", str(other))
    assert "4 episodes (" in capsys.readouterr().out
    assert "The first has" not in (tmp_path / "page/index.html").read_text()
    assert len(list((tmp_path / "page/sheets").iterdir())) == 2
