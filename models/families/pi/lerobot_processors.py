"""The processor files of a LeRobot policy: pipelines of steps before and after the network, with
the statistics that scale its state and actions.

Step names and order are those that LeRobot 0.6.1 writes. Scales are written as means and standard
deviations, which can represent any of ours exactly (up to f32).
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from models.checkpoints.lerobot_pipeline import step, write_pipeline
from models.checkpoints.safetensors_format import Entry
from models.inputs.embodiment import Normalizer

NORM_MAP = {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
"""Scaling by kind of feature, as config.json and the normalizers state it."""


def write_processors(
    path: Path, config: dict[str, Any], state: Normalizer, actions: Normalizer
) -> None:
    """Writes policy_preprocessor.json, policy_postprocessor.json and their statistics in `path`.

    Args:
      config: the contents of the policy's config.json.
    """
    inputs, outputs = config["input_features"], config["output_features"]
    relative = bool(config.get("use_relative_actions"))
    scales: dict[str, Any] = {"eps": 0.0, "norm_map": NORM_MAP}
    steps = {
        "rename": step("rename_observations_processor", rename_map={}),
        "batch": step("to_batch_processor"),
        "newline": step("pi0_new_line_processor"),
        "state": step("pi05_prepare_state_tokenizer_processor_step"),
        "tokens": step(
            "tokenizer_processor",
            max_length=config["tokenizer_max_length"],
            task_key="task",
            padding_side="right",
            padding="max_length",
            truncation=True,
            tokenizer_name="google/paligemma-3b-pt-224",
        ),
        "device": step("device_processor", device="cpu", float_dtype=None),
        "relative": step(
            "relative_actions_processor",
            enabled=relative,
            exclude_joints=config.get("relative_exclude_joints", []),
            action_names=config.get("action_feature_names"),
        ),
        "scale": step("normalizer_processor", features=inputs | outputs, **scales),
    }
    order = _ORDER[config["type"]]
    after = [
        step("unnormalizer_processor", features=outputs, **scales),
        step("absolute_actions_processor", enabled=relative),
        steps["device"],
    ]
    statistics = _statistics(state, actions)
    before = [steps[name] for name in order]
    scaling = ("normalizer_processor", "unnormalizer_processor")
    write_pipeline(path, "policy_preprocessor", before, statistics, scaling)
    write_pipeline(path, "policy_postprocessor", after, statistics, scaling)


_ORDER = {
    "pi0": ("rename", "batch", "newline", "tokens", "device", "relative", "scale"),
    "pi05": ("rename", "batch", "relative", "scale", "state", "tokens", "device"),
}


def _statistics(state: Normalizer, actions: Normalizer) -> dict[str, Entry]:
    return {
        f"{name}.{kind}": ((len(values),), partial(np.asarray, values))
        for name, scaling in (("action", actions), ("observation.state", state))
        for kind, values in (("mean", scaling.offset), ("std", scaling.scale))
    }
