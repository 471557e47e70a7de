"""A server from its first second: it listens at once, says how far it has come, and who came early
is answered when the policy is ready."""

import json
import logging
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from tests.helpers.tools.served import Echo, Running, get, metric, until
from tests.helpers.tools.visitor import NEEDS_CLIENT, visit
from tools.serve import ServeConfig, exposed, silence_vanished
from tools.serving.server import PolicyServer


class Slow:
    """Prepares an Echo when it is let, after three of twelve programs."""

    def __init__(self, error=None):
        self.go, self._error = threading.Event(), error

    def __call__(self, report):
        report(3, 12)
        assert self.go.wait(300)
        if self._error:
            raise self._error
        return Echo()


def starting(error=None):
    slow = Slow(error)
    return slow, Running(PolicyServer(None), prepare=slow)


def test_a_server_listens_at_once_and_says_how_far_it_has_come():
    slow, running = starting()
    until(lambda: get(f"{running.url}/healthz") == (503, "starting 3/12\n"))
    slow.go.set()
    until(lambda: get(f"{running.url}/healthz") == (200, "OK\n"))
    running.stop()
    assert running.join() == 0


def test_who_comes_while_it_starts_is_answered_when_it_is_ready():
    slow, running = starting()
    with connect(running.url, compression=None) as early:
        with pytest.raises(TimeoutError):
            early.recv(timeout=0.01)
        slow.go.set()
        assert "inputs" in json.dumps(early.recv(timeout=300).decode(errors="replace"))
    running.stop()
    assert running.join() == 0


@NEEDS_CLIENT
def test_openpis_client_started_before_the_policy_is_ready_simply_works():
    slow, running = starting()
    with ThreadPoolExecutor() as pool:
        told = pool.submit(visit, running.url, 3)
        until(lambda: metric(running.url, "chiliad_clients"))
        slow.go.set()
        assert told.result(300)["good"] == np.full((2, 2), 0.5).tolist()
    running.stop()
    assert running.join() == 0


def test_who_leaves_while_it_starts_keeps_no_place():
    slow, running = starting()
    with connect(running.url, compression=None):
        until(lambda: metric(running.url, "chiliad_clients"))
    until(lambda: not metric(running.url, "chiliad_clients"))
    slow.go.set()
    running.stop()
    assert running.join() == 0


def test_a_stop_while_it_starts_is_not_kept_waiting_and_told():
    slow, running = starting()
    with connect(running.url, compression=None) as early:
        until(lambda: metric(running.url, "chiliad_clients"))
        running.stop()
        with pytest.raises(ConnectionClosed, match=r"1001.*shutting down"):
            early.recv(timeout=300)
    assert running.join() == 0
    slow.go.set()


def test_a_start_that_fails_ends_the_server_with_its_reason_and_tells_who_waits():
    slow, running = starting(ValueError("the policy cannot be compiled"))
    with connect(running.url, compression=None) as early:
        until(lambda: metric(running.url, "chiliad_clients"))
        slow.go.set()
        with pytest.raises(ConnectionClosed, match=r"1011.*could not start"):
            early.recv(timeout=300)
    with pytest.raises(ValueError, match="cannot be compiled"):
        running.join()


@pytest.mark.slow
def test_the_command_ends_at_once_when_it_is_stopped_while_it_compiles(tmp_path):
    endless = "import sys, threading; from tools import serve; serve.load = lambda config: "
    endless += f"threading.Event().wait(); sys.argv = ['', '--checkpoint', '{tmp_path}', "
    endless += "'--port', '0']; serve.main()"
    process = subprocess.Popen([sys.executable, "-c", endless], stdout=subprocess.PIPE, text=True)
    try:
        assert "Listening on ws://127.0.0.1:" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("mode", "options", "said"),
    [
        (0o600, {}, []),
        (0o644, {}, ["mode 644"]),
        (0o640, {}, ["mode 640"]),
        (0o600, {"host": "0.0.0.0"}, ["Without --certificate, the token and images"]),
        (0o600, {"host": "0.0.0.0", "certificate": "chain.pem"}, []),
        (0o600, {"host": "::1"}, []),
    ],
)
def test_what_others_could_read_is_said_at_start(mode, options, said, tmp_path):
    token = tmp_path / "token"
    token.write_text("green")
    token.chmod(mode)
    lines = exposed(ServeConfig(tmp_path, token_file=token, **options))
    assert len(lines) == len(said)
    assert all(part in line for part, line in zip(said, lines, strict=True))
    assert not any(mode == 0o600 and "chmod" in line for line in lines)


def test_clients_that_vanish_do_not_fill_the_log(caplog, monkeypatch):
    logger = logging.getLogger("asyncio")
    monkeypatch.setattr(logger, "filters", [])
    monkeypatch.setattr(logging.getLogger("websockets.server"), "filters", [])
    silence_vanished()
    logger.warning("socket.send() raised exception.")
    logger.warning("something else")
    assert [record.getMessage() for record in caplog.records] == ["something else"]


def test_a_server_for_everybody_says_that_it_is(tmp_path):
    lines = exposed(ServeConfig(tmp_path, host="0.0.0.0"))
    assert "Without --token-file" in lines[0]
    assert "images and actions cross the network unencrypted" in lines[1]
