"""Placement "disaggregated" as a run: simulators and the policy that acts in processes on other
hosts, which Ray starts and watches, and the learner here; otherwise placement "host"."""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import jax

from models import Policy
from parallel.hosts.distributed import host_count
from rl.config import RlConfig
from rl.host.placement import Elsewhere, OnHost, divided, most_episodes, traced
from rl.remote.actor import RemoteActor, store
from rl.remote.cluster import cluster
from rl.remote.slots import RemoteSlots
from sim.suite import Suite


@contextmanager
def on_cluster(
    policy: Policy,
    suite: Suite,
    tasks: tuple[str, ...],
    config: RlConfig,
    directory: Path,
    address: str | None,
) -> Iterator[OnHost]:
    """Starts the workers, which end with the block; writes timeline.json to the directory.

    Raises:
      ValueError: there is no Ray, or no room for the workers, or they do not start; the job has
        several processes; or slots or simulators are fewer than tasks that cannot share slots.
    """
    if host_count() > 1:
        raise ValueError(
            f"placement 'disaggregated' has its workers elsewhere and learns in one process, but "
            f"this job has {host_count()}; start one (--num-processes 1), or set placement to "
            f"'host'."
        )
    spread = config.disaggregated
    shared = shares(suite, tasks, config)
    gpus = spread.inference_gpus
    if gpus is None:
        gpus = float(jax.default_backend() == "gpu")
    cpus = spread.simulators * spread.simulator_cpus + spread.inference * spread.inference_cpus
    with cluster(address, cpus), ExitStack() as stack:
        workers = [
            RemoteActor(
                f"inference worker {i}",
                cpus=spread.inference_cpus,
                gpus=gpus,
                patience=spread.patience,
            )
            for i in range(spread.inference)
        ]
        slots = [
            RemoteSlots(
                f"simulator {i}",
                partial(suite.open, together, count, suite.edge(policy.model.config.edge)),
                cpus=spread.simulator_cpus,
                gpus=spread.simulator_gpus,
                patience=spread.patience,
            )
            for i, (together, count) in enumerate(shared)
        ]
        for worker in workers:
            stack.enter_context(closing(worker))
        for some in slots:
            stack.enter_context(closing(some))
        for some in slots:
            some.ready()

        def replaced() -> int:
            return sum(x.restarts for x in slots) + sum(x.restarts for x in workers)

        specs = [some.reported_spec for some in slots[: len(suite.groups(tasks))]]
        elsewhere = Elsewhere(workers, store, replaced, specs)
        made = OnHost(policy, suite, tasks, slots, config, elsewhere)
        for worker in workers:
            worker.ready()
        yield stack.enter_context(traced(made, directory))


def shares(
    suite: Suite, tasks: tuple[str, ...], config: RlConfig
) -> list[tuple[tuple[str, ...], int]]:
    """Tasks and number of slots of each simulator. The simulators share the number that was asked
    for, or else the suite's own; if there is neither, one slot per simulator CPU. Tasks that cannot
    share slots have simulators of their own, in turn.

    Raises:
      ValueError: some would have none.
    """
    groups, simulators = suite.groups(tasks), config.disaggregated.simulators
    if simulators < len(groups):
        raise ValueError(
            f"disaggregated.simulators is {simulators}, but {len(groups)} tasks cannot share "
            f"slots; give each a simulator."
        )
    cores = simulators * max(int(config.disaggregated.simulator_cpus), 1)
    asked = config.rollout.slots or suite.slots or cores
    count = suite.count(asked, most_episodes(config))
    if count < simulators:
        raise ValueError(
            f"disaggregated.simulators is {simulators}, but there are only {count} slots to share "
            f"(rollout.slots, and no more than (staleness + 1)·tickets·group episodes at a time); "
            f"take fewer simulators."
        )
    counts = divided(count, simulators)
    return [(groups[i % len(groups)], counts[i]) for i in range(simulators)]
