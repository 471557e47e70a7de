"""The benchmark of readers of a bucket loads every frame from it, from its cache and from disk."""

import numpy as np
import pytest
from rich.console import Console

from tools.bench.data import bucket


@pytest.mark.slow
def test_every_reader_loads_all_frames_from_the_bucket_and_from_disk(tmp_path):
    pytest.importorskip("moto.server", reason="needs moto: pip install -e '.[dev]'")
    found = bucket.run(Console(quiet=True), tiny=True, cache=tmp_path)
    assert found["frames"] == 120
    assert list(found["rows"]) == ["1", "2"]
    for readers, row in found["rows"].items():
        assert row["readers"] == int(readers)
        for name in ("bucket", "cached", "disk"):
            rate = row[name]["samples_per_second"]
            assert rate == pytest.approx(row["readers"] * 120 / row[name]["seconds"])
            assert row[name]["cpu_seconds"] > 0
        fetched = row["megabytes_per_second"] * row["bucket"]["seconds"]
        assert fetched == pytest.approx(row["readers"] * found["megabytes"])
    rates = [found["rows"][n]["bucket"]["samples_per_second"] for n in ("2", "1")]
    assert found["ratio"] == rates[0] / rates[1]


def test_each_reader_has_an_order_of_its_own_and_leaves_out_no_frame():
    class Seen:
        image_size, cameras, lengths = 4, ("front", "wrist"), np.array([30, 20])

        def __init__(self):
            self.rows = {"front": [], "wrist": []}

        def images(self, rows, camera, out):
            assert len(out) == len(rows)
            self.rows[camera] += rows.tolist()

        def column(self, name, rows):
            assert 0 <= rows.min() <= rows.max() < 50

    readers = [Seen(), Seen()]
    for seed, store in enumerate(readers):
        bucket.load(store, seed)
        assert sorted(store.rows["front"]) == list(range(50))
        assert store.rows["front"] == store.rows["wrist"]
    assert readers[0].rows != readers[1].rows
