"""Checks of a dataset of any format: tables that fit together, columns fit for training,
instructions, and images that decode.

A format's own checks begin with these or replace them (`Format.validate`).
"""

from collections.abc import Iterator, Sequence

import numpy as np

from data.dataset import Dataset, Report, Runs, subtasks_of
from data.errors import Problem, caught, error, warning
from data.validation.check_columns import check_columns
from data.validation.check_pictures import check_depth, check_pictures, check_presence


def check_dataset(
    dataset: Dataset, report: Report, columns: Sequence[str] = ()
) -> Iterator[Problem]:
    """All problems of a dataset that any format can have; `columns` as in `check_columns`."""
    wrong = list(_check_tables(dataset))
    yield from wrong
    if wrong:
        return
    found, _, _ = check_columns(dataset, report, columns)
    yield from found
    yield from check_prompts(dataset)
    yield from caught(_check_subtasks(dataset))
    yield from check_depth(dataset)
    for c, camera in enumerate(dataset.cameras):
        present = np.flatnonzero(dataset.present[:, c]).tolist()
        yield from check_presence(dataset, camera, present)
        yield from caught(check_pictures(dataset, camera, present, report))


def check_prompts(dataset: Dataset) -> Iterator[Problem]:
    """Checks that frames have an instruction, for datasets without a table of tasks."""
    wordless = [i for i, texts in enumerate(dataset.prompts) if not any(map(str.strip, texts))]
    without = np.flatnonzero(np.isin(dataset.runs.task, wordless))
    if len(without):
        every = len(without) == len(dataset.runs.task)
        yield (error if every else warning)(
            dataset.root, "instructions",
            f"are empty in {len(without)} of {len(dataset.runs.task)} runs of frames, the first in "
            f"episode {dataset.runs.episode[without[0]]}; leave those episodes out, because a "
            "policy cannot be asked for what they show.",
        )  # fmt: skip


def _check_subtasks(dataset: Dataset) -> Iterator[Problem]:
    """Checks that runs of subtasks go through all frames, and refer only to known texts."""
    found = subtasks_of(dataset)
    if found is None:
        return
    yield from _check_runs(dataset, found.runs, "subtasks")
    task = found.runs.task
    strange = (task < -1) | (task >= len(found.texts))
    if strange.any():
        yield error(
            dataset.root, "subtasks",
            f"name text {task[strange][0]}, but there are {len(found.texts)} (-1: none); "
            "correct the reader.",
        )  # fmt: skip


def _check_runs(dataset: Dataset, runs: Runs, field: str) -> Iterator[Problem]:
    """Checks that runs go through all frames."""
    lengths = dataset.lengths
    starts, ends = np.cumsum(lengths) - lengths, np.cumsum(runs.length)
    known = np.isin(runs.episode, np.arange(len(lengths))) & (runs.length > 0)
    begin = starts[np.where(known, runs.episode, 0)] + runs.first
    if not known.all() or ends[-1:] != lengths.sum() or (begin != ends - runs.length).any():
        yield error(
            dataset.root, field,
            "do not cover the frames of all episodes one after the other; correct the reader.",
        )  # fmt: skip


def _check_tables(dataset: Dataset) -> Iterator[Problem]:
    """Checks that the tables of episodes, of features and of tasks agree."""
    lengths, runs = dataset.lengths, dataset.runs
    missing = [n for n in (*dataset.column_names, *dataset.cameras) if n not in dataset.features]
    if missing:
        yield error(dataset.root, f"feature '{missing[0]}'", "is not described; add its shape.")
    empty = np.flatnonzero(lengths < 1)
    if len(empty) or not len(lengths):
        what = f"episode {empty[0]} has no frames" if len(empty) else "there is no episode"
        yield error(dataset.root, "episodes", f"{what}; leave out empty ones, or record some.")
        return
    expected = len(lengths), len(dataset.cameras)
    if dataset.present.shape != expected:
        yield error(
            dataset.root, "present",
            f"has shape {list(dataset.present.shape)}, expected {list(expected)}: whether an "
            "episode has a camera; correct the reader.",
        )  # fmt: skip
    yield from _check_runs(dataset, runs, "runs")
    named = np.isin(runs.task, [i for i, texts in enumerate(dataset.prompts) if texts])
    if not named.all():
        yield error(
            dataset.root, "runs",
            f"name task {runs.task[~named][0]}, but prompts have wordings of "
            f"{len(dataset.prompts)} tasks; correct the reader.",
        )  # fmt: skip
