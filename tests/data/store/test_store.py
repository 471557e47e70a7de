import json
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorstore as ts

from data import open_dataset
from data.errors import DatasetError
from data.files.folder import LocalFolder
from data.frames import ACTION, STATE
from data.store import convert, tables
from data.store.store import build_store, cached_store, open_store, verify
from models.inputs.pictures import picture_fit, resize_with_pad
from tests.helpers.data.recording import FRONT, LENGTHS, TASKS, WRIST, make_episode, write
from tests.helpers.data.stores import ROWS, pictures

FRAMES = sum(LENGTHS)


@pytest.fixture(scope="module")
def raw(recorded, tmp_path_factory):
    return build_store(open_dataset(recorded), tmp_path_factory.mktemp("raw") / "s", 32, "raw")


@pytest.fixture(scope="module")
def jpeg(recorded, tmp_path_factory):
    """A store of several shards a camera and several shards a column."""
    folder = LocalFolder(tmp_path_factory.mktemp("jpeg") / "s")
    dataset = open_dataset(recorded)
    convert.convert(dataset, folder, convert.Settings(32, "jpeg", shard_frames=20))
    return open_store(folder.root)


def test_a_store_is_made_and_read_at_a_path_with_dots(jpeg, recorded, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    made = build_store(open_dataset(recorded), "../s", 32)
    for store in (made, open_store("../here/../s"), open_store(tmp_path / "s")):
        assert pictures(store, ROWS, FRONT).tolist() == pictures(jpeg, ROWS, FRONT).tolist()
        assert store.column(STATE, ROWS).tolist() == jpeg.column(STATE, ROWS).tolist()


@pytest.fixture
def damaged(jpeg, tmp_path):
    """A copy of the store, and a function that changes a byte of the file it is told."""
    root = shutil.copytree(jpeg.path, tmp_path / "copy")

    def damage(pattern, at):
        file = min(root.glob(pattern))
        content = bytearray(file.read_bytes())
        content[at] ^= 0xFF
        file.write_bytes(content)
        return file

    return root, damage


def resized(dataset, camera):
    frames = (frame for i in range(dataset.num_episodes) for frame in dataset.frames(i, camera))
    return np.stack([resize_with_pad(frame, 32) for frame in frames])


def read(store, rows, camera):
    out = np.zeros((len(rows), store.image_size, store.image_size, 3), np.uint8)
    store.images(np.array(rows), camera, list(out))
    return out


@pytest.mark.parametrize("camera", [FRONT, WRIST])
def test_raw_frames_are_the_resized_frames_in_any_order(raw, recorded, camera):
    expected = resized(open_dataset(recorded), camera)
    rows = [40, 0, 52, 7, 7]
    assert np.array_equal(read(raw, rows, camera), expected[rows])


@pytest.mark.parametrize("camera", [FRONT, WRIST])
def test_jpeg_frames_of_all_shards_are_close(jpeg, recorded, camera):
    assert len(list(LocalFolder(jpeg.folder.root).list(f"frames/*/{camera}.array_record"))) > 2
    expected = resized(open_dataset(recorded), camera).astype(float)
    rows = np.random.default_rng(0).permutation(FRAMES)
    errors = ((read(jpeg, rows, camera) - expected[rows]) ** 2).mean(axis=(1, 2, 3))
    others = ((read(jpeg, rows, camera) - expected[rows - 1]) ** 2).mean(axis=(1, 2, 3))
    assert errors.max() < 60
    assert others.min() > 2 * errors.max()


def test_many_threads_read_the_same(jpeg):
    rows = np.arange(FRAMES)
    alone = read(jpeg, rows, FRONT)
    with ThreadPoolExecutor(8) as pool:
        orders = [np.random.default_rng(seed).permutation(FRAMES) for seed in range(16)]
        for order, out in zip(
            orders, pool.map(lambda r: read(jpeg, r, FRONT), orders), strict=True
        ):
            assert np.array_equal(out, alone[order])


def test_columns_are_exact_float32_of_every_numeric_column(raw, episodes):
    assert raw.columns == {STATE: 4, ACTION: 3, "next.success": 1}
    rows = np.random.default_rng(0).integers(0, FRAMES, (5, 7))
    for name, width in raw.columns.items():
        whole = np.concatenate([e.columns[name].reshape(-1, width) for e in episodes])
        values = raw.column(name, rows)
        assert values.dtype == np.float32
        assert np.array_equal(values, whole[rows].astype(np.float32))


def test_columns_longer_than_a_shard_are_read_across_its_border(
    recorded, raw, tmp_path, monkeypatch
):
    monkeypatch.setattr(tables, "_SHARD_ROWS", 16)
    monkeypatch.setattr(tables, "_CHUNK_ROWS", 4)
    store = build_store(open_dataset(recorded), tmp_path / "s", 8, "raw")
    assert len(store.folder.list("columns/action/c/*/0")) == 4
    monkeypatch.undo()
    whole = raw.column(ACTION, np.arange(FRAMES))
    monkeypatch.setattr(tables, "_SHARD_ROWS", 16)
    monkeypatch.setattr(tables, "_CHUNK_ROWS", 4)
    rows = np.random.default_rng(0).permutation(FRAMES)
    assert np.array_equal(store.column(ACTION, rows), whole[rows])


def test_columns_are_zarr_that_others_read(raw):
    url = f"file://{raw.path}/columns/{STATE}/"
    array = ts.open({"driver": "zarr3", "kvstore": url}, open=True, read=True).result()
    assert np.array_equal(array.read().result(), raw.column(STATE, np.arange(FRAMES)))


def test_episodes_runs_and_prompts_are_those_of_the_dataset(raw, jpeg, recorded):
    dataset = open_dataset(recorded)
    for store in (raw, jpeg):
        assert store.lengths.tolist() == list(LENGTHS)
        assert store.starts.tolist() == [0, *np.cumsum(LENGTHS)[:-1]]
        assert store.present.all()
        assert store.present.shape == (len(LENGTHS), 2)
        assert store.prompts == dataset.prompts == tuple((task,) for task in TASKS)
        assert all(map(np.array_equal, store.runs, dataset.runs))
        assert (store.fps, store.cameras) == (20, (FRONT, WRIST))
        assert (store.name, store.digest) == (dataset.name, dataset.digest)


def test_statistics_are_those_of_all_frames(raw, episodes):
    values = np.concatenate([e.columns[ACTION] for e in episodes]).astype(float)
    assert raw.stats.keys() == raw.columns.keys()
    assert np.allclose(raw.stats[ACTION]["q99"], np.quantile(values, 0.99, axis=0))
    assert raw.stats[ACTION]["count"] == FRAMES


def test_a_column_that_is_not_finite_is_kept_without_statistics(recorded, tmp_path, caplog):
    dataset = open_dataset(recorded)
    stream = dataset.stream

    def with_nan(names, episodes=None):
        for block in stream(names, episodes):
            if STATE in block:
                block[STATE] = np.where(block[STATE] > 1, np.nan, block[STATE])
            yield block

    dataset.stream = with_nan
    store = build_store(dataset, tmp_path / "s", 8, "raw")
    assert store.stats.keys() == {ACTION, "next.success"}
    assert np.isnan(store.column(STATE, np.arange(FRAMES))).any()
    assert f"'{STATE}' is not finite" in caplog.text


def test_episodes_with_the_same_numbers_are_alike(tmp_path):
    numbers = [0, 1, 0, 2, 1, 0]
    write(tmp_path / "d", [make_episode(number, 6 + number) for number in numbers])
    store = build_store(open_dataset(tmp_path / "d"), tmp_path / "s", 8, "raw")
    assert store.duplicate_of.tolist() == [0, 1, 0, 3, 1, 0]


def test_a_pickled_store_reads_the_same(raw):
    copied = pickle.loads(pickle.dumps(raw))
    assert copied == raw
    assert np.array_equal(read(copied, [9], WRIST), read(raw, [9], WRIST))


def test_a_cached_store_is_built_once_per_content(copy, tmp_path):
    calls = []
    first = cached_store(
        open_dataset(copy), 16, "raw", tmp_path / "cache", lambda *call: calls.append(call)
    )
    assert calls[-1] == (FRAMES, FRAMES)
    calls.clear()
    again = cached_store(
        open_dataset(copy), 16, "raw", tmp_path / "cache", lambda *call: calls.append(call)
    )
    assert again == first
    assert calls == []
    info = copy / "meta/info.json"
    info.write_text(info.read_text().replace("test", "other"))
    changed = cached_store(open_dataset(copy), 16, "raw", tmp_path / "cache")
    assert changed.path != first.path
    assert changed.digest != first.digest


@pytest.mark.parametrize("encoding", ["jpeg", "raw"])
def test_a_store_of_every_third_frame_has_those_pictures_and_all_numbers(encoding, copy, tmp_path):
    whole, sparse = (
        cached_store(open_dataset(copy), 16, encoding, tmp_path / "cache", every=n) for n in (1, 3)
    )
    assert sparse.path != whole.path
    rows = np.concatenate(
        [np.arange(s, s + n, 3) for s, n in zip(whole.starts, whole.lengths, strict=True)]
    )
    for store in (sparse, open_store(sparse.path), pickle.loads(pickle.dumps(sparse))):
        assert np.array_equal(read(store, rows, FRONT), read(whole, rows, FRONT))
        assert np.array_equal(store.column("action", rows + 1), whole.column("action", rows + 1))
    with pytest.raises(
        ValueError, match="one image for every 3 frames of an episode, and none for frame 1;"
    ):
        read(sparse, [0, 1], FRONT)
    verify(sparse)


def test_a_frame_whose_bytes_changed_is_named_with_its_file(damaged):
    root, damage = damaged
    store = open_store(root)
    file = damage(f"frames/*-00001/{FRONT}.array_record", 100)
    first = int(store.starts[2])
    with pytest.raises(
        DatasetError, match=rf"{file}, frame {first}: cannot be read .*delete parts"
    ):
        read(store, [first + 3, first, first + 1], FRONT)
    read(store, [first + 3, first + 1], FRONT)


def test_a_record_that_is_no_picture_is_named_with_its_file(raw, tmp_path):
    root = shutil.copytree(raw.path, tmp_path / "copy")
    description = json.loads((root / "store.json").read_text()) | {"encoding": "jpeg"}
    description["sum"] = convert.checksum(description)
    (root / "store.json").write_text(json.dumps(description))
    store = open_store(root)
    file = convert.shard_file(store.key, 0, WRIST, "jpeg")
    writer = convert.ArrayRecordWriter(str(root / file), "group_size:1,uncompressed")
    for _ in range(FRAMES):
        writer.write(b"\xff\xd8 no picture")
    writer.close()
    with pytest.raises(DatasetError, match=rf"{file}, frame 5: cannot be read"):
        read(store, [5], WRIST)


def test_verification_finds_any_changed_byte(damaged):
    root, damage = damaged
    verify(open_store(root))
    file = damage("columns/action/c/*/0", 50)
    with pytest.raises(DatasetError, match=f"{file}, checksum: "):
        verify(open_store(root))


def test_a_file_that_was_cut_off_is_found_at_opening(damaged):
    root, damage = damaged
    file = damage(f"frames/*-00002/{WRIST}.array_record", 0)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DatasetError, match=f"{file}, size: is .* bytes, expected"):
        open_store(root)


@pytest.mark.parametrize("store", ["jpeg", "raw"])
def test_a_file_that_is_cut_off_after_opening_is_named_with_the_frame(store, request, tmp_path):
    root = shutil.copytree(request.getfixturevalue(store).path, tmp_path / "copy")
    opened = open_store(root)
    (root / convert.shard_file(opened.key, 0, WRIST, store)).write_bytes(bytes(9))
    with pytest.raises(DatasetError, match=f"{WRIST}.*, frame 4: .*delete parts/"):
        read(opened, [4, 5], WRIST)


def test_a_file_that_is_missing_is_found_at_opening(damaged):
    root, damage = damaged
    file = damage("prompts.json", 0)
    file.unlink()
    with pytest.raises(DatasetError, match=rf"{file}, file: is missing; delete parts/\*-tables\."):
        open_store(root)


def test_a_column_with_a_damaged_index_is_named(damaged, monkeypatch):
    root, damage = damaged
    store = open_store(root)
    file = damage("columns/action/c/0/0", -4 - 16 * tables._SHARD_ROWS // tables._CHUNK_ROWS)
    tables._kept_open.cache_clear()
    with pytest.raises(DatasetError, match=f"{file}, index: "):
        store.column(ACTION, np.arange(3))


def test_what_the_dataset_lacks_is_refused_by_name(raw):
    with pytest.raises(ValueError, match="no column 'velocity'; there are"):
        raw.column("velocity", np.arange(3))
    with pytest.raises(ValueError, match="no camera 'top'; there are"):
        read(raw, [0], "top")
    for read_one in (
        lambda row: read(raw, row.reshape(1), FRONT),
        lambda row: raw.column(ACTION, row),
    ):
        for row in (53, -1):
            with pytest.raises(IndexError, match=r"not all in 0\.\.52"):
                read_one(np.array(row))


def test_an_existing_store_is_not_overwritten(raw, recorded):
    with pytest.raises(ValueError, match="already exists"):
        build_store(open_dataset(recorded), raw.path, 32)


def test_a_folder_without_description_is_no_store(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"store\.json: missing"):
        open_store(tmp_path)


def test_another_format_version_is_refused(recorded, tmp_path):
    store = build_store(open_dataset(recorded), tmp_path / "s", 8, "raw")
    description = tmp_path / "s/store.json"
    description.write_text(description.read_text().replace('"format": 3', '"format": 1'))
    with pytest.raises(ValueError, match="format is 1"):
        open_store(store.path)


def test_pictures_are_fitted_as_asked_and_the_store_tells_how(recorded, raw, tmp_path):
    dataset = open_dataset(recorded)
    store = build_store(dataset, tmp_path / "s", 16, "raw", resize="stretched")
    assert open_store(store.path).resize == "stretched"
    assert store.key != raw.key
    assert raw.resize == "antialiased"
    assert "resize" not in json.loads(raw.folder.local("store.json").read_text())
    wanted = [picture_fit("stretched", 16)(frame) for frame in dataset.frames(0, FRONT)[:3]]
    np.testing.assert_array_equal(read(store, [0, 1, 2], FRONT), wanted)
