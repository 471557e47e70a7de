"""Listening sockets that limit how many connections may be in their opening handshake.

Clients that connect and stay silent, or send a byte a second, hold a descriptor each, until the
process has none left and nobody can connect. So the oldest of these connections makes room for the
newest, and descriptors for all connections that may be open are reserved at start.
"""

import errno
import resource
import socket
import time
from contextlib import suppress
from typing import Any

from models.files.terminal import logger
from tools.serving.limits import Limits

log = logger(__name__)

_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_OWN_FILES = 384
"""Files that the process itself may have open (checkpoints being loaded, libraries, devices), and
connections that were accepted in one turn of the event loop and are being shut."""
_QUIET_SECONDS = 10.0


def listen(host: str, port: int, handshakes: int) -> list["Listener"]:
    """A socket for each address of `host`, all on one port.

    Args:
      port: 0 for any that is free.

    Raises:
      ValueError: an address cannot be listened on.
    """
    listeners: list[Listener] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(found):
            listener = Listener(family, handshakes)
            listeners.append(listener)
            listener.bind((address[0], port, *address[2:]))
            listener.listen()
            port = listener.getsockname()[1]
    except OSError as error:
        for listener in listeners:
            listener.close()
        raise ValueError(
            f"Cannot listen on {host}:{port}: {error}; choose another --host or --port."
        ) from None
    return listeners


def reserve_descriptors(limits: Limits) -> None:
    """Raises the soft limit of open files, where it is too low, to what the connections need.

    Raises:
      ValueError: the hard limit does not allow so many.
    """
    needed = 2 * limits.clients + limits.handshakes + _OWN_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ValueError(
            f"{limits.clients} clients and {limits.handshakes} handshakes need {needed} open "
            f"files but this process may have {hard} (ulimit -Hn); lower --limits.clients or "
            "--limits.handshakes, or raise the ulimit."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class Listener(socket.socket):
    """Accepts connections, at most `handshakes` of which are not `opened` yet: the oldest of these
    is shut for the next one. If descriptors run out all the same, new connections are closed at
    once, with one line in the log every 10 s."""

    def __init__(self, family: int, handshakes: int) -> None:
        super().__init__(family, socket.SOCK_STREAM)
        self._handshakes = handshakes
        self._opening: dict[Any, socket.socket] = {}
        self._spare: socket.socket | None = socket.socket()
        self._logged = float("-inf")
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            self.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)

    def accept(self) -> tuple[socket.socket, Any]:
        try:
            connection, address = super().accept()
        except OSError as error:
            if error.errno not in _EXHAUSTED:
                raise
            self._turn_away(error)
            raise BlockingIOError(error.errno, error.strerror) from None
        self._opening = {a: s for a, s in self._opening.items() if s.fileno() >= 0}
        while len(self._opening) >= self._handshakes:
            self._shut(next(iter(self._opening)))
        self._opening[address] = connection
        return connection, address

    def opened(self, address: Any) -> bool:
        """Stops counting the connection from `address` as opening; False if it was not counted any
        more."""
        return self._opening.pop(address, None) is not None

    def shut_opening(self) -> None:
        """Ends all connections that are in their handshake."""
        for address in list(self._opening):
            self._shut(address)

    def close(self) -> None:
        if self._spare is not None:
            self._spare.close()
        super().close()

    def _shut(self, address: Any) -> None:
        """Shuts a connection down, so that the event loop reads its end and closes it."""
        with suppress(OSError):
            self._opening.pop(address).shutdown(socket.SHUT_RDWR)

    def _turn_away(self, error: OSError) -> None:
        """Closes the new connection with the help of the spare descriptor; left waiting, it would
        wake the event loop again and again."""
        now = time.monotonic()
        if now - self._logged >= _QUIET_SECONDS:
            self._logged = now
            log.warning("new connections are closed unanswered: %s", error.strerror)
        if self._opening:
            self._shut(next(iter(self._opening)))
        if self._spare is not None:
            self._spare.close()
            self._spare = None
        with suppress(OSError):
            super().accept()[0].close()
        with suppress(OSError):
            self._spare = socket.socket()
