"""Subtasks of LeRobot datasets: from each way in which they are written to the same runs, and what
is broken by name."""

import json
import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import open_dataset
from data.dataset import Subtasks, subtasks_of
from data.errors import DatasetError
from data.lerobot.writer import DatasetWriter
from data.store import tables
from data.store.numbers import open_numbers
from data.validation.validate import validate

TOLD = (("go", "go", "take", "take"), ("take", "go", "go"), ("bring", "bring"))
TEXTS = ("go", "take", "bring")
DATA = "data/chunk-000/file-000.parquet"
NUMBER = {"dtype": "float32", "shape": (2,), "names": None}


def write(path: Path, subtasks: bool = True) -> Path:
    features = {"observation.state": NUMBER, "action": NUMBER}
    features |= {} if subtasks else {"doing": {"dtype": "string", "shape": (1,), "names": None}}
    with DatasetWriter(path, fps=10, features=features, subtasks=subtasks) as writer:
        for number, told in enumerate(TOLD):
            values = np.random.default_rng(number).normal(size=(len(told), 2)).astype(np.float32)
            columns = {"observation.state": values, "action": values}
            columns |= {} if subtasks else {"doing": np.array(told)}
            writer.add_episode(columns, {}, "fetch", told if subtasks else ())
    return path


def spelt(found: Subtasks | None) -> list[list[str]]:
    """The text of every frame, by episode."""
    assert found is not None
    words: list[list[str]] = [[] for _ in range(int(found.runs.episode.max()) + 1)]
    for episode, first, length, text in zip(*found.runs, strict=True):
        assert len(words[episode]) == first
        words[episode] += [found.texts[text] if text >= 0 else ""] * int(length)
    return words


def change(path: Path, name: str, values: pa.Array, dtype: str) -> None:
    """Writes another column, and its feature."""
    table = pq.read_table(path / DATA)
    at = table.column_names.index(name) if name in table.column_names else None
    made = table.append_column(name, values) if at is None else table.set_column(at, name, values)
    pq.write_table(made, path / DATA)
    info = json.loads((path / "meta/info.json").read_text())
    info["features"][name] = {"dtype": dtype, "shape": [1], "names": None}
    (path / "meta/info.json").write_text(json.dumps(info))


def test_written_subtasks_are_read_again_and_kept_by_a_store(tmp_path):
    dataset = open_dataset(write(tmp_path / "set"))
    found = subtasks_of(dataset)
    assert spelt(found) == [list(told) for told in TOLD]
    assert found.texts == TEXTS
    assert subtasks_of(pickle.loads(pickle.dumps(dataset))).texts == TEXTS
    kept = open_numbers(dataset, tmp_path / "kept")
    assert spelt(subtasks_of(kept)) == spelt(found)
    assert not [p for p in validate(tmp_path / "set") if "subtask" in p.field]


def test_a_dataset_without_subtasks_has_none_and_its_tables_are_as_before(tmp_path):
    dataset = open_dataset(write(tmp_path / "set", subtasks=False))
    assert subtasks_of(dataset) is None
    open_numbers(dataset, tmp_path / "kept")
    assert not {*tables.OPTIONAL} & {path.name for path in (tmp_path / "kept").iterdir()}


def test_a_column_of_texts_tells_them_by_its_name(tmp_path):
    dataset = open_dataset(write(tmp_path / "set", subtasks=False))
    told = dataset.with_subtask_column("doing")
    assert spelt(subtasks_of(told)) == [list(each) for each in TOLD]
    assert told.digest != dataset.digest
    with pytest.raises(DatasetError, match=r"'action'.* cannot hold subtasks"):
        dataset.with_subtask_column("action")
    with pytest.raises(DatasetError, match=r"'acts'.* does not exist"):
        dataset.with_subtask_column("acts")


def test_annotations_hold_from_their_time_to_the_next(tmp_path):
    path = write(tmp_path / "set", subtasks=False)
    of_episode = (
        (("subtask", "take", 0.2), ("plan", "all of it", 0.0), ("subtask", "go", 0.0)),
        (("subtask", "go", float(np.float32(0.1))),),
        (),
    )
    cells = []
    for told, rows in zip(TOLD, of_episode, strict=True):
        names = ("style", "content", "timestamp")
        cells += [[dict(zip(names, row, strict=True)) for row in rows]] * len(told)
    kind = pa.list_(
        pa.struct({"style": pa.string(), "content": pa.string(), "timestamp": pa.float32()})
    )
    change(path, "language_persistent", pa.array(cells, kind), "language")
    expected = [["go", "go", "take", "take"], ["", "go", "go"], ["", ""]]
    assert spelt(subtasks_of(open_dataset(path))) == expected


@pytest.mark.parametrize("wrong", [7, -2])
def test_an_index_without_text_is_an_error_by_its_place(tmp_path, wrong):
    path = write(tmp_path / "set")
    numbers = pq.read_table(path / DATA)["subtask_index"].to_pylist()
    numbers[5] = wrong
    change(path, "subtask_index", pa.array(numbers, pa.int64()), "int64")
    words = rf"'subtask_index': is {wrong} at step 1 of episode 1.* texts of 0 to 2"
    with pytest.raises(DatasetError, match=words):
        _ = open_dataset(path).subtasks
    (found,) = [p for p in validate(path) if "subtask_index" in p.field]
    assert found.severity == "error"


def test_indices_without_their_texts_are_a_warning(tmp_path):
    path = write(tmp_path / "set")
    (path / "meta/subtasks.parquet").unlink()
    assert subtasks_of(open_dataset(path)) is None
    found = [p for p in validate(path) if "no subtasks are learnt" in p.message]
    assert [p.severity for p in found] == ["warning"]


def test_texts_that_are_not_numbered_by_their_rows_are_refused(tmp_path):
    path = write(tmp_path / "set")
    table = pq.read_table(path / "meta/subtasks.parquet")
    pq.write_table(table.take([1, 0, 2]), path / "meta/subtasks.parquet")
    with pytest.raises(DatasetError, match=r"is \[1, 0, 2\], expected 0 to 2 in order"):
        _ = open_dataset(path).subtasks


def test_an_episode_needs_a_subtask_for_every_frame(tmp_path):
    with (
        pytest.raises(ValueError, match="has 1 subtasks, expected 2"),
        DatasetWriter(tmp_path / "set", fps=10, features={"action": NUMBER}, subtasks=True) as made,
    ):
        made.add_episode({"action": np.zeros((2, 2), np.float32)}, {}, "fetch", ("go",))
