"""A websocket connection that is read in small pieces, and not at all while its client does not
read. Otherwise, thousands of tiny frames are parsed at once, and pongs pile up without bound.

The connection ends at once if a request comes with bytes that break the protocol. For these bytes,
websockets (17.4) sends the end of the stream, and then sends it again with its answer to the
request. This second end fails and is logged, unless the client's own end comes before it.
"""

import asyncio

from websockets.asyncio.server import ServerConnection
from websockets.protocol import State

_BITE = 2**14
"""Bytes read at a time. In asyncio's 2**18, a client can send 43,000 frames, which cost 3 MB and
0.1 s."""


class BoundedConnection(ServerConnection):
    """A connection of websockets with these two changes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if hasattr(transport, "max_size"):  # without TLS, which reads 2**14 at a time anyway
            transport.max_size = _BITE
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self.protocol.state is State.CLOSED:
            return
        super().data_received(data)
        unanswered = self.request is not None and self.response is None
        if unanswered and self.protocol.eof_sent:
            self.protocol.receive_eof()
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.recv_messages.paused:
            self.transport.resume_reading()
