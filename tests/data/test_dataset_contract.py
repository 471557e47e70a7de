"""Whatever the format, a dataset is known by one protocol, and formats stand in one table."""

import ast
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from data import Format, open_dataset
from data.dataset import Dataset, Runs, dimension_names, find_format, register, use_format
from data.errors import DatasetError, MissingFileError
from data.frames import Frames
from data.mixture.relabelled import RelabelledFrames
from data.store import tables
from data.validation.check_dataset import check_dataset
from data.validation.validate import validate
from models.files import own_file
from tests.helpers.data.memory_frames import MemoryFrames
from tests.helpers.data.npz_episodes import write_episodes

ROOT = Path(__file__).parents[2]
OWN = ROOT / "tests/own_dataset.py"
FIXTURES = ROOT / "tests/fixtures"
SHIPPED = {"LeRobot": FIXTURES / "lerobot/chiliad", "RLDS": FIXTURES / "rlds/tfrecord"}
FORMATS = ("data.lerobot", "data.rlds")
"""Packages that are of one format alone, which what serves all of them does not import."""
FOR_ALL = ("dataset", "frames", "statistics/stats", "store/tables", "store/convert", "store/store",
           "files/job", "lake/on_ray", "lake/ranges", "validation/validate",
           "validation/check_dataset", "validation/check_columns", "validation/check_pictures",
           "view/view", "packing/plan", "mixture/mixture", "mixture/mixed", "mixture/relabelled",
           "mixture/embodiments")  # fmt: skip


@pytest.fixture
def episodes(tmp_path):
    return write_episodes(tmp_path / "episodes", 4)


@pytest.fixture
def table(monkeypatch):
    """The table of formats, as it was afterwards."""
    monkeypatch.setattr("data.dataset._own", {})


@pytest.fixture
def npz(table):
    found = own_file.load(f"{OWN}:NPZ", Format, "format")
    register(found)
    return found


def members(protocol):
    return [name for name in vars(protocol) if not name.startswith("_")]


def test_no_union_of_formats_stands_for_a_dataset():
    for package in ("models", "data", "parallel", "sim", "rl", "tools"):
        for path in (ROOT / package).rglob("*.py"):
            assert not re.search(r"Any" r"Dataset", path.read_text()), path


def test_what_serves_every_format_imports_none():
    for name in FOR_ALL:
        tree = ast.parse((ROOT / f"data/{name}.py").read_text())
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not [module for module in imported if str(module).startswith(FORMATS)], name


def test_a_format_is_imported_when_the_first_dataset_is_opened():
    program = (
        "import sys, data, data.packing.plan, data.mixture.mixture\n"
        "lazy = {'data.lerobot.dataset', 'data.rlds.dataset', 'av', 'pyarrow'}\n"
        "early = lazy & set(sys.modules)\n"
        "assert not early, early\n"
        f"data.open_dataset({str(SHIPPED['LeRobot'])!r})\n"
        "assert 'data.lerobot.dataset' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, timeout=300)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_format_is_recognised_and_serves_the_protocol(name):
    assert find_format(SHIPPED[name]).name == name
    assert_serves(open_dataset(SHIPPED[name]))


def test_a_format_of_ones_own_is_recognised_and_serves_the_protocol(episodes, npz):
    assert find_format(episodes) is npz
    assert_serves(open_dataset(episodes))
    assert find_format(SHIPPED["LeRobot"]).name == "LeRobot"


def assert_serves(dataset):
    assert all(hasattr(dataset, name) for name in members(Dataset))
    count = len(dataset.lengths)
    assert dataset.present.shape == (count, len(dataset.cameras))
    assert np.bincount(dataset.runs.episode, dataset.runs.length).tolist() == [*dataset.lengths]
    assert {*dataset.column_names, *dataset.cameras} <= set(dataset.features)
    (block,) = dataset.stream(["action"], [count - 1])
    assert len(block["action"]) == dataset.lengths[-1]
    camera = int(np.argmax(dataset.present[0]))
    frames = dataset.frames(0, dataset.cameras[camera])
    assert frames.shape[0] == dataset.lengths[0]
    assert frames.dtype == np.uint8
    assert str(dataset.root) in str(dataset.file(0))
    assert re.fullmatch("[0-9a-f]{64}", dataset.digest)


def test_what_no_format_recognises_is_refused_with_what_is_missing(tmp_path, table):
    with pytest.raises(MissingFileError, match=r"meta/info\.json, file: is missing"):
        open_dataset(tmp_path)


def test_with_a_format_of_ones_own_the_refusal_names_every_format(tmp_path, npz):
    with pytest.raises(MissingFileError, match=r"\(npz, LeRobot, RLDS\); .*correct `recognises`"):
        open_dataset(tmp_path)


def test_a_format_that_cannot_open_some_episodes_says_so(episodes, npz):
    for path in (episodes, SHIPPED["RLDS"]):
        with pytest.raises(
            ValueError, match=r"which cannot select single episodes; leave `episodes`"
        ):
            open_dataset(path, [0])
    assert len(open_dataset(SHIPPED["LeRobot"], [0]).lengths) == 1


def test_a_reader_that_lacks_something_is_refused_by_its_name(episodes, npz):
    class Bare:
        def __init__(self, path):
            self.root = path

    register(replace(npz, open=Bare))
    with pytest.raises(
        ValueError, match=r"npz opens a Bare, which lacks name, robot_type, fps, .*"
    ):
        open_dataset(episodes)


def test_a_format_registered_again_takes_the_place_of_the_first(episodes, npz):
    other = replace(npz, recognises=lambda folder: False)
    register(other)
    with pytest.raises(MissingFileError, match=r"\(npz, LeRobot, RLDS\)"):
        open_dataset(episodes)


@pytest.mark.parametrize(
    ("where", "error", "message"),
    [
        ("absent.py:NPZ", FileNotFoundError, r"absent\.py: no such file, needed for format"),
        (f"{OWN}:Absent", ValueError, r"own_dataset\.py has no Format named 'Absent'; found None"),
        (f"{OWN}:NpzDataset", ValueError, r"has no Format named 'NpzDataset'; found type"),
        ("npz", ValueError, r"format is 'npz'; give path/to/file\.py:NAME of a Format"),
    ],
)
def test_a_file_without_the_format_is_refused(table, where, error, message):
    with pytest.raises(error, match=message):
        use_format(where)


def test_a_sound_folder_of_ones_own_has_no_problems(episodes, npz):
    assert validate(episodes) == []


def test_damage_is_found_with_the_file_and_the_field(episodes, npz):
    file = sorted(episodes.glob("*.npz"))[2]
    file.write_bytes(file.read_bytes()[:-40])
    (problem,) = validate(episodes)
    assert problem.severity == "error"
    assert problem.file == str(file)
    assert problem.field == "action"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"present": np.ones((4, 2), bool)}, r"present: has shape \[4, 2\], expected \[4, 1\]"),
        ({"lengths": np.array([5, 0, 7, 8])}, r"episodes: episode 1 has no frames"),
        ({"lengths": np.array([5, 6, 7, 9])}, r"runs: do not cover the frames of all episodes"),
        ({"prompts": (("push",),)}, r"runs: name task 1, but prompts have wordings of 1 tasks"),
        ({"cameras": ("top",)}, r"feature 'top': is not described"),
        ({"features": {"shape": [2]}}, r"'action': values have shape \[5, 2\], expected \[5, 3\]"),
        ({"cut": 3}, r"column 'observation.state': values come in blocks, one of which ends at"),
        ({"leave_out": 1}, r"column 'observation.state': values are 18, where .* 26 frames"),
        ({"pictures": np.zeros((5, 16, 16), np.uint8)}, r"camera '.*': has uint8 \[5, 16, 16\] in"),
    ],
)
def test_a_reader_that_breaks_the_contract_is_found_out(episodes, npz, changes, message):
    problems = list(check_dataset(Broken(open_dataset(episodes), changes), lambda *told: None))
    errors = [problem.message for problem in problems if problem.severity == "error"]
    assert any(re.search(message, text) for text in errors), problems


class Broken:
    """A dataset with some things changed."""

    def __init__(self, dataset, changes):
        self.dataset, self.changes = dataset, changes

    def __getattr__(self, name):
        return self.changes.get(name, getattr(self.dataset, name))

    @property
    def features(self):
        wide = {"action": {"dtype": "float32", "shape": [3]}}
        return self.dataset.features | (wide if "features" in self.changes else {})

    def stream(self, names, episodes=None):
        kept = range(len(self.dataset.lengths) - self.changes.get("leave_out", 0))
        for block in self.dataset.stream(names, kept):
            yield {name: values[self.changes.get("cut", 0) :] for name, values in block.items()}

    def frames(self, i, camera):
        return self.changes.get("pictures", self.dataset.frames(i, camera))


def test_a_reader_that_leaves_rows_out_makes_no_store(episodes, npz, tmp_path):
    broken = Broken(open_dataset(episodes), {"leave_out": 1})
    with pytest.raises(
        DatasetError, match="columns: have 18 rows where the episodes have 26 frame"
    ):
        tables.write(broken, tmp_path)


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["x", "y"], ["x", "y"]),
        (("x", "y"), ["x", "y"]),
        ([["x", "y"]], ["x", "y"]),
        ([["x"], ["y"]], ["x", "y"]),
        ({"axes": ["x", "y"]}, ["x", "y"]),
        ({"motors": [["x", "y"]]}, ["x", "y"]),
        ({"left": ["x"], "right": ["y"]}, ["x", "y"]),
        ({"left": ["x"], "right": ["x"]}, ["left x", "right x"]),
        ({"names": ["x", "y"], "units": ["rad", "m"]}, ["x", "y"]),
        ({"y": 1, "x": 0}, ["x", "y"]),
        ([3, "y"], ["3", "y"]),
    ],
)
def test_dimensions_are_named_in_any_of_the_ways_that_datasets_name_them(names, found):
    assert dimension_names(names, 2) == found
    assert dimension_names(names, 3) == ["0", "1", "2"]
    assert dimension_names(None, 2) == ["0", "1"]
    assert dimension_names([f"joint {'x' * 300}{n}" for n in "ab"], 2)[0][-3:] == "xa'"


def test_reworded_frames_have_all_that_frames_have():
    frames = MemoryFrames()
    told = RelabelledFrames(frames, (("go",), ("stop",)), {}, 1.0)
    given = ["frames", "prompts", "increments", "step", "every", "kept"]
    assert [field.name for field in fields(RelabelledFrames)] == given
    for name in members(Frames):
        assert name in dir(RelabelledFrames) or name in vars(told), name
    assert "__getattr__" not in dir(RelabelledFrames)
    assert told.prompts == (("go",), ("stop",))
    assert np.array_equal(told.starts, frames.starts)
    out = [np.zeros((8, 8, 3), np.uint8)]
    told.images(np.array([3]), "front", out)
    assert np.array_equal(out[0], frames.picture(3, "front"))


def test_runs_are_one_class_wherever_they_are_imported_from():
    from data import frames
    from data.lerobot import task_runs as runs

    assert runs.Runs is frames.Runs is Runs


def test_an_error_of_a_reader_ends_its_check_alone(episodes, npz):
    class Blind(Broken):
        def frames(self, i, camera):
            raise DatasetError(self.root, camera, "is dark; record it again.")

    (problem,) = check_dataset(Blind(open_dataset(episodes), {}), lambda *told: None)
    assert problem.field == "observation.images.front"
