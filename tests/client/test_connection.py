"""The connection to a real server: answers, refusals, losses, and that nothing of it stays."""

import asyncio
import socket
import threading
from contextlib import suppress

import numpy as np
import pytest
from websockets.sync.server import serve

from chiliad_client import Backoff, Connection
from tests.helpers.client.bad_network import bad_network
from tests.helpers.tools.served import (
    NEEDS_OPENSSL,
    OBSERVATION,
    Echo,
    Running,
    certificate,
    observation,
    serving,
    until,
)
from tools.serving.limits import Limits
from tools.serving.server import PolicyServer
from tools.serving.wire import pack

QUICK = Backoff(0.01, 0.05)
LONG = 300
LARGE = {**OBSERVATION, "observation/front": np.zeros((3000, 4000, 3), np.uint8)}
"""More than the buffers of a socket hold."""


@pytest.fixture(autouse=True)
def no_thread_stays():
    before = set(threading.enumerate())
    yield
    left = [t for t in set(threading.enumerate()) - before if t.name.startswith("chiliad")]
    assert not left


def number(server):
    """Number of the connection that stands, 0 without one; it may go at any moment."""
    session = server.session
    return 0 if session is None else session.number


def insistent(server, message):
    """The answer, however often a slow machine makes it come too late."""
    while True:
        with suppress(ConnectionError):
            return server.infer(message, LONG)["actions"]


def test_a_chunk_is_asked_for_and_answered():
    with serving() as running, Connection(running.url) as server:
        assert server.wait(LONG).metadata["actions"]["shape"] == [2, 2]
        for value in (0.5, 0.25):
            actions = server.infer(observation(value), LONG)["actions"]
            np.testing.assert_array_equal(actions, np.full((2, 2), value, np.float32))


def test_asking_never_waits_and_arrays_may_be_used_again():
    echo = Echo()
    with serving(echo) as running, Connection(running.url) as server:
        server.wait(LONG)
        echo.gate.clear()
        state = np.full(3, 0.5)
        asked = server.ask({**OBSERVATION, "observation/state": state})
        state[:] = 7
        assert server.answer() is None
        echo.gate.set()
        answers = []
        until(lambda: answers.append(server.answer()) or answers[-1])
        assert answers[-1].number == asked
        assert (answers[-1].content["actions"] == 0.5).all()


def test_what_the_server_refuses_is_said_and_the_connection_stays():
    with serving() as running, Connection(running.url) as server:
        first = server.wait(LONG)
        with pytest.raises(ValueError, match=r"refused the request: .*lacks \['wrist'\]"):
            server.infer({k: v for k, v in OBSERVATION.items() if "wrist" not in k}, LONG)
        assert (server.infer(observation(1.0), LONG)["actions"] == 1).all()
        assert server.session.number == first.number


FOREIGN, SHOWN = "\x1b]52;c;cm0=\x07\x1b[2J", r"\x1b]52;c;cm0=\x07\x1b[2J"


@pytest.mark.parametrize("sent", ["first message", "answer", "reason"])
def test_text_of_a_server_has_no_power_over_the_terminal(sent, caplog):
    def speak(link):
        link.send(FOREIGN if sent == "first message" else pack({"chunking": 5, "inputs": [[]]}))
        link.recv()
        if sent == "answer":
            link.send("Traceback\n" * 1_000_000 + FOREIGN)
            link.recv()
        link.close(1011, FOREIGN)

    with serve(speak, "127.0.0.1", 0) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        url = f"ws://127.0.0.1:{running.socket.getsockname()[1]}"
        with (
            Connection(url, backoff=QUICK) as server,
            pytest.raises((ValueError, ConnectionError)) as caught,
        ):
            server.infer(OBSERVATION, LONG)
        running.shutdown()
        thread.join()
    assert SHOWN in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert FOREIGN not in caplog.text


def test_pictures_come_as_jpeg_where_that_is_wanted():
    picture = np.zeros((48, 64, 3), np.uint8)
    picture[:, 32:] = (200, 30, 60)
    seen = []

    class Seeing(Echo):
        def read(self, message, session):
            seen.append(message)
            return super().read(message, session)

    message = {**OBSERVATION, "observation/front": picture, "observation/wrist": picture}
    with serving(Seeing()) as running, Connection(running.url, jpeg=95) as server:
        server.infer(message, LONG)
    arrived = seen[0]["observation/front"]
    assert arrived.dtype == np.uint8
    assert arrived.shape == picture.shape
    assert np.abs(arrived.astype(int) - picture)[:, :28].max() <= 3
    assert np.abs(arrived.astype(int) - picture)[:, 36:].max() <= 6


def test_a_server_that_reads_no_jpeg_is_refused(monkeypatch):
    monkeypatch.setattr("tools.serving.server.PICTURES", ("raw",))
    with (
        serving() as running,
        Connection(running.url, jpeg=90) as server,
        pytest.raises(ValueError, match="does not read JPEG; leave jpeg out"),
    ):
        server.wait(LONG)


def test_a_cut_connection_is_opened_again():
    with (
        serving() as running,
        bad_network(running.port) as network,
        Connection(network.url, backoff=QUICK) as server,
    ):
        first = server.wait(LONG)
        network.cut()
        until(lambda: number(server) > first.number)
        assert (insistent(server, observation(2.0)) == 2).all()


def test_a_dead_server_is_tried_again_with_growing_pauses():
    assert [Backoff(0.1, 1.0).seconds(n) for n in (1, 2, 3, 4, 5, 5000)] == [
        *(0.1, 0.2, 0.4, 0.8, 1.0, 1.0)
    ]
    with serving() as running, bad_network(running.port) as network:
        network.dead = True
        with Connection(network.url, backoff=QUICK) as server:
            until(lambda: network.connections >= 3)
            assert server.session is None
            with pytest.raises(ConnectionError, match=r"not ready after 0 s: .*server running"):
                server.wait(0)
            network.dead = False
            assert (server.infer(observation(3.0), LONG)["actions"] == 3).all()


def test_a_lost_answer_ends_its_connection_and_never_answers_another_question():
    echo = Echo()
    with (
        serving(echo) as running,
        bad_network(running.port) as network,
        Connection(network.url, backoff=QUICK, answer_within=1.0) as server,
    ):
        first = server.wait(LONG)
        network.loses = True
        with pytest.raises(ConnectionError, match=r"did not answer: no answer within 1 s"):
            server.infer(observation(4.0), LONG)
        network.loses = False
        until(lambda: number(server) > first.number)
        for value in (5.0, 6.0):
            assert (insistent(server, observation(value)) == value).all()


def test_a_link_that_dies_while_a_question_is_sent_is_given_up():
    with (
        serving() as running,
        bad_network(running.port) as network,
        Connection(network.url, backoff=QUICK, answer_within=1.0) as server,
    ):
        first = server.wait(LONG)
        network.stuck = True
        with pytest.raises(ConnectionError, match=r"did not answer: no answer within 1 s"):
            server.infer(LARGE, LONG)
        network.stuck = False
        until(lambda: number(server) > first.number)
        assert (insistent(server, observation(2.0)) == 2).all()


def test_a_link_that_dies_while_a_question_is_sent_can_be_closed():
    with serving() as running, bad_network(running.port) as network:
        server = Connection(network.url, answer_within=LONG).__enter__()
        server.wait(LONG)
        network.stuck = True
        server.ask(LARGE)
        until(lambda: server._waiting is None)
        closing = threading.Thread(target=server.close, daemon=True)
        closing.start()
        closing.join(60)
        assert not closing.is_alive()


def test_an_answer_that_lands_as_the_connection_is_closed_does_not_keep_it_open():
    class Link:
        """A socket whose answer lands in the turn in which the client is closed."""

        async def wait_closed(self):
            await asyncio.Event().wait()

        async def send(self, question):
            self.answer = asyncio.get_running_loop().create_future()

        async def recv(self):
            return await self.answer

    async def ends() -> bool:
        server, link = Connection("ws://127.0.0.1:1"), Link()
        server._loop, server._wake = asyncio.get_running_loop(), asyncio.Event()
        task = asyncio.ensure_future(server._converse(link))
        server.ask(observation(1.0))
        while not hasattr(link, "answer"):
            await asyncio.sleep(0)
        link.answer.set_result("refused")
        await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=1)
        task.cancel()
        return bool(done)

    assert asyncio.run(ends())


def test_a_question_that_nobody_answers_in_time_says_so_and_not_what_was_before():
    echo = Echo()
    with serving(echo) as running, bad_network(running.port) as network:
        network.dead = True
        with Connection(network.url, backoff=QUICK) as server:
            until(lambda: network.connections >= 2)
            network.dead = False
            server.wait(LONG)
            echo.gate.clear()
            with pytest.raises(ConnectionError, match=r"did not answer: no answer within 0.1 s\.$"):
                server.infer(observation(1.0), 0.1)
            echo.gate.set()


def test_a_server_that_is_still_loading_is_waited_for():
    loaded = threading.Event()

    def prepare(report):
        assert loaded.wait(LONG)
        return Echo()

    running = Running(PolicyServer(None), prepare=prepare)
    try:
        with Connection(running.url) as server:
            until(lambda: "has not sent" in server._why)
            with pytest.raises(ConnectionError, match="reached, but has not sent its policy's"):
                server.wait(0.05)
            loaded.set()
            assert server.wait(LONG).number == 1
    finally:
        loaded.set()
        running.stop()
        running.join()


def test_a_token_is_shown_and_a_wrong_one_is_not_tried_twice():
    with serving(token="green") as running:
        with Connection(running.url, "green") as server:
            server.wait(LONG)
        with Connection(running.url, "red") as server:
            with pytest.raises(ValueError, match=r"HTTP 401.*--token-file"):
                server.wait(LONG)
            with pytest.raises(ValueError, match="HTTP 401"):
                assert server.session


def test_a_message_that_is_too_long_says_what_to_do():
    with (
        serving(limits=Limits(message_bytes=2**12)) as running,
        Connection(running.url, backoff=QUICK) as server,
    ):
        message = {**OBSERVATION, "observation/front": np.zeros((64, 64, 3), np.uint8)}
        with pytest.raises(ValueError, match=r"send smaller images or jpeg=90, or raise"):
            server.infer(message, LONG)


@NEEDS_OPENSSL
def test_tls_is_spoken_with_a_certificate_that_is_trusted_and_no_other(tmp_path):
    tls, trusting = certificate(tmp_path)
    with serving(tls=tls) as running:
        with Connection(running.url, tls=trusting) as server:
            assert (server.infer(observation(1.0), LONG)["actions"] == 1).all()
        with (
            Connection(running.url) as server,
            pytest.raises(ValueError, match="certificate that is not trusted"),
        ):
            server.wait(LONG)


def test_what_is_no_policys_server_is_tried_again_and_can_be_closed():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"ws://127.0.0.1:{silent.getsockname()[1]}"
        with Connection(url) as server, pytest.raises(ConnectionError, match="not ready after"):
            server.wait(0.1)


@pytest.mark.parametrize(
    ("given", "why"),
    [({"url": "http://a"}, "give ws://"), ({"url": "ws://a", "jpeg": 0}, "quality from 1 to 100")],
)
def test_what_cannot_be_connected_to_is_refused(given, why):
    with pytest.raises(ValueError, match=why):
        Connection(**given)
