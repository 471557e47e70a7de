"""Connection to a policy server, kept by one thread: requests go in and answers come out without
ever making the control loop wait. The thread connects, reconnects after a growing pause when the
connection is lost or an answer is late, and ends with the block that started it.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Coroutine, Mapping, NamedTuple

import numpy as np
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI

from .wire import encoder, pack, unpack

log = logging.getLogger("chiliad_client")

_LARGEST = 64 * 2**20
"""Largest answer, in bytes."""
_OPENING_SECONDS, _CLOSING_SECONDS = 10.0, 1.0
_TOO_BIG = 1009
"""Close code for a message that is longer than the server accepts."""


class ServerSession(NamedTuple):
    """An open connection: its number, and the metadata that the server sent."""

    number: int
    metadata: Mapping[str, Any]


class ServerAnswer(NamedTuple):
    """Answer to request `number`: its content, or `refusal`, the server's reason for none."""

    number: int
    content: Mapping[str, Any]
    refusal: str | None = None


@dataclass(frozen=True)
class Backoff:
    """Pauses before reconnecting: `first` seconds, twice as long each time, at most `most`."""

    first: float = 0.1
    most: float = 5.0

    def seconds(self, failures: int) -> float:
        """The pause after this many failures in a row, at least one."""
        return min(self.most, self.first * 2.0 ** min(failures - 1, 60))


class Connection:
    """Connection to a policy server; use as a context manager. One request is in flight at a time,
    and one more may wait.

    Args:
      url: ws://HOST:PORT or wss://….
      token: secret that the server requires, if any.
      tls: for wss:// with a certificate of your own.
      jpeg: quality, 1 to 100, at which images are sent as JPEG; None sends them as they are.
      answer_within: seconds to send a request and receive its answer; after that, the request and
        its connection count as lost.

    Raises:
      ValueError: the URL is not ws:// or wss://, or the quality is out of range.
      ImportError: no JPEG encoder is installed.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        tls: ssl.SSLContext | None = None,
        jpeg: int | None = None,
        answer_within: float = 10.0,
        backoff: Backoff | None = None,
    ) -> None:
        if not url.startswith(("ws://", "wss://")):
            raise ValueError(
                f"The server's URL is '{url}'; give ws://HOST:PORT or wss://HOST:PORT."
            )
        if jpeg is not None:
            if not 1 <= jpeg <= 100:
                raise ValueError(f"jpeg is {jpeg}; give a quality from 1 to 100, or None.")
            encoder()
        self.url, self._jpeg = url, jpeg
        self._answer_within, self._backoff = answer_within, backoff or Backoff()
        self._options: dict[str, Any] = {} if tls is None else {"ssl": tls}
        if token:
            self._options["additional_headers"] = {"Authorization": f"Api-Key {token}"}
        self._changed = threading.Condition()
        self._session: ServerSession | None = None
        self._broken: str | None = None
        self._why = self._ending = "it has not been reached yet"
        self._opened = self._asked = 0
        self._waiting: tuple[int, Mapping[str, Any]] | None = None
        self._answers: deque[ServerAnswer] = deque(maxlen=16)
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chiliad connection", daemon=True)

    @property
    def session(self) -> ServerSession | None:
        """The open connection, None while there is none.

        Raises:
          ValueError: there will never be one; says why.
        """
        with self._changed:
            if self._broken is not None:
                raise ValueError(self._broken)
            return self._session

    def wait(self, seconds: float) -> ServerSession:
        """Waits for the open connection and returns it.

        Raises:
          ConnectionError: it is not open within these seconds.
          ValueError: it will never open.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._session or self._broken, seconds)
        session = self.session
        if session is None:
            raise ConnectionError(
                f"{self.url} is not ready after {seconds:g} s: {self._why}. Is the server running, "
                "and its policy loaded?"
            )
        return session

    def ask(self, message: Mapping[str, Any]) -> int:
        """Queues a request and returns its number; never waits. It is sent when the previous
        request is answered, and replaces one that still waits. Arrays are copied, so that a robot
        may reuse them."""
        copied = _copied(message)
        with self._changed:
            self._asked += 1
            self._waiting = (self._asked, copied)
            number = self._asked
        with suppress(RuntimeError):  # the thread has ended: `session` says why
            self._loop.call_soon_threadsafe(self._wake.set)
        return number

    def answer(self) -> ServerAnswer | None:
        """The next answer, if one has arrived; never waits."""
        with self._changed:
            return self._answers.popleft() if self._answers else None

    def infer(self, message: Mapping[str, Any], seconds: float = 60.0) -> Mapping[str, Any]:
        """Sends a request and waits for its answer; for programs without a control loop.

        Raises:
          ConnectionError: no answer arrived within these seconds, or the connection was lost.
          ValueError: the server refused the request, or the connection will never open.
        """
        session = self.wait(seconds)
        with self._changed:
            self._answers.clear()
        number = self.ask(message)

        def done() -> bool:
            lost = self._session is None or self._session.number != session.number
            return lost or any(answer.number == number for answer in self._answers)

        with self._changed:
            self._changed.wait_for(done, seconds)
            found = [answer for answer in self._answers if answer.number == number]
            why = self._ending if done() else f"no answer within {seconds:g} s"
            self._answers.clear()
        if not found:
            self.session  # noqa: B018  it says what is broken
            raise ConnectionError(f"{self.url} did not answer: {why}.")
        if found[0].refusal is not None:
            raise ValueError(f"{self.url} refused the request: {found[0].refusal}")
        return found[0].content

    def close(self) -> None:
        """Ends the connection and its thread."""
        if self._thread.is_alive():
            with suppress(RuntimeError):  # it has just ended by itself
                self._loop.call_soon_threadsafe(self._task.cancel)
            self._thread.join()

    def __enter__(self) -> Connection:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self) -> None:
        async def main() -> None:
            self._loop, self._wake = asyncio.get_running_loop(), asyncio.Event()
            self._task = asyncio.ensure_future(self._serve())
            self._started.set()
            with suppress(asyncio.CancelledError):
                await self._task

        asyncio.run(main())

    async def _serve(self) -> None:
        failures = 0
        while self._broken is None:
            opened = self._opened
            try:
                await self._connected()
            except (OSError, asyncio.TimeoutError, ConnectionClosed, InvalidHandshake) as error:
                failures = 1 if self._opened > opened else failures + 1
                self._lost(error)
            except InvalidURI as error:
                self._break(f"{self.url} is not the address of a server: {error}.")
            except ValueError as error:
                self._break(f"{self.url}: {error}")
            except Exception as error:
                log.exception("%s: the connection failed", self.url)
                self._break(f"{self.url}: the connection failed ({error!r}); see the log.")
            finally:
                self._set_session(None)
            if self._broken is None:
                await asyncio.sleep(self._backoff.seconds(failures))

    async def _connected(self) -> None:
        """Serves one connection until it ends, which raises an error."""
        async with connect(
            self.url,
            compression=None,
            max_size=_LARGEST,
            open_timeout=_OPENING_SECONDS,
            close_timeout=_CLOSING_SECONDS,
            **self._options,
        ) as socket:
            self._why = "it was reached, but has not sent its policy's metadata yet"
            try:
                metadata = self._read(await socket.recv())  # comes when the policy is loaded
                pictures = metadata.get("pictures")
                reads = pictures if isinstance(pictures, (list, tuple)) else ()
                if self._jpeg is not None and "jpeg" not in reads:
                    raise ValueError(
                        "this server does not read JPEG; leave jpeg out, or serve with a newer "
                        "Chiliad."
                    )
                self._opened += 1
                self._set_session(ServerSession(self._opened, metadata))
                log.info("%s: connected", self.url)
                await self._converse(socket)
            finally:  # a dead link never confirms a close, so do not wait for it
                asyncio.get_running_loop().call_later(_CLOSING_SECONDS, socket.transport.abort)

    async def _converse(self, socket: ClientConnection) -> None:
        closed = asyncio.ensure_future(socket.wait_closed())
        try:
            while True:
                wake = asyncio.ensure_future(self._wake.wait())
                await asyncio.wait({wake, closed}, return_when=asyncio.FIRST_COMPLETED)
                wake.cancel()
                self._wake.clear()
                with self._changed:
                    question, self._waiting = self._waiting, None
                if question is None:
                    if closed.done():
                        await socket.recv()  # raises the error that closed it
                    continue
                number, message = question
                exchange = _exchange(socket, pack(message, self._jpeg))
                told = await _within(self._answer_within, exchange)
                if isinstance(told, str):
                    last = (told.strip().splitlines() or [""])[-1]  # openpi sends a traceback
                    self._add(ServerAnswer(number, {}, last))
                else:
                    self._add(ServerAnswer(number, self._read(told)))
        finally:
            closed.cancel()

    def _read(self, data: Any) -> dict[str, Any]:
        if isinstance(data, str):
            raise ValueError(f"the server's first message is '{data:.200}'; is it a policy server?")
        try:
            return unpack(data)
        except ValueError as error:
            raise ValueError(
                f"its message cannot be read, as {error}; does the server use openpi's protocol?"
            ) from None

    def _add(self, answer: ServerAnswer) -> None:
        with self._changed:
            self._answers.append(answer)
            self._changed.notify_all()

    def _set_session(self, session: ServerSession | None) -> None:
        with self._changed:
            self._session = session
            if session is None:
                self._waiting = None
            self._changed.notify_all()

    def _lost(self, error: Exception) -> None:
        """Notes why there is no connection; sets `_broken` if trying again cannot help."""
        code = getattr(getattr(error, "rcvd", None), "code", None)
        status = error.response.status_code if isinstance(error, InvalidStatus) else None
        if code == _TOO_BIG:
            self._break(
                f"{self.url} does not accept messages of this size ({error}); send smaller images "
                "or jpeg=90, or raise its --limits.message-bytes."
            )
        elif status in (401, 403):
            self._break(
                f"{self.url} does not let this robot in (HTTP {status}); give the token of its "
                "--token-file."
            )
        elif isinstance(error, ssl.SSLCertVerificationError):
            self._break(
                f"{self.url} has a certificate that is not trusted ({error}); give a context that "
                "trusts it as tls."
            )
        else:
            late = f"no answer within {self._answer_within:g} s"
            why = str(error) or (late if isinstance(error, asyncio.TimeoutError) else repr(error))
            if why != self._why:
                log.warning("%s: no connection (%s); trying again", self.url, why)
            self._why = self._ending = why

    def _break(self, why: str) -> None:
        log.error("%s", why)
        with self._changed:
            self._broken = why
            self._changed.notify_all()


async def _exchange(socket: ClientConnection, question: bytes) -> Any:
    await socket.send(question)
    return await socket.recv()


async def _within(seconds: float, work: Coroutine[Any, Any, Any]) -> Any:
    """The result of `work`; asyncio.TimeoutError if it takes longer. Before Python 3.12,
    `asyncio.wait_for` loses a cancellation that comes in the loop's turn in which the work ends."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise asyncio.TimeoutError
        return task.result()
    finally:
        task.cancel()


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(inner) for key, inner in value.items()}
    return value.copy() if isinstance(value, np.ndarray) else value
