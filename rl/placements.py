"""Placements of acting and learning by their name in the config, each as `rl.run` takes it."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from models import Policy
from rl.config import RlConfig
from rl.run import Placement
from sim.suite import Suite


def place(
    policy: Policy,
    suite: Suite,
    tasks: tuple[str, ...],
    config: RlConfig,
    directory: Path,
    ray_address: str | None = None,
) -> AbstractContextManager[Placement]:
    """The placement, which ends with the block; writes a timeline to the directory.

    Raises:
      ValueError: policy, suite and config do not fit the placement, or `ray_address` is not for
        this one.
    """
    if config.placement == "disaggregated":
        from rl.remote.placement import on_cluster

        return on_cluster(policy, suite, tasks, config, directory, ray_address)
    if ray_address is not None:
        raise ValueError(
            f"--ray-address {ray_address} is for placement 'disaggregated', but this run's is "
            f"'{config.placement}'; give --placement disaggregated, or leave the address out."
        )
    if config.placement == "colocated":
        from rl.device.placement import OnDevice

        return nullcontext(OnDevice(policy, suite, tasks, config))
    from rl.host.placement import on_host

    return on_host(policy, suite, tasks, config, directory)
