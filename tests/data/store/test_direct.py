"""A dataset read straight from its files shows what reading whole episodes does, in any order."""

import io
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from data import open_dataset
from data.errors import DatasetError, MissingFileError
from data.frames import ACTION, STATE, fit_of
from data.store.direct import open_direct
from data.store.store import build_store, cached_store
from data.video import seek
from data.video.seek import seek_table
from models.inputs.parts import kinds
from models.inputs.pictures import PictureFit, picture_fit, resize_with_pad
from tests.fixtures.lerobot.episodes import _video as textured
from tests.helpers.data.pictures import png, stored_in_parquet
from tests.helpers.data.recording import FRONT

FIXTURES = Path(__file__).parents[2] / "fixtures" / "lerobot"
WRITTEN = ("lerobot_av1", "lerobot_h264", "lerobot_png")
SIZE, FRAMES, FPS = 32, 60, 30


def shown(frames, rows, camera):
    out = np.full((len(rows), frames.image_size, frames.image_size, 3), 7, np.uint8)
    frames.images(np.asarray(rows), camera, list(out))
    return out


def whole(dataset, camera, size):
    episodes = [dataset.frames(i, camera) for i in range(dataset.num_episodes)]
    return np.stack([resize_with_pad(frame, size) for frame in np.concatenate(episodes)])


@pytest.mark.parametrize("size", [32, 50])
@pytest.mark.parametrize("name", WRITTEN)
def test_pictures_at_random_are_those_of_whole_episodes(name, size, tmp_path):
    dataset = open_dataset(FIXTURES / name)
    frames = open_direct(dataset, size, tmp_path, exact=True)
    rows = np.random.default_rng(0).integers(0, dataset.num_frames, 40)
    for camera in dataset.cameras:
        expected = whole(dataset, camera, size)[rows]
        np.testing.assert_array_equal(shown(frames, rows, camera), expected)


@pytest.mark.parametrize("name", WRITTEN)
def test_samples_are_those_of_a_frame_store(name, tmp_path):
    dataset = open_dataset(FIXTURES / name)
    frames = open_direct(dataset, SIZE, tmp_path / "cache", exact=True)
    store = build_store(dataset, tmp_path / "store", SIZE, "raw")
    rows = np.random.default_rng(1).permutation(dataset.num_frames)
    for camera in frames.cameras:
        np.testing.assert_array_equal(shown(frames, rows, camera), shown(store, rows, camera))
    for column in (STATE, ACTION):
        np.testing.assert_array_equal(frames.column(column, rows), store.column(column, rows))
        for number, values in store.stats[column].items():
            np.testing.assert_array_equal(frames.stats[column][number], values)
    for known in ("name", "digest", "fps", "image_size", "cameras", "prompts"):
        assert getattr(frames, known) == getattr(store, known)
    for known in ("lengths", "starts", "present", "duplicate_of", "runs"):
        np.testing.assert_array_equal(getattr(frames, known), getattr(store, known))


@pytest.mark.parametrize("kind", kinds(PictureFit))
def test_pictures_of_every_fit_are_those_that_a_policy_acts_on(kind, tmp_path):
    """Exactly straight from the files; rounded to grey levels in a store, but for borders."""
    dataset, fit = open_dataset(FIXTURES / "lerobot_h264"), picture_fit(kind, SIZE)
    exact = open_direct(dataset, SIZE, tmp_path / "cache", kind, exact=True)
    raw = build_store(dataset, tmp_path / "raw", SIZE, "raw", resize=kind)
    jpeg = build_store(dataset, tmp_path / "jpeg", SIZE, "jpeg", resize=kind)
    rows = np.random.default_rng(0).integers(0, dataset.num_frames, 20)
    for camera in dataset.cameras:
        episodes = [dataset.frames(i, camera) for i in range(dataset.num_episodes)]
        wanted = np.stack([fit(frame) for frame in np.concatenate(episodes)[rows]])
        found, stored, packed = (np.full_like(wanted, 7) for _ in range(3))
        exact.images(rows, camera, list(found))
        np.testing.assert_array_equal(found, wanted)
        pickle.loads(pickle.dumps(raw)).images(rows, camera, list(stored))
        assert np.abs(np.subtract(stored, wanted, dtype=np.float32)).max() <= 0.5
        beside = wanted < 0
        jpeg.images(rows, camera, list(packed))
        np.testing.assert_array_equal(packed < 0, beside)
        errors = np.abs(np.subtract(packed, wanted, dtype=np.float32))[~beside]
        assert errors.mean() < 8
    assert beside.any() == (kind == "bilinear-dark")


def test_a_camera_may_have_a_fit_of_its_own(tmp_path):
    dataset = open_dataset(FIXTURES / "lerobot_h264")
    first, second = dataset.cameras[:2]
    own = {second: picture_fit("stretched", (32, 48))}
    frames = [
        open_direct(dataset, SIZE, tmp_path / "seek", exact=True, fits=own),
        *(cached_store(dataset, SIZE, e, tmp_path / e, fits=own) for e in ("raw", "jpeg")),
    ]
    rows = np.arange(0, dataset.num_frames, 7)
    for camera, fit in ((first, picture_fit("antialiased", SIZE)), *own.items()):
        decoded = np.concatenate([dataset.frames(i, camera) for i in range(dataset.num_episodes)])
        wanted = np.stack([fit(frame) for frame in decoded[rows]])
        for each in frames:
            assert fit_of(each, camera) == fit
            found = np.full_like(wanted, 7)
            pickle.loads(pickle.dumps(each)).images(rows, camera, list(found))
            apart = np.abs(np.subtract(found, wanted, dtype=np.float32))
            assert apart.mean() < 8 if getattr(each, "encoding", "") == "jpeg" else not apart.any()
    assert cached_store(dataset, SIZE, "raw", tmp_path / "raw").key != frames[1].key


@pytest.mark.parametrize("name", WRITTEN)
def test_unless_asked_for_exactly_pictures_are_a_stores_within_one_level(name, tmp_path):
    dataset = open_dataset(FIXTURES / name)
    frames = pickle.loads(pickle.dumps(open_direct(dataset, SIZE, tmp_path)))
    exact = pickle.loads(pickle.dumps(open_direct(dataset, SIZE, tmp_path, exact=True)))
    rows = np.random.default_rng(0).integers(0, dataset.num_frames, 40)
    shrunk = [camera for camera in dataset.cameras if max(dataset.features[camera]["shape"]) > SIZE]
    assert shrunk
    for camera in dataset.cameras:
        expected = shown(exact, rows, camera)
        apart = np.abs(shown(frames, rows, camera) - expected.astype(int))
        assert apart.max() == (camera in shrunk)


@pytest.mark.parametrize("version", ["v21", "v30"])
def test_an_episode_of_lerobots_own_datasets_is_found_in_any_version(version, metaworld, tmp_path):
    dataset = open_dataset(metaworld.with_name(f"metaworld_{version}"))
    frames, camera = open_direct(dataset, 480, tmp_path), dataset.cameras[0]
    rows = frames.starts[[1, 0, 2]] + [3, 0, 60]
    expected = [dataset.frames(i, camera)[k] for i, k in ((1, 3), (0, 0), (2, 60))]
    for found, picture in zip(shown(frames, rows, camera), expected, strict=True):
        np.testing.assert_array_equal(found, resize_with_pad(picture, 480))


def test_what_was_copied_is_found_again_by_content(tmp_path, monkeypatch):
    dataset = open_dataset(FIXTURES / "lerobot_png")
    first = open_direct(dataset, SIZE, tmp_path)
    monkeypatch.setattr("data.store.direct._write", None)
    again = open_direct(open_dataset(FIXTURES / "lerobot_png"), 2 * SIZE, tmp_path)
    assert again.folder == first.folder


def test_it_pickles_and_serves_many_threads(tmp_path):
    frames = open_direct(open_dataset(FIXTURES / "lerobot_h264"), SIZE, tmp_path)
    frames = pickle.loads(pickle.dumps(frames))
    camera = frames.cameras[0]
    orders = [np.random.default_rng(i).permutation(22) for i in range(16)]
    expected = shown(frames, np.arange(22), camera)
    with ThreadPoolExecutor(4) as pool:
        for rows, found in zip(
            orders, pool.map(lambda rows: shown(frames, rows, camera), orders), strict=True
        ):
            np.testing.assert_array_equal(found, expected[rows])


def test_a_missing_video_is_named(tmp_path):
    shutil.copytree(FIXTURES / "lerobot_av1", tmp_path / "set")
    frames = open_direct(open_dataset(tmp_path / "set"), SIZE, tmp_path / "cache")
    (video,) = (tmp_path / "set").glob("videos/*front/*/*.mp4")
    video.unlink()
    with pytest.raises(MissingFileError, match=str(video)):
        shown(frames, [3], frames.cameras[0])


def test_a_damaged_picture_in_the_parquet_is_named(tmp_path):
    dataset = open_dataset(FIXTURES / "lerobot_png")
    frames = open_direct(dataset, SIZE, tmp_path)
    camera = frames.cameras[0]
    (stored,) = frames.folder.glob(f"pictures/{camera}.bin")
    content = bytearray(stored.read_bytes())
    content[200] ^= 1
    stored.write_bytes(content)
    with pytest.raises(
        DatasetError,
        match=rf"lerobot_png, camera '{camera}', episode 0, frame 0: is not a readable",
    ):
        shown(frames, [5, 0], camera)
    assert shown(frames, [5], camera).any()


def test_an_episode_without_a_camera_is_stepped_over(copy, episodes, tmp_path):
    cells = [
        None if i == 2 else {"bytes": png(picture), "path": None}
        for i, episode in enumerate(episodes)
        for picture in episode.frames[FRONT]
    ]
    camera = stored_in_parquet(copy, cells)
    frames = open_direct(open_dataset(copy), 64, tmp_path / "cache")
    assert np.argwhere(~frames.present).tolist() == [[2, 2]]
    for i in (1, 3):
        (found,) = shown(frames, frames.starts[[i]] + 4, camera)
        np.testing.assert_array_equal(found, resize_with_pad(episodes[i].frames[FRONT][4], 64))
    with pytest.raises(ValueError, match=f"episode 2 has no '{camera}'"):
        shown(frames, frames.starts[[1, 2]], camera)


def test_only_datasets_with_cameras_and_numbers_of_lerobots_are_opened(tmp_path):
    class Rlds:
        name = "droid"

    with pytest.raises(ValueError, match=r"droid: only LeRobot .* tools\.data convert"):
        open_direct(Rlds(), SIZE, tmp_path)
    frames = open_direct(open_dataset(FIXTURES / "lerobot_av1"), SIZE, tmp_path)
    with pytest.raises(ValueError, match="no camera 'top'; there are"):
        shown(frames, [0], "top")
    with pytest.raises(ValueError, match="no column 'torque'; there are"):
        frames.column("torque", np.array([0]))


CODECS = {
    "h264, one keyframe and B-frames": ("libx264", {"bf": "3", "g": "250"}),
    "h264, open GOPs": ("libx264", {"x264-params": "open-gop=1:keyint=12:bframes=3"}),
    "hevc, open GOPs of 2": ("libx265", {"g": "2", "x265-params": "log-level=none"}),
    "hevc, open GOPs": ("libx265", {"x265-params": "log-level=none:keyint=12:bframes=4"}),
    "av1": ("libsvtav1", {"g": "20", "preset": "12"}),
    "vp9": ("libvpx-vp9", {"g": "20", "cpu-used": "8", "lag-in-frames": "16"}),
    "mpeg4": ("mpeg4", {"g": "12", "bf": "2"}),
}


def write_video(path, codec, options, count=FRAMES):
    pictures = textured(np.random.default_rng(0), count, 64, 64)
    with av.open(str(path), "w", options={"movflags": "faststart"}) as container:
        stream = container.add_stream(codec, rate=FPS, options=options)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        for number, picture in enumerate(pictures):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts = number
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def in_order(path):
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def at(table, frames):
    return {n: frame.to_ndarray(format="rgb24") for n, frame in table.decode(sorted(frames))}


@pytest.mark.parametrize("codec", CODECS)
def test_any_frame_of_any_codec_is_the_one_decoded_in_order(codec, tmp_path, monkeypatch):
    monkeypatch.setenv("SVT_LOG", "1")
    write_video(tmp_path / "video.mp4", *CODECS[codec])
    expected = in_order(tmp_path / "video.mp4")
    assert len(expected) == FRAMES
    table = seek_table(tmp_path / "video.mp4", tmp_path / "cache")
    every = np.arange(FRAMES)
    np.testing.assert_array_equal(table.at(np.zeros(FRAMES), every, FPS), every)
    np.testing.assert_array_equal(table.at(every / FPS, 0 * every, FPS), every)
    order = np.random.default_rng(0).permutation(FRAMES)
    for frames in np.array_split(order, FRAMES // 3):
        for number, picture in at(table, frames.tolist()).items():
            np.testing.assert_array_equal(picture, expected[number])


@pytest.fixture
def long_gops(tmp_path):
    write_video(tmp_path / "video.mp4", "libx264", {"g": "20", "bf": "0"})
    return seek_table(tmp_path / "video.mp4", tmp_path / "cache")


def test_frames_of_a_gop_are_decoded_once(long_gops, monkeypatch):
    decoded = []
    read = seek._File.packet
    monkeypatch.setattr(
        seek._File, "packet", lambda file, *where: decoded.append(where) or read(file, *where)
    )
    first = at(long_gops, [3, 7, 11, 45])
    assert len(decoded) == 12 + 6
    again = at(long_gops, [3, 9, 11, 44])
    assert len(decoded) == 12 + 6
    np.testing.assert_array_equal(first[11], again[11])


def test_no_more_decoded_frames_are_kept_than_fit(long_gops, monkeypatch):
    picture = 64 * 64 * 3 // 2
    kept = seek._Kept(limit=50 * picture)
    monkeypatch.setattr(seek, "_kept", kept)
    for frame in (19, 39, 59, 19):
        at(long_gops, [frame])
    assert 20 * picture <= kept._used <= kept._limit
    assert kept._used == sum(map(seek._bytes, kept._gops.values()))
    assert (long_gops, 1) not in kept._gops


def test_a_table_is_made_once_for_a_file_and_anew_for_a_changed_one(tmp_path, monkeypatch):
    path, cache = tmp_path / "video.mp4", tmp_path / "cache"
    write_video(path, "mpeg4", {}, 10)
    table = seek_table(path, cache)
    seek._table.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(seek, "_scan", None)
        again = seek_table(path, cache)
    for known in ("offset", "size", "pts", "keys", "shown"):
        np.testing.assert_array_equal(getattr(again, known), getattr(table, known))
    write_video(path, "mpeg4", {}, 12)
    assert len(seek_table(path, cache).shown) == 12


def test_of_a_truncated_video_frames_before_the_cut_are_right_and_others_an_error(tmp_path):
    path = tmp_path / "video.mp4"
    write_video(path, "libx264", {"g": "5", "bf": "2"})
    expected = in_order(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    table = seek_table(path, tmp_path / "cache")
    there = len(table.shown)
    assert 10 < there < FRAMES
    for number, picture in at(table, [0, 7, 12]).items():
        np.testing.assert_array_equal(picture, expected[number])
    with pytest.raises(
        DatasetError, match=rf"video\.mp4, frame at 1\.9.* s: is not there \(.* {there}\)"
    ):
        table.at(np.zeros(2), np.array([3, 58]), FPS)


def test_leading_pictures_without_the_gop_before_are_an_error(tmp_path):
    path = tmp_path / "video.mp4"
    write_video(path, *CODECS["hevc, open GOPs"])
    table, expected = seek_table(path, tmp_path / "cache"), in_order(path)
    first = next(k for k in table.keys.tolist() if (table.pts[k:] < table.pts[k]).any())
    later = replace(
        table,
        offset=table.offset[first:],
        size=table.size[first:],
        pts=table.pts[first:],
        keys=table.keys[table.keys >= first] - first,
        shown=np.argsort(table.pts[first:]),
    )
    leading = int((later.pts < later.pts[0]).sum())
    after = FRAMES - len(later.pts) + leading
    np.testing.assert_array_equal(at(later, [leading])[leading], expected[after])
    with pytest.raises(DatasetError, match="frame 0: comes before the first keyframe"):
        at(later, [0])


def test_damaged_packets_are_an_error_that_names_the_frame(tmp_path):
    path = tmp_path / "video.mp4"
    write_video(path, "libsvtav1", {"g": "2", "preset": "12"})
    table = seek_table(path, tmp_path / "cache")
    content = bytearray(path.read_bytes())
    first, size = int(table.offset[table.keys[8]]), int(table.size[table.keys[8]])
    content[first : first + size] = bytes(size)
    path.write_bytes(content)
    assert at(table, [15]).keys() == {15}
    with pytest.raises(DatasetError, match=r"video\.mp4, frame 16: cannot be decoded"):
        at(table, [15, 17])


def test_other_files_than_videos_are_refused_by_name(tmp_path):
    (tmp_path / "text.mp4").write_bytes(b"no video" * 100)
    with pytest.raises(DatasetError, match=r"text\.mp4, file: is not a readable video"):
        seek_table(tmp_path / "text.mp4", tmp_path)
    path = tmp_path / "unknown.mp4"
    write_video(path, "libx264", {}, 3)
    path.write_bytes(path.read_bytes().replace(b"avc1", b"zzzz"))
    with pytest.raises(DatasetError, match=r"unknown\.mp4, file: is not a readable video"):
        seek_table(path, tmp_path)
    with pytest.raises(MissingFileError, match=r"none\.mp4, file: is missing"):
        seek_table(tmp_path / "none.mp4", tmp_path)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "LA"])
def test_png_of_any_mode_is_read_as_pillow_does(mode, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
    picture = Image.fromarray(pixels)
    picture = picture.quantize(16) if mode == "P" else picture.convert(mode)
    with io.BytesIO() as file:
        picture.save(file, "PNG")
        content = file.getvalue()
    (tmp_path / "pictures.bin").write_bytes(content * 2)
    each = np.arange(2)
    table = seek.SeekTable(
        tmp_path / "pictures.bin", "png", b"", 1, each * len(content),
        np.full(2, len(content)), each, each, each,
    )  # fmt: skip
    for found in at(table, [0, 1]).values():
        np.testing.assert_array_equal(found, np.asarray(picture.convert("RGB")))
