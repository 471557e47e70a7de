"""GR00T's `meta/modality.json` for an edited dataset: its entries name columns and cameras of the
dataset, which an edit may rename or drop.

If an entry has no `original_key`, Isaac-GR00T uses the default column of its kind; for a camera, it
uses the entry's own name, or that name below observation.images (gr00t/data/schema.py and
dataset.py).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.columns import BOOKKEEPING
from data.errors import DatasetError
from data.files.json_file import read_json
from data.lerobot.dataset import LeRobotDataset

MODALITY = "meta/modality.json"

_USUAL = {
    "state": ("observation.state",),
    "action": ("action",),
    "video": ("{}", "observation.images.{}"),
    "annotation": ("annotation.{}",),
}


def write_edited_modality(source: LeRobotDataset, names: Mapping[str, str], root: Path) -> None:
    """Writes `source`'s file for the new dataset at `root`; the same bytes if no name changes. If
    it names states, actions or cameras and none of that kind remains, it is left out, because no
    reader accepts it then.

    Args:
      names: the source's name of each column and camera of the new dataset.

    Raises:
      DatasetError: the file is not valid JSON of its kind, and names change.
    """
    file, where = source.folder.local(MODALITY), source.path(MODALITY)
    now = {name: name for name in BOOKKEEPING} | {old: new for new, old in names.items()}
    if all(now.get(name) == name for name in source.features):
        (root / MODALITY).write_bytes(file.read_bytes())
        return
    told = read_json(file, where, "correct or delete it")
    for kind, part in {"file": told, **(told if isinstance(told, dict) else {})}.items():
        if not isinstance(part, dict):
            raise DatasetError(where, kind, "is not a JSON object; correct it, or delete the file.")
    found = {
        kind: _renamed(part, _USUAL[kind], now, source) if kind in _USUAL else part
        for kind, part in told.items()
    }
    if all(found.get(kind) or not told.get(kind) for kind in ("state", "action", "video")):
        (root / MODALITY).write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")


def _renamed(
    entries: Mapping[str, Any],
    usual: tuple[str, ...],
    now: Mapping[str, str],
    source: LeRobotDataset,
) -> dict[str, Any]:
    """Entries of one kind with the new names. Entries whose column is gone are dropped; entries
    that named no column of the source stay as they are."""
    found = {}
    for name, entry in entries.items():
        about = entry if isinstance(entry, dict) else {}
        given = about.get("original_key")
        candidates = [given] if given else [text.format(name) for text in usual]
        old = next((key for key in candidates if key in source.features), None)
        if old is None or now.get(old) == old:
            found[name] = entry
        elif old in now:
            found[name] = {**about, "original_key": now[old]}
    return found
