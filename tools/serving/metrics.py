"""Prometheus metrics of a server's clients and batches."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_DISTANCES = (1, 1.5, 2, 3, 5, 10, 20, 50, 100)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """One server's metrics, separate from those of other servers in the process."""

    def __init__(self) -> None:
        own = self._registry = CollectorRegistry()
        self.clients = Gauge("chiliad_clients", "Clients connected now.", registry=own)
        self.pending = Gauge(
            "chiliad_pending_requests", "Requests that are waiting for their answer.", registry=own
        )
        self.refused = Counter(
            "chiliad_refused_connections", "Connections refused, by reason.", ["why"], registry=own
        )
        self.replaced = Counter(
            "chiliad_replaced_clients", "Idle clients replaced by new ones.", registry=own
        )
        self.requests = Counter(
            "chiliad_requests", "Requests, by outcome.", ["outcome"], registry=own
        )
        self.request_seconds = Histogram(
            "chiliad_request_seconds",
            "Time from a request's arrival until its actions are ready.",
            buckets=_SECONDS,
            registry=own,
        )
        self.batch_seconds = Histogram(
            "chiliad_batch_seconds", "Time to compute one batch.", buckets=_SECONDS, registry=own
        )
        self.state_distance = Histogram(
            "chiliad_state_distance",
            "Distance of a state's farthest dim from the middle of the training data, in half "
            "ranges.",
            buckets=_DISTANCES,
            registry=own,
        )
        self.batch_rows = Histogram(
            "chiliad_batch_rows", "Requests in one batch.", buckets=_ROWS, registry=own
        )

    def text(self) -> str:
        """Metrics in Prometheus's text format."""
        return generate_latest(self._registry).decode()
