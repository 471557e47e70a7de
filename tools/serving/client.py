"""A client of the server, from connecting to leaving, and the answer to one of its requests."""

import asyncio
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from websockets.asyncio.server import ServerConnection

from tools.serving.limits import Allowance


@dataclass(eq=False)
class ConnectedClient:
    """State of a client's connection. `number` distinguishes it from all earlier clients.
    `last_call` is done when nothing will be read from it beyond what has arrived. What the policy
    knows of the client's robot is in a `RobotSession`."""

    number: int
    connection: ServerConnection
    allowance: Allowance
    task: asyncio.Task[Any] | None = field(default_factory=asyncio.current_task)
    last_call: asyncio.Future[None] = field(init=False)
    busy: bool = True
    """True while a request is in flight, and until the policy's metadata is sent."""
    since: float = 0.0
    """Time of the client's last answer."""
    total_ms: float | None = None
    """Time from the last request's arrival until its answer was ready to send."""


class Reply(NamedTuple):
    """Result of one request."""

    actions: Float[np.ndarray, "h a"]
    """Actions in the robot's units."""
    seconds: float
    """Seconds that computing its batch took."""
    subtask: str | None = None
    """Text of what the actions do, from a policy that writes subtasks."""
