"""Prometheus metrics of a server's clients and batches."""

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_DISTANCES = (1, 1.5, 2, 3, 5, 10, 20, 50, 100)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """One server's metrics, separate from those of other servers in the process."""

    def __init__(self) -> None:
        own = self._registry = CollectorRegistry()
        gauge, counter = partial(Gauge, registry=own), partial(Counter, registry=own)
        histogram = partial(Histogram, registry=own)
        self.clients = gauge("chiliad_clients", "Clients connected now.")
        self.pending = gauge(
            "chiliad_pending_requests", "Requests that are waiting for their answer."
        )
        self.refused = counter(
            "chiliad_refused_connections", "Connections refused, by reason.", ["why"]
        )
        self.replaced = counter("chiliad_replaced_clients", "Idle clients replaced by new ones.")
        self.requests = counter("chiliad_requests", "Requests, by outcome.", ["outcome"])
        self.request_seconds = histogram(
            "chiliad_request_seconds",
            "Time from a request's arrival until its actions are ready.",
            buckets=_SECONDS,
        )
        self.batch_seconds = histogram(
            "chiliad_batch_seconds", "Time to compute one batch.", buckets=_SECONDS
        )
        self.state_distance = histogram(
            "chiliad_state_distance",
            "Distance of a state's farthest dim from the middle of the training data, in half "
            "ranges.",
            buckets=_DISTANCES,
        )
        self.batch_rows = histogram("chiliad_batch_rows", "Requests in one batch.", buckets=_ROWS)

    def text(self) -> str:
        """Metrics in Prometheus's text format."""
        return generate_latest(self._registry).decode()
