"""Small recordings that ask for gigabytes are refused by name before memory is taken, pipes are not
opened, and nothing is written into what is read."""

import json
import os
import sqlite3
import zipfile

import h5py
import numpy as np
import pytest
import zarr
import zstandard
from mcap.writer import CompressionType
from mcap.writer import Writer as McapWriter
from rosbags.rosbag1 import Writer as Bag1Writer
from rosbags.rosbag2 import CompressionFormat, CompressionMode, StoragePlugin
from rosbags.rosbag2 import Writer as Bag2Writer
from rosbags.typesys import Stores, get_typestore

from data import open_dataset
from data.edit.edit import edit_dataset
from data.edit.plan import Edit
from data.errors import DatasetError
from data.lerobot.importing.clock import SECOND, align
from data.lerobot.importing.importing import import_dataset
from data.lerobot.importing.layout import read_layout
from data.lerobot.upgrade import upgrade
from data.store.store import build_store
from models.files.whole_text import replacing, write_whole
from parallel.runs.atomic import replace_text
from tests.helpers.data.aloha import write_aloha
from tests.helpers.data.little_memory import little_memory

HUGE, SILENT = 3 << 30, 1 << 24
TEXT = "/text"
TOPIC = {
    "fps": 10,
    "task": "x",
    "columns": {"observation.state": f"{TEXT}:data", "action": f"{TEXT}:data"},
}


def packed(size):
    """A frame of zstd that says that it holds so many bytes (RFC 8878, 3.1.1), or, of 16 MB, does
    hold them and does not say so."""
    if size == SILENT:
        packer = zstandard.ZstdCompressor(write_content_size=False).compressobj()
        return packer.compress(bytes(size)) + packer.flush()
    return zstandard.FRAME_HEADER + b"\xe0" + size.to_bytes(8, "little") + bytes(9)


def mcap(folder, size=HUGE):
    path = folder / "a.mcap"
    with path.open("wb") as file:
        writer = McapWriter(file, compression=CompressionType.ZSTD, chunk_size=1 << 30)
        writer.start()
        schema = writer.register_schema("s", "jsonschema", b"{}")
        channel = writer.register_channel(TEXT, "json", schema)
        writer.add_message(channel, 1, b'{"data": 1}', 1)
        writer.finish()
    content = path.read_bytes()
    at = content.index(b"zstd") + 4  # of the first chunk: the records' length, and its header
    length, bomb = int.from_bytes(content[at : at + 8], "little"), packed(size)
    head = at - 4 - 32  # after the opcode and length of the chunk
    grown = int.from_bytes(content[head - 8 : head], "little") - length + len(bomb)
    path.write_bytes(
        content[: head - 8]
        + grown.to_bytes(8, "little")
        + content[head:at]
        + len(bomb).to_bytes(8, "little")
        + bomb
        + content[at + 8 + length :]
    )
    return path


def ros2(folder, mode=None):
    store = get_typestore(Stores.ROS2_HUMBLE)
    path = folder / "bag"
    writer = Bag2Writer(path, version=9, storage_plugin=StoragePlugin.SQLITE3)
    if mode:
        writer.set_compression(CompressionMode[mode], CompressionFormat.ZSTD)
    with writer:
        to = writer.add_connection(TEXT, "std_msgs/msg/Float64", typestore=store)
        message = store.types["std_msgs/msg/Float64"](data=1.0)
        for k in range(20):
            content = store.serialize_cdr(message, "std_msgs/msg/Float64")
            writer.write(to, 10**18 + k * 10**8, content)
    return path


def ros2_messages(folder, size=HUGE):
    path = ros2(folder, "MESSAGE")
    (file,) = path.glob("*.db3")
    database = sqlite3.connect(file)
    database.execute("update messages set data = ? where id = 5", (packed(size),))
    database.commit()
    database.close()
    return path


def ros2_file(folder):
    path = ros2(folder, "FILE")
    (file,) = path.glob("*.zstd")
    file.write_bytes(packed(HUGE))
    return path


def ros2_yaml(folder):
    path = ros2(folder)
    with (path / "metadata.yaml").open("a") as file:
        file.write("# \n" * (10 << 20))
    return path


def ros1(folder):
    store = get_typestore(Stores.ROS1_NOETIC)
    path = folder / "a.bag"
    writer = Bag1Writer(path)
    writer.set_compression(writer.CompressionFormat.BZ2)
    with writer:
        to = writer.add_connection(TEXT, "std_msgs/msg/String", typestore=store)
        message = store.types["std_msgs/msg/String"](data="x" * (16 << 20))
        content = store.serialize_ros1(message, "std_msgs/msg/String")
        for k in range(2):
            writer.write(to, 10**18 + k * 10**8, content)
    assert path.stat().st_size < 1 << 20
    return path


def pusht(folder, **declared):
    path = folder / "a.zarr"
    root = zarr.open_group(path, mode="w", zarr_format=2)
    for name, values in {
        "data/state": np.ones((12, 5), np.float32),
        "data/action": np.ones((12, 2), np.float32),
        "data/img": np.ones((12, 16, 16, 3), np.uint8),
        "meta/episode_ends": np.array([4, 12]),
    }.items():
        root.create_array(name, data=values)
    for name, said in declared.items():
        file = path / name.replace("__", "/") / ".zarray"
        file.write_text(json.dumps(json.loads(file.read_text()) | said))
    return path


def zarr_attributes(folder):
    path = pusht(folder)
    with (path / ".zattrs").open("wb") as file:
        file.truncate(HUGE)
    return path


def zarr_zip(folder, name, size):
    path = folder / "a.zarr.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for file in pusht(folder).rglob("*"):
            if file.is_file() and file.relative_to(folder / "a.zarr").as_posix() != name:
                packed.write(file, file.relative_to(folder / "a.zarr"))
        with packed.open(name, "w") as entry:
            for _ in range(size >> 20):
                entry.write(bytes(1 << 20))
    return path


def hdf5(folder, **made):
    path = folder / "a.hdf5"
    with h5py.File(path, "w") as root:
        root["observations/qpos"] = np.ones((4, 14), np.float32)
        root["action"] = np.ones((4, 14), np.float32)
        if "camera" in made:
            shape, kind = made["camera"]
            chunk = (1, *[min(n, 1 << 10) for n in shape[1:]])
            root.create_dataset("observations/images/top", shape, kind, chunks=chunk)
        if "text" in made:
            root.create_dataset("text", **made["text"])
    return path


BOMBS = {
    "chunk of MCAP": (mcap, TOPIC, r"a\.mcap, chunk at byte \d+: unpacks to 3,221,225,472 bytes"),
    "message of a bag": (ros2_messages, TOPIC, r"message: unpacks to 3,221,225,472 bytes"),
    "file of a bag": (ros2_file, TOPIC, r"\.zstd, file: unpacks to 3,221,225,472 bytes"),
    "metadata.yaml": (ros2_yaml, TOPIC, r"metadata\.yaml, file: has .* bytes of text"),
    "silent chunk": (lambda p: mcap(p, SILENT), TOPIC, r"chunk at byte \d+: unpacks to [\d,]+"),
    "silent message": (lambda p: ros2_messages(p, SILENT), TOPIC, r"message: unpacks to [\d,]+"),
    "chunk of a ROS 1 bag": (ros1, TOPIC, r"a\.bag, chunk: unpacks to [\d,]+ bytes"),
    "chunk of zarr": (
        lambda p: pusht(p, data__img={"chunks": [12, 1 << 14, 1 << 14, 3]}),
        "diffusion_policy",
        "'img': unpacks to 9,663,676,416 bytes",
    ),
    "chunk of a column": (
        lambda p: pusht(p, data__action={"chunks": [1 << 30, 2]}),
        "diffusion_policy",
        "'action': unpacks to 8,589,934,592 bytes",
    ),
    "episode ends": (
        lambda p: pusht(p, meta__episode_ends={"shape": [2**33], "chunks": [2**33]}),
        "diffusion_policy",
        "'meta/episode_ends': has 8589934592 episodes, but the arrays have 12 frames",
    ),
    "chunk of episode ends": (
        lambda p: pusht(p, meta__episode_ends={"chunks": [2**33]}),
        "diffusion_policy",
        "'meta/episode_ends': unpacks to 68,719,476,736 bytes",
    ),
    "attributes of zarr": (zarr_attributes, "diffusion_policy", r"\.zattrs': has 3,221,225,472"),
    "attributes in a zip": (
        lambda p: zarr_zip(p, ".zattrs", 8 << 20),
        "diffusion_policy",
        r"\.zattrs': has 8,388,608 bytes of text",
    ),
    "chunk in a zip": (
        lambda p: zarr_zip(p, "data/img/0.0.0.0", 16 << 20),
        "diffusion_policy",
        r"0\.0\.0\.0': unpacks to 16,777,216 bytes",
    ),
    "encoded camera": (
        lambda p: hdf5(p, camera=((4, 10**12), np.uint8)),
        "aloha",
        "images/top': unpacks to 1,000,000,000,000 bytes",
    ),
    "camera never written": (
        lambda p: hdf5(p, camera=((4, 480, 640, 3), np.uint8)),
        "aloha",
        "images/top': 4 of 4 chunks were never written",
    ),
    "text": (
        lambda p: hdf5(p, text={"shape": (10**12,), "dtype": "S1", "chunks": (1 << 20,)}),
        {"like": "aloha", "cameras": {}, "task": {"from": "text"}},
        "'text': has 1,000,000,000,000 bytes of text",
    ),
}


def layout_of(folder, said):
    if isinstance(said, str):
        return read_layout(said, task="x")
    (folder / "layout.json").write_text(json.dumps(said))
    return read_layout(str(folder / "layout.json"))


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_small_recording_that_asks_for_much_is_refused(tmp_path, monkeypatch, bomb):
    monkeypatch.setattr("data.files.limits._FREE_BYTES", 1 << 20)
    make, layout, message = BOMBS[bomb]
    path = make(tmp_path)
    files = [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file()]
    if bomb not in ("metadata.yaml", "attributes of zarr"):
        assert sum(file.stat().st_size for file in files) < 4 << 20
    with little_memory(), pytest.raises(DatasetError, match=message):
        import_dataset([path], tmp_path / "out", layout_of(tmp_path, layout))
    assert not (tmp_path / "out").exists()


def test_two_distant_times_do_not_make_a_billion_frames():
    far = {"a": np.array([0, 10**9 * SECOND], np.int64), "b": np.array([0, 5], np.int64)}
    with pytest.raises(ValueError, match=r"span 1000000000\.00 s, 30000000000 frames at 30 fps"):
        align(far, 30, 1e10, "refuse")
    far = {"a": np.array([0, 10**9 * SECOND, 3 * 10**9 * SECOND], np.int64)}
    with pytest.raises(ValueError, match=r"span 1000000000\.00 s"):
        align(far, 30, 1.5e9, "cut")
    (hour,) = align({"a": np.arange(0, 3600 * SECOND, SECOND // 50)}, 50, 1.0, "refuse")
    assert len(hour.ticks) == 180_000


@pytest.mark.parametrize("name", ["a.hdf5", "a.csv", "a.zarr", "a.zarr.zip", "a.mcap", "a.bag"])
def test_a_pipe_or_a_broken_link_among_recordings_is_named_and_not_opened(tmp_path, name):
    for make in (os.mkfifo, lambda path: os.symlink(tmp_path / "none", path)):
        make(tmp_path / name)
        with pytest.raises(DatasetError, match=f"{name}, file: is a pipe, device or broken link"):
            import_dataset([tmp_path], tmp_path / "out", read_layout("aloha", task="x"))
        (tmp_path / name).unlink()


@pytest.mark.parametrize("given", ["", "bag", "bag/bag.db3", "among others"])
def test_a_killed_bag_names_the_command_that_mends_it(tmp_path, given):
    path = ros2(tmp_path)
    if given == "bag/bag.db3":
        with pytest.raises(ValueError, match="is in a bag; give the bag's folder"):
            import_dataset([tmp_path / given], tmp_path / "out", layout_of(tmp_path, TOPIC))
    (path / "metadata.yaml").unlink()
    if given == "among others":
        (tmp_path / "a.bag").touch()
    where = tmp_path / given if "bag" in given else tmp_path
    with pytest.raises(DatasetError, match=f"run `ros2 bag reindex {path}`, which writes it"):
        import_dataset([where], tmp_path / "out", layout_of(tmp_path, TOPIC))


def test_a_bag_with_a_pipe_in_it_is_not_opened(tmp_path):
    path = ros2(tmp_path)
    (file,) = path.glob("*.db3")
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(DatasetError, match=r"\.db3, file: is not a regular file"):
        import_dataset([path], tmp_path / "out", layout_of(tmp_path, TOPIC))


@pytest.mark.parametrize("name", [".zgroup", "data/action/.zarray", "data/action/0.0", "data/x"])
def test_a_replay_buffer_with_a_pipe_or_device_in_it_is_not_opened(tmp_path, name):
    file = pusht(tmp_path) / name
    for make in (os.mkfifo, lambda path: os.symlink("/dev/zero", path)):
        file.unlink(missing_ok=True)
        make(file)
        with pytest.raises(DatasetError, match=f"{name}, file: is not a regular file"):
            import_dataset(
                [tmp_path / "a.zarr"], tmp_path / "out", read_layout("diffusion_policy", task="x")
            )


@pytest.mark.parametrize(
    "write",
    [
        lambda source, out: edit_dataset([source], out, Edit(delete=(0,))),
        lambda source, out: edit_dataset([source, source], out, Edit()),
        lambda source, out: upgrade(source, out),
        lambda source, out: build_store(open_dataset(source), out, 16),
    ],
    ids=["edit", "join", "upgrade", "convert"],
)
def test_nothing_is_written_into_the_dataset_that_is_read(recorded, tmp_path, write):
    (tmp_path / "link").symlink_to(recorded)
    before = sorted(recorded.rglob("*"))
    for out in (recorded / "sub", tmp_path / "link/sub", recorded / "x/../meta/sub"):
        with pytest.raises(ValueError, match=r"is inside of .*, which is read"):
            write(recorded, out)
    assert sorted(recorded.rglob("*")) == before


def test_an_import_is_not_written_into_a_recording(tmp_path):
    path = pusht(tmp_path)
    with pytest.raises(ValueError, match=r"is inside of .*a\.zarr, which is read"):
        import_dataset([path], path / "out", read_layout("diffusion_policy", task="x"))
    folder = write_aloha(tmp_path / "recordings")
    import_dataset([folder], folder / "out", read_layout("aloha", task="x"))
    assert open_dataset(folder / "out").num_episodes == 2


def test_a_pipe_is_written_through_and_never_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, "text")
    assert os.read(reader, 9) == b"text"
    os.close(reader)
    for write in (lambda: replace_text(pipe, "x"), lambda: replacing(pipe).__enter__()):
        with pytest.raises(ValueError, match="is a device or a pipe, which a file cannot replace"):
            write()
    assert pipe.is_fifo()
