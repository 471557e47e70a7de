"""Raw observations and answers that openpi's and LeRobot's own policies gave to them, see
tests/fixtures/released."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

RELEASED_CASES = Path(__file__).parents[2] / "fixtures" / "released"


def case_policy(case: Path, folder: Path) -> Path:
    """A checkpoint as its authors save it, put together in `folder` under the case's name, with the
    weights that the case shares with others of its kind."""
    kind, root = read_case(case)["kind"], folder / case.name
    shutil.copytree(case, root)
    for name in ("params", "model.safetensors"):
        shared = case.parent / kind / name
        if shared.exists() and not (root / name).exists():
            (root / name).symlink_to(shared)
    return root


def read_case(case: Path) -> dict[str, Any]:
    return json.loads((case / "case.json").read_text())


def answers(case: Path) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """The observations as a robot sends them, and {"noise": [n, h, d], "actions": [n, h, a]}."""
    with np.load(case / "case.npz") as file:
        arrays = dict(file)
    return [_loaded(seen) for seen in read_case(case)["observations"]], arrays


def _loaded(value: Any) -> Any:
    if isinstance(value, dict) and "picture" in value:
        height, width = value["size"]
        file = RELEASED_CASES / "pictures" / f"{value['picture']}.png"
        image = np.asarray(Image.open(file))[:height, :width]
        return image.transpose(2, 0, 1) if value.get("channels_first") else image
    if isinstance(value, dict):
        return {key: _loaded(each) for key, each in value.items()}
    return np.asarray(value) if isinstance(value, list) else value
