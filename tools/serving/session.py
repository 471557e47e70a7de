"""State of one client on the server, from connecting to leaving."""

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
    `chunk` is the last that it was given, in the robot's units. `last_call` is done when nothing
    more is read of it than has arrived."""

    number: int
    connection: ServerConnection
    allowance: Allowance
    task: asyncio.Task[Any] | None = field(default_factory=asyncio.current_task)
    last_call: asyncio.Future[None] = field(init=False)
    busy: bool = True
    """True with a request in flight, or if not introduced to the policy yet."""
    since: float = 0.0
    """Time of its last answer."""
    requests: int = 0
    unusual: bool = False
    """True if the log already tells of a state of its that is far from the training data."""
    chunk: Float[np.ndarray, "h a"] | None = None
    total_ms: float | None = None
    """Time from the last request's arrival until its answer was ready to send."""


class Reply(NamedTuple):
    """Result of one request."""

    actions: Float[np.ndarray, "h a"]
    """Actions in the robot's units."""
    seconds: float
    """Seconds of computing its batch."""
    subtask: str | None = None
    """Text of what the actions do, of a policy that says so."""
