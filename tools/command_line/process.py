"""Place of a command's process in a job, as options: the same for training and RL."""

from dataclasses import dataclass

from models.files.bounds import check_positive


@dataclass(frozen=True)
class Process:
    """This process among those of a job; see docs/multihost.md."""

    coordinator: str | None = None
    """HOST:PORT where process 0 runs; detected under tools.launch, SLURM, MPI and Kubernetes."""
    num_processes: int | None = None
    """Number of processes in the job; 1 runs alone, whatever the cluster says."""
    process_id: int | None = None
    """Index of this process."""
    stall_seconds: float = 60.0
    """Seconds without a finished step after which the run is ended, but at least 20 times the usual
    duration of a step."""
    inject: str = ""
    """Faults to inject on purpose, such as kill@rank1:step50; each strikes once in a run."""

    def __post_init__(self) -> None:
        check_positive({"stall_seconds": self.stall_seconds})


ALONE = Process()
