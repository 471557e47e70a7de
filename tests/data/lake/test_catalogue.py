"""The catalogue: a table that others read, and the lineage that it tells."""

from datetime import UTC, datetime, timedelta

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.errors import DatasetError
from data.lake.catalogue import Catalogue, DatasetVersion, find, lineage

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def version(name: str, number: int, *parents: "DatasetVersion") -> DatasetVersion:
    made = BEGAN + timedelta(hours=number)
    digests = tuple(parent.digest for parent in parents)
    command = "chiliad data edit" if parents else ""
    digest = f"{number:064x}"[::-1]
    return DatasetVersion(
        name, f"/d/{name}", digest, "LeRobot v3.0", 3, 30, 10, made, command, digests
    )


RAW, OTHER = version("raw", 1), version("other", 2)
CLEAN = version("clean", 3, RAW)
JOINED = version("joined", 4, CLEAN, OTHER)
EVERY = [RAW, OTHER, CLEAN, JOINED]


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield "memory://lake/catalogue"
    fsspec.filesystem("memory").store.clear()


def test_what_is_added_is_read_back_in_the_order_of_its_making(tmp_path, bucket):
    for url in (tmp_path / "catalogue", bucket):
        Catalogue(url).add([JOINED, CLEAN])
        Catalogue(url).add([RAW, OTHER])
        assert Catalogue(url).versions() == EVERY


def test_duckdb_reads_it_as_a_table(tmp_path):
    duckdb = pytest.importorskip("duckdb", reason="DuckDB is not installed: it is in the dev extra")
    Catalogue(tmp_path / "catalogue").add(EVERY[:2])
    Catalogue(tmp_path / "catalogue").add(EVERY[2:])
    rows = duckdb.sql(
        f"""
        select child.name, parent.name, child.episodes, child.command
        from (select *, unnest(parents) as of from '{tmp_path}/catalogue/*.parquet') as child
        join '{tmp_path}/catalogue/*.parquet' as parent on parent.digest = child.of
        order by child.made, parent.made
        """
    ).fetchall()
    assert rows == [
        ("clean", "raw", 3, "chiliad data edit"),
        ("joined", "other", 3, "chiliad data edit"),
        ("joined", "clean", 3, "chiliad data edit"),
    ]


def test_lineage_goes_back_to_what_nothing_made():
    assert lineage(EVERY, find(EVERY, "joined")) == [(0, JOINED), (1, CLEAN), (2, RAW), (1, OTHER)]
    assert lineage(EVERY, find(EVERY, RAW.digest[:4])) == [(0, RAW)]


def test_a_version_of_what_it_was_made_of_ends_the_lineage():
    same = RAW._replace(command="chiliad data edit", parents=(RAW.digest,))
    assert lineage([RAW, same], same) == [(0, same)]


def test_a_folder_of_something_else_is_no_catalogue(tmp_path):
    (tmp_path / "thesis.tex").write_text("\\documentclass")
    with pytest.raises(ValueError, match=r"no catalogue\.json, so it is not a catalogue"):
        Catalogue(tmp_path)
    with pytest.raises(ValueError, match=r"no catalogue\.json, so it is not a catalogue"):
        Catalogue(tmp_path / "thesis.tex")


def test_a_catalogue_that_is_not_there_has_no_versions(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"c: there is no catalogue yet; give --catalogue"):
        Catalogue(tmp_path / "c").versions()


def test_a_damaged_or_strange_table_is_named(tmp_path):
    Catalogue(tmp_path / "c").add(EVERY)
    strange = tmp_path / "c/x.parquet"
    pq.write_table(pa.table({"price": [1.0]}), strange)
    with pytest.raises(DatasetError, match=r"x\.parquet, table: is not a table of a catalogue"):
        Catalogue(tmp_path / "c").versions()
    strange.write_bytes(b"PAR1")
    with pytest.raises(DatasetError, match=r"x\.parquet, table: is not a table of a catalogue"):
        Catalogue(tmp_path / "c").versions()


def test_what_is_not_there_is_not_found():
    for what in ("none", RAW.digest[:3]):
        with pytest.raises(ValueError, match=f"has no version '{what}'"):
            find(EVERY, what)
