"""LeRobot's processor files: a JSON list of steps, and a safetensors file beside it for each step
that has statistics.

A policy folder has two, policy_preprocessor and policy_postprocessor, which LeRobot 0.4 and later
read (`lerobot.processor.pipeline`).
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from models.checkpoints.safetensors_format import Entry, map_file, write_file
from models.files.bounds import check_name
from models.files.foreign_json import read_json

PREPROCESSOR = "policy_preprocessor.json"
"""File with the steps from an observation to the model's inputs."""


def read_steps(file: Path) -> list[dict[str, Any]]:
    """The steps of a processor file; raises ValueError if it has no list of steps."""
    listed = read_json(file).get("steps")
    if not isinstance(listed, list) or not all(isinstance(step, dict) for step in listed):
        raise ValueError(f"{file} has no list of steps; copy or download it again.")
    return listed


def read_statistics(file: Path, step: dict[str, Any]) -> dict[str, np.ndarray]:
    """The statistics of a step; raises ValueError if the step does not name a file of them."""
    name = step["state_file"]
    if not isinstance(name, str):
        raise ValueError(f"{file}: state_file is {str(name)[:80]!r}; expected a file's name.")
    check_name(f"{file}: state_file", name)
    return map_file(file.parent / name)[0]


def step(name: str, **config: Any) -> dict[str, Any]:
    """One step, by the name under which LeRobot registers it."""
    return {"registry_name": name, "config": config}


def write_pipeline(
    path: Path,
    name: str,
    steps: Sequence[dict[str, Any]],
    statistics: Mapping[str, Entry],
    scaling: Sequence[str],
) -> None:
    """Writes `path/name.json`, and f32 statistics for the steps whose names `scaling` lists."""
    listed = []
    for at, one in enumerate(steps):
        if one["registry_name"] in scaling:
            file = f"{name}_step_{at}_{one['registry_name']}.safetensors"
            write_file(path / file, statistics, np.dtype(np.float32), {})
            one = one | {"state_file": file}
        listed.append(one)
    (path / f"{name}.json").write_text(json.dumps({"name": name, "steps": listed}, indent=2) + "\n")
