"""A Ray cluster of several nodes on one machine: each has network, processes and /tmp/ray of its
own (namespaces of Linux), an address of its own, and a cable to one bridge.

To the nodes it is as if they were machines that share a disk: one that is killed is gone at once
with all its processes, others may join, and one can be made slow. Needs root, iproute2 and
util-linux. By itself it makes a cluster that lasts until Ctrl-C:

    python -m tests.helpers.data.ray_nodes 3
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.helpers.namespaces import begun, first_process, ip

BRIDGE, SUBNET, PORT = "chiliad-ray", "10.77.0", 6379
_STARTING = 300.0
_ROOT = Path(__file__).parents[3]

_NODE = """
set -e
mount -t tmpfs -o size=2g tmpfs /dev/shm
mkdir -p /tmp/ray
mount --bind "$1" /tmp/ray
ip link set lo up
until ip link show eth0 >/dev/null 2>&1; do sleep 0.05; done
ip address add "$2/24" dev eth0
ip link set eth0 up
shift 2
exec "$@"
"""


@dataclass
class RayNode:
    """A node: its number, address, and the process that all others of it end with."""

    number: int
    address: str
    process: "subprocess.Popen[bytes]"
    log: Path

    @property
    def init(self) -> int:
        """Number of the first process in it, as seen from outside."""
        return first_process(self.process)

    def processes(self) -> list[int]:
        """All its processes."""
        mine = os.stat(f"/proc/{self.init}/ns/pid").st_ino
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdecimal() and os.stat(entry / "ns/pid").st_ino == mine:
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def kill(self) -> None:
        """Ends it at once, as a power cut does."""
        os.kill(self.init, signal.SIGKILL)
        self.process.wait()

    @contextmanager
    def slow(self, share: float = 0.2, period: float = 0.5) -> Iterator[None]:
        """Lets its workers run for only this share of the time within a block; its own daemons go
        on, as those of a machine that is busy do."""
        ended = threading.Event()

        def toggle() -> None:
            while not ended.is_set():
                workers = [pid for pid in self.processes() if _is_worker(pid)]
                _send(workers, signal.SIGSTOP)
                ended.wait(period * (1 - share))
                _send(workers, signal.SIGCONT)
                ended.wait(period * share)

        thread = threading.Thread(target=toggle)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


@dataclass
class RayNodes:
    """Nodes that are up; the first is the head. `cpus` and `store` (bytes of the object store) are
    those of each; `token` is what Ray asks of whoever connects."""

    cpus: int = 2
    store: int = 100 << 20
    nodes: list[RayNode] = field(default_factory=list)
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="chiliad-ray-")))
    token: dict[str, str] = field(
        default_factory=lambda: {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    )
    _numbers: int = 0

    @property
    def address(self) -> str:
        """Address to give --ray-address."""
        return f"{SUBNET}.1:{PORT}"

    def join(self) -> RayNode:
        """Starts one more node; it may take a while until the cluster knows it."""
        self._numbers += 1
        number = self._numbers
        address, log = f"{SUBNET}.{number}", self.folder / f"node{number}.log"
        own = self.folder / f"ray{number}"
        own.mkdir()
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        ray += [f"--node-ip-address={address}", f"--num-cpus={self.cpus}", "--num-gpus=0"]
        ray += [f"--object-store-memory={self.store}", "--disable-usage-stats"]
        if number == 1:
            ray += ["--head", f"--port={PORT}", "--include-dashboard=false"]
        else:
            ray += [f"--address={self.address}"]
        apart = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child=KILL"]
        shell = ["--mount-proc", "sh", "-c", _NODE, "node", str(own), address]
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*apart, *shell, *ray],
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                env=os.environ | self.token | {"RAY_worker_niceness": "0"},
            )
        node = RayNode(number, address, process, log)
        _until(lambda: begun(process))
        cable = f"chray{number}"
        ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", str(node.init))
        ip("link", "set", cable, "master", BRIDGE, "up")
        self.nodes.append(node)
        return node

    def lose(self, node: RayNode) -> None:
        """Kills a node."""
        node.kill()
        self.nodes.remove(node)

    def wait(self, count: int, seconds: float = _STARTING) -> None:
        """Returns when the cluster has so many living nodes.

        Raises:
          TimeoutError: it has not in time; tells what the nodes said.
        """
        program = (
            "import ray, sys; ray.init(sys.argv[1], log_to_driver=False, logging_level='ERROR');"
            "print('living', sum(n['Alive'] for n in ray.nodes()))"
        )
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            said = subprocess.run(
                self.inside([sys.executable, "-c", program, self.address]),
                capture_output=True,
                text=True,
            )
            if f"living {count}" in said.stdout:
                return
            time.sleep(0.5)
        logs = "\n".join(node.log.read_text()[-2000:] for node in self.nodes)
        raise TimeoutError(f"{said.stdout} {said.stderr[-2000:]}\n{logs}")

    def inside(self, command: Sequence[str]) -> list[str]:
        """A command as it is run on the head."""
        here = ["env", f"--chdir={_ROOT}", f"PYTHONPATH={_ROOT}"]
        here += [f"{name}={value}" for name, value in self.token.items()]
        return ["nsenter", f"--target={self.nodes[0].init}", "-n", "-m", "-p", *here, *command]

    def close(self) -> None:
        """Ends all nodes, and takes the bridge away."""
        for node in reversed(self.nodes):
            node.kill()
        self.nodes.clear()
        subprocess.run(["ip", "link", "delete", BRIDGE], check=False, capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def ray_nodes(count: int, cpus: int = 2, store: int = 100 << 20) -> Iterator[RayNodes]:
    """A cluster of `count` nodes that ends with the block.

    Args:
      cpus: cores that each node says it has.
      store: bytes of each node's object store (Ray takes no fewer than 75 MiB).
    """
    ip("link", "add", BRIDGE, "type", "bridge")
    cluster = RayNodes(cpus, store)
    try:
        ip("address", "add", f"{SUBNET}.254/24", "dev", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        cluster.join()
        cluster.wait(1)
        for _ in range(count - 1):
            cluster.join()
        cluster.wait(count)
        yield cluster
    finally:
        cluster.close()


def _is_worker(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::")
    except OSError:
        return False


def _send(processes: Sequence[int], number: int) -> None:
    for pid in processes:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _until(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError("A node's first process did not begin.")
        time.sleep(0.02)


if __name__ == "__main__":
    with ray_nodes(int(sys.argv[1])) as running:
        print(f"--ray-address {running.address}, from within: {' '.join(running.inside(['bash']))}")
        signal.sigwait([signal.SIGINT, signal.SIGTERM])
