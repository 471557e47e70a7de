"""Table of released policies: what their training configs say but their files do not.

Rows are openpi's configs by name (`src/openpi/training/config.py` and `policies/*_policy.py` at
15a9616, 2026-06) and LeRobot's repositories on the hub (to 0.6.1).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from models.files.address import whole
from models.inputs.embodiment import Scaling
from models.inputs.raw import RawKeys

StateOption = Literal["text", "text-padded", "suffix", "none"]
"""Form of the state: the robot's dims as text, all of the model's dims as text (LeRobot's π0.5
before 0.5.0), a token of the expert (π0), or none."""
Source = Literal["openpi", "lerobot"]

CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
"""Cameras of openpi's models, in their order."""
FAST_CAMERAS = ("base_0_rgb", "base_1_rgb", "wrist_0_rgb")
"""Cameras of openpi's π0-FAST on DROID."""


@dataclass(frozen=True)
class Released:
    """A released policy. A field is None where its authors' config leaves it to the robot or to the
    file.

    `source`: the code that wrote its files. `horizon`: steps of a chunk. `relative`: action dims
    that the model measures from the state dim of the same number; () if all are absolute.
    `cameras`: the model's, of which `absent` may be missing (masked, not black). `keys`: names in
    what the authors' clients send. `adapter`: conversion of the robot's units, see
    `models.inputs.adapters`. `normalization`: of state and actions. `assets`: folder of its
    norm_stats.json. `state_dims`, `action_dims`: the robot's, out of the model's. `text`: longest
    prompt in tokens. `refused`: why it cannot act here, if so.
    """

    family: Literal["pi0", "pi05", "pi0_fast"]
    source: Source = "openpi"
    horizon: int | None = None
    state: StateOption | None = None
    relative: tuple[int, ...] | None = None
    cameras: tuple[str, ...] = CAMERAS
    absent: tuple[str, ...] = ()
    keys: RawKeys | None = None
    adapter: str = ""
    normalization: Scaling | None = None
    assets: str | None = None
    state_dims: int | None = None
    action_dims: int | None = None
    text: int | None = None
    refused: str = ""


def find_released(path: Path, source: Source, released: str | None = None) -> Released | None:
    """The row named `released` or, if that is None, the row with the name of a checkpoint's folder;
    None if there is no such row.

    openpi's training writes checkpoints/CONFIG/EXPERIMENT/STEP, so if a folder's name is a number,
    the name of the folder two above it counts.

    Raises:
      ValueError: the table has no row named `released`, or the row's policy cannot act here.
    """
    names = _names(path, source) if released is None else [released, f"lerobot/{released}"]
    rows = [RELEASED[name] for name in names if name in RELEASED]
    fitting = [row for row in rows if row.source == source]
    if released is not None and not rows:
        raise ValueError(
            f"'{released}' is not a known released policy; expected one of {list(RELEASED)}."
        )
    if released is not None and not fitting:
        raise ValueError(
            f"'{released}' is released in {rows[0].source}'s format, but {path} is in {source}'s."
        )
    if not fitting:
        return None
    if fitting[0].refused:
        raise ValueError(f"{path} is released as {names[0]}, but {fitting[0].refused}")
    return fitting[0]


def _names(path: Path, source: Source) -> list[str]:
    path = whole(path)
    if path.name == "params" or path.is_file():
        path = path.parent
    if path.name == "pretrained_model":
        path = path.parent
    name = path.parent.parent.name if path.name.isdecimal() else path.name
    if path.parent.name == "snapshots":  # a repository in huggingface_hub's cache
        name = path.parent.parent.name.rpartition("--")[2]
    return [f"lerobot/{name}"] if source == "lerobot" else [name]


_LIBERO = RawKeys(
    images=(
        ("observation/image", "base_0_rgb"),
        ("observation/wrist_image", "left_wrist_0_rgb"),
    ),
    state=("observation/state",),
)
_DROID = RawKeys(
    images=(
        ("observation/exterior_image_1_left", "base_0_rgb"),
        ("observation/wrist_image_left", "left_wrist_0_rgb"),
    ),
    state=("observation/joint_position", "observation/gripper_position"),
    ignored=("observation/exterior_image_2_left",),
)
_ALOHA = RawKeys(
    images=(
        ("images/cam_high", "base_0_rgb"),
        ("images/cam_left_wrist", "left_wrist_0_rgb"),
        ("images/cam_right_wrist", "right_wrist_0_rgb"),
    ),
    state=("state",),
    ignored=("images/cam_low",),
)
_PI0 = Released("pi0", horizon=50, state="suffix", normalization="z-score", text=48)
_PI05 = Released("pi05", horizon=50, state="text", normalization="quantile", text=200)


def _libero(base: Released, **changes: object) -> Released:
    return replace(
        base,
        absent=CAMERAS[2:],
        keys=_LIBERO,
        assets="physical-intelligence/libero",
        state_dims=8,
        action_dims=7,
        **changes,  # type: ignore[arg-type]
    )


def _droid(base: Released, horizon: int, *, positions: bool = False, text: int = 0) -> Released:
    """DROID's joint velocities, or joint positions as differences; the gripper is absolute."""
    return replace(
        base,
        horizon=horizon,
        relative=tuple(range(7)) if positions else (),
        absent=CAMERAS[2:],
        keys=_DROID,
        assets="droid",
        state_dims=8,
        action_dims=8,
        text=text or base.text,
    )


def _aloha(base: Released, prompt: str = "", assets: str = "trossen") -> Released:
    """ALOHA's joints as differences and grippers absolute, in the units of openpi's base models."""
    return replace(
        base,
        relative=(0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12),
        absent=CAMERAS[1:],
        keys=replace(_ALOHA, default=prompt),
        adapter="aloha",
        assets=assets,
        state_dims=14,
        action_dims=14,
    )


_FAST = Released("pi0_fast", state="text", normalization="quantile", text=250)


def _fast_droid(horizon: int, *, positions: bool = False, text: int = 250) -> Released:
    """DROID for π0-FAST, which sees the missing camera as a black picture."""
    images = (_DROID.images[0], (_DROID.images[1][0], FAST_CAMERAS[2]))
    return replace(
        _droid(_FAST, horizon, positions=positions, text=text),
        cameras=FAST_CAMERAS,
        absent=FAST_CAMERAS[1:2],
        keys=replace(_DROID, images=images),
    )


_TOKENS = Released(
    "pi0_fast",
    refused="its action tokens are not FAST's, the only ones supported here; use the π0, π0.5 or "
    "π0-FAST that was released for the same robot.",
)


def _lerobot(family: Literal["pi0", "pi05", "pi0_fast"], state: StateOption | None) -> Released:
    """A repository on the hub; its config.json gives horizon, cameras and relative actions."""
    return Released(family, "lerobot", state=state, cameras=())


RELEASED: Mapping[str, Released] = MappingProxyType(
    {
        "pi0_base": replace(_PI0, absent=CAMERAS[1:]),
        "pi05_base": replace(_PI05, absent=CAMERAS[1:]),
        "pi0_libero": _libero(_PI0, relative=tuple(range(6))),
        "pi0_libero_low_mem_finetune": _libero(_PI0, relative=tuple(range(6))),
        "pi05_libero": _libero(_PI05, horizon=10, state="none", relative=()),
        "pi0_droid": _droid(_PI0, 10),
        "pi05_droid": _droid(_PI05, 15),
        "pi05_droid_finetune": _droid(_PI05, 16),
        "pi05_full_droid_finetune": _droid(_PI05, 16, positions=True),
        "paligemma_diffusion_droid": _droid(_PI0, 10),
        "pi05_droid_jointpos_polaris": _droid(_PI05, 15, positions=True),
        "pi0_droid_jointpos_polaris": _droid(_PI0, 10, positions=True, text=100),
        "pi0_droid_jointpos_100k_polaris": _droid(_PI0, 10, positions=True, text=100),
        "pi0_aloha": _aloha(_PI0),
        "pi05_aloha": _aloha(_PI05),
        "pi0_aloha_towel": _aloha(_PI0, "fold the towel"),
        "pi0_aloha_tupperware": _aloha(_PI0, "open the tupperware and put the food on the plate"),
        "pi0_aloha_pen_uncap": _aloha(_PI0, "uncap the pen"),
        "pi05_aloha_pen_uncap": _aloha(_PI05, "uncap the pen"),
        "pi0_aloha_sim": replace(
            _aloha(_PI0, "Transfer cube", "lerobot/aloha_sim_transfer_cube_human"), relative=()
        ),
        "pi0_fast_base": replace(_FAST, absent=CAMERAS[1:]),
        "pi0_fast_droid": _fast_droid(10),
        "pi0_fast_libero": _libero(_FAST, horizon=10, relative=tuple(range(6)), text=180),
        "pi0_fast_libero_low_mem_finetune": _libero(
            _FAST, horizon=10, relative=tuple(range(6)), text=180
        ),
        "pi0_fast_full_droid_finetune": _fast_droid(16, positions=True, text=180),
        "pi0_fast_droid_jointpos_polaris": _fast_droid(10, positions=True, text=180),
        "paligemma_fast_droid": _fast_droid(15),
        "paligemma_fast_specialist_droid": _fast_droid(15),
        **dict.fromkeys(("paligemma_binning_droid", "paligemma_vq_droid"), _TOKENS),
        "lerobot/pi0_base": _lerobot("pi0", "suffix"),
        "lerobot/pi0_libero": _lerobot("pi0", "suffix"),
        "lerobot/pi0_libero_finetuned": _lerobot("pi0", "suffix"),
        "lerobot/pi05_base": _lerobot("pi05", None),
        "lerobot/pi05_libero_base": _lerobot("pi05", None),
        "lerobot/pi05_libero_finetuned": _lerobot("pi05", "text-padded"),
        "lerobot/pi05_libero_finetuned_v044": _lerobot("pi05", "text-padded"),
        "lerobot/pi0fast-base": _lerobot("pi0_fast", "text"),
        "lerobot/pi0fast-libero": _lerobot("pi0_fast", "text"),
    }
)
"""Released policies by name."""
