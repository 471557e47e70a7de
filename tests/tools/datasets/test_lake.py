"""Commands that tell a catalogue what they made, and what is said of bad options."""

import errno
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from data.lake.catalogue import Catalogue
from tests.helpers.data.recording import make_episode, write
from tools.data import app
from tools.datasets.versions import typed


@pytest.fixture
def run(monkeypatch, capsys):
    def typed(*words: str | Path) -> str:
        monkeypatch.setattr(sys, "argv", ["chiliad data", *map(str, words)])
        app.cli(args=[str(word) for word in words])
        return " ".join(capsys.readouterr().out.split())

    return typed


@pytest.fixture
def dataset(tmp_path) -> Path:
    return write(tmp_path / "mine", [make_episode(number, 4) for number in range(3)])


def test_what_is_made_is_noted_with_its_command_and_its_sources(
    run, dataset, tmp_path, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "300")
    catalogue, clean, store = (tmp_path / name for name in ("catalogue", "clean", "store"))
    run("edit", dataset, "--delete", "1", "--out", clean, "--catalogue", catalogue)
    monkeypatch.setenv("CHILIAD_CATALOGUE", str(catalogue))
    run("convert", clean, store, "--image-size", "16")
    before, edited, converted = Catalogue(catalogue).versions()
    assert (before.path, before.command, before.parents) == (str(dataset), "", ())
    assert (before.episodes, before.frames) == (3, 12)
    assert (
        edited.command
        == f"chiliad data edit {dataset} --delete 1 --out {clean} --catalogue " + str(catalogue)
    )
    assert edited.parents == (before.digest,)
    assert converted.parents == (edited.digest,)
    assert (converted.format, converted.episodes, converted.frames) == ("frame store", 2, 8)
    assert run("catalogue").endswith(f"3 versions in {catalogue}.")
    shown = run("catalogue", "--of", store)
    assert shown.index(converted.digest[:12]) < shown.index(edited.digest[:12])
    assert shown.index(edited.digest[:12]) < shown.index(before.digest[:12])
    other = shutil.copytree(dataset, tmp_path / "other")
    assert "4 versions" in run("catalogue", "--add", other)


def test_a_command_is_noted_as_a_shell_takes_it(run, dataset, tmp_path, monkeypatch):
    run("edit", dataset, "--task", "0,1", "lift 'it'", "--out", tmp_path / "new",
        "--catalogue", tmp_path / "c")  # fmt: skip
    command = Catalogue(tmp_path / "c").versions()[-1].command
    assert shlex.split(command)[2:7] == ["edit", str(dataset), "--task", "0,1", "lift 'it'"]
    monkeypatch.setattr(sys, "argv", ["/home/me/chiliad/tools/data.py", "edit", "my set"])
    assert typed() == "python -m tools.data edit 'my set'"


def test_recordings_are_sources_too(run, tmp_path):
    h5py = pytest.importorskip("h5py")
    episode = make_episode(0, 4)
    with h5py.File(tmp_path / "episode_0.hdf5", "w") as file:
        file["action"] = episode.columns["action"]
        file["observations/qpos"] = episode.columns["observation.state"]
        file["observations/images/front"] = episode.frames["observation.images.front"]
    words = ("import", tmp_path / "episode_0.hdf5", "--layout", "aloha", "--task", "lift")
    run(*words, "--out", tmp_path / "new", "--catalogue", tmp_path / "c")
    recording, made = Catalogue(tmp_path / "c").versions()
    assert made.parents == (recording.digest,)
    assert recording.format.lower() == "hdf5"


def test_a_folder_that_is_no_catalogue_is_refused_before_anything_is_made(run, dataset, tmp_path):
    with pytest.raises(SystemExit, match=r"no catalogue\.json, so it is not a catalogue"):
        run("edit", dataset, "--out", tmp_path / "new", "--catalogue", dataset)
    assert not (tmp_path / "new").exists()


def test_a_catalogue_that_cannot_be_written_is_refused_before_anything_is_made(
    run, dataset, tmp_path, monkeypatch
):
    (tmp_path / "file").touch()
    for nowhere in ("/proc/none/catalogue", tmp_path / "file/catalogue"):
        with pytest.raises(SystemExit, match=r"/catalogue: the catalogue cannot be written \(.*"):
            run("edit", dataset, "--out", tmp_path / "new", "--catalogue", nowhere)
    Catalogue(tmp_path / "c").begin()

    def full(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tempfile.NamedTemporaryFile", full)
    with pytest.raises(SystemExit, match=r"c: the catalogue cannot be written .*Read-only file"):
        run("edit", dataset, "--out", tmp_path / "new", "--catalogue", tmp_path / "c")
    assert not list(tmp_path.glob("new*"))


def test_no_catalogue_at_all_is_said(run, monkeypatch):
    monkeypatch.delenv("CHILIAD_CATALOGUE", raising=False)
    with pytest.raises(ValueError, match="Give the folder of a catalogue"):
        run("catalogue")


def test_a_format_of_ones_own_stays_on_one_machine(run, dataset):
    own = Path(__file__).parents[2] / "own_dataset.py"
    with pytest.raises(ValueError, match="a cluster's workers do not have your file"):
        run("stats", dataset, "--ray", "--data-format", f"{own}:NPZ")
