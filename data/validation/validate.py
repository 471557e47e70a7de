"""Finds what is wrong with a dataset before hours of training are spent on it.

Every large public dataset that others converted failed some check; here each finding names the file
and the field, errors stop training and warnings do not. Content is never trusted: whatever the
files hold, the answer is a list. Memory does not depend on the number of frames.
"""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from data.errors import DatasetError
from data.files.checksums import damaged_files
from data.lerobot.dataset import open_dataset
from data.statistics.stats import Report
from data.validation.check_cameras import check_camera
from data.validation.check_columns import check_columns
from data.validation.check_metadata import (
    check_info,
    check_listing,
    check_prompts,
    check_statistics,
    check_tasks,
)
from data.validation.problem import Problem, from_error

__all__ = ["Problem", "require_valid", "validate"]


def validate(path: str | Path, progress: Report | None = None) -> list[Problem]:
    """All problems of the dataset at `path`, errors first; an empty list if it is sound.

    Args:
      path: anything that `open_dataset` opens.
      progress: called with what is checked, how much of it is done and how much there is.
    """
    report = progress or (lambda what, done, total: None)
    problems: dict[Problem, None] = {}

    def collect(check: Callable[[], Iterable[Problem]]) -> None:
        try:
            for problem in check():
                problems[problem] = None
        except DatasetError as raised:
            problems[from_error(raised)] = None

    try:
        dataset = open_dataset(path)
    except DatasetError as raised:
        return [from_error(raised)]
    found, stats, tasks = check_columns(dataset, report)
    problems |= dict.fromkeys(found)
    if hasattr(dataset, "info"):
        report("Metadata", 0, 1)
        collect(partial(check_info, dataset))
        collect(partial(check_tasks, dataset, tasks))
        collect(partial(check_listing, dataset))
        collect(partial(check_statistics, dataset, stats))
    else:
        collect(partial(check_prompts, dataset))
    for camera in dataset.cameras:
        collect(partial(check_camera, dataset, camera, report))
    report("Checksums", 0, 1)
    named = {problem.file for problem in problems if problem.severity == "error"}
    damaged = partial(damaged_files, dataset.folder)
    collect(lambda: (from_error(e) for e in damaged() if str(e.file) not in named))
    return sorted(problems, key=lambda problem: problem.severity)


def require_valid(path: str | Path) -> list[Problem]:
    """The warnings about the dataset at `path`.

    Raises:
      ValueError: it has errors; the message is the first one's sentence and how many more there
        are.
    """
    problems = validate(path)
    errors = [problem for problem in problems if problem.severity == "error"]
    if errors:
        more = f" ({len(errors) - 1} more)" if len(errors) > 1 else ""
        raise ValueError(errors[0].message + more)
    return problems
