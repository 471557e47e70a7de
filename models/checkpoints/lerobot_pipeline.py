"""LeRobot's processor files: a JSON list of steps, and a safetensors file beside it for each step
that has statistics.

A policy folder has two, policy_preprocessor and policy_postprocessor, which LeRobot 0.4 and later
read (`lerobot.processor.pipeline`). A step names itself by `registry_name`, or by the path of its
class. Steps that a reader does not carry out are refused, since the policy would act differently.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from models.checkpoints.safetensors_format import Entry, map_file, write_file
from models.files.bounds import check_name
from models.files.foreign_json import read_json, section

PREPROCESSOR, POSTPROCESSOR = "policy_preprocessor.json", "policy_postprocessor.json"
"""Files with the steps from an observation to the model's inputs, and from its actions to the
robot's."""
RENAME = "rename_observations_processor"
TOKENIZE = "tokenizer_processor"

_HARMLESS = (
    "device_processor",
    "IdentityProcessorStep",
    "to_batch_processor",
    "to_batch_processor_action",
    "to_batch_processor_complementary_data",
    "to_batch_processor_observation",
)
"""Steps that change where arrays lie, or their batch axis, but no value."""
_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "delta_actions_processor": "relative_actions_processor",  # its name in LeRobot 0.5
        "smolvla_new_line_processor": "pi0_new_line_processor",
        "AbsoluteActionsProcessorStep": "absolute_actions_processor",
        "ActionTokenizerProcessorStep": "action_tokenizer_processor",
        "AddBatchDimensionActionStep": "to_batch_processor_action",
        "AddBatchDimensionComplementaryDataStep": "to_batch_processor_complementary_data",
        "AddBatchDimensionObservationStep": "to_batch_processor_observation",
        "AddBatchDimensionProcessorStep": "to_batch_processor",
        "DeviceProcessorStep": "device_processor",
        "GrootActionUnpackUnnormalizeStep": "groot_action_unpack_unnormalize_v1",
        "GrootN17ActionDecodeStep": "groot_n1_7_action_decode_v1",
        "GrootN17PackInputsStep": "groot_n1_7_pack_inputs_v1",
        "GrootN17VLMEncodeStep": "groot_n1_7_vlm_encode_v1",
        "GrootEagleCollateStep": "groot_eagle_collate_v3",
        "GrootEagleEncodeStep": "groot_eagle_encode_v3",
        "GrootPackInputsStep": "groot_pack_inputs_v3",
        "NewLineTaskProcessorStep": "pi0_new_line_processor",
        "NormalizerProcessorStep": "normalizer_processor",
        "Pi0FastPrepareStateAndLanguageTokenizerProcessorStep": (
            "pi0_fast_prepare_state_tokenizer_processor_step"
        ),
        "Pi0NewLineProcessor": "pi0_new_line_processor",
        "Pi05PrepareStateTokenizerProcessorStep": "pi05_prepare_state_tokenizer_processor_step",
        "RelativeActionsProcessorStep": "relative_actions_processor",
        "RenameObservationsProcessorStep": RENAME,
        "TokenizerProcessorStep": TOKENIZE,
        "UnnormalizerProcessorStep": "unnormalizer_processor",
    }
)
"""Registered names by other names, and by those of LeRobot's classes."""
_SETTINGS: Mapping[str, dict[str, tuple[Any, ...]]] = MappingProxyType(
    {
        "device_processor": {"float_dtype": (None, "float32")},
        "groot_action_unpack_unnormalize_v1": {"normalize_min_max": (True,)},
        "groot_n1_7_pack_inputs_v1": {
            "language_key": ("task",),
            "normalize_min_max": (True,),
            "state_horizon": (1,),
        },
        "groot_pack_inputs_v3": {
            "formalize_language": (False,),
            "language_key": ("task",),
            "normalize_min_max": (True,),
        },
        "pi05_prepare_state_tokenizer_processor_step": {
            "include_state_in_prompt": (True,),
            "task_key": ("task",),
        },
        "pi0_fast_prepare_state_tokenizer_processor_step": {"task_key": ("task",)},
        TOKENIZE: {"padding_side": ("right",), "task_key": ("task",), "truncation": (True,)},
    }
)
"""Values of a step's settings that are carried out; others are refused."""


@dataclass(frozen=True)
class Step:
    """One step of a pipeline: its registered name, its place `at` in the file's list, and its
    settings; `entry` is all that the file says of it."""

    file: Path
    at: int
    name: str
    config: dict[str, Any]
    entry: dict[str, Any]

    def statistics(self) -> dict[str, np.ndarray]:
        """The step's statistics by FEATURE.KIND: those in its settings, else those in its file,
        which lies beside under a usual name if the step does not name it; {} if there are none.

        Raises:
          ValueError: the file's name is a path, or the file is damaged.
        """
        where = str(self.file)
        if inline := section(self.config, "stats", where):
            try:
                return {
                    f"{feature}.{kind}": np.asarray(value, np.float64)
                    for feature in inline
                    for kind, value in section(inline, feature, where).items()
                }
            except (TypeError, ValueError) as error:
                raise ValueError(f"{where}: stats of {self.name} are no numbers: {error}") from None
        folder, name = self.file.parent, self.entry.get("state_file")
        if name is None:
            usual = f"{self.file.stem}_step_*{self.name}.safetensors"
            names = sorted(file.name for file in folder.glob(usual))
            name = names[0] if len(names) == 1 else f"{self.file.stem}_step_{self.at}.safetensors"
        if not isinstance(name, str):
            raise ValueError(f"{where}: state_file is {str(name)[:80]!r}; expected a file's name.")
        check_name(f"{where}: state_file", name)
        return map_file(folder / name)[0] if (folder / name).is_file() else {}


def read_pipeline(
    file: Path, orders: Sequence[Sequence[str]], needed: Sequence[str] = ()
) -> dict[str, Step]:
    """The steps of a processor file by their registered names, without those that change no value;
    {} if there is no such file.

    Args:
      orders: names of the steps that the reader carries out, each list in its order; steps of
        different lists do not depend on each other.
      needed: those that the reader carries out even if they are not there.

    Raises:
      ValueError: the file has no list of steps, one of them is not among those in `orders`, has
        other settings, occurs twice or in another order, or a `needed` one is missing.
    """
    if not file.is_file():
        return {}
    listed = read_json(file).get("steps")
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        raise ValueError(f"{file} has no list of steps; copy or download it again.")
    steps: dict[str, Step] = {}
    known = {name for order in orders for name in order}
    for at, entry in enumerate(listed):
        name = _name(entry)
        step = Step(file, at, name, section(entry, "config", f"{file}, step {at}"), entry)
        if name not in known and name not in _HARMLESS:
            raise ValueError(
                f"{file}: step {at} is {name[:80]!r}, which is not carried out here, so the policy "
                "would act differently; act with the code that trained it, or remove the step if "
                "it changes nothing."
            )
        for setting, allowed in _SETTINGS.get(name, {}).items():
            if step.config.get(setting, allowed[0]) not in allowed:
                raise ValueError(
                    f"{file}: {setting} of step {at} ({name}) is "
                    f"{str(step.config[setting])[:80]!r}; only {allowed[0]} is supported."
                )
        if name in steps:
            raise ValueError(f"{file} has the step {name} twice; remove the one that is too much.")
        if name in known:
            steps[name] = step
    for order in orders:
        there = [name for name in steps if name in order]
        if there != sorted(there, key=order.index):
            raise ValueError(
                f"{file} has its steps in the order {', '.join(there)}; only "
                f"{', '.join(sorted(there, key=order.index))} is supported."
            )
    if missing := [name for name in needed if name not in steps]:
        raise ValueError(
            f"{file} lacks the step {missing[0]}, without which this policy would act differently; "
            "copy the file of the policy's release again."
        )
    return steps


def read_renamed(steps: Mapping[str, Step]) -> dict[str, str]:
    """{name in the robot's observations: the policy's} of a preprocessor's names that differ.

    Raises:
      ValueError: a name is not a text, two names become one, or a name is taken away.
    """
    if RENAME not in steps:
        return {}
    where = str(steps[RENAME].file)
    renamed = section(steps[RENAME].config, "rename_map", where)
    if not all(isinstance(name, str) for name in renamed.values()):
        raise ValueError(f"{where}: rename_map is {str(renamed)[:80]}; expected names.")
    if len(set(renamed.values())) < len(renamed):
        raise ValueError(f"{where}: rename_map gives two observations the same name; correct it.")
    return renamed


def robot_names(renamed: Mapping[str, str], names: Sequence[str], where: str) -> tuple[str, ...]:
    """The names under which a robot sends a policy's inputs, with a `rename_map` of `where`.

    Raises:
      ValueError: the map takes an input's name away and gives it no other.
    """
    theirs = {new: old for old, new in renamed.items()}
    if lost := [name for name in names if name in renamed and name not in theirs]:
        raise ValueError(
            f"{where}: rename_map turns {lost[0]} into {renamed[lost[0]]}, but the policy reads "
            "both; name the robot's input for each."
        )
    return tuple(theirs.get(name, name) for name in names)


def _name(entry: dict[str, Any]) -> str:
    """The registered name of a step, "" if it has none."""
    kind = str(entry.get("class", ""))
    if kind.startswith("lerobot."):
        kind = kind.rpartition(".")[2]
    name = str(entry.get("registry_name") or kind)
    return _ALIASES.get(name, name)


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
