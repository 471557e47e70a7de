"""Policies of the fixtures written for LeRobot by our command, as LeRobot's own loader ran them:

python -m tests.helpers.tools.exported_policies FOLDER    # writes FOLDER/pi0 and FOLDER/pi05
"""

import hashlib
import sys
import tempfile
from pathlib import Path

import tyro

from models import Policy
from tests.helpers.models.released_cases import RELEASED_CASES, case_policy
from tools import convert_checkpoint
from tools.recipes.policy import PolicyOptions, load

EXPORTS: dict[str, tuple[str, tuple[int, ...] | None]] = {
    "pi0": ("pi0_libero", None),
    "pi05": ("pi05_base", ()),
}
"""openpi's policy that each is made from, and action dims relative to the state, where untold."""
CAMERAS = ("image=base_0_rgb", "image2=left_wrist_0_rgb", "image3=right_wrist_0_rgb")


def export(name: str, folder: Path) -> Policy:
    """Writes `folder/name` as the command does; returns the policy that was written."""
    row, relative = EXPORTS[name]
    options = PolicyOptions(
        tokenizer=RELEASED_CASES / "tokenizer.model",
        cameras=tuple(f"observation.images.{pair}" for pair in CAMERAS),
    )
    if relative is not None:
        options = tyro.cli(PolicyOptions, args=["--relative"], default=options)
    with tempfile.TemporaryDirectory() as scratch:
        source = case_policy(RELEASED_CASES / "openpi" / row, Path(scratch))
        convert_checkpoint.main(source, folder / name, to="lerobot", options=options)
        return load(source, options)


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file in `folder` by its name."""
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.iterdir())
    }


if __name__ == "__main__":
    for name in EXPORTS:
        export(name, Path(sys.argv[1]))
