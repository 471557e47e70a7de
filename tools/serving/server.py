"""A policy behind a websocket, as openpi's clients expect it: metadata on connecting, then an
observation in and an action chunk out, as often as they like; errors come back as text.

Beyond openpi's server, a client's bad message affects only that client, requests of many clients
run as one batch, and there are a health check, metrics, a token, limits and a drain that loses
nothing.
"""

import asyncio
import hmac
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from ssl import SSLContext
from typing import Any, Protocol

import numpy as np
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode
from websockets.http11 import Request, Response

from models.files.terminal import logger
from models.session import RobotSession
from tools.serving.client import ConnectedClient, Reply
from tools.serving.connection import BoundedConnection
from tools.serving.limits import Allowance, Limits
from tools.serving.listener import Listener, listen
from tools.serving.metrics import CONTENT_TYPE, Metrics
from tools.serving.startup import in_background
from tools.serving.wire import PICTURES, pack, unpack

log = logger(__name__)

_FRAGMENTS = 256
_OPENING_SECONDS = 10
"""Limit of a whole handshake, for TLS and for the websocket each."""
_HEARD_SECONDS = 2
"""Limit for a client's answer to a ping or a close when the server shuts down."""
_SHUTTING_DOWN = (CloseCode.GOING_AWAY, "The server is shutting down.")
_NOT_STARTED = (CloseCode.INTERNAL_ERROR, "The server could not start; its log says why.")

Report = Callable[[int, int], None]
"""Called with (programs compiled, programs to compile)."""


class Answers(Protocol):
    """A policy as the server sees it."""

    metadata: Mapping[str, Any]

    def join(self, number: int) -> RobotSession:
        """Adds a client, for whose requests others may wait; returns its robot's session."""

    def leave(self) -> None:
        """Notes that the client has gone."""

    def read(self, message: Mapping[str, Any], session: RobotSession) -> Any:
        """The prepared request; may be called in any thread.

        Raises:
          ValueError: the message is not what the policy reads.
        """

    def submit(self, request: Any) -> Future[Reply]:
        """The answer, available when the request's batch has run."""


@dataclass
class PolicyServer:
    """Serves one policy. `answers`: None if `run` is to prepare them. `token`: token that clients
    must present, as `Authorization: Bearer …` or openpi's `Api-Key …`. `ended`: functions that are
    called with each client that leaves."""

    answers: Answers | None
    limits: Limits = field(default_factory=Limits)
    token: str | None = None
    metrics: Metrics = field(default_factory=Metrics)
    ended: list[Callable[[ConnectedClient], None]] = field(default_factory=list)
    draining: bool = field(default=False, init=False)
    _clients: set[ConnectedClient] = field(default_factory=set, init=False)
    _opened: int = field(default=0, init=False)
    _listeners: list[Listener] = field(default_factory=list, init=False)
    _ready: asyncio.Future[Answers] = field(init=False)
    _compiled: str = field(default="", init=False)
    _closing: set[asyncio.Task[None]] = field(default_factory=set, init=False)

    async def run(
        self,
        host: str,
        port: int,
        stop: asyncio.Event,
        *,
        tls: SSLContext | None = None,
        listening: Callable[[int], None] = lambda port: None,
        prepare: Callable[[Report], Answers] | None = None,
        ready: Callable[[int, Answers], None] = lambda port, answers: None,
    ) -> int:
        """Serves until `stop` is set, then answers the requests that have arrived and accepts no
        new clients. Returns how many clients were cut off because that took longer than
        `limits.drain_seconds`.

        Args:
          port: 0 for any that is free.
          listening: called with the port when clients may connect.
          prepare: makes `answers` in a thread, while clients wait for the server's first message.
          ready: called with the port and the answers when clients are answered.

        Raises:
          ValueError: the address cannot be listened on.
          Exception: whatever `prepare` raises.
        """
        self._listeners = listen(host, port, self.limits.handshakes)
        bound = self._listeners[0].getsockname()[1]
        self._ready = self._prepared(prepare)
        async with AsyncExitStack() as stack:
            for listener in self._listeners:
                await stack.enter_async_context(self._serve(listener, tls))
            listening(bound)
            stopped = asyncio.ensure_future(stop.wait())
            await _first(self._ready, stopped)
            self.answers = self._result()
            if self.answers is not None:
                ready(bound, self.answers)
                await stopped
            stopped.cancel()
            late = await self._drain()
        if self._ready.done():
            self._ready.result()
        return late

    def _prepared(self, prepare: Callable[[Report], Answers] | None) -> asyncio.Future[Answers]:
        if prepare is not None:
            return in_background(lambda: prepare(self._report))
        if self.answers is None:
            raise ValueError("A server without answers needs `prepare` to make them.")
        ready: asyncio.Future[Answers] = asyncio.get_running_loop().create_future()
        ready.set_result(self.answers)
        return ready

    def _result(self) -> Answers | None:
        """The answers; None while they are being prepared, and if that failed."""
        if not self._ready.done() or self._ready.exception() is not None:
            return None
        return self._ready.result()

    def _serve(self, listener: Listener, tls: SSLContext | None) -> Server:
        return serve(
            self._session,
            sock=listener,
            ssl=tls,
            compression=None,
            origins=[None],
            open_timeout=_OPENING_SECONDS,
            max_size=self.limits.message_bytes,
            max_queue=1,
            close_timeout=_HEARD_SECONDS,
            process_request=self._admit,
            create_connection=BoundedConnection,
            ssl_handshake_timeout=None if tls is None else _OPENING_SECONDS,
        )

    def _report(self, done: int, of: int) -> None:
        self._compiled = f" {done}/{of}"

    def _health(self) -> str:
        if self.draining:
            return "draining"
        return "OK" if self.answers is not None else f"starting{self._compiled}"

    def _admit(self, connection: ServerConnection, request: Request) -> Response | None:
        path = request.path.partition("?")[0]
        if path == "/healthz":
            health = self._health()
            status = HTTPStatus.OK if health == "OK" else HTTPStatus.SERVICE_UNAVAILABLE
            return connection.respond(status, f"{health}\n")
        if not self._is_trusted(request.headers.get_all("Authorization")):
            self.metrics.refused.labels("token").inc()
            response = connection.respond(HTTPStatus.UNAUTHORIZED, "A valid token is needed.\n")
            response.headers["WWW-Authenticate"] = "Bearer"
            return response
        if path == "/metrics":
            response = connection.respond(HTTPStatus.OK, self.metrics.text())
            del response.headers["Content-Type"]
            response.headers["Content-Type"] = CONTENT_TYPE
            return response
        refusal = self._refusal()
        if refusal:
            return connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, f"{refusal}\n")
        return None

    def _is_trusted(self, presented: list[str]) -> bool:
        if self.token is None:
            return True
        scheme, _, token = (presented[0] if len(presented) == 1 else "").partition(" ")
        known = scheme.lower() in ("bearer", "api-key")
        sent = token.strip().encode(errors="surrogateescape")
        return known & hmac.compare_digest(sent, self.token.encode())

    def _refusal(self) -> str | None:
        if self.draining:
            self.metrics.refused.labels("draining").inc()
            return "The server is shutting down."
        if len(self._clients) >= self.limits.clients and self._idlest() is None:
            self.metrics.refused.labels("full").inc()
            return (
                f"The server already has {self.limits.clients} clients, its limit; try again later."
            )
        return None

    def _idlest(self) -> ConnectedClient | None:
        """The client whose place another may take, if any."""
        before = time.monotonic() - self.limits.idle_seconds
        idle = [one for one in self._clients if not one.busy and one.since <= before]
        return min(idle, key=lambda client: client.since, default=None)

    def _make_room(self) -> None:
        idlest = self._idlest()
        if len(self._clients) < self.limits.clients or idlest is None:
            return
        self._clients.remove(idlest)
        self.metrics.replaced.inc()
        seconds = time.monotonic() - idlest.since
        why = (
            f"After {seconds:.0f} idle seconds, your place was given to another client; connect "
            "again."
        )
        task = asyncio.create_task(idlest.connection.close(CloseCode.TRY_AGAIN_LATER, why))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _session(self, connection: ServerConnection) -> None:
        for listener in self._listeners:
            listener.opened(connection.remote_address)
        refusal = self._refusal()
        if refusal:
            await connection.close(CloseCode.TRY_AGAIN_LATER, refusal)
            return
        self._make_room()
        self._opened += 1
        client = ConnectedClient(self._opened, connection, Allowance(self.limits.rate))
        client.last_call = asyncio.get_running_loop().create_future()
        self._clients.add(client)
        self.metrics.clients.inc()
        try:
            answers = await self._answers(client)
            if answers is not None:
                await self._converse(client, answers)
            failed = self._ready.done() and self._ready.exception() is not None
            await connection.close(*(_NOT_STARTED if failed else _SHUTTING_DOWN))
        except ConnectionClosed:
            log.debug("client %d left", client.number)
        finally:
            self._clients.discard(client)
            self.metrics.clients.dec()
            for tell in self.ended:
                tell(client)

    async def _answers(self, client: ConnectedClient) -> Answers | None:
        """The policy, as soon as it is ready; None if the client leaves or the server stops."""
        left = asyncio.ensure_future(client.connection.wait_closed())
        try:
            await _first(self._ready, left, client.last_call)
        finally:
            left.cancel()
        return self._result()

    async def _converse(self, client: ConnectedClient, answers: Answers) -> None:
        """Answers a client's messages until its last call."""
        session = answers.join(client.number)
        try:
            await client.connection.send(pack({**answers.metadata, "pictures": PICTURES}))
            while True:
                client.since, client.busy = time.monotonic(), False
                message = await _receive(client)
                if message is None:
                    return
                client.busy = True
                await client.connection.send(await self._answer(message, client, session, answers))
        finally:
            answers.leave()

    async def _answer(
        self,
        message: bytes | str,
        client: ConnectedClient,
        session: RobotSession,
        answers: Answers,
    ) -> bytes | str:
        """Packed actions, or the error as text."""
        began = time.monotonic()
        if not client.allowance.take(began):
            self.metrics.requests.labels("too_fast").inc()
            return f"Too fast: a client may send {self.limits.rate:g} requests per second."
        with self.metrics.pending.track_inprogress():
            try:
                try:
                    request = await asyncio.to_thread(_read, message, session, answers)
                except ValueError as error:
                    self.metrics.requests.labels("bad_input").inc()
                    return str(error)
                answer = await asyncio.wrap_future(answers.submit(request))
            except Exception:
                log.exception("a request of client %d failed", client.number)
                self.metrics.requests.labels("failed").inc()
                return "The server failed on this request; its log says why."
        if not np.isfinite(answer.actions).all():
            self.metrics.requests.labels("failed").inc()
            return "The policy's actions are not finite and were not sent."
        waited = time.monotonic() - began
        self.metrics.requests.labels("answered").inc()
        self.metrics.request_seconds.observe(waited)
        actions = session.answered(answer.actions)
        timing = {"infer_ms": waited * 1000}
        if client.total_ms is not None:
            timing["prev_total_ms"] = client.total_ms
        told = {} if answer.subtask is None else {"subtask": answer.subtask}
        packed = pack(
            {
                "actions": actions,
                **told,
                "policy_timing": {"infer_ms": answer.seconds * 1000},
                "server_timing": timing,
            }
        )
        client.total_ms = (time.monotonic() - began) * 1000
        return packed

    async def _drain(self) -> int:
        self.draining = True
        calls = {asyncio.create_task(_call_last(client)) for client in self._clients}
        tasks = calls | {client.task for client in self._clients if client.task}
        if tasks:
            await asyncio.wait(tasks, timeout=self.limits.drain_seconds)
        late = [client.task for client in self._clients if client.task]
        for task in late:
            task.cancel()
        if late:
            log.warning("%d clients were cut off with a request in flight", len(late))
        for listener in self._listeners:
            listener.shut_opening()
        return len(late)


async def _first(*futures: asyncio.Future[Any]) -> None:
    """Returns when one of them is done."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


async def _call_last(client: ConnectedClient) -> None:
    """Lets a client go when all is answered that it had sent before its pong."""
    with suppress(ConnectionClosed, TimeoutError):
        async with asyncio.timeout(_HEARD_SECONDS):
            await (await client.connection.ping())
    client.last_call.set_result(None)


async def _receive(client: ConnectedClient) -> bytes | str | None:
    """The next message, or None if the client's last call comes before one."""
    message = asyncio.ensure_future(_message(client.connection))
    try:
        await _first(message, client.last_call)
        if not message.done():
            await asyncio.sleep(0)  # what has arrived is taken in one turn of the event loop
        return message.result() if message.done() else None
    finally:
        message.cancel()


async def _message(connection: ServerConnection) -> bytes | str | None:
    """The next message. If it comes in too many fragments, closes the connection and returns None:
    empty fragments count towards no size limit and would fill the memory."""
    parts: list[Any] = []
    async for part in connection.recv_streaming():
        parts.append(part)
        if len(parts) > _FRAGMENTS:
            why = f"A message has more than {_FRAGMENTS} fragments."
            await connection.close(CloseCode.MESSAGE_TOO_BIG, why)
            return None
    return parts[0] if len(parts) == 1 else type(parts[0])().join(parts)


def _read(message: bytes | str, session: RobotSession, answers: Answers) -> Any:
    if isinstance(message, str):
        raise ValueError("The message is text; send msgpack in a binary message.")
    return answers.read(unpack(message), session)
