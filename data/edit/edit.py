"""LeRobot datasets edited into new ones: episodes deleted, kept, ordered, split and joined, frames
cut off, tasks, columns and cameras renamed or left out, videos encoded again, the rate lowered.

What LeRobot's `lerobot-edit-dataset` does, and that without encoding the videos again: packets are
copied. The result appears when it is whole; interrupted, the same call goes on.
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from data.edit.journal import FileJournal
from data.edit.plan import Edit, EditPlan, plan_edit
from data.edit.write import JOURNAL, Progress, described, write_plan
from data.files.exchange import exchange
from data.files.partial import partial_of
from data.lerobot.dataset import LeRobotDataset


def edit_dataset(
    paths: Sequence[str | Path],
    out: str | Path,
    edit: Edit,
    *,
    progress: Progress | None = None,
    data_megabytes: float = 100,
    video_megabytes: float = 200,
) -> dict[str, EditPlan]:
    """Writes the edited datasets as v3.0: to the folder `out`, with splits to folders in it.

    A dataset may be v2.0, v2.1 or v3.0, a folder or a URL. Where `out` is the only one of `paths`,
    the old dataset is moved to `<out>.old` in the moment in which the new one is whole.

    Args:
      paths: datasets, joined in this order.
      progress: called with frames done and frames in all.

    Returns:
      Plans of what was written, by the names of the splits ("" without).

    Raises:
      ValueError: the edit does not fit the datasets, `out` is not empty, `<out>.old` is in the way,
        or `<out>.partial` holds what another edit began.
      MissingFileError, DatasetError: a file of a dataset is missing or damaged.
      OSError: the disk is full or fails.

    What is finished when an error comes stays in `<out>.partial`, which is gone if nothing is.
    """
    out = Path(os.path.abspath(out))
    in_place = _is_in_place(paths, out)
    old, partial = out.with_name(out.name + ".old"), partial_of(out)
    limits = {"data_megabytes": data_megabytes, "video_megabytes": video_megabytes}
    if (out / JOURNAL).is_file():  # it was killed when the new dataset was in its place
        if in_place and partial.exists():
            partial.rename(old)
        begun = FileJournal.header(out / JOURNAL)
        _remove_journals(out)
        sources = [old] if in_place else paths
        plans = plan_edit([LeRobotDataset(path) for path in sources], edit)
        if begun == json.loads(json.dumps(_about(plans, limits))):
            return plans
    if in_place and old.exists():
        raise ValueError(f"{old}: is there from an edit before; delete or rename it first.")
    if not in_place and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out}: already exists and is not empty; choose another path.")
    if in_place and edit.splits:
        raise ValueError(f"{out}: cannot be split in place; give another folder for the splits.")
    plans = plan_edit([LeRobotDataset(path) for path in paths], edit)
    frames, before = sum(plan.work for plan in plans.values()), 0
    whole = FileJournal(partial / JOURNAL, _about(plans, limits)) if edit.splits else nullcontext()
    with whole:
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
    """Removes the journals of a dataset, or of splits and of all; that by which the others are
    found goes last."""
    for journal in (*out.glob(f"*/{JOURNAL}"), out / JOURNAL):
        journal.unlink()


def _is_in_place(paths: Sequence[str | Path], out: Path) -> bool:
    """True if the only dataset is at `out`; raises ValueError if it is one of several."""
    same = ["://" not in str(path) and Path(path).resolve() == out.resolve() for path in paths]
    if any(same) and len(same) > 1:
        raise ValueError(f"{out}: is one of the datasets to join; choose another folder for out.")
    return any(same)
