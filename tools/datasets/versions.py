"""Versions of datasets, frame stores and recordings, as a catalogue lists them."""

import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from data import open_dataset
from data.dataset import find_format
from data.files.checksums import digest_of
from data.files.folder import open_folder
from data.lake.catalogue import DatasetVersion
from data.lerobot.importing.importing import find_recordings
from data.store.convert import DESCRIPTION
from data.store.description import described, listed
from data.store.store import open_store
from models.files.address import parse, whole
from models.files.bucket import Bucket


def typed() -> str:
    """The command line with which this process was started, for a shell to run again."""
    program = Path(sys.argv[0])
    name = f"python -m tools.{program.stem}" if program.suffix == ".py" else program.name
    return f"{name} {shlex.join(sys.argv[1:])}"


def version_of(
    path: str, command: str = "", parents: Sequence[DatasetVersion] = ()
) -> DatasetVersion:
    """The present version of a dataset or frame store.

    Args:
      command: command that made it from the `parents`; empty if it is only read.

    Raises:
      ValueError: there is none, or it is damaged.
    """
    where, folder = parse(path).absolute, open_folder(path)
    made, of = datetime.now(UTC), tuple(dict.fromkeys(parent.digest for parent in parents))
    if folder.exists(DESCRIPTION):
        lengths, digest = open_store(path).lengths, described(folder)["files"]
        size = sum(size for size, _ in listed(folder, digest).values())
        name, kind = parse(path).name, "frame store"
    else:
        dataset = open_dataset(path)
        lengths, digest, size, name = dataset.lengths, dataset.digest, _bytes(path), dataset.name
        version = getattr(dataset, "info", {}).get("codebase_version", "")
        kind = f"{find_format(path).name} {version}".strip()
    counts = len(lengths), int(lengths.sum())
    return DatasetVersion(name, where, digest, kind, *counts, size, made, command, of)


def recordings(paths: Sequence[str]) -> list[DatasetVersion]:
    """Recordings of other formats, by the SHA-256 of their files."""
    kind, files = find_recordings(paths)
    found = []
    for file in files:
        inside = [file] if file.is_file() else sorted(p for p in file.rglob("*") if p.is_file())
        size = sum(one.stat().st_size for one in inside)
        about = file.name, str(whole(file)), digest_of([file]), kind.name
        found.append(DatasetVersion(*about, None, None, size, datetime.now(UTC)))
    return found


def _bytes(path: str) -> int:
    """Bytes of all files of a dataset."""
    address = parse(path)
    if not address.is_remote:
        return sum(file.stat().st_size for file in address.path.rglob("*") if file.is_file())
    if address.protocol == "hf":
        folder = open_folder(path)
        return sum(map(folder.size, folder.list("**/*")))
    return sum(file.size for file in Bucket(path).list().values())
