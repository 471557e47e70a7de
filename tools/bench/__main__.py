"""Run one benchmark; `--json` prints its result as one JSON object on the last line.

    python -m tools.bench packing --json
    python -m tools.bench pi05 --peer ENVIRONMENT/bin/python --width real
    python -m tools.bench data --peer ENVIRONMENT/bin/python OTHER/bin/python
    python -m tools.bench attention --tiny
    python -m tools.bench learn --task tabletop-reach
    python -m tools.bench all        # every one that a CPU can run, 21 hours; --list lists them
    python -m tools.bench pages      # rewrites the figures on the pages of docs from their JSON

Each result has `ratio` (ours over the other), both figures with their unit, versions and hardware.
Only the benchmark that you name is imported, so each needs only its own packages.
"""

import json
import signal
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from models.files.terminal import Console, guard_tracebacks, harmless
from parallel.hosts import exits
from tools.bench.peer import check_python
from tools.command_line.options import cli
from tools.command_line.versions import versions

BENCHMARKS: Mapping[str, str] = {
    "act": "tools.bench.models.act",
    "attention": "tools.bench.models.attention",
    "cameras": "tools.bench.data.cameras",
    "colocated": "tools.bench.rl.colocated",
    "data": "tools.bench.data.data",
    "families": "tools.bench.families",
    "fp8": "tools.bench.models.fp8",
    "learn": "tools.bench.learn",
    "libero": "tools.bench.sim.libero",
    "packing": "tools.bench.data.packing",
    "pi05": "tools.bench.models.pi05",
    "plan": "tools.bench.data.plan",
    "predict": "tools.bench.parallel.predict",
    "processes": "tools.bench.parallel.processes",
    "products": "tools.bench.models.products",
    "qlora": "tools.bench.models.qlora",
    "recipe": "tools.bench.parallel.recipe",
    "rl": "tools.bench.rl.rl",
    "serve": "tools.bench.serving.serve",
    "sim": "tools.bench.sim.sim",
    "stats": "tools.bench.data.stats",
    "step": "tools.bench.models.step",
}
"""Modules whose `run` measures."""
COMMANDS: Mapping[str, str] = {"all": "tools.bench.all", "pages": "tools.bench.pages"}
"""Modules whose `main` is a command about all of them."""

_WITH_PEER = ("act", "cameras", "data", "families", "pi05", "stats")
_WITH_PEERS = ("cameras", "data")
_WITH_TINY = (
    "act", "attention", "colocated", "fp8", "packing", "pi05", "processes", "products", "sim",
    "step",
)  # fmt: skip
_WITH_WIDTH = ("packing", "pi05", "serve")
_NAMES = tyro.conf.arg(constructor=tyro.extras.literal_type_from_choices(BENCHMARKS))


def main(
    name: Annotated[str, tyro.conf.Positional, _NAMES],
    peer: tuple[Path, ...] = (),
    tiny: bool = False,
    width: Literal["small", "real"] = "small",
    task: str = "",
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Measure a claim against its alternative in the same run.

    Args:
      name: benchmark to run.
      peer: the Python of an environment that has openpi (for act and pi05), LeRobot (for data,
        cameras and families) or both (for stats). data and cameras take Pythons of several
        LeRobots.
      tiny: shrink the benchmark to seconds on a CPU, to try the same code; its figures mean
        nothing.
      width: "real" takes layers of the released widths for packing and pi05 (half an hour on two
        cores, and 16 GB), and π0.5 itself for serve.
      task: task that learn's policies learn: tabletop-reach, tabletop-lift or
        metaworld-door-open-v3.
      as_json: print the result as one line of JSON at the end.
    """
    console = Console(stderr=as_json)
    if peer and name not in _WITH_PEER:
        raise ValueError(f"--peer is for {', '.join(_WITH_PEER)}; {name} does not take it.")
    if len(peer) > 1 and name not in _WITH_PEERS:
        raise ValueError(f"--peer has {len(peer)} Pythons, but {name} takes only one.")
    if tiny and name not in _WITH_TINY:
        raise ValueError(f"--tiny is for {', '.join(_WITH_TINY)}; {name} has one size.")
    if width == "real" and name not in _WITH_WIDTH:
        raise ValueError(f"--width is for {', '.join(_WITH_WIDTH)}; {name} has one width.")
    if bool(task) != (name == "learn"):
        raise ValueError("--task is for learn, which needs it.")
    for python in peer:
        check_python(python)
    given = peer if name in _WITH_PEERS else peer[0] if peer else None
    options: dict[str, Any] = {"peer": given} if given else {}
    options |= ({"tiny": True} if tiny else {}) | ({"width": width} if width == "real" else {})
    options |= {"task": task} if task else {}
    found = import_module(BENCHMARKS[name]).run(console, **options)
    result = {"name": name, **found, "versions": versions()}
    console.print(
        f"{name}: {result['ratio']:.2f} times ({result['ours']} against {result['other']})"
    )
    if as_json:
        print(json.dumps(result))


if __name__ == "__main__":
    guard_tracebacks()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if found := COMMANDS.get("".join(sys.argv[1:2])):
            command, prog = import_module(found), f"python -m tools.bench {sys.argv[1]}"
            cli(command.main, prog=prog, description=command.__doc__, args=sys.argv[2:])
        else:
            cli(main, prog="python -m tools.bench", description=__doc__)
    except (ValueError, FileNotFoundError, ImportError) as error:
        sys.exit(harmless(f"error: {error}"))
    except KeyboardInterrupt:
        print("Stopped by a signal; nothing was measured to the end.", file=sys.stderr)
        sys.exit(exits.INTERRUPTED)
