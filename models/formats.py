"""Formats of other codes' checkpoints, and the table of those known: the mirror of
`data.dataset.Format`.

A `CheckpointFormat` says how files are recognised, what they tell of the model, how its policy
prepares and acts, and how one is written. A family's formats live in its own folder and are
imported when a checkpoint is not ours; a user's file adds one with `register`, which is tried
before them. Safetensors that none of these recognises go to the `general` one, LeRobot's π0, which
refuses other types of policy by name.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

from models.checkpoints.rename import Table
from models.checkpoints.sources import CheckpointSource
from models.files import built_in
from models.inputs.embodiment import Normalizer, Scaling
from models.inputs.processor import Processor
from models.model import ModelConfig

ReadScales = Callable[[Scaling, Scaling], tuple[Normalizer, Normalizer]]
"""Scales of a robot's state and actions, of the kinds that are asked for. Raises ValueError if the
files have others."""


@dataclass(frozen=True)
class CheckpointInfo:
    """Facts about a checkpoint. One of another code has a format, a source, and a table to read
    it by."""

    config: ModelConfig
    processor: Processor | None
    source: CheckpointSource | None = None
    table: Table | None = None
    format: "CheckpointFormat | None" = None


@dataclass(frozen=True)
class NoOptions:
    """Options of a format whose files say all."""


@dataclass(frozen=True)
class CheckpointFormat:
    """One kind of checkpoint of another code.

    `families`: those whose models it holds. `recognises`: a file or folder, by its names and
    headers. `inspect` reads no arrays; its config is as full as the parameters determine it. `acts`
    completes config and processor from the files and from `options`, a dataclass of what files may
    not say, and asks for what nothing says in one error. `prepares` gives the processor with which
    the policy was trained, for a config to train on: its robots are placeholders, its tokenizer may
    be missing, and nothing is asked. `statistics`: readers of the scales in a folder, by robot, ""
    for one without a name; none where the folder has none. `write` puts a Policy into a new folder.
    `general`: it recognises files of others too, and is tried last. `kinds`: names of its policies
    in config.json (`type` of LeRobot, `model_type` of transformers); files of other names are
    refused before weights are asked for.
    """

    name: str
    families: tuple[str, ...]
    recognises: Callable[[Path], bool]
    inspect: Callable[[Path], CheckpointInfo]
    acts: Callable[[Path, CheckpointInfo, Any], tuple[ModelConfig, Processor | None]]
    prepares: Callable[[Path, CheckpointInfo, ModelConfig], Processor]
    options: type = NoOptions
    statistics: Callable[[Path], Mapping[str, ReadScales]] = lambda folder: {}
    write: Callable[[Any, Path], None] | None = None
    general: bool = False
    kinds: tuple[str, ...] = ()

    @property
    def asks(self) -> tuple[str, ...]:
        """Names of its options."""
        return tuple(field.name for field in fields(self.options))


_own: dict[str, CheckpointFormat] = {}


def register(own: CheckpointFormat) -> None:
    """Adds a format to the table of this process, before all others, and replaces one registered
    under the same name."""
    _own.pop(own.name, None)
    _own[own.name] = own


def formats() -> tuple[CheckpointFormat, ...]:
    """All formats, in the order in which they are tried: the last registered first."""
    shipped = [known for module in built_in.FORMATS for known in import_module(module).FORMATS]
    return (*reversed(_own.values()), *sorted(shipped, key=lambda known: known.general))


def check_kind(values: Mapping[str, Any], where: str) -> None:
    """Raises ValueError if no format reads the kind of policy that a config.json, `where`, names;
    with a format of the user's own that lists no `kinds`, none is refused."""
    kind = values.get("type", values.get("model_type"))
    known = [name for each in formats() for name in each.kinds]
    if kind is None or kind in known or any(not own.kinds for own in _own.values()):
        return
    raise ValueError(
        f"{where} describes a policy of type {str(kind)[:80]!r}, expected one of "
        f"{', '.join(dict.fromkeys(known))}; to read another, name a file that registers its "
        "CheckpointFormat with --family (docs/own_model.md)."
    )


def find_format(path: Path) -> CheckpointFormat | None:
    """The format of the checkpoint at `path`, None if no format recognises it."""
    return next((known for known in formats() if known.recognises(path)), None)


def writers(family: str) -> dict[str, Callable[[Any, Path], None]]:
    """`write` of each format, by its name, in which a family's policies can be written."""
    return {x.name: x.write for x in formats() if family in x.families and x.write is not None}


def require_scaling(
    where: str, what: str, kind: str, wanted: Scaling, known: Iterable[str] = ()
) -> None:
    """Raises ValueError unless a file's kind of scaling, of "state" or "action", is the one that is
    asked for; `known` are the files' own names of kinds."""
    if kind == wanted:
        return
    ours = kind in get_args(Scaling)
    remedy = f"give --data.{what}-scaling {kind}" if ours else f"known are {', '.join(known)}"
    raise ValueError(f"{where} scales the {what} by {kind[:80]}, not {wanted}; {remedy}.")
