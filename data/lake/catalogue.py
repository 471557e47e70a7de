"""Catalogue of datasets: a table of their versions, with what made each and from which others.

It is a folder, local or in a bucket, of parquet files. Each write adds a file and changes none, so
that any number of commands can write at once, and any parquet reader (DuckDB, Spark, pandas) reads
the folder as one table.
"""

import json
import tempfile
import uuid
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from data.errors import DatasetError, naming_damage
from data.files.folder import LocalFolder, open_folder
from models.files.terminal import first_line

MARK = "catalogue.json"

_FORMAT = 1
_SCHEMA = pa.schema(
    [
        ("name", pa.string()),
        ("path", pa.string()),
        ("digest", pa.string()),
        ("format", pa.string()),
        ("episodes", pa.int64()),
        ("frames", pa.int64()),
        ("bytes", pa.int64()),
        ("made", pa.timestamp("us", "UTC")),
        ("command", pa.string()),
        ("parents", pa.list_(pa.string())),
    ]
)


class DatasetVersion(NamedTuple):
    """A dataset, frame store or recording at some time. `digest` is a SHA-256 of its content;
    `parents` are the digests of what `command` made it from. Without a command, it was only
    seen."""

    name: str
    path: str
    digest: str
    format: str
    episodes: int | None
    frames: int | None
    bytes: int
    made: datetime
    command: str = ""
    parents: tuple[str, ...] = ()


class Catalogue:
    """The catalogue at a folder or URL; `begin` and `add` create it if there is none.

    Raises:
      ValueError: the folder holds something else.
    """

    def __init__(self, url: str | Path) -> None:
        self.url, self._folder = str(url), open_folder(url)
        self.exists = self._folder.exists(MARK)
        is_file = isinstance(self._folder, LocalFolder) and self._folder.root.is_file()
        if not self.exists and (is_file or any(map(self._folder.list, ("*", "*/*")))):
            raise ValueError(
                f"{url}: is a file, or a folder that is not empty and has no {MARK}, so it is not "
                "a catalogue; give an empty folder, or one that a command made with --catalogue."
            )

    def begin(self) -> None:
        """Creates the catalogue if there is none; for callers that will add to it after long work.

        Raises:
          ValueError: it cannot be written.
        """
        try:
            if not self.exists:
                with tempfile.TemporaryDirectory() as scratch:
                    self._mark(Path(scratch))
            elif isinstance(self._folder, LocalFolder):
                with tempfile.NamedTemporaryFile(dir=self._folder.root):
                    pass
        except (DatasetError, OSError) as error:
            raise ValueError(
                f"{self.url}: the catalogue cannot be written ({first_line(error)}); name another "
                "one, or leave it out."
            ) from None

    def add(self, versions: Sequence[DatasetVersion]) -> None:
        """Adds rows, all of them or none."""
        if not versions:
            return
        rows = [version._asdict() | {"parents": list(version.parents)} for version in versions]
        stamp = max(version.made for version in versions).strftime("%Y%m%dT%H%M%S")
        with tempfile.TemporaryDirectory() as scratch:
            if not self.exists:
                self._mark(Path(scratch))
            file = Path(scratch) / "versions.parquet"
            table = pa.Table.from_pylist(rows, schema=_SCHEMA)
            pq.write_table(table, file, write_page_checksum=True)
            self._folder.put(file, f"versions-{stamp}-{uuid.uuid4().hex[:12]}.parquet")

    def versions(self) -> list[DatasetVersion]:
        """All rows, the oldest first.

        Raises:
          FileNotFoundError: there is no catalogue yet.
          DatasetError: a file of it is damaged, or of another kind.
        """
        if not self.exists:
            raise FileNotFoundError(
                f"{self.url}: there is no catalogue yet; give --catalogue to a command that makes "
                "a dataset, or --add an existing one."
            )
        found = [row for name in self._folder.list("*.parquet") for row in self._read(name)]
        return sorted(found, key=lambda version: version.made)

    def _mark(self, scratch: Path) -> None:
        mark = scratch / MARK
        mark.write_text(json.dumps({"format": _FORMAT}) + "\n")
        self._folder.put(mark, MARK)
        self.exists = True

    def _read(self, name: str) -> Iterable[DatasetVersion]:
        sentence = "is not a table of a catalogue ({reason}); remove the file."
        damage = (ValueError, pa.ArrowException, OSError)
        with naming_damage(self._folder.path(name), "table", sentence, caught=damage):
            table = pq.read_table(self._folder.local(name), page_checksum_verification=True)
            rows = table.cast(_SCHEMA).to_pylist()
        return [DatasetVersion(**row | {"parents": tuple(row["parents"] or ())}) for row in rows]


def find(versions: Sequence[DatasetVersion], what: str) -> DatasetVersion:
    """The latest version with this path, this name, or a digest that begins with this text.

    Raises:
      ValueError: there is none.
    """
    for version in reversed(versions):
        if what in (version.path, version.name) or (
            len(what) >= 4 and version.digest.startswith(what)
        ):
            return version
    raise ValueError(
        f"The catalogue has no version '{what}'; give a path, a name, or at least 4 digits of a "
        "digest from its list."
    )


def lineage(
    versions: Sequence[DatasetVersion], version: DatasetVersion
) -> list[tuple[int, DatasetVersion]]:
    """A version, followed by all that it was made from, each with its distance. A version that
    occurs twice is followed once."""
    made = {v.digest: v for v in versions if v.command}
    known = {v.digest: v for v in versions} | made
    found: list[tuple[int, DatasetVersion]] = []
    seen: set[str] = set()

    def follow(one: DatasetVersion, depth: int) -> None:
        found.append((depth, one))
        if one.digest not in seen:
            seen.add(one.digest)
            for digest in one.parents:
                if digest in known and digest != one.digest:
                    follow(known[digest], depth + 1)

    follow(made.get(version.digest, version), 0)
    return found
