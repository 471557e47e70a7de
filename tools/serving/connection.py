"""A websocket connection that is read in small bites, and not at all while its client does not
read: thousands of tiny frames are parsed at once otherwise, and pongs pile up without bound.

It ends at once where a request comes with bytes that break the rules: websockets (17.4) sends the
end of the stream for these and then again with its answer to the request, which fails and is
logged, unless the client's own end comes before that.
"""

import asyncio

from websockets.asyncio.server import ServerConnection
from websockets.protocol import State

_BITE = 2**14
"""Bytes; of asyncio's 2**18 a client can make 43,000 frames, which cost 3 MB and 0.1 s."""


class BoundedConnection(ServerConnection):
    """Connection of websockets, apart from that."""

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
