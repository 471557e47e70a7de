"""Zarr as diffusion policy's ReplayBuffer and UMI's pipeline write it becomes the same numbers."""

import json
import shutil

import numpy as np
import pytest
import zarr
from imagecodecs.numcodecs import Jpegxl, register_codecs
from numcodecs import Blosc

from data import open_dataset
from data.lerobot.importing.importing import import_dataset
from data.lerobot.importing.layout import read_layout
from data.validation.validate import validate

ENDS = (4, 9, 12)


def frames(count=ENDS[-1], size=32):
    y, x = np.mgrid[:size, :size]
    base = np.stack([40 + 2 * x, 200 - 4 * y, np.full_like(x, 60)], axis=-1)
    return np.stack([base + 3 * step for step in range(count)]).astype(np.uint8)


def buffer(store, arrays, ends=ENDS, zarr_format=2, codecs=None):
    """A replay buffer: chunks along time alone, each array with a compressor of its own."""
    register_codecs(verbose=False)
    root = zarr.open_group(store, mode="w", zarr_format=zarr_format)
    data, meta = root.create_group("data"), root.create_group("meta")
    usual = Blosc("zstd", clevel=5, shuffle=Blosc.BITSHUFFLE) if zarr_format == 2 else "auto"
    for name, values in arrays.items():
        chunks = (1 if values.ndim == 4 else len(values), *values.shape[1:])
        codec = (codecs or {}).get(name, usual)
        data.create_array(name, data=values, chunks=chunks, compressors=codec)
    meta.create_array("episode_ends", data=np.array(ends, np.int64), compressors=None)


def pusht(path, **changed):
    rng = np.random.default_rng(0)
    arrays = {
        "img": frames().astype(np.float32),
        "state": rng.normal(size=(12, 5)).astype(np.float32),
        "action": rng.normal(size=(12, 2)).astype(np.float32),
    }
    options = {k: changed.pop(k) for k in ("ends", "zarr_format") if k in changed}
    buffer(path, arrays | changed, **options)
    return path


def load(path, out, name="diffusion_policy"):
    import_dataset([path], out, read_layout(name, task="push the T"))
    assert [p for p in validate(out) if p.severity == "error"] == []
    return open_dataset(out)


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_pusht_is_read_in_both_formats_of_zarr(tmp_path, zarr_format):
    path = pusht(tmp_path / "pusht.zarr", zarr_format=zarr_format)
    found, root = load(path, tmp_path / "out"), zarr.open_group(path, mode="r")
    assert (found.fps, found.lengths.tolist()) == (10, [4, 5, 3])
    assert np.array_equal(found.column("action"), root["data/action"][:])
    assert np.array_equal(found.column("observation.state"), root["data/state"][:, :2])
    assert np.abs(found.frames(1, "observation.image").astype(int) - frames()[4:9]).mean() < 4


def test_umis_zip_with_jpeg_xl_is_read_and_actions_are_its_poses(tmp_path):
    rng = np.random.default_rng(0)
    lows = {"eef_pos": 3, "eef_rot_axis_angle": 3, "gripper_width": 1, "demo_start_pose": 6}
    arrays = {f"robot0_{n}": rng.normal(size=(12, k)).astype(np.float32) for n, k in lows.items()}
    arrays["camera0_rgb"] = frames()
    path = tmp_path / "dataset.zarr.zip"
    with zarr.storage.ZipStore(path, mode="w") as store:
        buffer(store, arrays, codecs={"camera0_rgb": Jpegxl(level=99, numthreads=1)})
    found = load(path, tmp_path / "out", "umi")
    assert found.lengths.tolist() == [4, 5, 3]
    poses = np.concatenate([arrays[f"robot0_{n}"] for n in list(lows)[:3]], axis=1)
    assert np.array_equal(found.column("action"), poses)
    assert np.array_equal(found.column("observation.state"), poses)
    seen = found.frames(2, "observation.images.camera0").astype(int) - frames()[9:]
    assert np.abs(seen).mean() < 5


def damaged(path, file, **changed):
    said = json.loads((path / file).read_text())
    (path / file).write_text(json.dumps(said | changed))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda p: pusht(p, action=np.zeros((11, 2))),
            "'img': has 12 frames, but '.*' has|has 11",
        ),
        (lambda p: pusht(p, ends=(4, 9, 13)), "ends at 13, but the arrays have 12 frames"),
        (lambda p: pusht(p, ends=(4, 4, 12)), "should increase, from above 0"),
        (lambda p: pusht(p, img=frames() / np.float32(255)), "as uint8 from 0 to 255"),
        (lambda p: shutil.rmtree(p / "data/state"), "'state': is missing, but"),
        (
            lambda p: damaged(p, "data/action/.zarray", shape=[1 << 40, 2], chunks=[12, 2]),
            "has 12 frames|has 1099511627776 frames",
        ),
        (lambda p: (p / ".zgroup").unlink(), "not a zarr group|holds no recording"),
        (lambda p: (p / "data/action/0.0").write_bytes(b"\x02\x01rubbish"), "cannot be read"),
        (
            lambda p: damaged(p, "data/img/.zarray", compressor={"id": "imagecodecs_nosuch"}),
            r"'data/img': cannot be opened .*imagecodecs_nosuch.*pip install imagecodecs",
        ),
        (
            lambda p: damaged(p, "data/state/.zarray", dtype="|O", filters=[{"id": "pickle"}]),
            "holds Python objects, which are not read",
        ),
    ],
)
def test_a_buffer_that_cannot_be_read_is_refused_and_leaves_nothing(tmp_path, damage, message):
    path = pusht(tmp_path / "pusht.zarr")
    damage(path)
    with pytest.raises(ValueError, match=message):
        load(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_called_a_zip_and_is_none_is_said_so(tmp_path):
    path = tmp_path / "dataset.zarr.zip"
    path.write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(ValueError, match="is not a readable zip"):
        load(path, tmp_path / "out", "umi")


def test_arrays_that_no_layout_asks_for_may_be_of_any_kind(tmp_path):
    path = pusht(tmp_path / "pusht.zarr", other=np.zeros(12, np.float32))
    damaged(path, "data/other/.zarray", compressor={"id": "nosuch"})
    assert load(path, tmp_path / "out").num_episodes == 3


@pytest.mark.parametrize("kind", ["folder", "zip", "format 3", "shards"])
def test_chunks_that_were_lost_are_counted(tmp_path, caplog, kind):
    rng = np.random.default_rng(0)
    root = zarr.open_group(
        tmp_path / "a.zarr", mode="w", zarr_format=2 if kind in ("folder", "zip") else 3
    )
    shards = {"shards": (4, 2)} if kind == "shards" else {}
    chunk = 2 if shards else 4
    action = rng.normal(size=(12, 2)).astype(np.float32)
    root.create_array("data/action", data=action, chunks=(chunk, 2), **shards)
    root.create_array("data/state", data=rng.normal(size=(12, 5)).astype(np.float32))
    root.create_array("data/img", data=frames(), chunks=(1, 32, 32, 3))
    root.create_array("meta/episode_ends", data=np.array(ENDS))
    old = kind in ("folder", "zip")
    picture = "img/10.0.0.0" if old else "img/c/10/0/0/0"
    column = tmp_path / "a.zarr/data" / ("action/1.0" if old else "action/c/1/0")
    (tmp_path / "a.zarr/data" / picture).unlink()
    kept = column.read_bytes()
    column.unlink()
    path = tmp_path / "a.zarr"

    def packed():
        if kind != "zip":
            return path
        name = shutil.make_archive(str(tmp_path / "a.zarr"), "zip", path)
        return tmp_path / name

    with pytest.raises(ValueError, match=r"'action': 1 of 3 chunks .*from row 4 on.*as zeros"):
        load(packed(), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    column.write_bytes(kept)
    caplog.clear()
    found = load(packed(), tmp_path / "out")
    assert "'img': 1 of 12 chunks were never written (the first from row 10 on)" in caplog.text
    np.testing.assert_array_equal(found.column("action"), action)
    assert found.frames(2, "observation.image")[1].max() < 20


def test_umis_second_gripper_is_taken_and_what_is_left_out_is_listed(tmp_path):
    rng = np.random.default_rng(0)
    lows = {"eef_pos": 3, "eef_rot_axis_angle": 3, "gripper_width": 1, "demo_start_pose": 6}
    arrays = {
        f"robot{r}_{n}": rng.normal(size=(12, k)).astype(np.float32)
        for r in (0, 1)
        for n, k in lows.items()
    }
    arrays |= {f"camera{r}_rgb": frames() for r in (0, 1)}
    buffer(tmp_path / "a.zarr", arrays)
    summary = import_dataset(
        [tmp_path / "a.zarr"], tmp_path / "out", read_layout("umi", task="fold it")
    )
    found = open_dataset(tmp_path / "out")
    both = [arrays[f"robot{r}_{n}"] for r in (0, 1) for n in list(lows)[:3]]
    np.testing.assert_array_equal(found.column("action"), np.concatenate(both, axis=1))
    np.testing.assert_array_equal(found.column("observation.state"), found.column("action"))
    assert found.cameras == ("observation.images.camera0", "observation.images.camera1")
    assert summary.unused == ("robot0_demo_start_pose", "robot1_demo_start_pose")


def chunked(path, zarr_format, **changed):
    """A buffer of 40 rows in chunks of 10 rows, without the chunks that are zeros alone."""
    rng = np.random.default_rng(0)
    arrays = {"state": rng.normal(size=(40, 5)), "action": rng.normal(size=(40, 2))} | changed
    root = zarr.open_group(path, mode="w", zarr_format=zarr_format)
    for name, values in arrays.items():
        root.create_array(f"data/{name}", data=values, chunks=(10, *values.shape[1:]))
    root.create_array("meta/episode_ends", data=np.array([40]))
    return arrays


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize(
    ("extra", "count"),
    [
        (np.where(np.arange(40) < 25, 0, 0.04), "2 of 4"),
        (np.where(np.arange(40) < 20, 0, 0.04)[:, None], "2 of 4"),
        (np.maximum(np.arange(40) - 25, 0.0), "2 of 4"),
        (np.zeros((40, 3)), "4 of 4"),
        (np.arange(40) % 20 // 10 * np.arange(40), "2 of 4"),
    ],
    ids=["gripper", "gripper that moves between chunks", "ramp", "unused base", "integers"],
)
def test_chunks_of_zeros_that_zarr_left_out_are_zeros_and_counted(
    tmp_path, caplog, zarr_format, extra, count
):
    arrays = chunked(tmp_path / "a.zarr", zarr_format, extra=extra)
    layout = tmp_path / "layout.json"
    columns = {"observation.state": ["state", "extra"], "action": "action"}
    layout.write_text(json.dumps({"fps": 10, "columns": columns}))
    import_dataset([tmp_path / "a.zarr"], tmp_path / "out", read_layout(str(layout), task="go"))
    found = open_dataset(tmp_path / "out")
    assert f"'extra': {count} chunks were never written (the first from row 0 on)" in caplog.text
    expected = np.concatenate([arrays["state"], extra.reshape(40, -1)], axis=1)
    np.testing.assert_array_equal(found.column("observation.state"), expected.astype(np.float32))


@pytest.mark.parametrize("rows", [slice(10, 20), slice(30, 40)])
def test_chunks_of_rows_that_all_columns_lack_are_refused(tmp_path, rows):
    arrays = {"state": np.ones((40, 5)), "action": np.ones((40, 2), np.int64)}
    for values in arrays.values():
        values[rows] = 0
    chunked(tmp_path / "a.zarr", 3, **arrays)
    layout = tmp_path / "layout.json"
    columns = {"observation.state": "state", "action": "action"}
    layout.write_text(json.dumps({"fps": 10, "columns": columns}))
    with pytest.raises(ValueError, match=rf"'state': 1 of 4 chunks .*from row {rows.start} on"):
        load(tmp_path / "a.zarr", tmp_path / "out", str(layout))
    assert not (tmp_path / "out").exists()
