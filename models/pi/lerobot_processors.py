"""The processor files of a LeRobot policy: pipelines of steps before and after the network, with
the statistics that scale its state and actions.

Step names and order are those that LeRobot 0.6.1 writes; scales go out as means and deviations,
which hold any of ours exactly (up to f32).
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from models.checkpoints.safetensors_format import Entry, write_file
from models.inputs.embodiment import Normalizer

NORM_MAP = {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
"""Scaling by kind of feature, as config.json and the normalizers tell it."""


def write_processors(
    path: Path, config: dict[str, Any], state: Normalizer, actions: Normalizer
) -> None:
    """Writes policy_preprocessor.json, policy_postprocessor.json and their statistics in `path`.

    Args:
      config: of the policy, as its config.json holds it.
    """
    inputs, outputs = config["input_features"], config["output_features"]
    relative = bool(config.get("use_relative_actions"))
    scales: dict[str, Any] = {"eps": 0.0, "norm_map": NORM_MAP}
    steps = {
        "rename": _step("rename_observations_processor", rename_map={}),
        "batch": _step("to_batch_processor"),
        "newline": _step("pi0_new_line_processor"),
        "state": _step("pi05_prepare_state_tokenizer_processor_step"),
        "tokens": _step(
            "tokenizer_processor",
            max_length=config["tokenizer_max_length"],
            task_key="task",
            padding_side="right",
            padding="max_length",
            truncation=True,
            tokenizer_name="google/paligemma-3b-pt-224",
        ),
        "device": _step("device_processor", device="cpu", float_dtype=None),
        "relative": _step(
            "relative_actions_processor",
            enabled=relative,
            exclude_joints=config.get("relative_exclude_joints", []),
            action_names=config.get("action_feature_names"),
        ),
        "scale": _step("normalizer_processor", features=inputs | outputs, **scales),
    }
    order = _ORDER[config["type"]]
    after = [
        _step("unnormalizer_processor", features=outputs, **scales),
        _step("absolute_actions_processor", enabled=relative),
        steps["device"],
    ]
    statistics = _statistics(state, actions)
    _write(path, "policy_preprocessor", [steps[name] for name in order], statistics)
    _write(path, "policy_postprocessor", after, statistics)


_ORDER = {
    "pi0": ("rename", "batch", "newline", "tokens", "device", "relative", "scale"),
    "pi05": ("rename", "batch", "relative", "scale", "state", "tokens", "device"),
}


def _step(name: str, **config: Any) -> dict[str, Any]:
    return {"registry_name": name, "config": config}


def _statistics(state: Normalizer, actions: Normalizer) -> dict[str, Entry]:
    return {
        f"{name}.{kind}": ((len(values),), partial(np.asarray, values))
        for name, scaling in (("action", actions), ("observation.state", state))
        for kind, values in (("mean", scaling.offset), ("std", scaling.scale))
    }


def _write(
    path: Path, name: str, steps: list[dict[str, Any]], statistics: dict[str, Entry]
) -> None:
    listed = []
    for at, step in enumerate(steps):
        if step["registry_name"] in ("normalizer_processor", "unnormalizer_processor"):
            file = f"{name}_step_{at}_{step['registry_name']}.safetensors"
            write_file(path / file, statistics, np.dtype(np.float32), {})
            step = step | {"state_file": file}
        listed.append(step)
    (path / f"{name}.json").write_text(json.dumps({"name": name, "steps": listed}, indent=2) + "\n")
