"""Hosts of Linux's namespaces on one machine: each has network, host name, processes, /etc/hosts
and /dev/shm of its own, and a cable to one bridge; they share the disk. Needs root, iproute2 and
util-linux."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.namespaces import begun, first_process, ip

BRIDGE, SUBNET = "chiliad-box", "10.79.0"
_ROOT = Path(__file__).parents[3]

_HOST = """
set -e
hostname "$1"
mount -t tmpfs -o size=1g tmpfs /dev/shm
mount --bind "$2" /etc/hosts
ip link set lo up
until ip link show eth0 >/dev/null 2>&1; do sleep 0.05; done
ip address add "$3/24" dev eth0
ip link set eth0 up
exec sleep infinity
"""


@dataclass
class Host:
    """A host: its address, and the process that all others of it end with."""

    address: str
    process: "subprocess.Popen[bytes]"

    @property
    def init(self) -> int:
        """Number of the first process in it, as seen from outside."""
        return first_process(self.process)

    def inside(self, command: Sequence[str | Path]) -> list[str]:
        """A command as it is run on the host."""
        spaces = ["-n", "-u", "-i", "-m", "-p", f"--wd={_ROOT}"]
        return ["nsenter", f"--target={self.init}", *spaces, "--", *map(str, command)]

    def lose(self) -> None:
        """Ends it at once: its cable is cut, then all its processes are killed."""
        cut = ["ip", "link", "delete", _cable(self.address)]
        subprocess.run(cut, check=False, capture_output=True)
        os.kill(self.init, signal.SIGKILL)
        self.process.wait()


@contextmanager
def box(count: int, folder: Path) -> Iterator[list[Host]]:
    """Hosts n1, n2, … that end with the block; `folder` is for their files."""
    with ExitStack() as stack:
        ip("link", "add", BRIDGE, "type", "bridge")
        stack.callback(ip, "link", "delete", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        yield [stack.enter_context(_host(number, count, folder)) for number in range(1, count + 1)]


@contextmanager
def _host(number: int, count: int, folder: Path) -> Iterator[Host]:
    names = [f"{SUBNET}.{i} n{i}" for i in range(1, count + 1)]
    known, address = folder / f"hosts{number}", f"{SUBNET}.{number}"
    known.write_text("\n".join(["127.0.0.1 localhost", *names]) + "\n")
    apart = ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork"]
    shell = ["--kill-child=KILL", "--mount-proc", "sh", "-c", _HOST, "host"]
    process = subprocess.Popen(
        [*apart, *shell, f"n{number}", str(known), address],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    host = Host(address, process)
    try:
        _until(lambda: begun(process))
        there = ("peer", "name", "eth0", "netns", str(host.init))
        ip("link", "add", _cable(address), "type", "veth", *there)
        ip("link", "set", _cable(address), "master", BRIDGE, "up")
        _until(lambda: "sleep" in Path(f"/proc/{host.init}/comm").read_text())
        yield host
    finally:
        if process.poll() is None:
            host.lose()


def _cable(address: str) -> str:
    return f"chbox{address.rpartition('.')[2]}"


def _until(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError("A host did not come up.")
        time.sleep(0.02)
