"""One simulator's process, seen from its parent: two pipes that never block, its stderr, and its
end.

`sim.processes.child` runs in it.
"""

import os
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from typing import IO, Any, cast

from sim.processes import child

_LOG = 1 << 20
"""Largest number of bytes of stderr that are kept until the next reply."""
_PART = 1 << 20
"""Largest number of bytes read at once; a damaged length may have any value."""
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "LP_NUM_THREADS": "0"}
"""One thread for numpy and Mesa (0: only the caller's thread), as simulators share the cores."""


class SimulatorProcess:
    """A simulator's process, the data that it has yet to read and the data that it has written so
    far.

    Attributes:
      starting: whether it has not sent anything yet.
      deadline: time at which it counts as hung, by `time.monotonic`.
    """

    def __init__(self, command: tuple[str, ...], patience: float) -> None:
        """Starts the process; raises OSError if there is no such Python."""
        lifeline, self._lifeline = os.pipe()
        self._log = tempfile.TemporaryFile("a+b")  # noqa: SIM115
        try:
            self._child = subprocess.Popen(
                (*command, str(lifeline)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                bufsize=0,
                pass_fds=(lifeline,),
                env=_ONE_THREAD | os.environ,
                start_new_session=True,
            )
        except OSError:
            self._log.close()
            os.close(self._lifeline)
            raise
        finally:
            os.close(lifeline)
        self.requests = cast(IO[bytes], self._child.stdin)
        self.replies = cast(IO[bytes], self._child.stdout)
        os.set_blocking(self.requests.fileno(), False)
        os.set_blocking(self.replies.fileno(), False)
        self.starting = True
        self.deadline = time.monotonic() + patience
        self.outbox = bytearray()
        self._inbox = bytearray()

    def write(self) -> bool:
        """Writes as much as the pipe takes; returns whether that was everything."""
        try:
            while self.outbox:
                del self.outbox[: os.write(self.requests.fileno(), self.outbox)]
        except BlockingIOError:
            return False
        except BrokenPipeError:  # it died, as the end of its replies will show
            self.outbox.clear()
        return True

    def read(self) -> dict[str, Any] | None:
        """The next message, or None if it is not complete yet.

        Raises:
          EOFError: the process ended.
          ValueError: its output is not a message.
        """
        with suppress(BlockingIOError):
            while (needed := child.missing(self._inbox)) > 0:
                part = os.read(self.replies.fileno(), min(needed, _PART))
                if not part:
                    raise EOFError
                self._inbox += part
            message = child.unpack(self._inbox)
            self._inbox = bytearray()
            if os.fstat(self._log.fileno()).st_size > _LOG:
                os.ftruncate(self._log.fileno(), 0)
            return message
        return None

    def abort(self) -> None:
        """Makes the process write its stack to stderr and end."""
        os.kill(self._child.pid, signal.SIGABRT)

    def end(self, what: str, grace: float) -> str:
        """Makes sure that the process is dead; returns a description of its end, with the last
        lines of its stderr."""
        ended = self._ends(within=grace)
        self.kill()
        code = self._child.wait()
        size = os.fstat(self._log.fileno()).st_size
        tail = os.pread(self._log.fileno(), 4000, max(0, size - 4000)).decode(errors="replace")
        self.close()
        if ended:
            died = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
            what = f"{what} ({died})"
        lines = [line for line in tail.splitlines() if line and line[:17] != "Extension modules"]
        return "\n".join((f"{what}; the end of its stderr:", *lines[-12:])) if lines else f"{what}."

    def kill(self) -> None:
        """Kills the process and any processes that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)

    def close(self) -> None:
        """Collects its exit code and closes all pipes to it."""
        self._child.wait()
        self.requests.close()
        self.replies.close()
        self._log.close()
        os.close(self._lifeline)

    def _ends(self, within: float) -> bool:
        """True if the process ends in time; it stays a zombie, so that its pid is not reused."""
        until = time.monotonic() + within
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while os.waitid(os.P_PID, self._child.pid, flags) is None:
            if time.monotonic() > until:
                return False
            time.sleep(0.01)
        return True
