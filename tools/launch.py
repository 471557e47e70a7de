"""Run a command as several processes of one job on this machine, and keep it going.

    python -m tools.launch -n 4 -- python -m tools.train --data PATH --preset tiny
    python -m tools.launch -n 4 --max-restarts 3 -- python -m tools.train --data PATH
    python -m tools.launch -n 8 --nodes 2 --node-rank 0 --coordinator host0:9000 -- python -m ...

Each line that a process prints is prefixed with its rank: `[2] ...`. When a process fails, all are
ended; the first cause is printed last and decides the exit code. With --max-restarts, the job then
restarts from the run's last checkpoint.
"""

import sys
from dataclasses import astuple, dataclass
from typing import Annotated

import tyro

from models.files.terminal import guard_tracebacks, harmless
from parallel.hosts import exits
from parallel.hosts.supervisor import LaunchPlan, supervise
from tools.command_line.options import cli


@dataclass(frozen=True)
class Options:
    """Number of processes, and reaction to one that fails: the fields of a `LaunchPlan`, in its
    order."""

    processes: Annotated[int, tyro.conf.arg(aliases=["-n"])]
    """Number of processes on this machine."""
    devices_per_process: int | None = None
    """Accelerators of each process (default: an even share). On a machine without accelerators,
    the number of forced CPU devices."""
    max_restarts: int = 0
    """Largest number of restarts of a failed job, each from its last checkpoint."""
    min_processes: int | None = None
    """Restart without the process at fault, down to this many processes; default: restart with as
    many as before."""
    nodes: int = 1
    """Number of machines in the job; run this command on each."""
    node_rank: int = 0
    """Index of this machine."""
    coordinator: str | None = None
    """HOST:PORT of the first machine, the same on all machines; default: a free port on the
    loopback interface."""


def main() -> None:
    """Command line."""
    arguments = sys.argv[1:]
    at = arguments.index("--") if "--" in arguments else len(arguments)
    options = cli(Options, args=arguments[:at], description=__doc__, prog="python -m tools.launch")
    command = arguments[at + 1 :]
    if not command:
        print("error: give the command to run after --.", file=sys.stderr)
        sys.exit(exits.REFUSED)
    if command[0] == "python":
        command[0] = sys.executable
    try:
        sys.exit(supervise(LaunchPlan(command, *astuple(options))))
    except (ValueError, FileNotFoundError) as error:
        print(harmless(f"error: {error}"), file=sys.stderr)
        sys.exit(exits.REFUSED)


if __name__ == "__main__":
    guard_tracebacks()
    main()
