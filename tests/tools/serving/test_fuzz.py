"""Malformed messages: each costs its sender an answer that says why, or the connection, and
nothing else. The default suite sends hundreds, `make fuzz` 5,000."""

import socket
import threading
from contextlib import closing, suppress

import msgpack
import numpy as np
import pytest
import simplejpeg
from websockets.exceptions import ConnectionClosed

from models import Pi, Policy
from tests.helpers.models.processors import word_processor
from tests.helpers.tools.served import (
    OBSERVATION,
    PICTURE,
    ROBOT,
    UPGRADE,
    client,
    metric,
    observation,
    serving,
)
from tools.recipes.presets import TINY
from tools.serving.engine import Engine
from tools.serving.limits import Limits
from tools.serving.metrics import Metrics
from tools.serving.wire import pack, unpack

GOOD = pack(OBSERVATION)
JPEG = simplejpeg.encode_jpeg(PICTURE, 90, "RGB", "420")
STRANGE = [
    *(None, True, -1, 2**63, float("nan"), b"", b"\0" * 9, "", "é" * 3000, [], [[]], {}, {"": {}}),
    *(msgpack.ExtType(1, b""), msgpack.Timestamp(1), ["a"] * 300, {str(i): i for i in range(300)}),
]
DTYPES = ["O", "|O", "V8", "<U4", "M8[s]", "<c8", "<f4", "|u1", "<f3", "f4,f4", "<f16", "", 7, None]
SHAPES = [[], [0], [-1], [2**62] * 4, [1] * 40, [6, 8, 3], [8, 6, 3], [0, 2**62], 7, [None], "3"]


def damaged(rng):
    """A good message with bytes changed, left out, put in or cut off."""
    data = bytearray(GOOD)
    for _ in range(rng.integers(1, 4)):
        at, length = rng.integers(len(data)), int(rng.integers(1, 9))
        kind = rng.integers(4)
        if kind == 0:
            data[at] ^= 1 << int(rng.integers(8))
        elif kind == 1:
            del data[at : at + length]
        elif kind == 2:
            data[at:at] = rng.bytes(length)
        else:
            del data[at + 1 :]
    return bytes(data)


def nonsense(rng):
    return rng.bytes(int(rng.integers(200)))


def nested(rng):
    """Thousands of openings, or lengths that nothing follows."""
    one = [b"\x91", b"\x81\xa1a", b"\x81\xc4\x01a", b"\xdc\xff\xff", b"\xdf\xff\xff\xff\xff"]
    return one[rng.integers(len(one))] * int(rng.integers(1, 3000))


def strange(rng):
    """A good observation in which one entry is something else, or has something inside."""
    key = list(OBSERVATION)[rng.integers(len(OBSERVATION))]
    value = STRANGE[rng.integers(len(STRANGE))]
    keys = [key, "image", "executed", "committed", b"__ndarray__", "observation/elbow"]
    message = {**OBSERVATION, keys[rng.integers(len(keys))]: value}
    return msgpack.packb(message, default=lambda x: msgpack.unpackb(pack({"x": x}))["x"])


def false_array(rng):
    """A good observation in which one array is not what it says."""
    content = {
        b"__ndarray__": True,
        b"data": [GOOD[:144], bytes(8), b"", "text", None, 2**40][rng.integers(6)],
        b"dtype": DTYPES[rng.integers(len(DTYPES))],
        b"shape": SHAPES[rng.integers(len(SHAPES))],
    }
    if rng.random() < 0.2:
        content.pop(list(content)[rng.integers(4)])
    if rng.random() < 0.2:
        content = {b"__npgeneric__": True, b"data": STRANGE[rng.integers(7)], b"dtype": "<i2"}
    key = list(OBSERVATION)[rng.integers(len(OBSERVATION))]
    message = {**msgpack.unpackb(GOOD), key: content}
    return msgpack.packb(message)


def false_jpeg(rng):
    """A good observation in which one picture is a JPEG, mostly a damaged one."""
    data = bytearray(JPEG)
    for _ in range(rng.integers(4)):
        data[rng.integers(len(data))] = rng.integers(256)
    if rng.random() < 0.3:
        del data[rng.integers(len(data)) :]
    key = list(OBSERVATION)[rng.integers(len(OBSERVATION))]
    message = {**msgpack.unpackb(GOOD), key: {b"__jpeg__": True, b"data": bytes(data)}}
    return msgpack.packb(message)


def text(rng):
    """Words where bytes are expected."""
    return rng.bytes(20).hex()


KINDS = [damaged, nonsense, nested, strange, false_array, false_jpeg, text]


def send_all(url, seeds):
    """Sends each message on a connection of many; returns how many were refused by a text."""
    refused = 0
    with client(url) as sender:
        for seed in seeds:
            rng = np.random.default_rng(seed)
            try:
                answer = sender.send(KINDS[rng.integers(len(KINDS))](rng))
                assert set(answer) == {"actions", "policy_timing", "server_timing"}
            except ValueError as error:
                refused += 10 < len(str(error)) < 500
    return refused


def break_protocol(port, seed):
    """Bytes that are no websocket, or stop being one."""
    rng = np.random.default_rng(seed)
    with closing(socket.create_connection(("127.0.0.1", port), timeout=300)) as raw:
        if seed % 3:
            raw.sendall(UPGRADE)
        if seed % 3 == 1:
            raw.recv(100)
        raw.sendall(rng.bytes(int(rng.integers(1, 500))))


def fuzz(count, malformed, senders=4):
    with (
        serving(limits=Limits(rate=1e9, message_bytes=2**16)) as running,
        client(running.url) as good,
    ):
        refused: list[int] = []
        parts = [range(i, count, senders) for i in range(senders)]
        threads = [
            threading.Thread(target=lambda part=part: refused.append(send_all(running.url, part)))
            for part in parts
        ]
        for thread in threads:
            thread.start()
        value = 0
        while any(thread.is_alive() for thread in threads):
            value += 1
            assert good.infer(observation(value))["actions"][0, 0] == value
            break_protocol(running.port, value)
        assert len(refused) == senders, "a sender was not answered"
        assert sum(refused) >= malformed
        with client(running.url) as sender, pytest.raises(ConnectionClosed, match="1009"):
            sender.send(bytes(2**16 + 1))
        assert good.infer(observation(0.5))["actions"][0, 0] == 0.5
        counted = metric(running.url, 'chiliad_requests_total{outcome="bad_input"}')
        assert counted >= sum(refused), "chance may make a message of broken protocol, too"
        assert "failed" not in running.server.metrics.text()
    assert running.join() == 0
    assert metric_text(running.server, "chiliad_clients") == 0
    assert metric_text(running.server, "chiliad_pending_requests") == 0


def test_what_is_read_of_malformed_messages_never_fails_in_the_policys_preparation():
    config = TINY.model
    shape = (config.image_size, config.state_dim, config.action_dim, config.horizon)
    processor = word_processor(*shape, "token", ("lift", "block"), (ROBOT,), text_limit=32)
    read = 0
    with Engine(Policy(Pi(config), None, processor), Metrics(), deadline=0, capacity=64) as engine:
        session = engine.join(1)
        for seed in range(500):
            rng = np.random.default_rng(seed)
            with suppress(ValueError):
                message = KINDS[rng.integers(len(KINDS) - 1)](rng)
                read += len(engine.read(unpack(message), session).state) == 3
    assert 10 < read < 200


def frame(opcode, data=b"", *, last=True, masked=True, reserved=0, length=None):
    """A websocket frame that may break the rules."""
    length = len(data) if length is None else length
    short = length if length < 126 else 126 if length < 2**16 else 127
    head = bytes([last << 7 | reserved | opcode, masked << 7 | short])
    head += length.to_bytes({126: 2, 127: 8}.get(short, 0), "big") if short > 125 else b""
    return head + bytes(4 * masked) + data


HEADERS = UPGRADE[:-2]
BROKEN = {
    "a ping in fragments": UPGRADE + frame(9, b"a", last=False),
    "a ping of 126 bytes": UPGRADE + frame(9, bytes(126)),
    "a thousand pings": UPGRADE + frame(9, bytes(125)) * 1000,
    "pongs nobody asked for": UPGRADE + frame(10, b"a") * 1000,
    "a reserved opcode": UPGRADE + frame(3),
    "compressed, though none was offered": UPGRADE + frame(2, bytes(20), reserved=0x40),
    "unmasked": UPGRADE + frame(2, bytes(20), masked=False),
    "a length of 2**63 - 1": UPGRADE + frame(2, length=2**63 - 1),
    "a length of 2**64 - 1": UPGRADE + frame(2, length=2**64 - 1),
    "a continuation of nothing": UPGRADE + frame(0, b"x"),
    "a message within a message": UPGRADE + frame(2, b"x", last=False) + frame(2, b"y"),
    "tens of thousands of empty fragments": (
        UPGRADE + frame(2, last=False) + frame(0, last=False) * 30_000
    ),
    "text that is no UTF-8": UPGRADE + frame(1, b"\xff\xfe"),
    "a closing of one byte": UPGRADE + frame(8, b"x"),
    "a closing with a code that none may send": UPGRADE + frame(8, b"\x03\xed"),
    "a closing whose reason is no UTF-8": UPGRADE + frame(8, b"\x03\xe8\xff"),
    "messages after the closing": UPGRADE + frame(8, b"\x03\xe8") + frame(2, GOOD) * 100,
    "a request and a reset": UPGRADE + frame(2, GOOD) * 3,
    "an offer of compression": (
        HEADERS + b"Sec-WebSocket-Extensions: permessage-deflate; server_max_window_bits=8\r\n\r\n"
    ),
    "hundreds of offers": (
        HEADERS + b"Sec-WebSocket-Extensions: " + b"permessage-deflate," * 400 + b"x\r\n\r\n"
    ),
    "a header of 9,000 bytes": HEADERS + b"X: " + b"a" * 9000 + b"\r\n\r\n",
    "a thousand headers": HEADERS + b"X: a\r\n" * 1000 + b"\r\n",
    "a header without end": HEADERS + b"X: " + b"a" * 2**20,
    "a path that leads out": UPGRADE.replace(b"GET /", b"GET /../../../etc/passwd"),
    "another server's address": UPGRADE.replace(b"GET /", b"GET http://example.org/healthz"),
    "a request within a request": (
        HEADERS + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /metrics"
    ),
    "two requests at once": b"GET /healthz HTTP/1.1\r\n\r\n" * 2,
    "lines without returns": UPGRADE.replace(b"\r\n", b"\n"),
    "another method": UPGRADE.replace(b"GET", b"POST"),
    "another protocol": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a null in a header": HEADERS + b"X: a\0b\r\n\r\n",
    "control sequences in a header": HEADERS + b"Authorization: \x1b[31m\xff\r\n\r\n",
    "two origins": HEADERS + b"Origin: a\r\nOrigin: b\r\n\r\n",
    "no origin by name": HEADERS + b"Origin: null\r\n\r\n",
}


def test_broken_frames_and_headers_cost_nobody_else_anything(caplog):
    with serving() as running, client(running.url) as good:
        for name, said in BROKEN.items():
            with closing(socket.create_connection(("127.0.0.1", running.port))) as raw:
                raw.settimeout(300)
                with suppress(ConnectionError):
                    raw.sendall(said)
                    with suppress(OSError):  # the server has closed it already
                        raw.shutdown(socket.SHUT_WR)
                    while raw.recv(2**16):
                        pass
            assert good.infer(observation(1))["actions"][0, 0] == 1, name
        assert "failed" not in running.server.metrics.text()
    assert running.join() == 0
    assert metric_text(running.server, "chiliad_clients") == 0
    assert not caplog.records, caplog.text


@pytest.mark.parametrize(
    "name", ["two requests at once", "a request within a request", "unmasked", "a reserved opcode"]
)
def test_what_breaks_the_rules_right_behind_a_request_ends_the_connection_quietly(name, caplog):
    """websockets would answer after the end that it has sent, and log an error, where the client
    does not end its side first."""
    with serving() as running:
        with closing(socket.create_connection(("127.0.0.1", running.port))) as raw:
            raw.settimeout(300)
            raw.sendall(BROKEN[name])
            with suppress(ConnectionError):
                while raw.recv(2**16):
                    pass
        with client(running.url) as good:
            assert good.infer(observation(1))["actions"][0, 0] == 1
    assert running.join() == 0
    assert not caplog.records, caplog.text


def metric_text(server, name):
    lines = server.metrics.text().splitlines()
    return float(next(line for line in lines if line.startswith(name)).split()[-1])


def test_hundreds_of_malformed_messages_cost_nobody_else_anything():
    fuzz(300, malformed=200)


@pytest.mark.fuzz
def test_thousands_of_malformed_messages_cost_nobody_else_anything():
    fuzz(7000, malformed=5000)
