"""Loading of a policy on a command line: the same options for every command that acts, so that a
checkpoint is read in the same way when it is evaluated, served, recorded with, improved or
converted.

The options supply what files of other codes leave open; a checkpoint of ours needs none of them.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, make_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import docstring_parser
import tyro

from models import Policy, load_policy
from models.checkpoints import digests, own
from models.files.own_file import run_file
from models.flow.flow import Solver
from models.formats import formats


@cache
def _by_formats() -> type:
    """A dataclass of the options that only some formats take, grouped by these formats."""
    taking: dict[str, list[tuple[str, type]]] = defaultdict(list)
    for known in formats():
        for name in known.asks:
            taking[name].append((known.name, known.options))
    groups: dict[str, list[Any]] = defaultdict(list)
    for name, takers in taking.items():
        if name != "robot":  # which checkpoints of ours take too
            kinds = list(dict.fromkeys(kind for _, kind in takers))
            shown = tyro.conf.arg(help=" ".join(_help(kind, name) for kind in kinds))
            hint: Any = Annotated[get_type_hints(kinds[0])[name], shown]
            groups[", ".join(sorted(of for of, _ in takers))].append((name, hint, None))
    made = [(of, make_dataclass("Group", options, frozen=True)) for of, options in groups.items()]
    named = [
        (f"group{at}", Annotated[group, tyro.conf.arg(name=of)], group())
        for at, (of, group) in enumerate(made)
    ]
    return make_dataclass("Groups", named, frozen=True)


def _help(options: type, name: str) -> str:
    documented = docstring_parser.parse_from_object(options).params
    return " ".join(x.description or "" for x in documented if x.arg_name == name)


LIGHTER = ("half the bytes (--dtype bfloat16)", "a policy of 8 or 4 bits (tools.quantize)")
"""Remedies for a policy that does not fit into memory, in the order in which to try them."""


@dataclass(frozen=True)
class PolicyOptions:
    """Facts about a policy that its files may not contain."""

    tokenizer: Path | None = None
    """SentencePiece file, which openpi's checkpoints lack; for GR00T, a tokenizer.json or the
    folder of Eagle's processor."""
    fast: Path | None = None
    """Folder of the FAST tokenizer, for a π0-FAST that came without it."""
    cameras: tuple[str, ...] = ()
    """Pairs ROBOT=POLICY of the robot's cameras and the policy's cameras that they feed, where the
    names differ. The policy's other cameras keep their names and may be absent."""
    robot: str | None = None
    """Robot that acts, if there are several: its name in the mixture that the checkpoint was
    trained on; for openpi, the name of the statistics in the checkpoint's assets; for GR00T, the
    embodiment's tag."""
    of_formats: Annotated[
        Any,
        tyro.conf.arg(name="", constructor_factory=_by_formats),
        tyro.conf.OmitArgPrefixes,
    ] = field(default_factory=lambda: _by_formats()())

    def flat(self) -> dict[str, Any]:
        """The value of every option by its name."""
        ours = {name: value for name, value in vars(self).items() if name != "of_formats"}
        groups = vars(self.of_formats).values()
        return ours | {name: value for group in groups for name, value in vars(group).items()}


DEFAULTS = PolicyOptions()


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """Base of the configs of commands that load a policy to act with."""

    euler_steps: int | None = None
    """Steps of the flow sampler; default: each policy's own."""
    solver: Solver | None = None
    """Method of the sampler's steps: euler, or the second-order ab2, both with one evaluation per
    step; default: each policy's own."""
    dtype: str | None = None
    """Dtype of the parameters in memory, such as bfloat16; default: as saved by Chiliad, float32
    for checkpoints of other codes."""
    family: Path | None = None
    """Python file that defines the model's family, if it is not one of ours; the file is run."""
    options: Annotated[PolicyOptions, tyro.conf.arg(name="")] = DEFAULTS

    def load(self, checkpoint: Path) -> Policy:
        """A checkpoint's policy; raises as the function `load`."""
        how: dict[str, Any] = {"solver": self.solver, "dtype": self.dtype, "family": self.family}
        return load(checkpoint, self.options, euler_steps=self.euler_steps, apart=True, **how)


def own_checkpoint(path: Path) -> Path | None:
    """The checkpoint of ours, with digests, that `own.find` finds at a path; None if there is
    none."""
    try:
        found = own.find(path)
    except FileNotFoundError:
        return None
    return found if digests.is_sealed(found) else None


def given_options(options: PolicyOptions, dtype: str | None = None) -> dict[str, Any]:
    """Options that are not the defaults, as plain data: they decide how a checkpoint's policy
    acts."""
    usual = DEFAULTS.flat()
    changed = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in options.flat().items()
        if value != usual[name]
    }
    return changed if dtype is None else changed | {"dtype": dtype}


def load(
    checkpoint: Path,
    options: PolicyOptions,
    *,
    euler_steps: int | None = None,
    solver: Solver | None = None,
    dtype: str | None = None,
    family: Path | None = None,
    apart: bool = False,
) -> Policy:
    """A checkpoint's policy, as the options say; see `load_policy` for the other arguments.

    Args:
      family: Python file that defines the model's family, if it is not one of ours; it is run.

    Raises:
      ValueError, FileNotFoundError: as `load_policy`, or the policy lacks a camera of the map.
    """
    if family is not None:
        run_file(family)
    cameras = camera_map(options.cameras)
    policy = load_policy(
        checkpoint,
        euler_steps=euler_steps,
        solver=solver,
        dtype=dtype,
        apart=apart,
        **options.flat() | {"cameras": cameras or None},
    )
    return _in_own_words(policy) if cameras else policy


def _in_own_words(policy: Policy) -> Policy:
    """The policy without the keys of its authors' clients, if the robot has names of its own."""
    if policy.processor is None:
        return policy
    robots = tuple(replace(robot, keys=None) for robot in policy.processor.embodiments)
    return replace(policy, processor=replace(policy.processor, embodiments=robots))


def camera_map(pairs: Sequence[str]) -> dict[str, str]:
    """{robot's camera: policy's} of `ROBOT=POLICY` pairs.

    Raises:
      ValueError: something is no such pair, or a camera occurs twice.
    """
    found: dict[str, str] = {}
    for pair in pairs:
        theirs, equals, ours = pair.partition("=")
        if not (theirs and equals and ours):
            raise ValueError(
                f"--cameras has '{pair}'; give ROBOT=POLICY, such as "
                "observation.images.image=base_0_rgb."
            )
        if theirs in found or ours in found.values():
            raise ValueError(
                f"--cameras has '{pair}', but one of these cameras is already mapped; name each "
                "camera once."
            )
        found[theirs] = ours
    return found
