"""Python blocks of the guides: what each page's blocks are given that the reader has, and which
other tests run the blocks of a page."""

from typing import Any

import numpy as np

from tests.helpers.guides.shrink import STAGE, rewritten

PICTURE = np.zeros((48, 64, 3), np.uint8)
DROID = {
    "observation/exterior_image_1_left": PICTURE,
    "observation/wrist_image_left": PICTURE,
    "observation/joint_position": np.zeros(7),
    "observation/gripper_position": np.zeros(1),
    "prompt": "pick up the cup",
}
GIVEN: dict[str, dict[str, Any]] = {
    "README.md": {"frame": PICTURE, "wrist": PICTURE, "joints": np.zeros(7), "gripper": [0.0]},
    "docs/checks.md": {},
    "docs/datasets.md": {},
    "docs/direct.md": {},
    "docs/editing.md": {},
    "docs/evaluation.md": {},
    "docs/loading.md": {},
    "docs/running.md": {},
    "docs/store.md": {},
}
"""Pages whose blocks run one after the other in one namespace, and what stands in it before."""
ELSEWHERE = {
    "docs/chunking.md": "tests/models/flow/test_realtime_chunking.py",
    "docs/importing.md": "tests/tools/datasets/test_importing.py",
    "docs/insulation.md": "tests/models/families/pi/test_targets.py",
    "docs/mixtures.md": "tests/tools/test_train_mixture.py",
    "docs/own_dataset.md": "tests/tools/test_own_dataset.py",
    "docs/own_environment.md": "tests/sim/test_own_environment.py",
    "docs/own_model.md": "tests/tools/test_own_model.py",
    "docs/robot.md": "tests/client/test_guide.py",
    "docs/simulators.md": "tests/sim/benchmarks/test_metaworld.py",
}
"""Pages whose blocks another test runs."""
NOT_RUN = {
    "docs/arm.md": "a film of MJX's arm, a minute; tests/sim/environments/test_arm.py acts there",
    "docs/checkpoints.md": "pieces; tests/models/test_released.py calls the same",
    "docs/compile.md": "NVIDIA's compiler; tests/parallel/planning/test_budgets.py has the block",
    "docs/export.md": "beside an exported folder; tests/tools/test_export.py calls the same",
    "docs/from_lerobot.md": "a robot; tests/client/test_guide.py runs robot.md's, the same",
    "docs/lake.md": "a Ray cluster; tests/data/lake has one",
    "docs/fine_tune.md": "a robot; tests/client/test_guide.py runs the same of robot.md",
    "docs/parallel.md": "pieces of a training loop; tests/parallel/test_axes.py has it whole",
    "docs/results/python_versions.md": "what is shown aborts the process",
    "docs/saving.md": "pieces of a training loop; tests/parallel/test_checkpoint.py has them",
    "docs/serving.md": "openpi's client, in .venv-client; tests/tools/serving/test_client.py",
    "docs/trackers.md": "a class that --track names",
}
"""Pages whose blocks are not run, each with the reason."""
_SMALLER = (
    (r"runs/demo/dataset", "PATH"),
    (r"runs/demo", "runs/lift"),
    (r"hf://lerobot/pusht(@main)?", "hf://me/cups"),
    (r"s3://bucket/folder", "s3://bucket/PATH"),
    (r"droid/1\.0\.0", "droid"),
    (r"image_size=224", "image_size=16"),
    (r"\[3, 7, 20\]", "[3, 4]"),
    (r"tabletop-lift", f"{STAGE}:SUITE"),
    (r'load_preset\("tiny', f'load_preset("{STAGE}:TINY'),
    (r'preset="tiny', f'preset="{STAGE}:TINY'),
    (r'upgrade\("OLD', 'upgrade("v21'),
    (r"suite\.tasks, 16", "suite.tasks, 2"),
    (r"range\(32\)", "range(2)"),
    (r"\[40, 3, 977\]", "[4, 3, 20]"),
    (r"arange\(50\)", "arange(2)"),
    (r"start_step=1000", "start_step=10"),
)


def shrunk(block: str) -> str:
    """The block as it is run."""
    return rewritten(block, _SMALLER)
