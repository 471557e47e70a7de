"""Edits beside LeRobot's own `lerobot-edit-dataset` (0.6.1), and through LeRobot's reader.

LeRobot does not run here: `edits.npz` holds what its reader returned for each dataset, as LeRobot
edited it and as ours did (tests/fixtures/lerobot/make_edits.py).
"""

from pathlib import Path

import numpy as np
import pytest

from data import open_dataset
from data.edit.edit import edit_dataset
from tests.fixtures.lerobot.edits import BOTH, OURS, SOURCE
from tools.datasets.edit import EditOptions, read_edit

FIXTURES = Path(__file__).parents[2] / "fixtures/lerobot"
RENUMBERED = ("task_index",)
"""Numbers that each code may choose."""


def lerobot_reads(name: str, side: str) -> list[dict[str, np.ndarray]]:
    """Arrays of the datasets that an edit left, by LeRobot's names."""
    found: dict[int, dict[str, np.ndarray]] = {}
    with np.load(FIXTURES / "edits.npz") as arrays:
        for key in arrays.files:
            case, whose, number, rest = key.split("/", 3)
            if (case, whose) == (name, side):
                found.setdefault(int(number), {})[rest] = arrays[key]
    return [found[number] for number in sorted(found)]


def edited(name: str, out: Path) -> list[Path]:
    """Datasets that the same edit makes today."""
    words = list(({n: ours for n, (_, ours) in BOTH.items()} | OURS)[name])
    pairs: dict[str, list[tuple[str, str]]] = {}
    paths, given = [FIXTURES / SOURCE], {}
    while words:
        option = words.pop(0).removeprefix("--").replace("-", "_")
        if option == "SOURCE":
            paths.append(FIXTURES / SOURCE)
        elif option in ("split", "trim", "task", "rename_task", "rename"):
            pairs.setdefault(option, []).append((words.pop(0), words.pop(0)))
        else:
            given[option] = words.pop(0)
    typed = {"fps": float, "crf": int, "keyframes": int, "drop": lambda x: (x,)}
    options = {k: typed.get(k, str)(v) for k, v in given.items()}
    options |= {k: tuple(v) for k, v in pairs.items()}
    plans = edit_dataset(paths, out, read_edit(EditOptions(**options)))
    return [out / split for split in sorted(plans)]


@pytest.mark.parametrize("name", BOTH)
def test_the_same_edit_by_lerobot_gives_the_same_rows_tasks_and_frames(name, tmp_path):
    theirs = lerobot_reads(name, "theirs")
    for root, expected in zip(edited(name, tmp_path / "new"), theirs, strict=True):
        dataset = open_dataset(root)
        assert dataset.lengths.tolist() == expected["lengths"].tolist()
        tasks = [dataset.task(i) for i in range(dataset.num_episodes)]
        assert np.repeat(tasks, dataset.lengths).tolist() == expected["task"].tolist()
        cameras = [key for key in expected if key.startswith("observation.images.")]
        assert sorted(cameras) == sorted(dataset.cameras)
        for column in set(dataset.column_names) - {*RENUMBERED}:
            values = dataset.column(column)
            np.testing.assert_array_equal(values, expected[column].reshape(values.shape))
        for camera in cameras:
            seen = [dataset.frames(i, camera) for i in range(dataset.num_episodes)]
            apart = np.abs(np.concatenate(seen).astype(float) - expected[camera])
            assert apart.mean() < 6  # what LeRobot loses where it encodes again


@pytest.mark.parametrize("name", [*BOTH, *OURS])
def test_lerobots_reader_sees_in_an_edited_dataset_what_ours_sees(name, tmp_path):
    read = lerobot_reads(name, "ours")
    for root, expected in zip(edited(name, tmp_path / "new"), read, strict=True):
        dataset = open_dataset(root)
        tasks = [dataset.task(i) for i in range(dataset.num_episodes)]
        assert np.repeat(tasks, dataset.lengths).tolist() == expected["task"].tolist()
        for column in dataset.column_names:
            values = dataset.column(column)
            np.testing.assert_array_equal(values, expected[column].reshape(values.shape))
        for camera in dataset.cameras:
            seen = [dataset.frames(i, camera) for i in range(dataset.num_episodes)]
            if name in ("fps", "av1"):  # encoders differ between builds of FFmpeg
                assert np.abs(np.concatenate(seen) - expected[camera].astype(float)).mean() < 3
            else:
                np.testing.assert_array_equal(np.concatenate(seen), expected[camera])
