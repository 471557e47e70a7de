"""A server in a thread, for tests, and a policy that answers with what it was asked."""

import asyncio
import shutil
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
from websockets.sync.client import connect

from models.inputs.embodiment import Embodiment, Normalizer
from models.inputs.observation import Inputs, inputs_of
from models.session import RobotSession
from tools.serving.client import Reply
from tools.serving.inputs import read_message
from tools.serving.server import PolicyServer
from tools.serving.wire import pack, unpack

ROBOT = Embodiment(
    "arm",
    ("observation.images.front", "observation.images.wrist"),
    Normalizer((0.0,) * 3, (1.0,) * 3),
    Normalizer((0.0,) * 2, (1.0,) * 2),
)
PICTURE = np.arange(6 * 8 * 3, dtype=np.uint8).reshape(6, 8, 3)
OBSERVATION = {
    "observation/front": PICTURE,
    "observation/wrist": PICTURE,
    "observation/state": np.zeros(3),
    "prompt": "lift the red block",
}
UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


def free_port():
    """A port of the loopback for a server that is yet to begin."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


def observation(value):
    return {**OBSERVATION, "observation/state": np.full(3, value)}


@dataclass
class Echo:
    """Chunks [2, 2] of the state's first number, when `gate` is open."""

    gate: threading.Event = field(default_factory=threading.Event)
    inputs: Inputs = field(default_factory=lambda: inputs_of(ROBOT, reads_state=True))
    clients: int = 0
    sessions: list = field(default_factory=list)
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(16))

    def __post_init__(self):
        self.gate.set()

    @property
    def metadata(self):
        return {"inputs": self.inputs.expected, "actions": {"shape": [2, 2]}}

    def join(self, number):
        self.clients += 1
        return RobotSession(number)

    def leave(self):
        self.clients -= 1

    def read(self, message, session):
        self.sessions.append(session)
        return read_message(self.inputs, message)

    def submit(self, request) -> Future:
        def answer():
            assert self.gate.wait(300)
            asked = request.observation
            if asked.prompt == "fail":
                raise RuntimeError("a secret of the server")
            if asked.prompt == "nan":
                return Reply(np.full((2, 2), np.nan), 0.001)
            return Reply(np.full((2, 2), asked.state[0], np.float32), 0.001)

        return self.pool.submit(answer)


class Running:
    """A server that listens; `stop()` is its SIGTERM, `join()` gives how many were cut off."""

    def __init__(self, server: PolicyServer, tls=None, prepare=None):
        self.server, self._tls, self._prepare = server, tls, prepare
        self._started = threading.Event()
        self._result: Future = Future()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._started.wait(300)

    def _serve(self):
        async def main():
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            return await self.server.run(
                *("127.0.0.1", 0, self._stop),
                tls=self._tls,
                listening=self._listening,
                prepare=self._prepare,
            )

        try:
            self._result.set_result(asyncio.run(main()))
        except Exception as error:
            self._result.set_exception(error)

    def _listening(self, port):
        self.port = port
        self._started.set()

    @property
    def url(self):
        return f"{'ws' if self._tls is None else 'wss'}://127.0.0.1:{self.port}"

    def stop(self):
        self._loop.call_soon_threadsafe(self._stop.set)

    @contextmanager
    def busy_loop(self):
        """The server's event loop hears nothing meanwhile."""
        held, let_go = threading.Event(), threading.Event()
        self._loop.call_soon_threadsafe(lambda: (held.set(), let_go.wait(300)))
        assert held.wait(300)
        try:
            yield
        finally:
            let_go.set()

    def join(self):
        return self._result.result(300)


@contextmanager
def serving(answers=None, tls=None, **options):
    running = Running(PolicyServer(answers or Echo(), **options), tls)
    try:
        yield running
    finally:
        running.stop()
        running.join()


def certificate(folder):
    """TLS contexts of a server at 127.0.0.1, and of a client that trusts it."""
    key, chain = folder / "key.pem", folder / "certificate.pem"
    subject = "/CN=robot -addext subjectAltName=IP:127.0.0.1"
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj {subject}".split()
    subprocess.run([*command, "-keyout", key, "-out", chain], check=True, capture_output=True)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(chain, key)
    return tls, ssl.create_default_context(cafile=chain)


NEEDS_OPENSSL = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="needs the openssl command"
)


@contextmanager
def client(url, **options):
    with connect(url, compression=None, max_size=None, **options) as connection:
        yield Client(connection)


class Client:
    """Client like openpi's, with errors as ValueError."""

    def __init__(self, connection):
        self.connection = connection
        self.metadata = unpack(connection.recv(timeout=300))

    def infer(self, message):
        return self.send(pack(message))

    def send(self, data):
        self.connection.send(data)
        return self.receive()

    def receive(self):
        answer = self.connection.recv(timeout=300)
        if isinstance(answer, str):
            raise ValueError(answer)
        return unpack(answer)


def get(url, token=None):
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url.replace("ws", "http", 1), headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def metric(url, name):
    lines = get(f"{url}/metrics")[1].splitlines()
    return float(next(line for line in lines if line.startswith(name)).split()[-1])


def until(holds):
    deadline = time.monotonic() + 300
    while not holds():
        assert time.monotonic() < deadline
