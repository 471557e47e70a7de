"""Rendezvous of one run's processes: by options, by `tools.launch`, or by the cluster that started
them (SLURM, MPI, a Kubernetes Job, a TPU pod)."""

import atexit
import ipaddress
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import jax

from parallel.hosts import coordination

COORDINATOR, PROCESSES, RANK = "CHILIAD_COORDINATOR", "CHILIAD_PROCESSES", "CHILIAD_RANK"
"""Environment variables in which `tools.launch` gives a process its place in the job."""
RESTARTS = "CHILIAD_RESTARTS"
"""Environment variable for the number of times that this run was restarted: by `tools.launch`, and
by the scheduler before."""
_SLURM_RESTARTS = "SLURM_RESTART_COUNT"
DEVICES = "JAX_LOCAL_DEVICE_IDS"
"""JAX's environment variable for the accelerators of its machine that belong to a process."""

_CONNECT, _WORK = 300, 7 * 86400
_HEARTBEAT, _LAUNCHED = 10, 300
"""Seconds without a heartbeat after which JAX ends a job. Where `tools.launch` sees all of the
job's processes, it knows at once which one has died or was stopped, and a busy machine must not be
mistaken for a dead process."""
_turns = itertools.count()
T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """A process's place among several: rank 0 listens at `coordinator` (HOST:PORT); `device` is the
    machine's accelerator that belongs to this process, None for all that it sees."""

    coordinator: str
    processes: int
    rank: int
    device: int | None = None

    @property
    def bind(self) -> str | None:
        """Address that rank 0 binds: the loopback if the coordinator is there, else JAX's
        default."""
        return self.coordinator if _is_loopback(_host(self.coordinator)) else None


def start(
    coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> None:
    """Joins this process to its job, and returns when all processes have joined. Call it once,
    before any device is used; it does nothing in a process that is alone.

    Raises:
      ValueError: as `find_job`.
    """
    job = find_job(coordinator, num_processes, process_id)
    if job is None:
        if own := os.environ.get(DEVICES):  # jax.distributed reads it by itself
            jax.config.update("jax_cuda_visible_devices", own)
        return
    jax.config.update("jax_enable_preemption_service", False)  # it would swallow SIGTERM
    jax.distributed.initialize(
        job.coordinator,
        job.processes,
        job.rank,
        local_device_ids=None if job.device is None else [job.device],
        cluster_detection_method="deactivate",
        coordinator_bind_address=job.bind,
        initialization_timeout=_CONNECT,
        heartbeat_timeout_seconds=_LAUNCHED if RESTARTS in os.environ and job.bind else _HEARTBEAT,
    )
    atexit.register(jax.distributed.shutdown)


def find_job(
    coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> Job | None:
    """The job that this process belongs to, None if it is alone.

    If none of the three arguments is given, those that `tools.launch` set are used; values still
    missing come from the cluster. `num_processes` 1 skips this detection.

    Raises:
      ValueError: some are missing, or they do not fit each other.
    """
    given = (coordinator, num_processes, process_id)
    if given == (None, None, None):
        given = (os.environ.get(COORDINATOR), _number(PROCESSES), _number(RANK))
    if given[1:] in ((1, None), (1, 0)):
        return None
    place = coordination.detect() if None in given else None
    if place is None and given == (None, None, None):
        return None
    if place is not None:
        where, processes, rank = given
        given = (
            place.coordinator if where is None else where,
            place.processes if processes is None else processes,
            place.rank if rank is None else rank,
        )
    where, processes, rank = given
    if processes == 1:
        return None
    names = ("--coordinator", "--num-processes", "--process-id")
    missing = [name for name, value in zip(names, given, strict=True) if value is None]
    if missing or where is None or processes is None or rank is None:
        by = "the other options do" if place is None else f"{place.cluster} does"
        raise ValueError(
            f"{' and '.join(missing)}: missing, and {by} not supply them; give --coordinator "
            f"HOST:PORT (where process 0 runs), --num-processes N and --process-id I, or "
            f"--num-processes 1 to run alone."
        )
    if not 0 <= rank < processes:
        raise ValueError(
            f"--process-id is {rank} and --num-processes {processes}; ids go from 0 to the number "
            f"of processes minus 1."
        )
    check_address(where)
    return Job(where, processes, rank, None if place is None else place.device)


def check_address(where: str) -> None:
    """Raises ValueError unless a coordinator's address is HOST:PORT."""
    port = where.rpartition(":")[2]
    if not _host(where) or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(
            f"--coordinator is {where!r}; expected HOST:PORT, such as 10.0.0.1:9000, where process "
            f"0 runs."
        )


def restarts() -> int:
    """Number of times that this run was restarted, by `tools.launch` or SLURM; a restarted run
    resumes where it was."""
    return _number(RESTARTS if RESTARTS in os.environ else _SLURM_RESTARTS) or 0


def first_host_first(work: Callable[[], T]) -> T:
    """Result of `work` in each process. Process 0 calls `work` before the others, which then find
    the files that it left. All processes must call this function equally often."""
    client = coordination.client()
    if client is None:
        return work()
    name = f"first-host/{next(_turns)}"
    if jax.process_index() == 0:
        result = work()
        client.barrier(name, _WORK)
        return result
    client.barrier(name, _WORK)
    return work()


def _number(name: str) -> int | None:
    value = os.environ.get(name)
    if value is not None and not value.isdecimal():
        raise ValueError(f"{name} is {value!r} in the environment; expected a number, or unset it.")
    return None if value is None else int(value)


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
