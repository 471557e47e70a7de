"""Runs jobs on a Ray cluster: every unit is a task of Ray Data.

Ray Data spreads the tasks over the available nodes, including those that join later, and repeats
the tasks of lost nodes (docs.ray.io, Ray Data, fault tolerance). Datasets and destinations must be
where every node can reach them, in a bucket or on a shared disk.
"""

import logging
import pickle
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import data
import models
from data.errors import DatasetError
from data.files.job import Done, R, RunUnits, U, Work, using_cores

CORES = 2
"""CPU cores of a task."""

_ATTEMPTS = 3
_FIRST_WAIT = 1.0
_ANSWER = 10.0
_MOST_TASKS = 10_000
_LOST_AT_MOST = 8
"""Most times that a unit is restarted because its worker or node was lost."""


@dataclass
class WorkTally:
    """Counts of the work of a connection's jobs: `units` to do; `begun`, how often a worker began
    one; `failed`, attempts that were tried again after an error; and `nodes` with the units begun
    on each."""

    units: int = 0
    begun: int = 0
    failed: int = 0
    nodes: dict[str, int] = field(default_factory=dict)

    @property
    def redone(self) -> int:
        """Units restarted because their worker or node was lost."""
        return max(self.begun - self.failed - self.units, 0)

    def __str__(self) -> str:
        nodes = ", ".join(f"{node}: {count}" for node, count in sorted(self.nodes.items()))
        return (
            f"{self.units} units of work on {len(self.nodes)} nodes ({nodes}); {self.redone} "
            f"restarted after a worker or node was lost, {self.failed} retried after an error."
        )


@contextmanager
def on_ray(address: str = "local") -> Iterator[tuple[RunUnits, WorkTally]]:
    """Runner of jobs on the cluster at `address` ("auto": this machine's; "local": a Ray on this
    machine that lasts as long as the block), and the counts of its work.

    A unit that fails with a DatasetError or OSError is tried up to three times with growing pauses;
    a unit whose node is lost is repeated.

    Raises:
      ValueError: Ray is not installed, or there is none at the address.
    """
    with cluster(address) as ray:
        here = ray.get_runtime_context().get_node_id()
        pinned = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(here, soft=False)
        ledger = ray.remote(_Ledger).options(num_cpus=0, scheduling_strategy=pinned).remote()
        tally = WorkTally()

        def run(work: Work[U, R], units: Sequence[U], done: Done) -> Iterator[R]:
            if not units:
                return
            tally.units += len(units)
            rows = ray.data.from_items(
                [{"unit": pickle.dumps(unit)} for unit in units],
                override_num_blocks=min(len(units), _MOST_TASKS),
            ).map(
                _make,
                fn_args=(ray.cloudpickle.dumps(work), ledger),
                num_cpus=CORES,
                max_retries=_LOST_AT_MOST,
            )
            try:
                for row in rows.iter_rows():
                    result, amount, error = pickle.loads(row["made"])
                    if error is not None:
                        raise error
                    done(amount)
                    yield result
            finally:
                tally.begun, tally.failed, tally.nodes = ray.get(ledger.counts.remote())

        yield run, tally


@contextmanager
def cluster(address: str) -> Iterator[Any]:
    """A connection to Ray, the present one if there is one; workers get a copy of this very code.

    Raises:
      ValueError: Ray is not installed, or there is none at the address.
    """
    ray = _ray()
    if ray.is_initialized():
        yield ray
        return
    _require_answer(address)
    here = {"include_dashboard": False}
    elsewhere = {"runtime_env": {"py_modules": [data, models]}}
    try:
        ray.init(
            address,
            log_to_driver=False,
            logging_level=logging.WARNING,
            **(here if address == "local" else elsewhere),
        )
    except ConnectionError as error:
        if isinstance(error.__cause__, RuntimeError) and "InvalidAuthToken" in str(error.__cause__):
            raise ValueError(
                f"Ray at --ray-address {address} requires a token; set RAY_AUTH_MODE=token, and "
                "RAY_AUTH_TOKEN to the cluster's token, which `ray start --head` keeps in "
                "~/.ray/auth_token."
            ) from None
        raise _nobody(address, error) from None
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    try:
        yield ray
    finally:
        ray.shutdown()


def _require_answer(address: str) -> None:
    """Raises ValueError if nothing answers at HOST:PORT, where Ray would wait for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and "/" not in host:
        try:
            socket.create_connection((host.strip("[]"), int(port)), _ANSWER).close()
        except (OSError, OverflowError) as error:
            raise _nobody(address, error) from None


def _nobody(address: str, error: Exception) -> ValueError:
    return ValueError(
        f"Cannot connect to Ray at --ray-address {address} ({str(error).splitlines()[0]}); start "
        "it with `ray start --head`, or give --ray to run Ray on this machine alone."
    )


class _Ledger:
    """Actor on the command's machine that counts the units begun on each node."""

    def __init__(self) -> None:
        self._begun = self._failed = 0
        self._nodes: dict[str, int] = {}

    def begin(self, node: str) -> None:
        self._begun += 1
        self._nodes[node] = self._nodes.get(node, 0) + 1

    def fail(self) -> None:
        self._failed += 1

    def counts(self) -> tuple[int, int, dict[str, int]]:
        return self._begun, self._failed, self._nodes


def _make(row: dict[str, Any], work: bytes, ledger: Any) -> dict[str, Any]:
    """Does a unit in a worker. A lasting error is returned, so that the caller sees the same error
    as without Ray."""
    node = _ray().util.get_node_ip_address()
    unit, wait, amount = pickle.loads(row["unit"]), _FIRST_WAIT, 0

    def done(more: int) -> None:
        nonlocal amount
        amount += more

    for attempt in range(1, _ATTEMPTS + 1):
        ledger.begin.remote(node)
        amount = 0
        try:
            with using_cores(CORES):
                result = _opened(work)(unit, done)
            break
        except (ValueError, OSError) as error:
            if attempt == _ATTEMPTS or not isinstance(error, DatasetError | OSError):
                return {"made": pickle.dumps((None, 0, error))}
            ledger.fail.remote()
            time.sleep(wait)
            wait *= 4
    return {"made": pickle.dumps((result, amount, None))}


@lru_cache(1)
def _opened(work: bytes) -> Any:
    return pickle.loads(work)


def _ray() -> Any:
    try:
        import ray
        import ray.data
        import ray.util.scheduling_strategies
    except ImportError:
        raise ValueError(
            "Ray is not installed, so nothing can run on a cluster; run `pip install -e '.[ray]'` "
            "in Chiliad's repository."
        ) from None
    return ray
