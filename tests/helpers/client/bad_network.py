"""A network between a client and its server that a test makes slow, lossy or dead."""

import asyncio
import threading
from contextlib import contextmanager, suppress


class BadNetwork:
    """Passes bytes on to a port of this machine, `delay` seconds later. While it `loses`, whatever
    is sent either way is gone; a connection through which something is sent while it is `stuck`
    takes nothing more; `cut` ends all connections at once, as a killed server does, and while it is
    `dead` new ones are refused."""

    def __init__(self, port, delay=0.0):
        self.to, self.delay = port, delay
        self.loses = self.stuck = self.dead = False
        self.connections = 0
        self._writers, self._tasks = set(), set()
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        assert self._started.wait(60)

    @property
    def url(self):
        return f"ws://127.0.0.1:{self.port}"

    def cut(self):
        self._loop.call_soon_threadsafe(self._cut)

    def close(self):
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    def _cut(self):
        for writer in self._writers:
            writer.transport.abort()

    async def _run(self):
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        await self._over.wait()
        server.close()
        self._cut()
        await asyncio.gather(*self._tasks)

    async def _accept(self, reader, writer):
        self._writers.add(writer)
        self._tasks.add(asyncio.current_task())
        self.connections += 1
        if self.dead:
            writer.transport.abort()
            return
        with suppress(OSError):
            there, back = await asyncio.open_connection("127.0.0.1", self.to)
            self._writers.add(back)
            await asyncio.gather(self._pass(reader, back), self._pass(there, writer))

    async def _pass(self, reader, writer):
        with suppress(OSError):
            while data := await reader.read(2**16):
                if self.stuck:
                    await self._over.wait()
                if not self.loses:
                    self._loop.call_later(self.delay, self._send, writer, data)
        await asyncio.sleep(self.delay)
        writer.close()

    def _send(self, writer, data):
        if not writer.is_closing():
            writer.write(data)


@contextmanager
def bad_network(port, delay=0.0):
    network = BadNetwork(port, delay)
    try:
        yield network
    finally:
        network.close()
