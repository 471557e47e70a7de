"""A policy behind a websocket, as openpi's clients expect it: metadata on connecting, then an
observation in and an action chunk out, as often as they like; what is wrong comes back as text.

Beyond openpi's server: a client's bad message costs only that client, requests of many clients run
as one batch, and health, metrics, a token, limits and a drain that loses nothing.
"""

import asyncio
import hmac
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from http import HTTPStatus
from ssl import SSLContext
from typing import Any, Protocol

import numpy as np
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode
from websockets.http11 import Request, Response

from models.terminal import logger
from tools.serving.limits import Allowance, Limits
from tools.serving.metrics import CONTENT_TYPE, Metrics
from tools.serving.session import Answer, Session
from tools.serving.wire import pack, unpack

log = logger(__name__)

_FRAGMENTS = 256


class Answers(Protocol):
    """A policy as the server sees it."""

    metadata: Mapping[str, Any]

    def join(self) -> None:
        """A client has come, whose requests others may wait for."""

    def leave(self) -> None:
        """It has gone."""

    def read(self, message: Mapping[str, Any], session: Session) -> Any:
        """A request made ready, in any thread.

        Raises:
          ValueError: the message is not what the policy reads.
        """

    def submit(self, request: Any) -> Future[Answer]:
        """Its answer, when the batch that it goes into has run."""


@dataclass
class PolicyServer:
    """`token`: what clients must present, as `Authorization: Bearer …` or openpi's `Api-Key …`."""

    answers: Answers
    limits: Limits = field(default_factory=Limits)
    token: str | None = None
    metrics: Metrics = field(default_factory=Metrics)
    draining: bool = field(default=False, init=False)
    _sessions: set[Session] = field(default_factory=set, init=False)
    _opened: int = field(default=0, init=False)

    async def run(
        self,
        host: str,
        port: int,
        stop: asyncio.Event,
        *,
        tls: SSLContext | None = None,
        listening: Callable[[int], None] = lambda port: None,
    ) -> int:
        """Serves until `stop` is set, then finishes what is in flight and lets nobody in. Returns
        how many clients were cut off because that took longer than `limits.drain_seconds`.

        Args:
          port: 0 for any that is free.
          listening: told the port when clients may come.

        Raises:
          OSError: the address cannot be listened on.
        """
        async with serve(
            self._session,
            host,
            port,
            ssl=tls,
            compression=None,
            origins=[None],
            max_size=self.limits.message_bytes,
            max_queue=1,
            close_timeout=2,
            process_request=self._admit,
        ) as server:
            listening(server.sockets[0].getsockname()[1])
            await stop.wait()
            return await self._drain()

    def _admit(self, connection: ServerConnection, request: Request) -> Response | None:
        path = request.path.partition("?")[0]
        if path == "/healthz":
            status = HTTPStatus.SERVICE_UNAVAILABLE if self.draining else HTTPStatus.OK
            return connection.respond(status, "draining\n" if self.draining else "OK\n")
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
        if len(self._sessions) >= self.limits.clients:
            self.metrics.refused.labels("full").inc()
            return f"The server has its {self.limits.clients} clients; try again later."
        return None

    async def _session(self, connection: ServerConnection) -> None:
        refusal = self._refusal()
        if refusal:
            await connection.close(CloseCode.TRY_AGAIN_LATER, refusal)
            return
        self._opened += 1
        session = Session(self._opened, connection, Allowance(self.limits.rate))
        self._sessions.add(session)
        self.answers.join()
        self.metrics.clients.inc()
        try:
            await connection.send(pack(self.answers.metadata))
            while not self.draining:
                message = await _receive(connection)
                if message is None:
                    return
                session.busy = True
                await connection.send(await self._answer(message, session))
                session.busy = False
            await connection.close(CloseCode.GOING_AWAY, "The server is shutting down.")
        except ConnectionClosed:
            log.debug("client %d left", session.number)
        finally:
            self._sessions.remove(session)
            self.answers.leave()
            self.metrics.clients.dec()

    async def _answer(self, message: bytes | str, session: Session) -> bytes | str:
        """Packed actions, or what is wrong as a text."""
        began = time.monotonic()
        if not session.allowance.take(began):
            self.metrics.requests.labels("too_fast").inc()
            return f"Too fast: a client may ask {self.limits.rate:g} times a second."
        with self.metrics.pending.track_inprogress():
            try:
                try:
                    request = await asyncio.to_thread(self._read, message, session)
                except ValueError as error:
                    self.metrics.requests.labels("bad_input").inc()
                    return str(error)
                answer = await asyncio.wrap_future(self.answers.submit(request))
            except Exception:
                log.exception("a request of client %d failed", session.number)
                self.metrics.requests.labels("failed").inc()
                return "The server failed on this request; its log says how."
        if not np.isfinite(answer.actions).all():
            self.metrics.requests.labels("failed").inc()
            return "The policy's actions are not finite; a robot must not get them."
        waited = time.monotonic() - began
        self.metrics.requests.labels("answered").inc()
        self.metrics.request_seconds.observe(waited)
        session.requests += 1
        session.chunk = answer.actions
        timing = {"infer_ms": waited * 1000}
        if session.total_ms is not None:
            timing["prev_total_ms"] = session.total_ms
        packed = pack(
            {
                "actions": answer.actions,
                "policy_timing": {"infer_ms": answer.seconds * 1000},
                "server_timing": timing,
            }
        )
        session.total_ms = (time.monotonic() - began) * 1000
        return packed

    def _read(self, message: bytes | str, session: Session) -> Any:
        if isinstance(message, str):
            raise ValueError("The message is text; send msgpack in a binary message.")
        return self.answers.read(unpack(message), session)

    async def _drain(self) -> int:
        self.draining = True
        why = "The server is shutting down."
        idle = [session.connection for session in self._sessions if not session.busy]
        closing = [asyncio.create_task(door.close(CloseCode.GOING_AWAY, why)) for door in idle]
        tasks = {session.task for session in self._sessions if session.task} | set(closing)
        if not tasks:
            return 0
        await asyncio.wait(tasks, timeout=self.limits.drain_seconds)
        late = [session.task for session in self._sessions if session.task]
        for task in late:
            task.cancel()
        if late:
            log.warning("%d clients were cut off with a request in flight", len(late))
        return len(late)


async def _receive(connection: ServerConnection) -> bytes | str | None:
    """The next message. None, and the connection closed, if it comes in too many fragments: empty
    ones count for no limit on size, and would fill the memory."""
    parts: list[Any] = []
    async for part in connection.recv_streaming():
        parts.append(part)
        if len(parts) > _FRAGMENTS:
            why = f"A message has more than {_FRAGMENTS} fragments."
            await connection.close(CloseCode.MESSAGE_TOO_BIG, why)
            return None
    return parts[0] if len(parts) == 1 else type(parts[0])().join(parts)
