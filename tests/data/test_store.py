import pickle

import numpy as np
import pytest

from data import open_dataset
from data.errors import DatasetError
from data.store import build_store, cached_store, content_digest, open_store
from models.processor import resize_with_pad
from tests.data.conftest import FRONT, LENGTHS, WRIST


@pytest.fixture(scope="module")
def raw(recorded, tmp_path_factory):
    return build_store(open_dataset(recorded), tmp_path_factory.mktemp("raw") / "s", 32, "raw")


def resized(dataset, camera):
    frames = (frame for i in range(dataset.num_episodes) for frame in dataset.frames(i, camera))
    return np.stack([resize_with_pad(frame, 32) for frame in frames])


def test_raw_frames_are_the_resized_frames_in_any_order(raw, recorded):
    expected = [resized(open_dataset(recorded), camera) for camera in (FRONT, WRIST)]
    for frame in (40, 0, 52, 7):
        front, wrist = raw.images(frame)
        assert np.array_equal(front, expected[0][frame])
        assert np.array_equal(wrist, expected[1][frame])
    (wrist,) = raw.images(3, [WRIST])
    assert np.array_equal(wrist, expected[1][3])


def test_jpeg_frames_are_close(recorded, tmp_path):
    store = build_store(open_dataset(recorded), tmp_path / "s", 32, "jpeg")
    expected = resized(open_dataset(recorded), FRONT)
    for frame in (0, 30, 52):
        picture = store.images(frame)[0]
        assert picture.dtype == np.uint8
        assert ((picture.astype(float) - expected[frame]) ** 2).mean() < 20


def test_columns_and_prompts_are_exact(raw, episodes):
    assert raw.lengths.tolist() == list(LENGTHS)
    assert np.array_equal(raw.actions, np.concatenate([e.columns["action"] for e in episodes]))
    states = np.concatenate([e.columns["observation.state"] for e in episodes])
    assert np.array_equal(raw.states, states)
    assert [raw.prompt(i) for i in range(len(episodes))] == [e.task for e in episodes]
    assert raw.fps == 20
    assert raw.cameras == (FRONT, WRIST)


def test_statistics_leave_other_episodes_out(raw, episodes):
    stats = raw.stats([1, 3])["action"]
    chosen = np.concatenate([episodes[i].columns["action"] for i in (1, 3)]).astype(float)
    assert np.allclose(stats["q99"], np.quantile(chosen, 0.99, axis=0))


def test_a_pickled_store_reads_the_same(raw):
    copied = pickle.loads(pickle.dumps(raw))
    assert copied == raw
    assert np.array_equal(copied.images(9)[1], raw.images(9)[1])


def test_a_cached_store_is_built_once_per_content(copy, tmp_path):
    calls = []

    def report(done, total):
        calls.append((done, total))

    first = cached_store(copy, 16, "raw", tmp_path / "cache", report)
    assert calls[-1] == (sum(LENGTHS), sum(LENGTHS))
    calls.clear()
    assert cached_store(copy, 16, "raw", tmp_path / "cache", report) == first
    assert calls == []
    info = copy / "meta/info.json"
    info.write_text(info.read_text().replace("test", "other"))
    changed = cached_store(copy, 16, "raw", tmp_path / "cache")
    assert changed.path != first.path
    assert changed.digest == content_digest(copy)


def test_a_conversion_that_fails_leaves_nothing(copy, tmp_path):
    video = next(copy.glob(f"videos/{WRIST}/*/*.mp4"))
    video.write_bytes(video.read_bytes()[: video.stat().st_size // 2])
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(DatasetError, match=f"{WRIST}.*mp4, frame "):
        build_store(open_dataset(copy), out / "s", 32, "raw")
    assert list(out.iterdir()) == []


def test_an_existing_store_is_not_overwritten(raw, recorded):
    with pytest.raises(ValueError, match="already exists"):
        build_store(open_dataset(recorded), raw.path, 32)


def test_a_folder_without_description_is_no_store(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"store\.json: missing"):
        open_store(tmp_path)


def test_another_format_version_is_refused(recorded, tmp_path):
    store = build_store(open_dataset(recorded), tmp_path / "s", 8, "raw")
    description = store.path / "store.json"
    description.write_text(description.read_text().replace('"format": 1', '"format": 99'))
    with pytest.raises(ValueError, match="format is 99"):
        open_store(store.path)
