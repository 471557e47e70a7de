"""Runs one benchmark; `--json` prints its result as one JSON object on the last line.

    python -m tools.bench packing --json
    python -m tools.bench pi05 --peer ENVIRONMENT/bin/python
    python -m tools.bench data --peer ENVIRONMENT/bin/python

Each result has `ratio` (ours over the other), both figures with their unit, versions and hardware.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import tyro

from models.terminal import Console, guard_tracebacks, harmless
from tools.bench import learn, serve
from tools.bench.data import data, packing, plan, start, stats
from tools.bench.ladder import ladder
from tools.bench.models import attention, chunks, fp8, pi05, qlora
from tools.bench.parallel import predict, recipe
from tools.bench.rl import rl
from tools.bench.sim import libero, sim
from tools.command_line.versions import versions

BENCHMARKS: dict[str, Callable[..., dict[str, Any]]] = {
    "attention": attention.run,
    "chunks": chunks.run,
    "data": data.run,
    "fp8": fp8.run,
    "ladder": ladder.run,
    "learn": learn.run,
    "libero": libero.run,
    "packing": packing.run,
    "pi05": pi05.run,
    "plan": plan.run,
    "predict": predict.run,
    "qlora": qlora.run,
    "recipe": recipe.run,
    "rl": rl.run,
    "serve": serve.run,
    "sim": sim.run,
    "start": start.run,
    "stats": stats.run,
}

_WITH_PEER = ("data", "ladder", "pi05", "stats")
_NAMES = tyro.conf.arg(constructor=tyro.extras.literal_type_from_choices(BENCHMARKS))


def main(
    name: Annotated[str, tyro.conf.Positional, _NAMES],
    peer: Path | None = None,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Measure a claim against its alternative in one run.

    Args:
      name: what to measure.
      peer: the Python of an environment that has openpi, for pi05, LeRobot, for data and, if it is
        there, ladder, or both, for stats.
      as_json: end with the result as one line of JSON.
    """
    console = Console(stderr=as_json)
    if peer is not None and name not in _WITH_PEER:
        raise ValueError(f"--peer is for {', '.join(_WITH_PEER)}; {name} has no use for it.")
    options = {} if peer is None else {"peer": peer}
    result = {"name": name, **BENCHMARKS[name](console, **options), "versions": versions()}
    console.print(
        f"{name}: {result['ratio']:.2f} times ({result['ours']} against {result['other']})"
    )
    if as_json:
        print(json.dumps(result))


if __name__ == "__main__":
    guard_tracebacks()
    try:
        tyro.cli(main, prog="python -m tools.bench", description=__doc__)
    except (ValueError, FileNotFoundError) as error:
        sys.exit(harmless(f"error: {error}"))
