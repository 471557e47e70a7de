"""Command lines, `python -m tools.<command>`, as thin layers over the other folders.

Settings that must be made before JAX starts are made here, once for all commands. MJX is up to 100
times slower with XLA's CPU fusion emitters. Programs over several forced devices deadlock unless
the thread pool is large, which slows all other programs. A compiled loop, such as a simulator's,
holds a thread of the pool; with only one thread per core, other computations beside it starve.
"""

import os
import signal
import sys
from importlib.machinery import PathFinder
from importlib.metadata import version
from pathlib import Path
from types import FrameType, TracebackType

from tools.command_line.help import asks_for_help, join_lines, leave_out_what_computes

_EMITTERS = "--xla_cpu_use_fusion_emitters"
_FORCED = "--xla_force_host_platform_device_count"

_KNOWN = tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11)
"""XLA aborts a process that passes it a flag that it does not know."""

if _KNOWN and _EMITTERS not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_EMITTERS}=false".strip()
_FORCES = _FORCED in os.environ.get("XLA_FLAGS", "")
os.environ.setdefault("NPROC", "32" if _FORCES else str(2 * (os.cpu_count() or 1)))
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path.home() / ".cache/chiliad/jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")


def _end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print("Interrupted.", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def _stop(number: int, frame: FrameType | None) -> None:
    print("Stopped by SIGTERM.", file=sys.stderr)
    sys.exit(75)  # parallel.hosts.exits.UNFINISHED


if Path(sys.argv[0]).name in ("-m", "chiliad"):  # while the command's module is imported
    sys.excepthook = _end
    signal.signal(signal.SIGTERM, _stop)


def _refuse_shadows() -> None:
    root = Path(__file__).resolve().parents[1]
    for package in ("models", "data", "parallel", "sim", "rl"):
        found = PathFinder.find_spec(package)
        origin = None if found is None or found.origin is None else Path(found.origin).resolve()
        if origin not in (None, root / package / "__init__.py"):
            print(
                f"error: {str(origin)!a} hides Chiliad's own package '{package}', as `python -m` "
                "looks in the working directory first; type `python -P -m tools.…`, or run the "
                "command from another folder.",
                file=sys.stderr,
            )
            sys.exit(1)


_refuse_shadows()
join_lines()

_NAMED = sys.argv[0] == "-m" and sys.orig_argv[-len(sys.argv) :][0].startswith("tools.")
if _NAMED and asks_for_help(sys.argv[1:]):
    leave_out_what_computes()
