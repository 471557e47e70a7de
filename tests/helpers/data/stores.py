"""All that a frame store holds, to compare it with another."""

from pathlib import Path

import numpy as np

from data.store import convert
from data.store.store import Store, open_store
from tests.helpers.data.recording import LENGTHS


def contents(root):
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


ROWS = np.arange(sum(LENGTHS))
SETTINGS = {e: convert.Settings(16, e, shard_frames=30) for e in ("raw", "jpeg")}


def everything(root: Path) -> list[object]:
    """All that training reads of a store."""
    store = open_store(root)
    tables = [store.fps, store.prompts, repr(store.stats), *map(np.ndarray.tolist, store.runs)]
    tables += [array.tolist() for array in (store.lengths, store.present, store.duplicate_of)]
    columns = [store.column(name, ROWS).tobytes() for name in store.columns]
    return tables + columns + [pictures(store, ROWS, c).tobytes() for c in store.cameras]


def pictures(store: Store, rows: np.ndarray, camera: str) -> np.ndarray:
    out = np.zeros((len(rows), store.image_size, store.image_size, 3), np.uint8)
    store.images(rows, camera, list(out))
    return out
