"""Loading of a policy on a command line: the same options for every command that acts, so that a
checkpoint is read in the same way when it is evaluated, served, recorded with, improved or
converted.

The options supply what files of other codes leave open; a checkpoint of ours needs none of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from models import Policy, load_policy
from models.families.pi.released import StateOption
from models.flow.flow import Solver


@dataclass(frozen=True)
class PolicyOptions:
    """Facts about a policy that its files may not contain."""

    released: str | None = None
    """Name of the released policy, such as pi05_droid, if its folder has another name: a table
    supplies what the files lack."""
    horizon: int | None = None
    """Steps of a chunk, which openpi's checkpoints do not contain."""
    tokenizer: Path | None = None
    """SentencePiece file, which openpi's checkpoints lack; for GR00T, a tokenizer.json or the
    folder of Eagle's processor."""
    fast: Path | None = None
    """Folder of the FAST tokenizer, for a π0-FAST that came without it."""
    cameras: tuple[str, ...] = ()
    """Pairs ROBOT=POLICY of the robot's cameras and the policy's cameras that they feed, where the
    names differ. The policy's other cameras keep their names and may be absent."""
    state: StateOption | None = None
    """Form in which π reads the state: text (the robot's dims), text-padded (all of the model's
    dims as text), suffix (a token of its own), or none."""
    relative: tuple[int, ...] | None = None
    """Action dims that the model measures from the state dim of the same number; give the option
    without numbers if there are none."""
    robot: str | None = None
    """Robot that acts, if there are several: its name in the mixture that the checkpoint was
    trained on; for openpi, the name of the statistics in the checkpoint's assets; for GR00T, the
    embodiment's tag."""
    modality: Path | None = None
    """GR00T's modality.json, which gives the order of a robot's parts in NVIDIA's checkpoints."""


DEFAULTS = PolicyOptions()


def told(options: PolicyOptions, dtype: str | None = None) -> dict[str, Any]:
    """Options that are not the defaults, as plain data: they decide how a checkpoint's policy
    acts."""
    given = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(options).items()
        if value != getattr(DEFAULTS, name)
    }
    return given if dtype is None else given | {"dtype": dtype}


def load(
    checkpoint: Path,
    options: PolicyOptions,
    *,
    steps: int | None = None,
    solver: Solver | None = None,
    dtype: str | None = None,
    apart: bool = False,
) -> Policy:
    """A checkpoint's policy, as the options say; see `load_policy` for the other arguments.

    Raises:
      ValueError, FileNotFoundError: as `load_policy`, or the policy lacks a camera of the map.
    """
    cameras = camera_map(options.cameras)
    policy = load_policy(
        checkpoint,
        steps=steps,
        solver=solver,
        dtype=dtype,
        apart=apart,
        released=options.released,
        horizon=options.horizon,
        state=options.state,
        relative=options.relative,
        cameras=cameras or None,
        tokenizer=options.tokenizer,
        fast=options.fast,
        robot=options.robot,
        modality=options.modality,
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
