"""What a server remembers of one client, from connecting to leaving."""

import asyncio
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from websockets.asyncio.server import ServerConnection

from tools.serving.limits import Allowance


@dataclass(eq=False)
class Session:
    """`number` tells the client from any before it, `requests` counts its answered requests, and
    `chunk` is the last that it was given, in the robot's units."""

    number: int
    connection: ServerConnection
    allowance: Allowance
    task: asyncio.Task[Any] | None = field(default_factory=asyncio.current_task)
    busy: bool = False
    requests: int = 0
    chunk: Float[np.ndarray, "h a"] | None = None
    total_ms: float | None = None
    """From the last request's arrival until its answer was ready to send."""


class Answer(NamedTuple):
    """What came of one request."""

    actions: Float[np.ndarray, "h a"]
    """In the robot's units."""
    seconds: float
    """That its batch was computed."""
