"""Stragglers: a line that names the host that keeps the others waiting, and percentiles for the
metrics.

A step takes equally long on every host, since all meet in its collectives. Hosts differ in the time
that each spends before it enters the step: waiting for data, or in work of its own.
"""

import time
from collections import deque
from collections.abc import Mapping

import numpy as np

from parallel.hosts.facts import HostFacts

_STEPS = 50
_TIMES = 2.0  # the usual host's time
_SHARE = 0.05  # of the step, by which it takes longer
_SILENT_SECONDS = 600.0  # between two such lines


class StragglerMonitor:
    """Watches the last 50 steps of all hosts."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, Mapping[int, HostFacts]]] = deque(maxlen=_STEPS)
        self._seen, self._spoken = 0, -_SILENT_SECONDS

    def after(
        self, seconds: float, hosts: Mapping[int, HostFacts]
    ) -> tuple[dict[str, float], str | None]:
        """Records a step that took `seconds`; every 50th step gives metrics, and a line about a
        slow host.

        Metrics are seconds before entering a step: `host_p50`, `host_p95` and `host_max` over all
        hosts and the last 50 steps, `slowest_host_p50` of the host whose median is highest, and
        `slowest_host`, its index. A host is slow if its median is over twice the median host's and
        exceeds it by more than a twentieth of the step. The line comes at most every ten minutes.
        """
        self._steps.append((seconds, hosts))
        self._seen += 1
        if len(hosts) == 1 or self._seen % _STEPS:
            return {}, None
        names = sorted(hosts)
        busy = np.array([[f[host].busy for host in names] for _, f in self._steps])
        wait = np.array([[f[host].data_wait for host in names] for _, f in self._steps])
        medians, step = np.median(busy, axis=0), float(np.median([s for s, _ in self._steps]))
        worst = int(medians.argmax())
        p50, p95 = np.percentile(busy, [50, 95])
        metrics = {
            "host_p50": float(p50),
            "host_p95": float(p95),
            "host_max": float(busy.max()),
            "slowest_host": float(names[worst]),
            "slowest_host_p50": float(medians[worst]),
        }
        usual, slow = float(np.median(np.delete(medians, worst))), float(medians[worst])
        now = time.perf_counter()
        if (
            slow < _TIMES * usual
            or slow - usual < _SHARE * step
            or now - self._spoken < _SILENT_SECONDS
        ):
            return metrics, None
        self._spoken = now
        return metrics, (
            f"Host {names[worst]} of {len(names)} keeps the others waiting: in the last {_STEPS} "
            f"steps it needed {slow:.3g} s before each step, the others {usual:.3g} s; "
            f"{np.median(wait[:, worst]):.3g} s of that was waiting for data."
        )
