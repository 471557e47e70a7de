"""Weak scaling: throughput over the number of devices, with a batch that grows with them, and with
interruptions.

At each size, the fastest choice that fits is predicted, and months of training with it are
simulated with interruptions at the cluster's rate.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean, quantiles

from models.layers.layers import Remat
from parallel.planning.cluster import Cluster
from parallel.planning.predict import (
    Precision,
    Prediction,
    Profiles,
    TrainingTask,
    profiler,
    search,
)
from parallel.planning.reliability import (
    Recovery,
    daly,
    goodput,
    mean_time_between_failures,
    simulate,
)

DAYS, SEEDS = 30, 40
"""Length of each simulated run, and their number."""


@dataclass(frozen=True)
class ScalingPoint:
    """One size of cluster. `efficiency`: samples per second and device, relative to the first size.
    `interval`: seconds between saves. `simulated`: mean goodput of the simulated runs, `low` and
    `high` its 5th and 95th percentile, `failures` their interruptions on average."""

    devices: int
    best: Prediction
    efficiency: float
    interval: float
    goodput: float
    simulated: float
    low: float
    high: float
    failures: float


def curve(
    task: TrainingTask,
    cluster: Cluster,
    sizes: Sequence[int],
    recovery: Recovery,
    remats: Sequence[Remat],
    precisions: Sequence[Precision],
    profiles: Profiles | None = None,
) -> list[ScalingPoint]:
    """A point for each number of devices, with as many rows per device as `task` has on `cluster`.

    Raises:
      ValueError: nothing fits at one of the sizes.
    """
    profiles, points = profiles or profiler(task, cluster.chip), list[ScalingPoint]()
    for devices in sizes:
        grown = task.of_rows(task.rows * devices // cluster.devices)
        best = search(
            grown, replace(cluster, devices=devices), remats, precisions, profiles=profiles
        )[0]
        rate = best.samples_per_second / devices
        first = points[0].best.samples_per_second / points[0].devices if points else rate
        mtbf = mean_time_between_failures(devices, cluster.failures)
        interval = daly(recovery.save, mtbf)
        runs = [simulate(DAYS * 86_400.0, interval, recovery, mtbf, seed) for seed in range(SEEDS)]
        shares = [run.goodput for run in runs]
        cuts = quantiles(shares, n=20)
        expected = goodput(interval, recovery, mtbf)
        points.append(
            ScalingPoint(
                devices, best, rate / first, interval, expected, mean(shares), cuts[0], cuts[-1],
                mean(run.failures for run in runs),
            )
        )  # fmt: skip
    return points
