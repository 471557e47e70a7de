"""LeRobot's entry in the table of formats: v2.0, v2.1 and v3.0."""

from collections.abc import Iterator, Sequence

from data.columns import BOOKKEEPING
from data.dataset import Format, Report
from data.errors import Problem, caught
from data.files.checksums import check_sums
from data.lerobot.checks.check_cameras import check_camera
from data.lerobot.checks.check_metadata import (
    check_frame_numbers,
    check_info,
    check_listing,
    check_statistics,
    check_subtasks,
    check_tasks,
)
from data.lerobot.dataset import LeRobotDataset
from data.validation.check_columns import check_columns
from data.validation.check_pictures import check_depth


def _validate(dataset: LeRobotDataset, report: Report, columns: Sequence[str]) -> Iterator[Problem]:
    return check_sums(dataset.folder, _check(dataset, report, columns), report)


def _check(dataset: LeRobotDataset, report: Report, columns: Sequence[str]) -> Iterator[Problem]:
    found, stats, tasks = check_columns(dataset, report, columns, BOOKKEEPING)
    yield from found
    report("Metadata", 0, 1)
    yield from caught(check_info(dataset, columns))
    yield from caught(check_frame_numbers(dataset))
    yield from caught(check_tasks(dataset, tasks))
    yield from caught(check_subtasks(dataset))
    yield from caught(check_listing(dataset))
    yield from caught(check_statistics(dataset, stats))
    yield from check_depth(dataset)
    for camera in (*dataset.cameras, *dataset.depth_cameras):
        yield from caught(check_camera(dataset, camera, report))


LEROBOT = Format(
    "LeRobot",
    recognises=lambda folder: folder.exists("meta/info.json"),
    open=LeRobotDataset,
    select=LeRobotDataset,
    validate=_validate,
)
