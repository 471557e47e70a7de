"""MCAP files and ROS bags, as their own libraries write them, become episodes at one rate."""

import base64
import io
import json
import tracemalloc

import numpy as np
import pytest
from mcap.writer import Writer as McapWriter
from mcap_ros2.writer import Writer as Ros2McapWriter
from PIL import Image
from rosbags.rosbag1 import Writer as Bag1Writer
from rosbags.rosbag2 import CompressionFormat, CompressionMode, StoragePlugin
from rosbags.rosbag2 import Writer as Bag2Writer
from rosbags.typesys import Stores, get_typestore

from data import open_dataset
from data.lerobot.importing import mcap_files, ros_bags
from data.lerobot.importing.importing import import_dataset
from data.lerobot.importing.layout import read_layout
from data.validation.validate import validate

START, MS = 1_700_000_000 * 10**9, 10**6
JOINTS, COMMAND, CAMERA = "/joint_states", "/command", "/camera/image"
FRONT = "observation.images.front"
LAYOUT = {
    "fps": 10,
    "robot": "arm",
    "task": {"from": "/task:data"},
    "columns": {
        "observation.state": {"from": f"{JOINTS}:position", "names": ["shoulder", "elbow"]},
        "action": [f"{COMMAND}:linear", f"{COMMAND}:angular.z"],
    },
    "cameras": {FRONT: CAMERA},
}


def frame(number, size=32):
    y, x = np.mgrid[:size, :size]
    picture = np.stack([40 + 2 * x, 200 - 4 * y, np.full_like(x, 20 + 5 * number)], axis=-1)
    return picture.astype(np.uint8)


def script(seconds=1.0, rates=(100, 50, 30), stop=None, late=0.0):
    """Messages (milliseconds, topic, number), in the order of their times."""
    found = [(0, "/task", 0)]
    for topic, rate in zip((JOINTS, COMMAND, CAMERA), rates, strict=True):
        begin = late if topic == CAMERA else 0.0
        for number in range(int((seconds - begin) * rate)):
            at = begin + number / rate
            if topic != CAMERA or stop is None or not stop[0] < at < stop[1]:
                found.append((round(1000 * at), topic, number))
    return sorted(found)


MSGDEFS = {
    JOINTS: (
        "sensor_msgs/msg/JointState",
        "std_msgs/Header header\nstring[] name\nfloat64[] position\nfloat64[] velocity\n"
        "float64[] effort\n"
        + "=" * 80
        + "\nMSG: std_msgs/Header\nbuiltin_interfaces/Time stamp\nstring frame_id\n"
        + "=" * 80
        + "\nMSG: builtin_interfaces/Time\nint32 sec\nuint32 nanosec\n",
    ),
    COMMAND: (
        "geometry_msgs/msg/Twist",
        "geometry_msgs/Vector3 linear\ngeometry_msgs/Vector3 angular\n"
        + "=" * 80
        + "\nMSG: geometry_msgs/Vector3\nfloat64 x\nfloat64 y\nfloat64 z\n",
    ),
    CAMERA: (
        "sensor_msgs/msg/Image",
        "std_msgs/Header header\nuint32 height\nuint32 width\nstring encoding\n"
        "uint8 is_bigendian\nuint32 step\nuint8[] data\n"
        + "=" * 80
        + "\nMSG: std_msgs/Header\nbuiltin_interfaces/Time stamp\nstring frame_id\n"
        + "=" * 80
        + "\nMSG: builtin_interfaces/Time\nint32 sec\nuint32 nanosec\n",
    ),
    "/task": ("std_msgs/msg/String", "string data\n"),
}


def plain(topic, ms, number):
    """A message as plain data; pictures as BGR, as cameras give them."""
    stamp = {"sec": (START + ms * MS) // 10**9, "nanosec": (START + ms * MS) % 10**9}
    header = {"stamp": stamp, "frame_id": ""}
    zero = {"x": 0.0, "y": 0.0, "z": 0.0}
    if topic == JOINTS:
        names, position = ["elbow", "wrist", "shoulder"], [ms + 0.5, -1.0, float(ms)]
        rest = {"velocity": [0.0] * 3, "effort": [0.0] * 3}
        return {"header": header, "name": names, "position": position} | rest
    if topic == COMMAND:
        return {"linear": zero | {"x": float(number)}, "angular": zero | {"z": float(ms)}}
    if topic == "/task":
        return {"data": "lift the cup"}
    picture = frame(number)[..., ::-1]
    return {
        "header": header,
        "height": 32,
        "width": 32,
        "encoding": "bgr8",
        "is_bigendian": 0,
        "step": 96,
        "data": picture.tobytes(),
    }


def write_mcap(path, messages=None, topics=tuple(MSGDEFS), change=lambda topic, said: said):
    with path.open("wb") as file:
        writer = Ros2McapWriter(file, chunk_size=20_000)
        schemas = {topic: writer.register_msgdef(*MSGDEFS[topic]) for topic in topics}
        for ms, topic, number in messages or script():
            if topic in topics:
                said, at = change(topic, plain(topic, ms, number)), START + ms * MS
                writer.write_message(topic, schemas[topic], said, log_time=at, publish_time=at)
        writer.finish()
    return path


def write_json_mcap(path):
    """Messages as Foxglove's JSON schemas have them, pictures as base64 of JPEG."""
    with path.open("wb") as file:
        writer = McapWriter(file)
        writer.start()
        channels = {}
        for topic in MSGDEFS:
            schema = writer.register_schema(topic.strip("/"), "jsonschema", b"{}")
            channels[topic] = writer.register_channel(topic, "json", schema)
        for ms, topic, number in script():
            said = plain(topic, ms, number)
            if topic == CAMERA:
                content = io.BytesIO()
                Image.fromarray(frame(number)).save(content, "JPEG", quality=95)
                data = base64.b64encode(content.getvalue()).decode()
                said = {"format": "jpeg", "data": data}
            at = START + ms * MS
            writer.add_message(channels[topic], at, json.dumps(said).encode(), at)
        writer.finish()
    return path


def write_protobuf_mcap(path):
    """Numbers and pictures as protobuf, with a schema made here."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    from mcap_protobuf.writer import Writer as ProtobufWriter

    file = descriptor_pb2.FileDescriptorProto(name="mine.proto", package="mine", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    for name, fields in {
        "Numbers": {"values": (kinds.TYPE_DOUBLE, kinds.LABEL_REPEATED)},
        "Picture": {
            "data": (kinds.TYPE_BYTES, kinds.LABEL_OPTIONAL),
            "format": (kinds.TYPE_STRING, kinds.LABEL_OPTIONAL),
        },
    }.items():
        made = file.message_type.add(name=name)
        for number, (field, (kind, label)) in enumerate(fields.items(), 1):
            made.field.add(name=field, number=number, type=kind, label=label)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    kind = {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"mine.{name}"))
        for name in ("Numbers", "Picture")
    }
    with path.open("wb") as out, ProtobufWriter(out) as writer:
        for ms, topic, number in script():
            at = START + ms * MS
            if topic == JOINTS:
                message = kind["Numbers"](values=[ms, ms + 0.5])
            elif topic == CAMERA:
                content = io.BytesIO()
                Image.fromarray(frame(number)).save(content, "PNG")
                message = kind["Picture"](data=content.getvalue(), format="png")
            else:
                continue
            writer.write_message(topic, message, log_time=at, publish_time=at)
    return path


def write_bag(path, version, messages=None, compressed=None):
    """A bag of ROS 1 (1), or of ROS 2 with SQLite (2) or MCAP (3), by zstd in some mode."""
    store = get_typestore(Stores.ROS1_NOETIC if version == 1 else Stores.ROS2_HUMBLE)
    if version == 1:
        writer = Bag1Writer(path)
    else:
        plugin = StoragePlugin.SQLITE3 if version == 2 else StoragePlugin.MCAP
        writer = Bag2Writer(path, version=9, storage_plugin=plugin)
        if compressed is not None:
            writer.set_compression(compressed, CompressionFormat.ZSTD)
    with writer:
        connections = {
            topic: writer.add_connection(topic, kind, typestore=store)
            for topic, (kind, _) in MSGDEFS.items()
        }
        for ms, topic, number in messages or script():
            message = made(store, MSGDEFS[topic][0], plain(topic, ms, number), version)
            to_bytes = store.serialize_ros1 if version == 1 else store.serialize_cdr
            content = to_bytes(message, MSGDEFS[topic][0])
            writer.write(connections[topic], START + ms * MS, content)
    return path


def made(store, kind, said, version):
    """Message of a typestore from plain data."""
    cls = store.types[kind]
    values = {}
    for name in cls.__dataclass_fields__:
        if name == "__msgtype__":
            continue
        value = said.get(name)
        if name == "header":
            stamp = store.types["builtin_interfaces/msg/Time"](**said["header"]["stamp"])
            extra = {"seq": 0} if version == 1 else {}
            value = store.types["std_msgs/msg/Header"](stamp=stamp, frame_id="", **extra)
        elif name in ("linear", "angular"):
            value = store.types["geometry_msgs/msg/Vector3"](**value)
        elif name in ("position", "velocity", "effort"):
            value = np.array(value)
        elif name == "data" and isinstance(value, bytes):
            value = np.frombuffer(value, np.uint8)
        values[name] = value
    return cls(**values)


def layout(tmp_path, **changed):
    path = tmp_path / "layout.json"
    path.write_text(json.dumps(LAYOUT | changed))
    return read_layout(str(path))


def load(path, tmp_path, **changed):
    import_dataset([path], tmp_path / "out", layout(tmp_path, **changed))
    assert [p for p in validate(tmp_path / "out") if p.severity == "error"] == []
    return open_dataset(tmp_path / "out")


def is_as_written(found):
    """One second at 10 Hz: the last message of each topic by each tick."""
    assert (found.fps, found.robot_type, found.prompts) == (10, "arm", (("lift the cup",),))
    ticks = np.arange(10) * 100
    columns = found.columns(0)
    assert np.array_equal(columns["observation.state"], np.stack([ticks, ticks + 0.5], axis=1))
    assert columns["action"][:, 0].tolist() == (ticks // 20).tolist()
    assert columns["action"][:, 3].tolist() == ticks.tolist()
    shown = found.frames(0, FRONT).astype(int)
    expected = np.stack([frame(3 * k) for k in range(10)]).astype(int)
    assert np.abs(shown - expected).mean() < 4
    assert found.features["observation.state"]["names"] == ["shoulder", "elbow"]


def test_a_file_of_ros_2_gives_each_topics_last_message_at_every_tick(tmp_path):
    is_as_written(load(write_mcap(tmp_path / "a.mcap"), tmp_path))


def test_a_file_of_json_is_read_alike(tmp_path):
    is_as_written(load(write_json_mcap(tmp_path / "a.mcap"), tmp_path))


def test_a_file_of_protobuf_is_read(tmp_path):
    path = write_protobuf_mcap(tmp_path / "a.mcap")
    columns = {"observation.state": f"{JOINTS}:values", "action": f"{JOINTS}:values.1"}
    found = load(path, tmp_path, columns=columns, task="lift")
    assert found.columns(0)["action"][:, 0].tolist() == [100 * k + 0.5 for k in range(10)]
    assert np.abs(found.frames(0, FRONT)[9].astype(int) - frame(27)).mean() < 4


@pytest.mark.parametrize("version", [1, 2, 3])
def test_bags_of_both_ros_are_read_alike(tmp_path, version):
    name = "a.bag" if version == 1 else "rosbag2_2026_01_01"
    is_as_written(load(write_bag(tmp_path / name, version), tmp_path))


@pytest.mark.parametrize("mode", ["FILE", "MESSAGE"])
@pytest.mark.parametrize("version", [2, 3])
def test_a_compressed_bag_of_ros_2_is_read_alike(tmp_path, version, mode):
    bag = write_bag(tmp_path / "a", version, compressed=CompressionMode[mode])
    assert f"compression_mode: {mode.lower()}" in (bag / "metadata.yaml").read_text().lower()
    is_as_written(load(bag, tmp_path))


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_bag_whose_clock_was_set_back_is_refused(tmp_path, version):
    """Also where its index puts the messages in the order of their times."""
    bag = write_bag(tmp_path / ("a.bag" if version == 1 else "a"), version, jump(script()))
    with pytest.raises(ValueError, match=r"/joint_states goes back in time, from 0\.59 s") as said:
        load(bag, tmp_path)
    assert str(bag) in str(said.value)
    assert not (tmp_path / "out").exists()


def test_a_message_serves_all_ticks_until_the_next(tmp_path):
    found = load(write_mcap(tmp_path / "a.mcap", script(rates=(100, 50, 5))), tmp_path)
    seen = found.frames(0, FRONT)[:, 0, 0, 2].astype(int)
    assert np.abs(seen - [20, 20, 25, 25, 30, 30, 35, 35, 40, 40]).max() < 5


def test_a_camera_that_stops_in_mid_episode_is_named_with_its_times(tmp_path):
    path = write_mcap(tmp_path / "a.mcap", script(4.0, stop=(1.0, 3.0)))
    message = r"a\.mcap, topics: /camera/image is silent from 1\.00 s to 3\.00 s, longer than 1 s"
    with pytest.raises(ValueError, match=message):
        load(path, tmp_path)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match=r"/camera/image is silent from 1\.00 s to 3\.99 s"):
        load(write_mcap(path, script(4.0, stop=(1.0, 9.0))), tmp_path)


def test_gaps_are_cut_out_where_the_layout_says_so(tmp_path):
    path = write_mcap(tmp_path / "a.mcap", script(4.0, stop=(1.0, 3.0)))
    summary = import_dataset([path], tmp_path / "out", layout(tmp_path, gaps="cut"))
    assert summary.left_out == pytest.approx(2.1, abs=0.11)
    found = open_dataset(tmp_path / "out")
    assert found.lengths.tolist() == [11, 10]
    assert found.columns(1)["observation.state"][0].tolist() == [3000.0, 3000.5]
    (tmp_path / "out").rename(tmp_path / "first")
    assert load(path, tmp_path, silence=2.5).lengths.tolist() == [40]


def test_an_episode_begins_when_all_topics_have_spoken(tmp_path):
    found = load(write_mcap(tmp_path / "a.mcap", script(late=0.5)), tmp_path)
    assert found.columns(0)["observation.state"][:, 0].tolist() == [500, 600, 700, 800, 900]


def test_headers_may_be_the_clock(tmp_path):
    def delayed(topic, said):
        if topic == CAMERA:
            stamp = said["header"]["stamp"]
            at = stamp["sec"] * 10**9 + stamp["nanosec"] - 200 * MS
            stamp |= {"sec": at // 10**9, "nanosec": at % 10**9}
        return said

    path = write_mcap(tmp_path / "a.mcap", change=delayed)
    columns = {"observation.state": f"{JOINTS}:position", "action": f"{JOINTS}:velocity"}
    found = load(path, tmp_path, clock="header", columns=columns)
    assert found.columns(0)["observation.state"][0, 2] == 0
    assert np.abs(found.frames(0, FRONT)[0].astype(int) - frame(6)).mean() < 4
    message = "/command.*has no header with a time"
    with pytest.raises(ValueError, match=message):
        import_dataset([path], tmp_path / "other", layout(tmp_path, clock="header"))


def jump(messages):
    """Messages whose clock is set back by half a second in the middle."""
    return [(ms if ms < 600 else ms - 500, topic, number) for ms, topic, number in messages]


def changed(topic, **what):
    return lambda here, said: said | what if here == topic else said


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (
            lambda p: write_mcap(p, topics=(JOINTS, COMMAND, "/task")),
            "'/camera/image': is missing",
        ),
        (
            lambda p: write_mcap(p, topics=(JOINTS, COMMAND, CAMERA)),
            "'/task': is not a topic of the recording",
        ),
        (
            lambda p: write_mcap(p, [m for m in script() if m[1] != CAMERA]),
            "'/camera/image': (has no messages|is missing)",
        ),
        (lambda p: write_mcap(p, jump(script())), "/joint_states goes back in time, from 0.59 s"),
        (
            lambda p: write_mcap(p, change=changed(JOINTS, name=["a", "b", "c"])),
            "/joint_states, message 0: has no joint 'shoulder', only",
        ),
        (
            lambda p: write_mcap(p, change=changed(CAMERA, encoding="16UC1")),
            r"/camera/image, message 0: holds depth \('16UC1'\), not an image in colour",
        ),
        (
            lambda p: write_mcap(p, change=changed(CAMERA, encoding="bayer_rggb8")),
            "/camera/image, message 0: holds an image of encoding 'bayer_rggb8'",
        ),
        (
            lambda p: write_mcap(p, change=changed(CAMERA, height=64)),
            "claims to hold 32x64 pixels in rows of 96 bytes, but has 3072 bytes",
        ),
        (lambda p: p.write_bytes(write_mcap(p).read_bytes()[:9000]), "is not a readable MCAP"),
        (lambda p: p.write_text("bag"), "is not a readable MCAP"),
        (lambda p: write_mcap(p, [(0, t, 0) for t in MSGDEFS]), "have no two frames without a gap"),
    ],
)
def test_a_recording_that_cannot_be_read_is_refused_in_a_sentence(tmp_path, write, message):
    write(tmp_path / "a.mcap")
    with pytest.raises(ValueError, match=message) as caught:
        load(tmp_path / "a.mcap", tmp_path)
    assert "a.mcap" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_field_that_is_not_there_is_named_with_those_that_are(tmp_path):
    write_mcap(tmp_path / "a.mcap")
    columns = {"action": f"{COMMAND}:linear.w"}
    with pytest.raises(ValueError, match=r"/command.* has no field 'w' of 'linear.w', only .*'x'"):
        load(tmp_path / "a.mcap", tmp_path, columns=columns)
    with pytest.raises(ValueError, match="write TOPIC:FIELD"):
        load(tmp_path / "a.mcap", tmp_path, columns={"action": COMMAND})


def test_joints_that_change_places_need_names(tmp_path):
    def exchanged(topic, said):
        late = topic == JOINTS and said["position"][2] >= 500
        return said | {k: said[k][::-1] for k in ("name", "position") if late}

    write_mcap(tmp_path / "a.mcap", change=exchanged)
    is_as_written(load(tmp_path / "a.mcap", tmp_path))
    columns = {"action": f"{JOINTS}:position"}
    with pytest.raises(
        ValueError, match=r"message 50: has joints \['shoulder', .*but earlier messages have"
    ):
        import_dataset([tmp_path / "a.mcap"], tmp_path / "other", layout(tmp_path, columns=columns))


def test_a_damaged_bag_is_named(tmp_path):
    bag = write_bag(tmp_path / "bag", 2)
    database = next(bag.glob("*.db3"))
    database.write_bytes(b"not a database" * 100)
    with pytest.raises(ValueError, match="is not a readable bag"):
        load(bag, tmp_path)
    (tmp_path / "b.bag").write_bytes(b"#ROSBAG V2.0\nrubbish")
    with pytest.raises(ValueError, match="is not a readable bag"):
        load(tmp_path / "b.bag", tmp_path)


def test_recordings_of_several_formats_are_not_mixed(tmp_path):
    write_mcap(tmp_path / "a.mcap")
    write_bag(tmp_path / "b.bag", 1)
    with pytest.raises(ValueError, match="of several formats"):
        load(tmp_path, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["MCAP", "ROS 1", "SQLite", "MCAP of ROS 2"])
def test_a_recording_is_read_a_chunk_at_a_time(kind, tmp_path):
    topics, peaks = (JOINTS, COMMAND, CAMERA), []
    version = ["MCAP", "ROS 1", "SQLite", "MCAP of ROS 2"].index(kind)
    for seconds in (2.0, 30.0, 90.0):  # the first imports the libraries
        messages = script(seconds, rates=(10, 10, 30))
        source = tmp_path / f"{seconds:g}{('.mcap', '.bag', '', '')[version]}"
        if version:
            write_bag(source, version, messages)
        else:
            write_mcap(source, messages)
        opened = ros_bags._open_bag if version else mcap_files._open_mcap
        tracemalloc.start()
        with opened(source) as bag:
            count = sum(topic == CAMERA for topic, _ in bag.written(topics))
            assert count == sum(message.topic == CAMERA for message in bag.messages(topics))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert count == 30 * seconds
    assert peaks[2] - peaks[1] < 60 * 30 * frame(0).nbytes / 3
