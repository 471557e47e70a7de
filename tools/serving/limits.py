"""Limits of one client on a server that others share."""

import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Limits:
    """Limits on each client, and on the number of clients.

    Raises:
      ValueError: one of them would let nobody in.
    """

    clients: int = 64
    """Clients at once; further ones replace idle ones, or are refused with HTTP status 503."""
    idle_seconds: float = 120.0
    """Seconds after a client's last answer until another may replace it if all places are taken."""
    handshakes: int = 64
    """Connections that are still being opened; one more ends the oldest of them."""
    message_bytes: int = 16 * 2**20
    """Largest message in bytes; a larger one ends its connection with close code 1009."""
    rate: float = 100.0
    """Requests per second of one client; after a pause of a second, as many may come at once."""
    state_range: float = 100.0
    """Largest distance of a state from the middle of the training data, in half ranges of the data
    (standard deviations, if it is scaled by these). States beyond it are refused; 0 accepts
    any."""
    drain_seconds: float = 30.0
    """Seconds that requests in flight have after SIGTERM."""

    def __post_init__(self) -> None:
        for name in ("clients", "handshakes", "message_bytes", "rate"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; give a number above 0.")
        for name in ("idle_seconds", "state_range", "drain_seconds"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; give 0 or more.")


@dataclass
class Allowance:
    """Requests that a client may send now: a token bucket that holds a second's worth and refills
    steadily.

    `now` is the time in seconds of a clock that never goes back.
    """

    rate: float
    left: float = field(init=False)
    since: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.left = max(1.0, self.rate)

    def take(self, now: float) -> bool:
        """Takes one request from what is left; False if none is left."""
        self.left = min(max(1.0, self.rate), self.left + (now - self.since) * self.rate)
        self.since = now
        if self.left < 1:
            return False
        self.left -= 1
        return True
