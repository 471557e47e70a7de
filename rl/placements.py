"""Where acting and learning happen, by the name in the config; each as `rl.run` wants it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from models import Policy
from rl.config import RlConfig
from rl.run import Placement
from sim.suites import Suite


@contextmanager
def place(
    policy: Policy, suite: Suite, tasks: tuple[str, ...], config: RlConfig, directory: Path
) -> Iterator[Placement]:
    """Builds what acts and learns, and ends it with the block; a timeline is left in the directory.

    Raises:
      ValueError: the placement is not there, or policy, suite and config do not fit it.
    """
    if config.placement == "disaggregated":
        raise ValueError(
            "placement 'disaggregated' is not there yet; take 'host' (simulators in processes, "
            "one learner) or 'colocated' (all on the device)."
        )
    if config.placement == "colocated":
        from rl.colocated_placement import OnDevice

        yield OnDevice(policy, suite, tasks, config)
        return
    from rl.host_placement import on_host

    with on_host(policy, suite, tasks, config, directory) as made:
        yield made
