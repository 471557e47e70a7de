"""A websocket connection that is read in small bites, and not at all while its client does not
read: thousands of tiny frames are parsed at once otherwise, and pongs pile up without bound.
"""

import asyncio

from websockets.asyncio.server import ServerConnection

_BITE = 2**14
"""Bytes; of asyncio's 2**18 a client can make 43,000 frames, which cost 3 MB and 0.1 s."""


class BoundedConnection(ServerConnection):
    """Connection of websockets, apart from that."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if hasattr(transport, "max_size"):  # without TLS, which reads 2**14 at a time anyway
            transport.max_size = _BITE
        super().connection_made(transport)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.recv_messages.paused:
            self.transport.resume_reading()
