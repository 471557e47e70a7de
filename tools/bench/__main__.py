"""Runs one benchmark; `--json` prints its result as one JSON object on the last line.

    python -m tools.bench packing --json

Each result has `ratio` (ours over the other), both figures with their unit, versions and hardware.
"""

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from tools.bench import attention, packing
from tools.runs import versions

BENCHMARKS: dict[str, Callable[[Console], dict[str, Any]]] = {
    "attention": attention.run,
    "packing": packing.run,
}


def main(
    name: Annotated[Literal["attention", "packing"], tyro.conf.Positional],
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Measure a claim against its alternative in one run.

    Args:
      name: what to measure.
      as_json: end with the result as one line of JSON.
    """
    console = Console(stderr=as_json)
    result = {"name": name, **BENCHMARKS[name](console), "versions": versions()}
    console.print(
        f"{name}: {result['ratio']:.2f} times ({result['ours']} against {result['other']})"
    )
    if as_json:
        print(json.dumps(result))


if __name__ == "__main__":
    tyro.cli(main, prog="python -m tools.bench", description=__doc__)
