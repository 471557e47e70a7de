"""Texts of subtasks in an edited dataset. They are renumbered with the column `subtask_index`, even
if it is renamed, or left as they are if a column of another name indexes them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from data.columns import arrow_type
from data.lerobot.dataset import LeRobotDataset
from data.lerobot.subtasks import FILE, INDEX, read_texts


def numbered_column(names: Sequence[Mapping[str, str]]) -> str | None:
    """The column of the new dataset that is called `subtask_index`, or was called so in every
    source.

    Args:
      names: each source's name of each column of the new dataset.
    """
    if all(INDEX in one for one in names):
        return INDEX
    found = {next((new for new, old in one.items() if old == INDEX), None) for one in names}
    return found.pop() if len(found) == 1 else None


def texts_to_number(source: LeRobotDataset, column: str) -> tuple[str, ...] | None:
    """Texts that a source's column indexes, if the source has any.

    Raises:
      DatasetError: a frame's subtask has no text.
    """
    if not source.folder.exists(FILE):
        return None
    _ = source.with_subtask_column(column).subtasks
    return read_texts(source.folder)


def require_one_numbering(
    sources: Sequence[LeRobotDataset],
    names: Sequence[Mapping[str, str]],
    features: Mapping[str, Mapping[str, Any]],
) -> None:
    """Raises ValueError if a column of the joined dataset may index texts of different tables."""
    counts = [name for name, feature in features.items() if _may_count(feature)]
    if not counts or len(sources) == 1:
        return
    there = [source.folder.exists(FILE) for source in sources]
    if numbered_column(names) is not None and len(set(there)) == 1:
        return
    tables = [read_texts(s.folder) if has else None for s, has in zip(sources, there, strict=True)]
    for source, table in zip(sources, tables, strict=True):
        if table != tables[0]:
            raise ValueError(
                f"{sources[0].root} and {source.root} cannot be joined: their {FILE} differ, and "
                f"column '{counts[0]}' may number the texts in it; if a column does, rename it to "
                f"{INDEX}, otherwise delete the tables."
            )


def _may_count(feature: Mapping[str, Any]) -> bool:
    kind = arrow_type(feature["dtype"])
    return kind is not None and pa.types.is_integer(kind) and tuple(feature["shape"]) in ((), (1,))
