"""The coordination service of a job's processes (small values by key, barriers that name late
processes), and the job as a cluster's environment describes it.

JAX runs this service inside process 0 but has no public interface to it. All uses of JAX's private
interfaces are in this module.
"""

import os
import re
from dataclasses import dataclass
from typing import Any

from jax._src import clusters
from jax._src import distributed as _jax_distributed


@dataclass(frozen=True)
class Client:
    """Keys and barriers that all processes of the job share; any thread may use it."""

    _service: Any

    def put(self, key: str, value: str) -> None:
        """Sets a key, overwriting any value."""
        self._service.key_value_set(key, value, allow_overwrite=True)

    def put_first(self, key: str, value: str) -> str:
        """Sets a key unless it is already set; returns the value that it then has."""
        try:
            self._service.key_value_set(key, value)
        except Exception as error:
            if "ALREADY_EXISTS" not in str(error):
                raise
            return self._service.key_value_try_get(key)
        return value

    def get(self, key: str) -> str | None:
        """A key's current value, None if it is not set."""
        try:
            return self._service.key_value_try_get(key)
        except Exception as error:
            if "NOT_FOUND" in str(error):
                return None
            raise

    def list(self, folder: str) -> dict[str, str]:
        """All keys below `folder`, relative to it, with their values."""
        found = self._service.key_value_dir_get(folder)
        return {key.removeprefix(folder).lstrip("/"): value for key, value in found}

    def barrier(self, name: str, seconds: float) -> None:
        """Returns when all processes have reached the barrier `name`, which can be used only once.

        Raises:
          TimeoutError: some were not there after `seconds`; names them.
        """
        try:
            self._service.wait_at_barrier(name, int(seconds * 1000))
        except Exception as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            named = str(error).partition("timed out task names:")[2].split("RPC:")[0]
            late = sorted(map(int, re.findall(r"\d+", named)))
            raise TimeoutError(
                f"Not all processes reached '{name}' within {seconds:g} seconds; ranks {late} are "
                f"late, so check what they are waiting for."
            ) from error


def client() -> Client | None:
    """The job's coordination service, None if the process runs alone."""
    service = _jax_distributed.global_state.client
    return None if service is None else Client(service)


@dataclass(frozen=True)
class ProcessPlace:
    """A process as its cluster describes it: the job's size, its rank, where rank 0 listens (if
    known), and which of its machine's devices belongs to it (None: all)."""

    cluster: str
    processes: int
    rank: int
    coordinator: str | None
    device: int | None


_MPI = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),
)
"""Size, rank and rank on this machine, as set by MPI launchers that JAX does not know: Open MPI 5;
MPICH and Intel MPI."""
_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
"""Number of processes on this machine, as set by the same launchers."""


def detect() -> ProcessPlace | None:
    """This process as SLURM, MPI, a Kubernetes Job or a TPU pod describes it; None outside of
    these.

    Raises:
      ValueError: a Kubernetes Job cannot be queried.
    """
    for kind in clusters.ClusterEnv._cluster_types:
        pod = kind.__name__ == "K8sCluster"
        if kind.opt_in_only_method or (pod and "JOB_COMPLETION_INDEX" not in os.environ):
            continue
        if kind.is_env_present():
            processes, where = kind.get_process_count(), None
            if processes > 1:
                port = os.environ.get("JAX_COORDINATOR_PORT")
                where = kind.get_coordinator_address(300, port)
            device = None if _devices_are_dealt() else kind.get_local_process_id()
            return ProcessPlace(
                kind.name or kind.__name__, processes, kind.get_process_id(), where, device
            )
        if pod:
            raise ValueError(
                "JOB_COMPLETION_INDEX is set, so this is one pod of a Kubernetes Job, but jax "
                "cannot find the others; run `pip install 'jax[k8s]'`, or give --coordinator, "
                "--num-processes and --process-id."
            )
    for size, rank, local in _MPI:
        if size in os.environ and rank in os.environ:
            here = None if _devices_are_dealt() else os.environ.get(local)
            device = None if here is None else int(here)
            return ProcessPlace("MPI", int(os.environ[size]), int(os.environ[rank]), None, device)
    return None


def _devices_are_dealt() -> bool:
    """True if the process sees only its own devices: alone on its machine, or bound to them."""
    alone = re.fullmatch(r"1(\(x\d+\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",")
    return bool(
        alone
        or "1" in (os.environ.get(size) for size in _LOCAL_SIZES)
        or "SLURM_GPUS_PER_TASK" in os.environ
        or "," not in visible
    )
