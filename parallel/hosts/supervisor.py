"""Supervises a job of several processes on one machine: starts them, merges their output, and when
one is dead, stopped or stuck, ends all and restarts.

Each attempt is a job with a new port (as torchelastic re-forms a group), which waits for no remains
of the last. The first cause of a failure is told apart from what only lost its peer.
"""

import io
import json
import math
import os
import queue
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from models.files.bounds import LARGEST_CREW, check_size
from models.files.terminal import harmless
from parallel.hosts import exits, job, watchdog
from parallel.hosts.parent import die_with_parent
from parallel.hosts.stop import handled

_POLL, _STOPPED_FOR, _TAIL = 0.1, 2.0, 30
_LINE, _DRAIN = 2**16, 10.0
"""Characters after which a line is broken, and seconds for the output that is left at the end."""
_ECHO = 0.5
"""Seconds after a failure during which an earlier failure may still become known."""
_STACKS = 6.0
"""Seconds that the other processes have to write their stacks after the first is ended by its
watchdog."""
_ALONE = 5.0
"""Seconds for the other processes to stop after one that was told to, but not by the launcher."""
_FORCED = "--xla_force_host_platform_device_count"


@dataclass(frozen=True)
class LaunchPlan:
    """Job to run: `processes` on each of `nodes` machines, of which this one is `node`, with rank 0
    at `coordinator` (a free port of the loopback if None). Each process gets `devices` of its own
    (forced CPU devices, or accelerators; an even share if None).

    After a failure the job restarts up to `max_restarts` times, with the same number of processes.
    With `min_processes`, it restarts without the process at fault: with the largest divisor of
    `processes` that the remaining ones allow, since rows that divide over n processes divide over
    n's divisors.
    """

    command: Sequence[str]
    processes: int
    devices: int | None = None
    max_restarts: int = 0
    min_processes: int | None = None
    nodes: int = 1
    node: int = 0
    coordinator: str | None = None


@dataclass(frozen=True)
class ProcessFailure:
    """The first cause of a failure, or of an orderly stop: the rank, what happened to it, and the
    matching exit code."""

    rank: int
    what: str
    code: int


def supervise(plan: LaunchPlan) -> int:
    """Runs the job to its end; returns its exit code, which is that of the first cause if it
    failed.

    SIGTERM and Ctrl-C go to all processes, which then save and end; a second Ctrl-C kills them. A
    job that stopped so is not restarted (`exits.ORDERLY`): who stopped it starts it again.

    Raises:
      ValueError: the numbers do not fit each other or this machine.
    """
    _check(plan)
    available = accelerators()
    slots = list(range(plan.processes))
    signals, attempt = _Forwarded(), 0
    with handled(signals.forward, signal.SIGTERM, signal.SIGINT):
        while failure := _Attempt(plan, slots, attempt, available, signals).run():
            hopeless = failure.code in (exits.REFUSED, exits.NON_FINITE, *exits.ORDERLY)
            if signals.count or hopeless or attempt == plan.max_restarts:
                return failure.code
            slots, attempt = _next_slots(plan, slots, failure.rank), attempt + 1
            _say(
                f"restarting with {len(slots)} processes, restart {attempt} of {plan.max_restarts}"
            )
    return 0


def accelerators() -> int:
    """NVIDIA GPUs that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def _check(plan: LaunchPlan) -> None:
    for name, value, least in (
        ("-n", plan.processes, 1),
        ("--devices-per-process", plan.devices, 1),
        ("--max-restarts", plan.max_restarts, 0),
        ("--min-processes", plan.min_processes, 1),
    ):
        if value is not None and value < least:
            raise ValueError(f"{name} is {value}; expected {least} or more.")
    check_size("-n", plan.processes, LARGEST_CREW)
    if plan.min_processes is not None and plan.min_processes > plan.processes:
        raise ValueError(
            f"--min-processes is {plan.min_processes}; expected at most {plan.processes} (-n)."
        )
    if not 0 <= plan.node < plan.nodes:
        raise ValueError(
            f"--node-rank is {plan.node}; expected 0 to {plan.nodes - 1}, below --nodes."
        )
    if plan.nodes > 1 and (plan.coordinator is None or plan.min_processes is not None):
        raise ValueError(
            "Several machines (--nodes) need --coordinator HOST:PORT of the first machine, the "
            "same on all, and always restart with all processes; leave out --min-processes."
        )
    if plan.coordinator is not None:
        job.check_address(plan.coordinator)
    if shutil.which(plan.command[0]) is None:
        raise ValueError(
            f"{plan.command[0]}: no such program, or it is not executable; give the command to run "
            f"after --, such as python -m tools.train."
        )


def _next_slots(plan: LaunchPlan, slots: list[int], failed: int) -> list[int]:
    if plan.min_processes is None:
        return slots
    rest = [slot for rank, slot in enumerate(slots) if rank != failed]
    sizes = range(len(rest), plan.min_processes - 1, -1)
    size = next((n for n in sizes if plan.processes % n == 0), None)
    return slots if size is None else rest[:size]


@dataclass
class _Attempt:
    """One job from its start to its end; rank r has the devices of `slots[r]`."""

    plan: LaunchPlan
    slots: list[int]
    attempt: int
    accelerators: int
    signals: "_Forwarded"

    def __post_init__(self) -> None:
        self._first = self.plan.node * self.plan.processes
        self._tails = [deque[str](maxlen=_TAIL) for _ in self.slots]
        self._ended: queue.Queue[int] = queue.Queue()
        self._told: int | None = None
        self._over = threading.Event()

    def run(self) -> ProcessFailure | None:
        """The first cause of an end before the job's; None if all processes ended well."""
        with tempfile.TemporaryDirectory(prefix="launch-") as scratch, socket.socket() as holder:
            self._report = Path(scratch) / "first-cause.json"
            where = self._coordinator(holder)
            self._processes = [self._start(i, where) for i in range(len(self.slots))]
            self.signals.release(self._processes)
            readers = [
                threading.Thread(
                    target=self._relay, args=(i, stream, out), name="relay", daemon=True
                )
                for i, process in enumerate(self._processes)
                for stream, out in ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
            ]
            waiters = [
                threading.Thread(target=self._wait, args=(i,), daemon=True)
                for i in range(len(self._processes))
            ]
            for thread in (*readers, *waiters):
                thread.start()
            try:
                failed, stopped = self._watch()
                if failed is not None:
                    detected = time.time()
                    failed = self._settled(failed, stopped)
            finally:
                for process in self._processes:
                    _kill(process)
                self.signals.hold()
                self._over.set()
            until = time.monotonic() + _DRAIN
            for thread in (*readers, *waiters):
                thread.join(timeout=max(0.0, until - time.monotonic()))
            return None if failed is None else self._explained(failed, stopped, detected)

    def _coordinator(self, holder: socket.socket) -> str:
        """Rank 0's address, with another port in every attempt. A port of the loopback stays bound
        to `holder`, so that nobody takes it before rank 0 listens (gRPC shares it,
        SO_REUSEPORT)."""
        if self.plan.coordinator is not None:
            host, _, port = self.plan.coordinator.rpartition(":")
            return f"{host}:{int(port) + self.attempt}"
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{holder.getsockname()[1]}"

    def _start(self, index: int, where: str) -> "subprocess.Popen[bytes]":
        world = self.plan.nodes * len(self.slots)
        told = {
            job.COORDINATOR: where,
            job.PROCESSES: str(world),
            job.RANK: str(self._first + index),
            job.RESTARTS: str(job.restarts() + self.attempt),
            watchdog.REPORT: str(self._report),
            "PYTHONUNBUFFERED": "1",
        }
        share = _devices(self.plan, self.slots[index], self.accelerators, os.environ)
        return subprocess.Popen(
            self.plan.command,
            env={**os.environ, **told, **share},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # so that it is killed with its own children
            preexec_fn=die_with_parent,
        )

    def _relay(self, index: int, stream: IO[bytes], out: IO[str]) -> None:
        text = io.TextIOWrapper(io.BufferedReader(_Pipe(stream, self._over)), errors="replace")
        while line := text.readline(_LINE):
            line = line if line.endswith("\n") else line + "\n"
            if out is sys.stderr:
                self._tails[index].append(line)
            _put(f"[{self._first + index}] {line}", out)

    def _wait(self, index: int) -> None:
        self._processes[index].wait()
        self._ended.put(index)

    def _watch(self) -> tuple[int | None, bool]:
        """Index of the process that failed first, else of one that was told to stop (None: all
        ended well), and if it was stopped by SIGSTOP."""
        running, stopped_since = set(range(len(self._processes))), dict[int, float]()
        until = math.inf
        while running:
            try:
                index = self._ended.get(timeout=_POLL)
                running.discard(index)
                if (code := self._processes[index].returncode) in exits.ORDERLY:
                    self._told, until = index, min(until, time.monotonic() + _ALONE)
                elif code:
                    return index, False
            except queue.Empty:
                pass
            if (
                running
                and self._told is not None
                and time.monotonic() > until
                and not self.signals.count
            ):
                _say(f"rank {self._first + self._told} was told to stop; the others were ended")
                break
            for index in running:
                if _is_stopped(self._processes[index].pid):
                    since = stopped_since.setdefault(index, time.monotonic())
                    if time.monotonic() - since > _STOPPED_FOR:
                        return index, True
                else:
                    stopped_since.pop(index, None)
        return self._told, False

    def _settled(self, failed: int, stopped: bool) -> int:
        """Index of the process that failed first, once the others that failed are known. A process
        that JAX aborted (SIGABRT) or that reports a lost peer is not the cause if another process
        failed in another way."""
        watched = self._processes[failed].returncode in (exits.STALLED, exits.PEER_LOST)
        until = time.monotonic() + (_STACKS if watched else 0.0 if stopped else _ECHO)
        while time.monotonic() < until and any(p.poll() is None for p in self._processes):
            time.sleep(0.02)
        ended = [failed, *([] if self._told is None else [self._told])]
        while not self._ended.empty():
            ended.append(self._ended.get())
        echoes = (0, -signal.SIGABRT, exits.PEER_LOST, exits.UNFINISHED)
        own = [i for i in ended if self._processes[i].returncode not in echoes]
        reported = self._reported().get("rank", -1) - self._first
        if stopped or not own:
            return failed
        return reported if reported in own else own[0]

    def _reported(self) -> dict[str, Any]:
        """Report that the first process to fail has written, or {}."""
        try:
            return json.loads(self._report.read_text())
        except (FileNotFoundError, json.JSONDecodeError):  # a full disk holds no report
            return {}

    def _explained(self, index: int, stopped: bool, detected: float) -> ProcessFailure:
        rank, code = self._first + index, self._processes[index].returncode
        if code in exits.ORDERLY:
            return ProcessFailure(index, "was told to stop", code)
        report = self._reported()
        if stopped:
            what, code = f"rank {rank} was stopped (SIGSTOP or a debugger)", exits.STALLED
        elif code == exits.STALLED and report:
            what, rank = report["what"], report["rank"]
        elif code < 0:
            what, code = f"rank {rank} was killed by {signal.Signals(-code).name}", 128 - code
        else:
            what = f"rank {rank} ended with exit code {code}"
            what += f": {report['what']}" if report.get("rank") == rank else ""
        _say(f"detected at {detected:.3f}: {what}; all processes were ended")
        tail = self._tails[index]
        if code != exits.STALLED and len(self._processes) > 1:
            for line in tail:
                _put(f"    [{self._first + index}] {line}", sys.stderr)
        return ProcessFailure(rank - self._first, what, code)


class _Pipe(io.RawIOBase):
    """Output of a process, up to its end or, once the job is `over`, up to what was written: a
    child that outlives the process may hold the pipe for ever."""

    def __init__(self, stream: IO[bytes], over: threading.Event) -> None:
        self._stream, self._over, self._ready = stream, over, select.poll()
        self._ready.register(stream, select.POLLIN)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            over = self._over.is_set()
            if self._ready.poll(1000 * _POLL):
                return os.readv(self._stream.fileno(), [buffer])
            if over:
                return 0


class _Forwarded:
    """Forwards signals to the processes of the current attempt, or to those of the next once it has
    started them; the second Ctrl-C kills them."""

    def __init__(self) -> None:
        self.count = 0
        self._processes: list[subprocess.Popen[bytes]] | None = None
        self._held: list[int] = []

    def hold(self) -> None:
        """Holds signals back, as there is no process to receive them."""
        self._processes = None

    def release(self, processes: "list[subprocess.Popen[bytes]]") -> None:
        """Forwards signals to `processes`, first those held back."""
        self._processes = processes
        for number in self._held:
            self._send(number, processes)

    def forward(self, number: int, _: FrameType | None) -> None:
        """Handles a signal."""
        self.count += 1
        if self._processes is None:
            self._held.append(number)
        else:
            self._send(number, self._processes)

    def _send(self, number: int, processes: "list[subprocess.Popen[bytes]]") -> None:
        for process in processes:
            if self.count > 1 and number == signal.SIGINT:
                _kill(process)
            elif process.poll() is None:
                process.send_signal(number)


_writing = threading.Lock()


def _say(what: str) -> None:
    _put(harmless(f"launch: {what}\n"), sys.stderr)


def _put(text: str, out: IO[str]) -> None:
    """Writes as far as possible: a full disk or a closed pipe behind the launcher must not block
    its processes for ever on unread output, or prevent the restart of a failed job."""
    with _writing, suppress(OSError):
        out.write(text)
        out.flush()


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Kills the process and everything that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _is_stopped(pid: int) -> bool:
    """True if the process is stopped. Linux only; elsewhere JAX's heartbeats notice."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")


def _devices(
    plan: LaunchPlan, slot: int, accelerators: int, environment: Mapping[str, str]
) -> dict[str, str]:
    """Environment variables that give the process of a slot its own devices."""
    if not accelerators or environment.get("JAX_PLATFORMS") == "cpu":
        flags = [f for f in environment.get("XLA_FLAGS", "").split() if _FORCED not in f]
        flags.append(f"{_FORCED}={plan.devices or 1}")
        # fewer threads deadlock in collectives
        pool = max(32, 4 * (plan.devices or 1), int(environment.get("NPROC", 0)))
        return {"XLA_FLAGS": " ".join(flags), "NPROC": str(pool)}
    each = plan.devices or accelerators // plan.processes
    if each < 1 or each * plan.processes > accelerators:
        raise ValueError(
            f"-n is {plan.processes} with {max(each, 1)} devices each, but this machine has "
            f"{accelerators}; start fewer, or set JAX_PLATFORMS=cpu."
        )
    own = range(slot * each, (slot + 1) * each)
    return {job.DEVICES: ",".join(map(str, own))}
