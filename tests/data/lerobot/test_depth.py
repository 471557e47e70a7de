"""Depth never becomes colour: a depth camera is kept to the bit and left out of what is looked at,
and pictures of more than 8 bits a channel are refused anywhere else."""

import io
import json

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from data import open_dataset
from data.edit.edit import edit_dataset
from data.edit.plan import Edit, Trim
from data.errors import DatasetError
from data.lerobot.importing.messages import picture
from data.lerobot.upgrade import upgrade
from data.lerobot.writer import DatasetWriter
from data.store.direct import open_direct
from data.validation.validate import validate
from data.video.encoding import VideoEncoding
from data.video.still_images import decode_picture
from models.inputs.pictures import picture_fit
from tests.helpers.data.pictures import edit_info, set_column
from tests.helpers.data.recording import FEATURES, FRONT, WRIST, make_episode
from tests.helpers.data.v21 import parquet, video, write_v21

DEPTH, STORED = "observation.images.depth", "observation.images.stored"
LENGTHS = (7, 5)
SCALE = {"depth_min": 0.01, "depth_max": 10.0, "use_log": True, "depth_unit": "m"}
MARKS = {
    "0.6": {"info": {"is_depth_map": True, **SCALE}},
    "0.4": {"info": {"video.is_depth_map": True, **SCALE}},
    "0.1": {"video_info": {"video.is_depth_map": True, **SCALE}},
    "beside": {"is_depth_map": True},
    "none": {"info": None},
}


def codes(episode, step):
    """12-bit depth, in which every frame of every episode looks different."""
    ramp = 400 + 50 * np.arange(64, dtype=np.uint16) + np.zeros((48, 1), np.uint16)
    ramp[8:24, 3 * step : 3 * step + 8] = 1200 + 64 * episode
    return ramp


def write_depth(path, episode):
    """As LeRobot 0.6 stores it: HEVC of 12 grey bits, here without loss."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as out:
        options = {"x265-params": "log-level=none:lossless=1:pools=1"}
        stream = out.add_stream("libx265", rate=20, options=options)
        stream.height, stream.width, stream.pix_fmt = 48, 64, "gray12le"
        for step in range(LENGTHS[episode]):
            frame = av.VideoFrame.from_ndarray(codes(episode, step), format="gray12le")
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))


def encoded(shown, form="PNG", **options):
    file = io.BytesIO()
    image = shown if isinstance(shown, Image.Image) else Image.fromarray(shown)
    image.save(file, form, **options)
    return file.getvalue()


def with_depth(root, mark="0.6"):
    """v2.1 with a depth camera as video, and another in parquet: PNG of 16 bits."""
    write_v21(root, [make_episode(i, n) for i, n in enumerate(LENGTHS)], FEATURES, 20)
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    for i, length in enumerate(LENGTHS):
        write_depth(root / video(DEPTH, i), i)
        cells = [{"bytes": encoded(codes(i, k) * 10), "path": None} for k in range(length)]
        set_column(root / parquet(i), STORED, pa.array(cells, kind))
    feature = {"shape": [48, 64, 1], "names": ["height", "width", "channels"], **MARKS[mark]}
    edit_info(
        root,
        lambda info: info.update(
            total_videos=3 * len(LENGTHS),
            features=info["features"]
            | {DEPTH: {"dtype": "video", **feature}, STORED: {"dtype": "image", **feature}},
        ),
    )
    return root


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    return with_depth(tmp_path_factory.mktemp("depth") / "old")


def read_codes(dataset, i):
    """The depth of an episode as 12-bit numbers: of the video, and of the stored pictures."""
    path, start = dataset.video(i, DEPTH)
    with av.open(str(path)) as container:
        frames = list(container.decode(video=0))
    assert {frame.format.name for frame in frames} == {"gray12le"}
    seen = [frame.to_ndarray() for frame in frames if frame.time > start - 0.01]
    seen = seen[: int(dataset.lengths[i])]
    cells = dataset.encoded(i, STORED).field("bytes").to_pylist()
    stored = [np.asarray(Image.open(io.BytesIO(cell))) // 10 for cell in cells]
    return np.stack(seen), np.stack(stored)


@pytest.mark.parametrize("mark", ["0.4", "0.1", "beside"])
def test_every_versions_mark_makes_a_depth_camera(old, tmp_path, mark):
    import shutil

    root = shutil.copytree(old, tmp_path / "marked")
    feature = {"dtype": "video", "shape": [48, 64, 1], "names": None, **MARKS[mark]}
    edit_info(root, lambda info: info["features"].update({DEPTH: feature}))
    assert open_dataset(root).depth_cameras == (DEPTH, STORED)


def test_a_depth_camera_is_left_out_with_a_warning_and_counts_as_a_video(old):
    dataset = open_dataset(old)
    assert dataset.cameras == (FRONT, WRIST)
    assert dataset.depth_cameras == (DEPTH, STORED)
    assert dataset.present.shape == (2, 2)
    assert DEPTH not in dataset.episode(0)
    for camera in (DEPTH, STORED):
        with pytest.raises(ValueError, match=f"'{camera}' is a depth camera"):
            dataset.frames(0, camera)
    found = [(p.severity, p.field) for p in validate(old)]
    assert found == [("warning", f"camera '{camera}'") for camera in (DEPTH, STORED)]


def test_an_upgrade_and_an_edit_keep_depth_to_the_bit(old, tmp_path):
    new = upgrade(old, tmp_path / "new")
    assert new.depth_cameras == (DEPTH, STORED)
    assert new.features[DEPTH]["info"] == MARKS["0.6"]["info"]
    edit = Edit(order=(3, 0), trims=(Trim((1,), 1, 4),))
    edit_dataset([old, tmp_path / "new"], tmp_path / "joined", edit)
    joined = open_dataset(tmp_path / "joined")
    assert joined.lengths.tolist() == [5, 7, 3, 7]
    for dataset, i, episode, steps in [
        *((new, i, i, range(n)) for i, n in enumerate(LENGTHS)),
        (joined, 0, 1, range(5)),
        (joined, 1, 0, range(7)),
        (joined, 2, 1, range(1, 4)),
    ]:
        expected = np.stack([codes(episode, step) for step in steps])
        for found in read_codes(dataset, i):
            np.testing.assert_array_equal(found, expected)
    assert not [p for p in validate(tmp_path / "joined") if p.severity == "error"]
    stats = json.loads((tmp_path / "joined/meta/stats.json").read_text())
    assert {FRONT, WRIST} == {name for name in stats if ".images." in name}
    listed = pq.read_table(tmp_path / "joined/meta/episodes/chunk-000/file-000.parquet")
    assert listed[f"stats/{FRONT}/mean"].null_count == 0
    with pytest.raises(ValueError, match=f"'{DEPTH}' is a depth camera, whose values"):
        edit_dataset([old], tmp_path / "coded", Edit(encoding=VideoEncoding()))


def test_depth_of_another_scale_is_not_joined(old, tmp_path):
    other = with_depth(tmp_path / "other")
    edit_info(other, lambda info: info["features"][DEPTH]["info"].update(depth_max=4.0))
    with pytest.raises(ValueError, match=r"depth_max': 10.0.*depth_max': 4.0"):
        edit_dataset([old, other], tmp_path / "joined", Edit())


def test_depth_that_is_not_marked_is_refused_by_every_reader(tmp_path):
    root = with_depth(tmp_path / "bare", "none")
    dataset = open_dataset(root)
    assert dataset.cameras == (FRONT, WRIST, DEPTH, STORED)
    one = np.array([2])
    for read in (dataset.frames, lambda i, camera: dataset.frames_at(i, camera, one)):
        with pytest.raises(DatasetError, match=r"gray12le, of 12 bits.*is_depth_map"):
            read(0, DEPTH)
        with pytest.raises(DatasetError, match=r"row \d .*more than 8 bits.*is_depth_map"):
            read(0, STORED)
    frames = open_direct(dataset, 32, tmp_path / "cache")
    for camera in (DEPTH, STORED):
        with pytest.raises(DatasetError, match=r"is gray12le|not a readable image"):
            frames.images(one, camera, [np.zeros((32, 32, 3), np.uint8)])
    fields = [p.field for p in validate(root) if p.severity == "error"]
    assert sorted(fields) == [f"column '{STORED}'", "pixel format"]


def test_a_writer_takes_no_depth_camera(tmp_path):
    feature = {"dtype": "video", "shape": (48, 64, 3), "names": None, **MARKS["0.6"]}
    with pytest.raises(ValueError, match=f"'{DEPTH}' is a depth camera"):
        DatasetWriter(tmp_path / "new", fps=20, features={DEPTH: feature})


COLOUR = np.random.default_rng(0).integers(0, 256, (8, 12, 3), np.uint8)
GREY, ALPHA = COLOUR[..., 0], np.arange(96, dtype=np.uint8).reshape(8, 12)
PALETTE = Image.fromarray(COLOUR).quantize(16)
ORIENTATION = 0x0112


def turned(number):
    tags = Image.Exif()
    tags[ORIENTATION] = number
    return tags


RIGHT = {
    "RGB": (encoded(COLOUR), COLOUR),
    "RGBA": (encoded(np.dstack([COLOUR, ALPHA])), COLOUR),
    "grey": (encoded(GREY), np.stack([GREY] * 3, axis=-1)),
    "grey and alpha": (encoded(np.dstack([GREY, ALPHA])), np.stack([GREY] * 3, axis=-1)),
    "palette": (encoded(PALETTE), np.asarray(PALETTE.convert("RGB"))),
    "clear palette": (encoded(PALETTE, transparency=3), np.asarray(PALETTE.convert("RGB"))),
    "black and white": (
        encoded(Image.fromarray(GREY > 99)),
        np.stack([np.uint8(255) * (GREY > 99)] * 3, axis=-1),
    ),
    "EXIF upright": (encoded(COLOUR, exif=turned(1)), COLOUR),
    "EXIF 6": (encoded(COLOUR, exif=turned(6)), np.rot90(COLOUR, -1)),
    "EXIF 8": (encoded(COLOUR, exif=turned(8)), np.rot90(COLOUR)),
    "EXIF 3": (encoded(COLOUR, exif=turned(3)), COLOUR[::-1, ::-1]),
    "EXIF 2": (encoded(COLOUR, exif=turned(2)), COLOUR[:, ::-1]),
    "TIFF": (encoded(COLOUR, "TIFF"), COLOUR),
    "BMP": (encoded(COLOUR, "BMP"), COLOUR),
    "PPM": (encoded(COLOUR, "PPM"), COLOUR),
}
ANY = ("PNG", "TIFF", "BMP", "PPM")


@pytest.mark.parametrize("kind", RIGHT)
def test_a_picture_of_8_bits_has_its_colours_and_is_upright(kind):
    content, expected = RIGHT[kind]
    np.testing.assert_array_equal(decode_picture(content, ANY), expected)


@pytest.mark.parametrize("kind", [kind for kind in RIGHT if kind not in ("TIFF", "BMP", "PPM")])
def test_stored_pictures_are_the_same_read_directly(copy, tmp_path, kind):
    content, expected = RIGHT[kind]
    kinds = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = copy / "data/chunk-000/file-000.parquet"
    count = pq.ParquetFile(table).metadata.num_rows
    set_column(table, STORED, pa.array([{"bytes": content, "path": None}] * count, kinds))
    feature = {"dtype": "image", "shape": [*expected.shape[:2], 3], "names": None}
    edit_info(copy, lambda info: info["features"].update({STORED: feature}))
    dataset = open_dataset(copy)
    np.testing.assert_array_equal(dataset.frames_at(0, STORED, np.array([1]))[0], expected)
    if kind.startswith("EXIF") and kind != "EXIF upright":
        with pytest.raises(DatasetError, match="EXIF turns; make a frame store"):
            open_direct(dataset, 8, tmp_path / "cache")
        return
    frames = open_direct(dataset, 8, tmp_path / "cache", exact=True)
    out = np.zeros((8, 8, 3), np.uint8)
    frames.images(np.array([1]), STORED, [out])
    np.testing.assert_array_equal(out, picture_fit("antialiased", 8)(expected))


DEEP = {
    "PNG of 16 bits": encoded(GREY.astype(np.uint16) << 8),
    "TIFF of 16 bits": encoded(GREY.astype(np.uint16), "TIFF"),
    "TIFF of floats": encoded(GREY.astype(np.float32), "TIFF"),
    "TIFF of integers": encoded(GREY.astype(np.int32), "TIFF"),
    "PGM of 16 bits": encoded(GREY.astype(np.uint16), "PPM"),
    "PPM of 16 bits": b"P6 2 2 65535\n" + bytes(24),
}


@pytest.mark.parametrize(
    ("form", "content"),
    [
        ("16UC1; png compressed", DEEP["PNG of 16 bits"]),
        ("16UC1; compressedDepth png", bytes(12) + DEEP["PNG of 16 bits"]),
        ("png", DEEP["PNG of 16 bits"]),
        ("32FC1; compressedDepth", bytes(20)),
    ],
)
def test_compressed_depth_of_a_bag_is_refused(form, content):
    with pytest.raises(ValueError, match=r"holds depth \(|more than 8 bits a channel"):
        picture({"format": form, "data": content})


@pytest.mark.parametrize("kind", DEEP)
def test_a_picture_of_more_than_8_bits_is_refused(kind):
    with pytest.raises(ValueError, match="more than 8 bits a channel"):
        decode_picture(DEEP[kind], ANY)


def test_a_png_of_16_bits_in_three_channels_is_refused_too():
    codec = av.CodecContext.create("png", "w")
    codec.width, codec.height, codec.pix_fmt = 12, 8, "rgb48be"
    codec.time_base = 1
    frame = av.VideoFrame.from_ndarray(COLOUR, format="rgb24").reformat(format="rgb48be")
    (content,) = codec.encode(frame) or codec.encode(None)
    said = r"more than 8 bits a channel .*; write it with 8 bits a channel if it is colour"
    with pytest.raises(ValueError, match=said):
        decode_picture(bytes(content), ANY)
