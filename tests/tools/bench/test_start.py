"""The benchmark of a run's start on few episodes: what it makes can be read."""

from data import open_dataset
from data.store.store import open_store
from tools.bench.data.start import SyntheticDataset, begin_run, make_metadata, make_store


def test_a_run_begins_on_the_store(tmp_path):
    make_store(SyntheticDataset(300, 20), tmp_path / "store", 224)
    report = begin_run(tmp_path / "store")
    assert list(report["parts"])[-1] == "first batch"
    assert report["seconds"] >= sum(wall for wall, _ in report["parts"].values()) * 0.99


def test_store_and_metadata_tell_the_same(tmp_path):
    synthetic = SyntheticDataset(300, 20)
    make_store(synthetic, tmp_path / "store", 32)
    make_metadata(synthetic, tmp_path / "dataset")
    store, dataset = open_store(tmp_path / "store"), open_dataset(tmp_path / "dataset")
    assert store.lengths.tolist() == dataset.lengths.tolist() == synthetic.lengths.tolist()
    for frames in (store, dataset):
        told = [frames.prompts[task][0] for task in frames.runs.task]
        assert told == [synthetic.instructions[task] for task in synthetic.tasks]
