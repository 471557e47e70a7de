"""Folders of LeRobot's policies that hold weights, config.json and two pipelines of steps: read
with the policy's scales, as LeRobot 0.3 to 0.6 wrote them, and written so that 0.4 and 0.6 load
them.

A family says which fields its config.json has, as a subclass of `PolicyFields` with LeRobot's
defaults, and which steps it carries out.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from models.checkpoints.lerobot_pipeline import (
    POSTPROCESSOR,
    PREPROCESSOR,
    RENAME,
    Step,
    read_pipeline,
    read_renamed,
    robot_names,
    step,
    write_pipeline,
)
from models.checkpoints.lerobot_scales import (
    EPSILON,
    NORMALIZE,
    UNNORMALIZE,
    Kind,
    find_scale,
    has_buffers,
    is_scaled,
    mode_of,
    read_scaling,
    refuse_lost,
    statistics,
)
from models.checkpoints.safetensors_format import Entry, new_model, write_file
from models.checkpoints.sources import CheckpointSource, open_safetensors
from models.config import from_json, to_json
from models.files.foreign_json import read_json
from models.inputs.embodiment import Normalizer

STATE, ACTION, PICTURES = "observation.state", "action", "observation.images."
_NEWER = ("pretrained_revision", "gradient_checkpointing")
"""Fields of 0.6 that 0.4 refuses; both read a config.json without them."""


@dataclass(frozen=True)
class Feature:
    """An input or output of a policy; pictures have the shape (3, height, width)."""

    type: Kind
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        picture = self.type == "VISUAL"
        if len(self.shape) != (3 if picture else 1) or min(self.shape) < 1:
            raise ValueError(f"shape is {list(self.shape)}; expected {_SHAPES[picture]}.")
        if picture and self.shape[0] != 3:
            raise ValueError(f"shape is {list(self.shape)}; only pictures of 3 channels are read.")


_SHAPES = ("one size", "channels, height and width")


@dataclass(frozen=True)
class PolicyFields:
    """Fields of config.json that every policy of LeRobot has, with their defaults; a field that a
    policy's own fields lack is refused, as by LeRobot."""

    type: str
    n_obs_steps: int = 1
    input_features: dict[str, Feature] = field(default_factory=dict)
    output_features: dict[str, Feature] = field(default_factory=dict)
    normalization_mapping: dict[str, str] = field(default_factory=dict)
    device: str | None = "cpu"
    use_amp: bool = False
    use_peft: bool = False
    push_to_hub: bool = False
    repo_id: str | None = None
    private: bool | None = None
    tags: tuple[str, ...] | None = None
    license: str | None = None
    pretrained_path: str | None = None
    pretrained_revision: str | None = None

    @property
    def features(self) -> dict[str, Feature]:
        """All features: inputs, then outputs, each in the file's order."""
        return self.input_features | self.output_features

    def named(self, *kinds: Kind) -> tuple[str, ...]:
        """Names of the features of these kinds, kind by kind, each in the file's order."""
        return tuple(name for kind in kinds for name, x in self.features.items() if x.type == kind)

    def dims(self, *kinds: Kind) -> int:
        """Numbers of all features of these kinds together; of a picture, its channels."""
        return sum(self.features[name].shape[0] for name in self.named(*kinds))

    @property
    def picture_shapes(self) -> tuple[tuple[int, int], ...]:
        """Height and width of each camera's pictures, in the file's order."""
        shapes = (self.features[name].shape for name in self.named("VISUAL"))
        return tuple((shape[1], shape[2]) for shape in shapes)


Fields = TypeVar("Fields", bound=PolicyFields)


@dataclass(frozen=True)
class LerobotPolicy(Generic[Fields]):
    """Facts of a policy's folder.

    `modes`: LeRobot's name of each feature's scaling. `scales`: of each feature, in the file's
    order, of a picture from 0 to 1 those of its channels; {} if the policy is a base that was saved
    without statistics. `robot`: the robot's name of each input, where the preprocessor renames it.
    `before`, `after`: steps of the pipelines, by name.
    """

    fields: Fields
    modes: Mapping[str, str]
    scales: Mapping[str, Normalizer]
    robot: Mapping[str, str]
    before: Mapping[str, Step]
    after: Mapping[str, Step]

    def scale(self, *kinds: Kind) -> Normalizer:
        """Scales of all features of these kinds, end to end."""
        each = [self.scales[name] for name in self.fields.named(*kinds)]
        offset, scale = ([y for x in each for y in getattr(x, n)] for n in ("offset", "scale"))
        return Normalizer(tuple(offset), tuple(scale))

    @property
    def picture_scales(self) -> tuple[Normalizer, ...]:
        """Scales of each camera's pictures, whose levels are 0 to 1; () if none is scaled."""
        names = [name for name in self.fields.named("VISUAL") if name in self.scales]
        scaled = any(self.modes[name] != "IDENTITY" for name in names)
        return tuple(self.scales[name] for name in names) if scaled else ()


def picture_name(camera: str) -> str:
    """LeRobot's name of a camera's pictures, which the camera may have already, such as pusht's
    observation.image."""
    return camera if camera.startswith("observation.") else PICTURES + camera


def is_policy(path: Path, kind: str) -> bool:
    """True if safetensors are at `path` whose config.json is of a type of policy."""
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    if path.suffix != ".safetensors" and not any(folder.glob("*.safetensors")):
        return False
    file = folder / "config.json"
    return file.is_file() and read_json(file).get("type") == kind


def open_policy(path: Path) -> CheckpointSource:
    """A policy's arrays by LeRobot's names, without what torch.compile adds to them."""
    return open_safetensors(path).renamed(lambda name: name.replace("_orig_mod.", ""))


def read_policy(
    path: Path,
    kind: type[Fields],
    orders: Sequence[Sequence[str]] = (),
    needed: Sequence[str] = (),
    *,
    base: bool = False,
) -> LerobotPolicy[Fields]:
    """Reads the folder of a policy, but not its weights.

    Args:
      path: the folder, or a file of weights in it.
      kind: the class of its config.json's fields.
      orders: further steps of its preprocessor that the family carries out, see `read_pipeline`;
        renaming and scaling are carried out here.
      needed: steps without which it would act differently, where it has a preprocessor.
      base: it may have been saved without any statistics.

    Raises:
      FileNotFoundError: there is no config.json.
      ValueError: a field is unknown, of another type or refused by `kind`, a step is not carried
        out, or statistics are lost or contradict each other.
    """
    folder = path if path.is_dir() else path.parent
    file = folder / "config.json"
    told = from_json(kind, read_json(file), str(file))
    for name, feature in told.features.items():
        if (feature.type == "STATE") != (name == STATE) or len(told.named("ACTION")) != 1:
            raise ValueError(
                f"{file} has {name} as {feature.type}; expected one action, and the robot's state "
                f"as {STATE} alone."
            )
    known = ((RENAME, NORMALIZE), *orders)
    before = read_pipeline(folder / PREPROCESSOR, known, needed)
    after = read_pipeline(folder / POSTPROCESSOR, ((UNNORMALIZE,),))
    steps = before.get(NORMALIZE), after.get(UNNORMALIZE)
    kinds = read_scaling(folder, told.normalization_mapping, *steps)
    modes, scales = dict[str, str](), dict[str, Normalizer]()
    lacking = []
    for name, feature in told.features.items():
        mode = kinds[feature.type] if is_scaled(steps[0], name) or name == ACTION else "IDENTITY"
        order, dims = steps[:: -1 if feature.type == "ACTION" else 1], feature.shape[0]
        modes[name] = mode
        scale = find_scale(path, name, mode, dims, order, lambda: open_policy(path).arrays)
        if scale is None:
            lacking.append(name)
        elif len(scale.offset) != dims:
            raise ValueError(
                f"{path}: statistics of {name} have {len(scale.offset)} dims, but {file} gives "
                f"{dims}; copy both of the same policy."
            )
        else:
            scales[name] = scale
    scaled = [name for name, mode in modes.items() if mode != "IDENTITY"]
    if lacking and base and lacking == scaled and _is_base(path, steps[0]):
        scales = {}
    elif lacking:
        refuse_lost(path, lacking[0], modes[lacking[0]])
    names = tuple(told.input_features)
    robot = dict(zip(names, robot_names(read_renamed(before), names, str(path)), strict=True))
    return LerobotPolicy(told, modes, scales, robot, before, after)


def write_policy(
    path: Path,
    told: PolicyFields,
    arrays: Mapping[str, Entry],
    scales: Mapping[str, Normalizer],
    steps: Sequence[dict[str, Any]] = (),
    dtype: np.dtype | Mapping[str, np.dtype] = np.dtype(np.float32),  # noqa: B008
) -> None:
    """Writes weights, config.json and both pipelines into a folder without a model.

    Args:
      told: the fields; the modes of its features' kinds are replaced by those that hold the
        scales.
      arrays: weights by LeRobot's names.
      scales: of features by name, from which a picture's may be missing if none is scaled.
      steps: further ones of the preprocessor, after that which makes batches.
      dtype: of the weights.

    Raises:
      ValueError: the folder has a model.
    """
    file = new_model(path)
    path.mkdir(parents=True, exist_ok=True)
    modes = dict(told.normalization_mapping)
    kinds: tuple[Kind, ...] = ("VISUAL", "STATE", "ENV", "ACTION")
    for kind in kinds:
        mode = mode_of([scales[name] for name in told.named(kind) if name in scales])
        if told.named(kind) and (kind in modes or mode != "IDENTITY"):
            modes[kind] = mode
    told = replace(told, normalization_mapping=modes, device="cpu")
    values = {name: x for name, x in to_json(told).items() if name not in _NEWER}
    features: dict[str, Any] = {
        name: {which: to_json(x) for which, x in values[name].items()}
        for name in ("input_features", "output_features")
    }
    write_file(file, arrays, dtype, {"format": "pt"})
    (path / "config.json").write_text(json.dumps(values | features, indent=4) + "\n")
    outputs = features["output_features"]
    scaling = {"eps": EPSILON, "norm_map": modes}
    device = step("device_processor", device="cpu", float_dtype=None)
    before = [
        step(RENAME, rename_map={}),
        step("to_batch_processor"),
        *steps,
        device,
        step(NORMALIZE, features=features["input_features"] | outputs, **scaling),
    ]
    after = [step(UNNORMALIZE, features=outputs, **scaling), device]
    by_name = {name: modes.get(told.features[name].type, "IDENTITY") for name in scales}
    told_scales = statistics(scales, by_name, told.named("VISUAL"))
    write_pipeline(path, "policy_preprocessor", before, told_scales, (NORMALIZE,))
    write_pipeline(path, "policy_postprocessor", after, told_scales, (UNNORMALIZE,))


def _is_base(path: Path, before: Step | None) -> bool:
    """True if a policy was saved without statistics, not robbed of their file."""
    if before is None:
        return has_buffers(open_policy(path).arrays)
    return "state_file" not in before.entry
