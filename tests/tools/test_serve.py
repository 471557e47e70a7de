"""The policy server over a socket: what a good client gets, and that another's mistakes, haste or
size cost nobody else anything."""

import itertools
import socket
import ssl
import threading
from contextlib import closing

import numpy as np
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
    get,
    metric,
    observation,
    serving,
    until,
)
from tools.serving.limits import Allowance, Limits
from tools.serving.server import PolicyServer
from tools.serving.wire import pack


def test_a_client_reads_metadata_and_gets_chunks_with_their_timing():
    with serving() as running, client(running.url) as robot:
        assert robot.metadata["inputs"]["observation/front"]["dtype"] == "uint8"
        first, second = (robot.infer(observation(x)) for x in (0.25, 0.5))
    np.testing.assert_array_equal(first["actions"], np.full((2, 2), 0.25, np.float32))
    np.testing.assert_array_equal(second["actions"], np.full((2, 2), 0.5, np.float32))
    assert first["policy_timing"] == {"infer_ms": 1}
    assert first["server_timing"].keys() == {"infer_ms"}
    assert second["server_timing"].keys() == {"infer_ms", "prev_total_ms"}


def test_answers_come_in_the_order_of_a_clients_requests():
    with serving() as running, client(running.url) as robot:
        for value in range(20):
            robot.connection.send(pack(observation(value)))
        assert [robot.receive()["actions"][0, 0] for _ in range(20)] == list(range(20))


def test_a_session_remembers_the_chunk_it_was_given_and_no_other_sessions():
    echo = Echo()
    with serving(echo) as running, client(running.url) as one, client(running.url) as other:
        one.infer(observation(1))
        other.infer(observation(2))
        one.infer(observation(3))
        assert [session.number for session in echo.sessions] == [1, 2, 1]
        assert [session.requests for session in echo.sessions[:2]] == [2, 1]
        assert [session.chunk[0, 0] for session in echo.sessions[:2]] == [3, 2]


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (b"\xc1", "not msgpack"),
        ("text", "binary"),
        (pack({k: v for k, v in OBSERVATION.items() if "wrist" not in k}), "lacks.*wrist"),
        (pack({**OBSERVATION, "prompt": "fail"}), "server failed"),
        (pack({**OBSERVATION, "prompt": "nan"}), "not finite"),
    ],
)
def test_a_mistake_is_answered_by_a_text_and_the_session_goes_on(message, why):
    with serving() as running, client(running.url) as robot:
        with pytest.raises(ValueError, match=why) as caught:
            robot.send(message)
        assert "secret" not in str(caught.value)
        assert robot.infer(observation(1))["actions"][0, 0] == 1


def test_a_message_over_the_limit_ends_its_own_connection_alone():
    with serving(limits=Limits(message_bytes=1000)) as running, client(running.url) as good:
        with client(running.url) as bad, pytest.raises(ConnectionClosed, match=r"1009.*1000 bytes"):
            bad.send(bytes(1001))
        assert good.infer(observation(1))["actions"][0, 0] == 1


def test_a_message_in_endless_fragments_ends_its_own_connection_alone():
    with serving() as running, client(running.url) as good:
        with client(running.url) as whole:
            half = pack(observation(2))
            whole.connection.send([half[:9], b"", half[9:]])
            assert whole.receive()["actions"][0, 0] == 2
        with client(running.url) as bad, pytest.raises(ConnectionClosed, match="256 fragments"):
            bad.send(itertools.repeat(b"", 10_000))
        assert good.infer(observation(1))["actions"][0, 0] == 1


def test_who_asks_too_fast_is_told_and_others_are_not():
    with serving(limits=Limits(rate=0.001)) as running, client(running.url) as hasty:
        hasty.infer(observation(1))
        with pytest.raises(ValueError, match="Too fast"):
            hasty.infer(observation(2))
        with client(running.url) as other:
            assert other.infer(observation(3))["actions"][0, 0] == 3


def test_an_allowance_refills_steadily_up_to_a_second():
    allowance = Allowance(rate=2, since=0)
    assert [allowance.take(0) for _ in range(3)] == [True, True, False]
    assert [allowance.take(t) for t in (0.4, 0.5, 0.6, 1.0)] == [False, True, False, True]
    assert [allowance.take(100) for _ in range(3)] == [True, True, False]


def test_a_client_over_the_number_is_refused_until_another_leaves():
    with serving(limits=Limits(clients=1)) as running:
        with client(running.url), pytest.raises(InvalidStatus, match="503"), client(running.url):
            pass
        until(lambda: not metric(running.url, "chiliad_clients"))
        with client(running.url) as robot:
            assert robot.infer(observation(1))["actions"][0, 0] == 1


@pytest.mark.parametrize("field", ["clients", "handshakes", "message_bytes", "rate"])
def test_a_limit_that_lets_nobody_in_is_refused(field):
    with pytest.raises(ValueError, match=field):
        Limits(**{field: 0})


def test_health_is_open_and_metrics_count_what_happened():
    with serving() as running, client(running.url) as robot:
        robot.infer(observation(1))
        with pytest.raises(ValueError, match="not msgpack"):
            robot.send(b"\xc1")
        assert get(f"{running.url}/healthz") == (200, "OK\n")
        assert metric(running.url, "chiliad_clients") == 1
        assert metric(running.url, 'chiliad_requests_total{outcome="answered"}') == 1
        assert metric(running.url, 'chiliad_requests_total{outcome="bad_input"}') == 1
        assert metric(running.url, "chiliad_request_seconds_count") == 1
        assert metric(running.url, "chiliad_pending_requests") == 0


def test_without_its_token_a_server_tells_only_that_it_is_alive():
    with serving(token="green") as running:
        for headers in (
            *({}, {"Authorization": "Bearer red"}, {"Authorization": "Basic green"}),
            *({"Authorization": "Bearer grün"}, {"Authorization": "green"}),
        ):
            with (
                pytest.raises(InvalidStatus, match="401"),
                client(running.url, additional_headers=headers),
            ):
                pass
        assert get(f"{running.url}/healthz")[0] == 200
        assert get(f"{running.url}/metrics")[0] == 401


@pytest.mark.parametrize(
    ("scheme", "token"), [("Bearer", "green"), ("Api-Key", "green"), ("Bearer", "grün")]
)
def test_the_token_opens_the_server_to_openpis_clients_and_others(scheme, token):
    header = {"Authorization": f"{scheme} {token}"}
    with (
        serving(token=token) as running,
        client(running.url, additional_headers=header) as robot,
    ):
        assert robot.infer(observation(1))["actions"][0, 0] == 1


def test_the_token_opens_the_metrics():
    with serving(token="green") as running:
        assert get(f"{running.url}/metrics", "green")[0] == 200


def test_a_web_page_cannot_reach_the_server_from_a_browser():
    with (
        serving() as running,
        pytest.raises(InvalidStatus, match="403"),
        client(running.url, origin="https://example.org"),
    ):
        pass


@NEEDS_OPENSSL
def test_messages_are_encrypted_with_a_certificate(tmp_path):
    tls, trusted = certificate(tmp_path)
    with serving(tls=tls) as running:
        with client(running.url, ssl=trusted) as robot:
            assert robot.infer(observation(1))["actions"][0, 0] == 1
        with pytest.raises(ssl.SSLCertVerificationError), client(running.url):
            pass


def test_a_drain_answers_what_is_in_flight_and_lets_nobody_in():
    echo = Echo()
    running = Running(PolicyServer(echo))
    with client(running.url) as busy, client(running.url) as idle:
        echo.gate.clear()
        answer: list = []
        thread = threading.Thread(target=lambda: answer.append(busy.infer(observation(1))))
        thread.start()
        until(lambda: metric(running.url, "chiliad_pending_requests"))
        running.stop()
        with pytest.raises(ConnectionClosed, match=r"1001.*shutting down"):
            idle.receive()
        assert get(f"{running.url}/healthz") == (503, "draining\n")
        with pytest.raises(InvalidStatus, match="503"), client(running.url):
            pass
        echo.gate.set()
        thread.join(60)
        assert answer[0]["actions"][0, 0] == 1
        with pytest.raises(ConnectionClosed, match=r"1001.*shutting down"):
            busy.receive()
    assert running.join() == 0
    with pytest.raises(ConnectionRefusedError), client(running.url):
        pass


def test_what_has_arrived_when_the_server_is_stopped_is_answered():
    running = Running(PolicyServer(Echo()))
    with client(running.url) as robot, client(running.url) as hasty, client(running.url) as idle:
        with running.busy_loop():
            running.stop()
            robot.connection.send(pack(observation(1)))
            for value in range(2, 5):
                hasty.connection.send(pack(observation(value)))
        assert robot.receive()["actions"][0, 0] == 1
        assert [hasty.receive()["actions"][0, 0] for _ in range(3)] == [2, 3, 4]
        for one in (robot, hasty, idle):
            with pytest.raises(ConnectionClosed, match=r"1001.*shutting down"):
                one.receive()
    assert running.join() == 0


def test_a_client_that_hears_nothing_is_not_waited_for_when_the_server_stops(monkeypatch):
    monkeypatch.setattr("tools.serving.server._HEARD_SECONDS", 0.05)
    running = Running(PolicyServer(Echo(), limits=Limits(drain_seconds=300)))
    with closing(socket.create_connection(("127.0.0.1", running.port))) as deaf:
        deaf.sendall(UPGRADE)
        until(lambda: metric(running.url, "chiliad_clients"))
        running.stop()
        assert running.join() == 0


def test_a_drain_cuts_off_who_is_not_done_in_time():
    echo = Echo()
    running = Running(PolicyServer(echo, limits=Limits(drain_seconds=0.05)))
    with client(running.url) as robot:
        echo.gate.clear()
        robot.connection.send(pack(OBSERVATION))
        until(lambda: metric(running.url, "chiliad_pending_requests"))
        running.stop()
        assert running.join() == 1
        echo.gate.set()


def test_a_client_that_vanishes_with_a_request_in_flight_leaves_nothing_behind():
    echo = Echo()
    with serving(echo) as running:
        echo.gate.clear()
        with client(running.url) as robot:
            robot.connection.send(pack(OBSERVATION))
            until(lambda: metric(running.url, "chiliad_pending_requests"))
            robot.connection.socket.close()
        echo.gate.set()
        until(lambda: not metric(running.url, "chiliad_clients"))
        assert metric(running.url, "chiliad_pending_requests") == 0
    assert echo.clients == 0
