"""Contents of a tracker, read by the means of the service itself."""

import json
import sqlite3
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

Held = dict[str, list[tuple[int, float]]]
"""Step and value of everything that was told, by metric, in the order of the telling."""


def read_wandb(folder: Path) -> tuple[set[str], Held]:
    """Ids of the runs in an offline folder, and what they hold. A .wandb file is a LevelDB log of
    protocol buffers: a header of 7 bytes, then blocks of 32 kB of chunks with 7 bytes of header."""
    from wandb.proto.wandb_internal_pb2 import Record

    ids, held = set(), defaultdict(list)
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        ids.add(path.stem.removeprefix("run-"))
        until = time.monotonic() + 60
        while True:  # its process may still write
            records = [Record.FromString(one) for one in _chunks(path.read_bytes())]
            if records and records[-1].HasField("exit"):
                break
            assert time.monotonic() < until, "wandb did not write the end of the run"
            time.sleep(0.1)
        for row in (one.history for one in records if one.HasField("history")):
            for item in row.item:
                name = item.key or "/".join(item.nested_key)
                if not name.startswith("_"):
                    held[name].append((row.step.num, json.loads(item.value_json)))
    return ids, held


def _chunks(data: bytes) -> Iterator[bytes]:
    at, record = 7, b""
    while at + 7 <= len(data):
        if (room := 32768 - at % 32768) < 7:
            at += room
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record = (b"" if kind in (1, 2) else record) + data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4) and at <= len(data):
            yield record


def read_mlflow() -> tuple[set[str], Held, list[str]]:
    """Ids, metrics and statuses of all runs of the experiment `arms`."""
    from mlflow.tracking import MlflowClient

    client, held = MlflowClient(), defaultdict(list)
    experiment = client.get_experiment_by_name("arms")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    for run in runs:
        for name in run.data.metrics:
            for one in client.get_metric_history(run.info.run_id, name):
                held[name].append((one.step, one.value))
    return {run.info.run_id for run in runs}, held, [run.info.status for run in runs]


def read_trackio(folder: Path) -> tuple[set[str], Held]:
    """Names of the runs of the project `arms` in trackio's folder, and what they hold."""
    held, names = defaultdict(list), set()
    with closing(sqlite3.connect(folder / "arms.db")) as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id")
        for name, step, metrics in rows:
            names.add(name)
            for metric, value in json.loads(metrics).items():
                held[metric].append((step, value))
    return names, held
