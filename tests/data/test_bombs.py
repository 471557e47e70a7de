"""Files of kilobytes that unpack to gigabytes are refused by name, before memory is taken."""

import io
import json
import shutil
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from data import open_dataset
from data.errors import DatasetError
from data.rlds.features import Leaf, decode_column, decode_pictures
from data.rlds.tf_example import feature_spans, feature_values
from data.rlds.tfrecord import masked_crc, record_spans
from data.validation.validate import validate
from data.video.mp4 import require_index_fits
from data.video.seek import seek_table
from data.video.still_images import decode
from data.video.video import VideoReader, encode_mp4
from tests.helpers.data.little_memory import little_memory
from tests.helpers.data.recording import FRONT

PARQUET = "data/chunk-000/file-000.parquet"
EPISODES = "meta/episodes/chunk-000/file-000.parquet"
TASKS = "meta/tasks.parquet"
VIDEO = f"videos/{FRONT}/chunk-000/file-000.mp4"


def refuses(match: str, read: Callable[[], object], kind: type[Exception] = DatasetError) -> None:
    with little_memory(), pytest.raises(kind, match=match):
        read()


def png(width: int, height: int) -> bytes:
    """A picture of this size by its header, of which no pixel is there."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        sum_ = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + sum_

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = chunk(b"IDAT", zlib.compress(bytes(64)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + data + chunk(b"IEND", b"")


def jpeg(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, "JPEG")
    content = bytearray(file.getvalue())
    at = content.index(b"\xff\xc0") + 5
    content[at : at + 4] = struct.pack(">HH", height, width)
    return bytes(content)


PICTURES = {
    "png": png(9000, 9000), "huge png": png(60000, 60000), "jpeg": jpeg(20000, 4000),
    "huge jpeg": jpeg(60000, 60000), "widest": png(2**31 - 1, 2**31 - 1),
}  # fmt: skip


@pytest.mark.parametrize("kind", PICTURES)
def test_a_picture_that_says_it_is_enormous_is_not_decoded(kind: str) -> None:
    cells = pa.array([{"bytes": PICTURES[kind], "path": None}])
    folder: Any = None
    refuses(
        r"set\.parquet, column 'front': row 0 .*(64 megapixels|bomb)",
        lambda: decode(folder, "set.parquet", "front", cells),
    )
    leaf = Leaf("steps/image", "image", "uint8", (None, None, 3))
    refuses("64 megapixels|bomb", lambda: decode_pictures(leaf, [PICTURES[kind]], 1), ValueError)


def test_a_picture_in_postscript_is_not_handed_to_its_interpreter() -> None:
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "EPS")
    cells = pa.array([{"bytes": file.getvalue(), "path": None}])
    folder: Any = None
    with pytest.raises(DatasetError, match="cannot identify image file"):
        decode(folder, "set.parquet", "front", cells)


def test_an_episode_of_more_pictures_than_memory_is_refused() -> None:
    file = io.BytesIO()
    Image.new("RGB", (4096, 4096)).save(file, "PNG")
    cells = pa.array([{"bytes": file.getvalue(), "path": None}] * 100)
    folder: Any = None
    refuses("100 images of 4096x4096", lambda: decode(folder, "set.parquet", "front", cells))


def boxed(content: bytes, kind: bytes, at: int, *values: int) -> bytes:
    """An mp4 with other numbers in its first box of this kind."""
    place = content.index(kind) + 4 + at
    return (
        content[:place]
        + struct.pack(f">{len(values)}I", *values)
        + content[place + 4 * len(values) :]
    )


@pytest.fixture(scope="module")
def video() -> bytes:
    return encode_mp4(np.zeros((3, 48, 64, 3), np.uint8), 10, {"preset": "ultrafast"})


def test_a_video_whose_index_lists_a_billion_frames_is_not_opened(
    video: bytes, tmp_path: Path
) -> None:
    listed = boxed(video, b"stsz", 4, 1, 10**9)
    listed = boxed(boxed(listed, b"stsc", 12, 10**9), b"stts", 8, 10**9)
    (tmp_path / "a.mp4").write_bytes(listed)
    for read in (VideoReader, lambda path: seek_table(path, tmp_path / "seek")):
        refuses(
            rf"a\.mp4, index: lists 1000000000 frames in a file of {len(video)} bytes",
            lambda read=read: read(tmp_path / "a.mp4"),
        )


def test_frames_of_fragments_count_and_a_compressed_index_is_refused(
    video: bytes, tmp_path: Path
) -> None:
    run = struct.pack(">I4sII", 16, b"trun", 0, 10**9)
    for inside in (b"traf", b"moof"):
        run = struct.pack(">I4s", 8 + len(run), inside) + run
    (tmp_path / "a.mp4").write_bytes(video + run)
    refuses("index: lists 10000000", lambda: require_index_fits(tmp_path / "a.mp4"))
    (tmp_path / "b.mp4").write_bytes(video.replace(b"mvhd", b"cmov"))
    refuses("index: is compressed", lambda: require_index_fits(tmp_path / "b.mp4"))


@pytest.mark.parametrize("cut", [0, 7, 8, 12, 40, 700, -1])
def test_boxes_that_make_no_sense_are_left_to_the_decoder(
    video: bytes, tmp_path: Path, cut: int
) -> None:
    for size in (0, 1, 2, 7, 2**31):
        (tmp_path / "a.mp4").write_bytes(boxed(video, b"trak", -8, size)[:cut])
        require_index_fits(tmp_path / "a.mp4")
    require_index_fits(Path(__file__))


def test_a_video_of_enormous_frames_is_refused_at_opening(video: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(video)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data.files.limits.MOST_PIXELS", 48 * 64 - 1)
        refuses(r"a\.mp4, frame size: it has 64x48", lambda: VideoReader(tmp_path / "a.mp4"))


def test_more_frames_than_a_video_has_bytes_take_no_memory(video: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(video)
    with VideoReader(tmp_path / "a.mp4") as reader:
        refuses("lists 3 frames", lambda: reader.read(0.0, 10**10, 10.0))


def opened(root: Path) -> None:
    dataset = open_dataset(root)
    dataset.column("action")
    _ = dataset.runs


@pytest.mark.slow
def test_a_table_of_millions_of_rows_in_a_few_kilobytes_is_refused(copy: Path) -> None:
    block = pa.table(dict.fromkeys(pq.read_schema(copy / PARQUET).names[-6:], np.zeros(1 << 20)))
    block = block.cast(pa.schema([(name, pa.int64()) for name in block.column_names]))
    with pq.ParquetWriter(copy / PARQUET, block.schema, compression="zstd") as file:
        for _ in range(40):
            file.write_table(block)
    size = (copy / PARQUET).stat().st_size
    refuses(
        rf"file-000\.parquet, rows: unpack to {40 << 20} values in a column from {size} bytes",
        lambda: opened(copy),
    )
    assert any("rows: unpack to" in problem.message for problem in validate(copy))


def test_a_row_of_millions_of_numbers_is_refused(copy: Path) -> None:
    table, count = pq.read_table(copy / PARQUET), 1 << 25
    ends = np.full(len(table) + 1, count, np.int32) * (np.arange(len(table) + 1) > 0)
    long = pa.ListArray.from_arrays(ends, np.zeros(count, np.float32))
    at = table.column_names.index("action")
    pq.write_table(table.set_column(at, "action", long), copy / PARQUET, compression="zstd")
    assert (copy / PARQUET).stat().st_size < 1 << 18
    refuses(r"file-000\.parquet, rows: unpack to 33554", lambda: opened(copy))


@pytest.mark.parametrize("file", [TASKS, EPISODES])
def test_texts_that_the_file_holds_once_and_all_rows_have_are_refused(
    copy: Path, file: str
) -> None:
    table = pq.read_table(copy / file)
    rows = 1 << 14
    text = pa.DictionaryArray.from_arrays(np.zeros(rows, np.int32), pa.array(["x" * (1 << 20)]))
    name = "__index_level_0__"
    if file == EPISODES:
        name, text = "tasks", pa.ListArray.from_arrays(np.arange(rows + 1, dtype=np.int32), text)
    table = table.take(np.zeros(rows, np.int32))
    table = table.set_column(table.column_names.index(name), name, text)
    number = "task_index" if file == TASKS else "episode_index"
    table = table.set_column(table.column_names.index(number), number, pa.array(np.arange(rows)))
    pq.write_table(table, copy / file, compression="zstd", store_schema=False)
    refuses(r"\.parquet, rows: unpack to more than", lambda: opened(copy))


def test_pictures_that_the_file_holds_once_and_all_rows_have_are_refused(copy: Path) -> None:
    table = pq.read_table(copy / PARQUET)
    noise = np.random.default_rng(0).bytes(1 << 20)
    rows = 1 << 13
    large = pa.DictionaryArray.from_arrays(np.zeros(rows, np.int32), pa.array([noise]))
    cells = pa.StructArray.from_arrays([large, pa.nulls(rows, pa.string())], ["bytes", "path"])
    table = table.take(np.zeros(rows, np.int32)).append_column("observation.images.top", cells)
    pq.write_table(table, copy / PARQUET, compression="zstd", store_schema=False)
    info = json.loads((copy / "meta/info.json").read_text())
    info["features"]["observation.images.top"] = {"dtype": "image", "shape": [8, 8, 3]}
    (copy / "meta/info.json").write_text(json.dumps(info))
    lengths = pq.read_table(copy / EPISODES)
    at = lengths.column_names.index("length")
    pq.write_table(lengths.slice(0, 1).set_column(at, "length", pa.array([rows])), copy / EPISODES)
    refuses(
        r"file-000\.parquet, rows: unpack to more than",
        lambda: open_dataset(copy).frames(0, "observation.images.top"),
    )


def test_an_episode_of_a_trillion_frames_takes_no_memory(copy: Path) -> None:
    table = pq.read_table(copy / EPISODES)
    at = table.column_names.index("length")
    for length in (10**12, 2**62, 2**31 - 1):
        values = pa.array([length, *table["length"].to_pylist()[1:]])
        pq.write_table(table.set_column(at, "length", values), copy / EPISODES)
        with little_memory():
            problems = validate(copy)
        assert any("column 'length'" in p.field for p in problems if p.severity == "error")
    refuses(r"file-000\.mp4, frame \d+: is asked for", lambda: open_dataset(copy).frames(0, FRONT))


def varint(value: int) -> bytes:
    parts = []
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def test_lengths_of_2_to_the_63_in_a_tfrecord_are_cut_off(tmp_path: Path) -> None:
    for length in (2**63, 2**64 - 1, 2**64 - 12):
        size = struct.pack("<Q", length)
        (tmp_path / "a").write_bytes(size + struct.pack("<I", masked_crc(size)) + bytes(64))
        refuses("record 0: is cut off", lambda: record_spans(tmp_path / "a"))
    example = b"\x0a" + varint(2**63) + b"x"
    refuses(
        "not a tf.train.Example",
        lambda: feature_spans(lambda at, n: example[at : at + n], len(example)),
        ValueError,
    )
    refuses("not a tf.train.Example", lambda: feature_values(b"\x12" + varint(2**62)), ValueError)


def test_a_packed_tensor_is_unpacked_to_its_declared_size_and_no_further() -> None:
    leaf = Leaf("steps/depth", "tensor", "uint8", (4, 4), "zlib")
    sound = decode_column(leaf, [zlib.compress(bytes(range(16)))], 1)
    np.testing.assert_array_equal(sound.ravel(), np.arange(16))
    packer = zlib.compressobj()
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(64)) + packer.flush()
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="reshape"):
            decode_column(leaf, [bomb], 1)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_lists_nested_deep_in_json_lines_are_an_error(tmp_path: Path, copy: Path) -> None:
    shutil.rmtree(copy / "meta/episodes")
    info = json.loads((copy / "meta/info.json").read_text()) | {"codebase_version": "v2.1"}
    (copy / "meta/info.json").write_text(json.dumps(info))
    (copy / "meta/episodes.jsonl").write_text('{"episode_index": 0, "x": ' + "[" * 10**6 + "\n")
    refuses(r"episodes\.jsonl, file: does not hold JSON lines", lambda: open_dataset(copy))
