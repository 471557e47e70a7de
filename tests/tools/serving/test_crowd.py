"""Clients that take places without using them, by silent and slow connections or never asking, cost
a good client nothing but a moment."""

import logging
import os
import resource
import socket
import subprocess
import sys
from contextlib import ExitStack, closing, contextmanager, suppress

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tests.helpers.tools.served import (
    NEEDS_OPENSSL,
    OBSERVATION,
    UPGRADE,
    Echo,
    Running,
    certificate,
    client,
    metric,
    observation,
    serving,
    until,
)
from tools.serving import listener
from tools.serving.limits import Limits
from tools.serving.listener import listen, reserve_descriptors
from tools.serving.server import PolicyServer
from tools.serving.wire import pack

CLIENT_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01"
FEW = Limits(handshakes=8)


@contextmanager
def stalled(port, count, said):
    """Connections that say this and no more."""
    with ExitStack() as stack:
        opened = []
        for _ in range(count):
            raw = stack.enter_context(closing(socket.create_connection(("127.0.0.1", port))))
            with suppress(ConnectionError):
                raw.sendall(said)
            opened.append(raw)
        yield opened


def is_shut(raw):
    raw.settimeout(0.001)
    try:
        return raw.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


@pytest.mark.parametrize("said", [b"", UPGRADE[:-2], b"GET /"])
def test_the_oldest_of_many_stalled_handshakes_are_ended_and_a_good_client_is_served(said):
    with serving(limits=FEW) as running, client(running.url) as early:
        with stalled(running.port, 100, said) as raws, client(running.url) as good:
            assert good.infer(observation(1))["actions"][0, 0] == 1
            until(lambda: sum(map(is_shut, raws[:92])) == 92)
        assert early.infer(observation(2))["actions"][0, 0] == 2


@NEEDS_OPENSSL
def test_stalled_handshakes_of_tls_are_ended_too(tmp_path):
    tls, trusted = certificate(tmp_path)
    with (
        serving(tls=tls, limits=FEW) as running,
        stalled(running.port, 50, CLIENT_HELLO) as raws,
        client(running.url, ssl=trusted) as good,
    ):
        assert good.infer(observation(1))["actions"][0, 0] == 1
        until(lambda: sum(map(is_shut, raws[:42])) == 42)


def test_silent_connections_do_not_delay_the_end():
    running = Running(PolicyServer(Echo()))
    with stalled(running.port, 3, b"") as raws:
        until(lambda: len(running.server._listeners[0]._opening) == 3)
        running.stop()
        assert running.join() == 0
        assert all(map(is_shut, raws))


def test_without_descriptors_newcomers_are_closed_with_one_line_in_the_log(caplog):
    (door,) = listen("127.0.0.1", 0, handshakes=8)
    address = door.getsockname()
    with closing(door), ExitStack() as stack:
        door.setblocking(False)
        waiting = [stack.enter_context(socket.create_connection(address)) for _ in range(20)]
        with no_descriptors(), caplog.at_level(logging.WARNING):
            for _ in waiting:
                with pytest.raises(BlockingIOError):
                    door.accept()
        assert all(map(is_shut, waiting)), "one would wake the event loop for ever"
        assert len(caplog.records) == 1
        assert "closed unanswered" in caplog.text
        stack.enter_context(socket.create_connection(address))
        door.setblocking(True)
        stack.enter_context(door.accept()[0])


@contextmanager
def no_descriptors():
    """All that may be open is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.dup(0)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/dev/fd"))) + 3, hard))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in taken:
            os.close(number)


def test_descriptors_for_all_clients_are_reserved_at_start_or_it_says_how(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 1024))
    asked = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    reserve_descriptors(Limits(clients=64))
    assert asked == [(2 * 64 + 64 + listener._OWN_FILES, 1024)]
    with pytest.raises(ValueError, match=r"500 clients.*may have 1024.*--limits.clients"):
        reserve_descriptors(Limits(clients=500))


def test_a_newcomer_takes_the_place_of_the_client_that_is_idle_longest():
    with (
        serving(limits=Limits(clients=2, idle_seconds=0)) as running,
        client(running.url) as first,
        client(running.url) as second,
    ):
        first.infer(observation(1))
        with client(running.url) as newcomer:
            assert newcomer.infer(observation(2))["actions"][0, 0] == 2
            with pytest.raises(ConnectionClosed, match=r"1013.*another client; connect again"):
                second.receive()
            assert first.infer(observation(3))["actions"][0, 0] == 3
            assert metric(running.url, "chiliad_replaced_clients_total") == 1
            until(lambda: metric(running.url, "chiliad_clients") == 2)


def test_nobody_with_a_request_in_flight_loses_its_place():
    echo = Echo()
    with (
        serving(echo, limits=Limits(clients=1, idle_seconds=0)) as running,
        client(running.url) as busy,
    ):
        echo.gate.clear()
        busy.connection.send(pack(OBSERVATION))
        until(lambda: metric(running.url, "chiliad_pending_requests"))
        with pytest.raises(InvalidStatus, match="503"), client(running.url):
            pass
        echo.gate.set()
        assert busy.receive()["actions"][0, 0] == 0


PING = b"\x89\xfd" + bytes(4 + 125)


def test_a_client_that_pings_without_end_and_reads_no_answer_is_not_read_any_more():
    with serving() as running, client(running.url) as good, closing(socket.socket()) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        deaf.connect(("127.0.0.1", running.port))
        deaf.sendall(UPGRADE)
        deaf.settimeout(0.3)
        with pytest.raises(TimeoutError):
            flood(deaf, 16 * 2**20)
        assert good.infer(observation(1))["actions"][0, 0] == 1
        held = [c.transport.get_write_buffer_size() for c in connections(running)]
        assert max(held) < 2**18


def flood(raw, size):
    pings = PING * 1000
    for _ in range(size // len(pings)):
        raw.sendall(pings)


def connections(running):
    return [one.connection for one in running.server._clients]


SERVER = """
import asyncio, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (640, 640))
from tests.helpers.tools.served import Echo
from tools.serving.server import PolicyServer
def listening(port): print(port, flush=True)
async def main():
    await PolicyServer(Echo()).run("127.0.0.1", 0, asyncio.Event(), listening=listening)
asyncio.run(main())
"""


@pytest.mark.fuzz
def test_a_thousand_silent_sockets_take_no_descriptors_and_say_nothing():
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        port = int(process.stdout.readline())
        with client(f"ws://127.0.0.1:{port}") as early, stalled(port, 1000, b""):
            for value in range(50):
                with client(f"ws://127.0.0.1:{port}") as good:
                    assert good.infer(observation(value))["actions"][0, 0] == value
            assert early.infer(observation(0.5))["actions"][0, 0] == 0.5
    finally:
        process.terminate()
    assert process.communicate()[1] == ""
