"""A conversion on a Ray cluster: the same parts, made as tasks of Ray Data.

Ray Data spreads the tasks, makes those of lost nodes again and sees nothing but names of parts:
pictures go straight from a worker to the store. Dataset and store have to be where every node
reaches them, in a bucket or on a shared disk (docs.ray.io, Ray Data).
"""

import logging
import pickle
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import data
import models
from data.dataset import Dataset
from data.errors import DatasetError
from data.files.folder import Folder, LocalFolder
from data.store.convert import Done, Run, Settings, WorkUnit, make_part

_CORES = 2
_ATTEMPTS = 3
_FIRST_WAIT = 1.0


def on_ray(address: str = "local") -> Run:
    """Makes parts on the cluster at `address` ("auto": the one this machine belongs to), or on a
    Ray of this machine's own that lasts as long as the work.

    A part that fails is tried three times with growing pauses, and made again if its node is lost.

    Raises:
      ValueError: Ray is not installed.
    """
    ray = _ray()

    def run(
        dataset: Dataset, parts: Sequence[WorkUnit], settings: Settings, folder: Folder, done: Done
    ) -> None:
        if not parts:
            return
        if isinstance(folder, LocalFolder):
            folder = LocalFolder(folder.root.absolute())
        with cluster(address):
            rows = ray.data.from_items(
                [part._asdict() for part in parts], override_num_blocks=len(parts)
            ).map(_make, fn_args=(pickle.dumps(dataset), settings, folder), num_cpus=_CORES)
            for row in rows.iter_rows():
                if row["error"]:
                    raise pickle.loads(row["error"])
                done(row["pictures"])

    return run


@contextmanager
def cluster(address: str) -> Iterator[None]:
    """A connection to Ray, the present one if there is one; workers get this very code."""
    ray = _ray()
    if ray.is_initialized():
        yield
        return
    here = {"include_dashboard": False}
    elsewhere = {"runtime_env": {"py_modules": [data, models]}}
    ray.init(
        address,
        log_to_driver=False,
        logging_level=logging.WARNING,
        **(here if address == "local" else elsewhere),
    )
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    try:
        yield
    finally:
        ray.shutdown()


def _make(
    row: dict[str, Any], dataset: bytes, settings: Settings, folder: Folder
) -> dict[str, Any]:
    """Makes a part in a worker; an error that stays is handed back, so that the caller sees the
    same one as without Ray."""
    part, wait = WorkUnit(**row), _FIRST_WAIT
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            make_part(_opened(dataset), part, settings, folder, threads=_CORES)
            break
        except (DatasetError, OSError) as error:
            if attempt == _ATTEMPTS:
                return row | {"error": pickle.dumps(error)}
            time.sleep(wait)
            wait *= 4
    return row | {"error": b""}


@lru_cache(1)
def _opened(dataset: bytes) -> Dataset:
    return pickle.loads(dataset)


def _ray() -> Any:
    try:
        import ray
        import ray.data
    except ImportError:
        raise ValueError(
            "Ray is not installed, so nothing can be converted on a cluster; "
            "`pip install -e '.[ray]'` in Chiliad's repository."
        ) from None
    return ray
