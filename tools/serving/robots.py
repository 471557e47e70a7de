"""Many robots at once, to measure a server: each sends a request as soon as its last is answered.

    python -m tools.serving.robots ws://127.0.0.1:8000 --robots 8 --requests 20

Prints JSON with the seconds that all requests took together and that each of them took. Images and
states are random, of the kinds that the server's metadata asks for.
"""

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import tyro
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from models.files.terminal import guard_tracebacks
from tools.command_line.ending import in_a_line
from tools.command_line.options import cli
from tools.serving.wire import pack, unpack


def random_observation(
    metadata: Mapping[str, Any], rng: np.random.Generator, size: int, prompt: str
) -> dict[str, Any]:
    """Random inputs for a server with this `metadata`, with square pictures of `size`.

    Raises:
      ValueError: the server's state has several parts, and it does not report their lengths.
    """
    made: dict[str, Any] = {}
    for key, kind in metadata["inputs"].items():
        if kind["dtype"] == "uint8":
            made[key] = rng.integers(256, size=(size, size, 3), dtype=np.uint8)
        elif "n" in kind.get("shape", []):
            raise ValueError(f"The server does not report how many numbers '{key}' has.")
        elif kind["dtype"] == "float32":
            made[key] = rng.normal(size=kind["shape"]).astype(np.float32)
        else:
            made[key] = prompt
    return made


async def ask(
    url: str, seed: int, requests: int, size: int, prompt: str, start: asyncio.Barrier
) -> list[float]:
    """One robot: seconds that each of its requests took; the first is sent when all are connected.

    Raises:
      ValueError: the server refused a request, or nobody answers.
    """
    took = []
    try:
        async with connect(url, compression=None, max_size=None) as connection:
            metadata = unpack(await connection.recv(decode=False))
            message = pack(random_observation(metadata, np.random.default_rng(seed), size, prompt))
            await start.wait()
            for _ in range(requests):
                began = time.monotonic()
                await connection.send(message)
                answer = await connection.recv()
                if isinstance(answer, str):
                    raise ValueError(f"The server refused a request: {answer}")
                took.append(time.monotonic() - began)
    except (OSError, WebSocketException) as error:
        raise ValueError(f"{url} does not answer: {error}. Is a policy server running?") from None
    return took


async def _ask_all(url: str, robots: int, requests: int, size: int, prompt: str) -> dict[str, Any]:
    start = asyncio.Barrier(robots + 1)
    asking = [
        asyncio.create_task(ask(url, seed, requests, size, prompt, start)) for seed in range(robots)
    ]
    ready = asyncio.create_task(start.wait())
    await asyncio.wait({ready, *asking}, return_when=asyncio.FIRST_COMPLETED)  # or one has failed
    began = time.monotonic()
    took = [second for answered in await asyncio.gather(*asking) for second in answered]
    return {"seconds": time.monotonic() - began, "took": took}


def main(
    url: tyro.conf.Positional[str],
    robots: int = 8,
    requests: int = 20,
    size: int = 224,
    prompt: str = "pick up the red block",
) -> None:
    """Send requests to a server as fast as it answers.

    Args:
      url: address of the server, ws://HOST:PORT.
      robots: number of clients at once.
      requests: requests per robot.
      size: edge of the images, in pixels.
      prompt: prompt that every robot sends.
    """
    print(json.dumps(asyncio.run(_ask_all(url, robots, requests, size, prompt))))


if __name__ == "__main__":
    guard_tracebacks()
    with in_a_line():
        cli(main, prog="python -m tools.serving.robots", description=__doc__)
