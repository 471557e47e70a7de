"""Edits LeRobot datasets into new ones: deletes, keeps, orders, splits and joins episodes, trims
frames, renames tasks, renames or drops columns and cameras, re-encodes videos, lowers the rate.

It does what LeRobot's `lerobot-edit-dataset` does without re-encoding the videos: packets are
copied. The result appears when it is complete; after an interruption, the same call resumes.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from data.edit.journal import FileJournal
from data.edit.plan import Edit, EditPlan, plan_edit
from data.edit.write import JOURNAL, Progress, described, write_plan
from data.files.exchange import exchange
from data.files.partial import partial_of, require_apart
from data.lerobot.dataset import LeRobotDataset
from models.files.address import parse, whole


def edit_dataset(
    paths: Sequence[str | Path],
    out: str | Path,
    edit: Edit,
    *,
    progress: Progress | None = None,
    data_megabytes: float = 100,
    video_megabytes: float = 200,
) -> dict[str, EditPlan]:
    """Writes the edited datasets as v3.0 to the folder `out`; splits go to folders in it.

    A dataset may be v2.0, v2.1 or v3.0, a folder or a URL. If `out` is the only one of `paths`, the
    old dataset is moved to `<out>.old` when the new one is complete.

    Args:
      paths: datasets, joined in this order.
      progress: called with the frames done and the total.

    Returns:
      Plans of what was written, by the name of the split ("" without splits).

    Raises:
      ValueError: the edit does not fit the datasets, `out` is not empty or inside one of them,
        `<out>.old` is in the way, or `<out>.partial` holds what another edit began.
      MissingFileError, DatasetError: a file of a dataset is missing or damaged.
      OSError: the disk is full or fails.

    After an error, finished files stay in `<out>.partial`, which is removed if there are none.
    """
    out = whole(out)
    in_place = _is_in_place(paths, out)
    old, partial = out.with_name(out.name + ".old"), partial_of(out)
    limits = {"data_megabytes": data_megabytes, "video_megabytes": video_megabytes}
    if (out / JOURNAL).is_file():  # killed after the new dataset was put in place
        if in_place and partial.exists():
            partial.rename(old)
        begun = FileJournal.header(out / JOURNAL)
        _remove_journals(out)
        sources = [old] if in_place else paths
        plans = plan_edit([LeRobotDataset(path) for path in sources], edit)
        if begun == json.loads(json.dumps(_about(plans, limits))):
            return plans
    if in_place and old.exists():
        raise ValueError(f"{old}: is left over from an earlier edit; delete or rename it first.")
    if not in_place and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out}: already exists and is not empty; choose another path.")
    if in_place and edit.splits:
        raise ValueError(f"{out}: cannot be split in place; give another folder for the splits.")
    if not in_place:
        require_apart(out, paths)
    plans = plan_edit([LeRobotDataset(path) for path in paths], edit)
    frames, before = sum(plan.work for plan in plans.values()), 0
    journal = (
        FileJournal(partial / JOURNAL, _about(plans, limits)) if edit.splits else nullcontext()
    )
    with journal:
        for name, plan in plans.items():

            def told(done: int, total: int, before: int = before) -> None:
                if progress is not None:
                    progress(before + done, frames)

            write_plan(plan, partial / name, told, **limits)
            before += plan.work
    if in_place:
        exchange(partial, out)
        partial.rename(old)
    else:
        if out.exists():
            out.rmdir()
        partial.rename(out)
    _remove_journals(out)
    return plans


def _about(plans: Mapping[str, EditPlan], limits: Mapping[str, float]) -> Any:
    """Header of the journal of the whole edit."""
    if list(plans) == [""]:
        return described(plans[""], **limits)
    return {name: plan.to_json() for name, plan in plans.items()}


def _remove_journals(out: Path) -> None:
    """Removes the journals of a dataset, or of its splits and of the whole edit. The one by which
    the others are found is removed last."""
    for journal in (*out.glob(f"*/{JOURNAL}"), out / JOURNAL):
        journal.unlink()


def _is_in_place(paths: Sequence[str | Path], out: Path) -> bool:
    """True if the only dataset is at `out`; raises ValueError if it is one of several."""
    same = [parse(path).same_as(out) for path in paths]
    if any(same) and len(same) > 1:
        raise ValueError(f"{out}: is one of the datasets to join; choose another folder for out.")
    return any(same)
